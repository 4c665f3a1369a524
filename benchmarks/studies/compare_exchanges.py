"""The cost of a gradient exchange, or of agreeing less often, in learning: trains one config in several ways and
with several seeds, and compares.

TFDS_DATA_DIR=... python -m benchmarks.studies.compare_exchanges --config configs/fashion_mnist.py \\
    --workdir runs/compare

Each run has its own folder in the workdir; a finished run is not repeated, a stopped one resumes. Prints a table and
writes `comparison.json` and `comparison.png`. An exchange is written as its kind and options,
`topk,density=0.01,method=mstopk`, an agreement before it with a slash, `diloco,every_steps=32/quantized,bits=4`; an
option with a dot belongs to another part, `optimizer.momentum=0`, `.optimizer=muon`. Everything after `--` changes the
config of all runs: `-- --epochs 3`. With `--delay` every exchange also runs with its gradients applied one step late.
With `--learning-rates` each is tuned: the first seed tries all of these rates, and all seeds take the best of them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import jaxdl
from benchmarks.studies.trials import folder_name, parse, side_flags
from jaxdl.core.config import ConfigError
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import Diverged, style
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.result import Run, exit_codes

EXCHANGES = (
    "dense",
    "topk,density=0.01,method=mstopk",
    "topk,density=0.01,method=threshold",
    "topk,density=0.01,method=threshold,error_feedback=False",
    "quantized,bits=8",
    "powersgd,rank=4",
)
"""The exchanges that are compared by default; the first is the baseline."""


def main() -> None:
    """Runs everything that is not finished, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--replica", type=int, default=8, help="replicas, each on one virtual CPU device")
    parser.add_argument("--exchanges", nargs="+", default=EXCHANGES, metavar="KIND,OPTION=VALUE")
    parser.add_argument("--delay", action="store_true", help="each exchange also with delay_steps=1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learning-rates", type=float, nargs="+", help="tried for each with the first seed")
    args, changes = parse(parser)
    if args.delay:
        args.exchanges = [name for exchange in args.exchanges for name in (exchange, f"{exchange},delay_steps=1")]
    with exit_codes():
        _report(_compare(args, changes), args.workdir)


def _compare(args: argparse.Namespace, changes: list[str]) -> dict[str, Any]:
    if args.replica < 2:
        raise ConfigError(f"--replica {args.replica}: one replica exchanges nothing. Give 2 or more.")
    mesh = MeshConfig(replica=args.replica, fsdp=1, cpu_devices=args.replica)
    experiments = {
        side: jaxdl.load(args.config, [*side_flags(side), *changes]).replaced({"mesh": mesh}) for side in args.exchanges
    }
    task = experiments[args.exchanges[0]].task
    runs: dict[str, Any] = {side: [] for side in experiments}
    curves, tried = {}, {}
    for seed in args.seeds:
        for side, experiment in experiments.items():
            seeded, folder = experiment.replaced({"seed": seed}), f"{folder_name(side)}_seed{seed}"
            if args.learning_rates and side not in tried:
                tried[side] = _tried(seeded, args.learning_rates, args.workdir, folder)
            if args.learning_rates:
                seeded, folder = _with_rate(seeded, tried[side]["best"], folder)
            run = _run(seeded, args.workdir / folder)
            sent = _bytes_a_step(experiment, run)
            runs[side].append(
                {"seed": seed, "metrics": run.metrics, "bytes_a_step": sent, "seconds": run.summary["seconds"]}
            )
            curves.setdefault(side, _numbers(run.history, "train/loss"))
    about = {"config": str(args.config), "changes": changes, "metric": task.best_metric, "tried": tried}
    return about | {"runs": runs, "curves": curves}


def _tried(experiment: Experiment, rates: Sequence[float], workdir: Path, folder: str) -> dict[str, Any]:
    """The best learning rate, and the metric of each; none of one that diverged. Raises Diverged if all have."""
    task, values = experiment.task, {}
    for rate in rates:
        changed, name = _with_rate(experiment, rate, folder)
        try:
            values[rate] = _run(changed, workdir / name).metrics[task.best_metric]
        except Diverged as error:
            print(error, flush=True)
    if not values:
        raise Diverged(f"{folder}: it diverged with each of --learning-rates. Give smaller ones.")
    return {"best": (min if task.best_mode == "min" else max)(values, key=lambda rate: values[rate]), "values": values}


def _with_rate(experiment: Experiment, rate: float, folder: str) -> tuple[Experiment, str]:
    return experiment.replaced({"optimizer.learning_rate": rate}), f"{folder}_rate{rate:g}"


def _run(experiment: Experiment, folder: Path) -> Run:
    print(f"--- {folder}", flush=True)
    try:
        return jaxdl.train(experiment, folder, quiet=True)
    except Diverged as error:
        raise Diverged(f"{error} Leave this exchange out of --exchanges.") from None


