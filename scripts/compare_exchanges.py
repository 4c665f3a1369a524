"""The cost of a gradient exchange in accuracy: trains one config with several exchanges and seeds, and compares.

TFDS_DATA_DIR=... python scripts/compare_exchanges.py --config configs/fashion_mnist.py --workdir runs/compare

Each run has its own folder in the workdir; a finished run is not repeated, a stopped one resumes. Prints a table and
writes `comparison.json` and `comparison.png`. An exchange is written as its kind and options,
`topk,density=0.01,method=mstopk`; an option with a dot belongs to another part, `optimizer.momentum=0`. Everything
after `--` changes the config of all runs: `-- --epochs 3`. With `--delay` every exchange also runs with its gradients
applied one step late.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from trials import exchange_flags, folder_name, parse

import jaxdl
from jaxdl.config import ConfigError
from jaxdl.mesh import MeshConfig
from jaxdl.report import Diverged, style
from jaxdl.run.result import exit_codes

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
    args, changes = parse(parser)
    if args.delay:
        args.exchanges = [name for one in args.exchanges for name in (one, f"{one},delay_steps=1")]
    with exit_codes():
        _report(_compare(args, changes), args.workdir)


def _compare(args: argparse.Namespace, changes: list[str]) -> dict[str, Any]:
    if args.replica < 2:
        raise ConfigError(f"--replica {args.replica}: one replica exchanges nothing. Give 2 or more.")
    mesh = MeshConfig(replica=args.replica, fsdp=1, cpu_devices=args.replica)
    experiments = {
        exchange: jaxdl.load(args.config, [*exchange_flags(exchange), *changes]).replaced({"mesh": mesh})
        for exchange in args.exchanges
    }
    metric, curves = experiments[args.exchanges[0]].task.best_metric, {}
    runs: dict[str, Any] = {exchange: [] for exchange in experiments}
    for seed in args.seeds:
        for exchange, experiment in experiments.items():
            folder = args.workdir / f"{folder_name(exchange)}_seed{seed}"
            print(f"--- {exchange}, seed {seed}: {folder}", flush=True)
            try:
                run = jaxdl.train(experiment.replaced({"seed": seed}), folder, quiet=True)
            except Diverged as error:
                raise Diverged(f"{error} Leave this exchange out of --exchanges.") from None
            ratio = _numbers(run.history, "train/exchange/compression")
            runs[exchange].append(
                {"seed": seed, "metrics": run.metrics, "compression": ratio[-1][1], "seconds": run.summary["seconds"]}
            )
            curves.setdefault(exchange, _numbers(run.history, "train/loss"))
    return {"config": str(args.config), "changes": changes, "metric": metric, "runs": runs, "curves": curves}


def _numbers(history: dict[str, list[Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that have the column."""
    return [
        (step, value)
        for step, value in zip(history["step"], history[name], strict=True)
        if value is not None and not math.isnan(value)
    ]


def _report(found: dict[str, Any], workdir: Path) -> None:
    metric, runs = found["metric"], found["runs"]
    (workdir / "comparison.json").write_text(json.dumps(found, indent=2) + "\n")
    table = Table(title=f"{found['config']} {' '.join(found['changes'])}")
    for heading in ("exchange", f"{metric}: mean", "lowest", "highest", "difference", "bytes: 1 /"):
        table.add_column(heading, justify="left" if heading == "exchange" else "right")
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
            f"{mean - first:+.4f}",
            f"{results[0]['compression']:.1f}",
        )
    Console(width=140).print(table)
    (workdir / "comparison.png").write_bytes(figure(found))
    print(f"written: {workdir / 'comparison.json'}, {workdir / 'comparison.png'}")


def figure(found: dict[str, Any]) -> bytes:
    """A PNG: the training loss of one seed, and the final metric of all.

    Args:
      found: the content of comparison.json.
    """
    chosen, runs = style.looks(list(found["runs"])), found["runs"]
    height = max(4.3, 0.5 * len(runs) + 1.5) + 2 * style.legend_inches(len(runs), 3)
    drawn = style.new_figure(13, height, f"{found['config']}: the cost of an exchange in learning, measured")
    left, right = drawn.subplots(1, 2)
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
    values = {name: [one["metrics"][found["metric"]] for one in results] for name, results in runs.items()}
    style.dress(right, "At the end", x=f"final {found['metric'].replace('_', ' ')}")
    style.seed_dots(right, values, chosen)
    right.locator_params(axis="x", nbins=6)
    names = [style.line_entry(name, look.color, look.mark, **style.MEASURED) for name, look in chosen.items()]
    style.legend(drawn, [*names, style.mean_entry()])
    return style.png(drawn)


if __name__ == "__main__":
    main()
