"""Time to a held-out accuracy or loss on an emulated cluster, by exchange, agreement and link rate.

TFDS_DATA_DIR=... python -m benchmarks.studies.time_to_accuracy --config configs/fashion_mnist.py --target 0.90 \\
    --rates 20mbit 100mbit --workdir runs/time_to_accuracy

Needs what `python -m jaxdl.launch netns` needs: Linux, root, iproute2. Each run trains on `--hosts` network namespaces
and is stopped by SIGTERM once it has reached the target; seeds are the outermost loop, so that exchanges and rates take
turns. The time is that of training alone, from the first step to the evaluation: compiling and evaluating, which are
the same for all, are left out. A run with its result in the workdir is not repeated; a stopped one resumes.
With `--at-most-sec` a run is also stopped after so many seconds of training. Prints a table and writes `times.json` and
`times.png`. The first of `--exchanges` (written as in compare_exchanges.py, agreements too) is the baseline. Everything
after `--` changes the config of all runs.
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

import jaxdl
from benchmarks.studies.trials import finished, folder_name, parse, read_rows, same_request, side_flags, train_on_hosts
from jaxdl.core.files import CONFIG_FILE
from jaxdl.platform.launch.netns import parse_rate
from jaxdl.report import style
from jaxdl.training.run.result import exit_codes
from jaxdl.training.tasks.base import Task


def main() -> None:
    """Runs everything that is not finished, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--target", type=float, required=True, help="of the task's best metric")
    parser.add_argument("--rates", nargs="+", required=True, metavar="RATE", help="of each host's link: 50mbit")
    parser.add_argument("--exchanges", nargs="+", default=["dense", "topk,density=0.01"], metavar="KIND,OPTION=VALUE")
    parser.add_argument("--at-most-sec", type=float, default=math.inf, help="of training; by default to the run's end")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--devices-per-host", type=int, default=2)
    args, changes = parse(parser)
    with exit_codes():
        for exchange in args.exchanges:  # A mistake is reported before the first run.
            base = jaxdl.load(args.config, [*side_flags(exchange), *changes])
        runs = [
            run(args, changes, base.task, exchange, rate, seed)
            for seed in args.seeds
            for rate in args.rates
            for exchange in args.exchanges
        ]
    report(args, runs)