def _bytes_a_step(experiment: Experiment, run: Run) -> float:
    """Bytes that a device sends to other replicas in an average step; what a merge sends counts for its whole round."""
    agreement, num_steps = experiment.agreement, run.summary["steps"]
    sent = _numbers(run.history, "train/exchange/bytes_sent/replica")[-1][1]
    joint = sum(agreement.joint(step) for step in range(num_steps)) / num_steps
    if not joint:
        return sent / agreement.merge_steps
    dense = sent * _numbers(run.history, "train/exchange/compression")[-1][1]
    return joint * dense + (1 - joint) * sent / agreement.merge_steps


def _numbers(history: dict[str, list[Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that have the column."""
    return [
        (step, value)
        for step, value in zip(history["step"], history[name], strict=True)
        if value is not None and not math.isnan(value)
    ]


def _report(comparison: dict[str, Any], workdir: Path) -> None:
    metric, runs = comparison["metric"], comparison["runs"]
    (workdir / "comparison.json").write_text(json.dumps(comparison, indent=2) + "\n", encoding="utf-8")
    table = Table(title=f"{comparison['config']} {' '.join(comparison['changes'])}")
    headings = ("exchange", f"{metric}: mean", "lowest", "highest", "to the first", "fewer bytes", "learning rate")
    for heading in headings if comparison["tried"] else headings[:-1]:
        table.add_column(heading, justify="left" if heading == "exchange" else "right")
    fewer = _times_fewer_bytes(runs)
    first = None
    for exchange, results in runs.items():
        values = [result["metrics"][metric] for result in results]
        mean = statistics.fmean(values)
        first = mean if first is None else first
        table.add_row(
            exchange,
            f"{mean:.4f}",
            f"{min(values):.4f}",
            f"{max(values):.4f}",
            f"{mean - first:+.4f} ({mean / first - 1:+.1%})",
            f"{style.plain(float(f'{fewer[exchange]:.3g}'))} times",
            *([f"{comparison['tried'][exchange]['best']:g}"] if comparison["tried"] else []),
        )
    Console(width=140).print(table)
    (workdir / "comparison.png").write_bytes(figure(comparison))
    print(f"written: {workdir / 'comparison.json'}, {workdir / 'comparison.png'}")


def _times_fewer_bytes(runs: dict[str, Any]) -> dict[str, float]:
    """How many times fewer bytes each side sends than the first."""
    sent = {name: results[0]["bytes_a_step"] for name, results in runs.items()}
    return {name: next(iter(sent.values())) / num_bytes for name, num_bytes in sent.items()}


def figure(found: dict[str, Any]) -> bytes:
    """A PNG: the training loss of one seed, the final metric of all, and how many times fewer bytes each side sends.

    Args:
      found: the content of comparison.json.
    """
    chosen, runs = style.looks(list(found["runs"])), found["runs"]
    height = max(4.3, 0.5 * len(runs) + 1.5) + 2 * style.legend_inches(len(runs), 3)
    title = f"{found['config']}: the cost of sending less in learning, measured"
    drawn = style.new_figure(14, height, title)
    left, middle, right = drawn.subplots(1, 3, width_ratios=(1.2, 1, 0.6))
    shown: list[float] = []
    for exchange, curve in found["curves"].items():
        window = max(1, len(curve) // 100)
        steps = [step for step, _ in curve][window - 1 :]
        losses = [loss for _, loss in curve]
        smooth = [statistics.fmean(losses[end - window : end]) for end in range(window, len(losses) + 1)]
        every = max(1, len(smooth) // 8)
        look = chosen[exchange]
        left.plot(steps, smooth, color=look.color, marker=look.mark, markevery=every, lw=1.3, **style.MEASURED)
        shown += smooth
    style.dress(left, "Training loss of the first seed", x="step", y="training loss, mean of 1 % of the reports")
    if shown and min(shown) > 0:
        style.log_axis(left, "y", shown)
    values = {name: [result["metrics"][found["metric"]] for result in results] for name, results in runs.items()}
    style.dress(middle, "At the end", x=f"final {found['metric'].replace('_', ' ')}")
    style.seed_dots(middle, values, chosen)
    middle.locator_params(axis="x", nbins=6)
    fewer = _times_fewer_bytes(runs)
    style.dress(right, "Bytes", x="times fewer than the first")
    style.seed_dots(right, {name: [times_fewer] for name, times_fewer in fewer.items()}, chosen)
    right.tick_params(axis="y", labelleft=False)
    style.log_axis(right, "x", list(fewer.values()), most=5)
    names = [style.line_entry(name, look.color, look.mark, **style.MEASURED) for name, look in chosen.items()]
    style.legend(drawn, [*names, style.mean_entry()])
    return style.png(drawn)


if __name__ == "__main__":
    main()