def run(
    args: argparse.Namespace, changes: list[str], task: Task, exchange: str, rate: str, seed: int
) -> dict[str, Any]:
    """Trains until the target is reached, or to the end; returns the time and the steps, without a target's if none."""
    workdir = args.workdir / f"{folder_name(exchange)}_{rate}_seed{seed}"
    print(f"--- {exchange} at {rate}, seed {seed}: {workdir}", flush=True)
    hosts, devices = str(args.hosts), str(args.devices_per_host)
    launch = ["netns", "--hosts", hosts, "--devices-per-host", devices, "--rate", rate]
    mesh = ["--mesh.replica", hosts, "--mesh.fsdp", devices, "--mesh.cpu-devices", devices]
    flags = ["--config", str(args.config), "--seed", str(seed), *mesh, *side_flags(exchange), *changes]

    same_request(workdir, {"launch": launch, "flags": flags})

    def found(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        return reached(rows, workdir, f"eval/{task.best_metric}", args.target, rising=task.resolved_mode == "max")

    def ended(rows: list[dict[str, Any]]) -> bool:
        return found(rows) is not None or trained(rows, workdir)[0] >= args.at_most_sec

    if not ended(read_rows(workdir)) and not finished(workdir):
        train_on_hosts(launch, workdir, flags, until=ended)
    rows = read_rows(workdir)
    seconds, steps = trained(rows, workdir)
    times = found(rows) or {"seconds": None, "stopped_after_sec": seconds, "stopped_after_steps": steps}
    return {"exchange": exchange, "rate": rate, "seed": seed, **times}


def reached(
    rows: list[dict[str, Any]], workdir: Path, metric: str, target: float, *, rising: bool
) -> dict[str, Any] | None:
    """Seconds of training and steps until the evaluation that reached the target; None if none has."""
    for number, row in enumerate(rows):
        value = row.get(metric)
        if value is not None and (value >= target if rising else value <= target):
            return {"seconds": trained(rows[: number + 1], workdir)[0], "steps": row["step"], metric: value}
    return None


def trained(rows: list[dict[str, Any]], workdir: Path) -> tuple[float, int]:
    """Seconds of training in these rows, and the steps."""
    seconds, step = 0.0, 0
    examples = json.loads((workdir / CONFIG_FILE).read_text(encoding="utf-8"))["batch_size"] if rows else 0
    for row in rows:
        if "examples_per_sec" in row:
            seconds += (row["step"] - step) * examples / row["examples_per_sec"]
            step = row["step"]
    return seconds, step


def report(args: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """Prints the table, writes and draws the figures."""
    table = Table(title=f"{args.config}: training time to {args.target:g}, {len(args.seeds)} seeds")
    for heading in ("link", "exchange", "seconds: median", "least", "most", "steps: median", "faster: median", "each"):
        table.add_column(heading, justify="left" if heading == "exchange" else "right")
    summary = []
    for rate in args.rates:
        first = {run["seed"]: run["seconds"] for run in select(runs, rate, args.exchanges[0])}
        for exchange in args.exchanges:
            reached_runs = [run for run in select(runs, rate, exchange) if run["seconds"] is not None]
            if len(reached_runs) < len(args.seeds):
                others = [run for run in select(runs, rate, exchange) if run["seconds"] is None]
                least = min(other["stopped_after_sec"] for other in others)
                note = f"reached by {len(reached_runs)} of {len(args.seeds)} seeds, not in {least:.0f} s"
                table.add_row(rate, exchange, note)
                continue
            seconds = [run["seconds"] for run in reached_runs]
            ratios = [first[run["seed"]] / run["seconds"] for run in reached_runs if first[run["seed"]] is not None]
            median = statistics.median(ratios) if ratios else float("nan")
            summary.append(
                {"rate": rate, "exchange": exchange, "seconds": statistics.median(seconds), "faster": ratios}
            )
            table.add_row(
                rate,
                exchange,
                *(f"{pick(seconds):.1f}" for pick in (statistics.median, min, max)),
                f"{statistics.median(run['steps'] for run in reached_runs):g}",
                f"{median:.2f} x" if ratios else "-",
                ", ".join(f"{ratio:.2f}" for ratio in ratios),
            )
    Console(width=140).print(table)
    content = {"target": args.target, "runs": runs, "summary": summary}
    (args.workdir / "times.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (args.workdir / "times.png").write_bytes(figure(runs, args.target))
    print(f"written: {args.workdir / 'times.json'}, {args.workdir / 'times.png'}")


def select(runs: list[dict[str, Any]], rate: str, exchange: str) -> list[dict[str, Any]]:
    """The runs of an exchange at a rate."""
    return [run for run in runs if (run["rate"], run["exchange"]) == (rate, exchange)]


def figure(runs: list[dict[str, Any]], target: float) -> bytes:
    """A PNG: the time of each run that reached the target, a panel for each rate."""
    rates, exchanges = ([*dict.fromkeys(run[key] for run in runs)] for key in ("rate", "exchange"))
    chosen = style.looks(exchanges)
    drawn = style.new_figure(
        4.2 * len(rates) + 2.5, 0.6 * len(exchanges) + 2.2, f"Training time to {target:g} on held-out data, measured"
    )
    for axes, rate in zip(drawn.subplots(1, len(rates), sharex=True, squeeze=False)[0], rates, strict=True):
        groups = {
            exchange: [run["seconds"] for run in select(runs, rate, exchange) if run["seconds"] is not None]
            for exchange in exchanges
        }
        style.dress(axes, f"link of a host: {parse_rate(rate) / 1e6:g} Mbit/s", x="seconds of training")
        style.seed_dots(axes, groups, chosen)
        if axes.get_subplotspec().colspan.start:  # pyright: ignore
            axes.tick_params(labelleft=False)
        axes.set_xlim(0, 1.05 * max((run["seconds"] for run in runs if run["seconds"] is not None), default=1.0))
        axes.locator_params(axis="x", nbins=6)
    style.legend(drawn, [style.measured_entry("one seed", line=False), style.mean_entry()])
    return style.png(drawn)


if __name__ == "__main__":
    main()
