"""Time to accuracy on an emulated cluster: how long until a run evaluates at `--target`, by exchange and link rate.

TFDS_DATA_DIR=... python scripts/time_to_accuracy.py --config configs/fashion_mnist.py --target 0.90 \\
    --rates 20mbit 100mbit --workdir runs/time_to_accuracy

Needs what `python -m jaxdl.launch netns` needs: Linux, root, iproute2. Each run trains on `--hosts` network namespaces
and is stopped by SIGTERM once it has reached the target; seeds are the outermost loop, so that exchanges and rates take
turns. The time is that of training alone, from the first step to the evaluation: compiling and evaluating, which are
the same for all, are left out. A run that has its result in the workdir is not run again; one that was stopped goes on.
Prints a table and writes `times.json` and `times.png`. The first of `--exchanges` (written as in compare_exchanges.py)
is what the others are measured against. Everything after `--` changes the config of all runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from trials import exchange_flags, finished, folder_name, parse, read_rows, same_request, train_on_hosts

import jaxdl
from jaxdl.config import ConfigError
from jaxdl.outcome import exit_codes


def main() -> None:
    """Runs everything that is not finished yet, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--target", type=float, required=True, help="of the task's best metric")
    parser.add_argument("--rates", nargs="+", required=True, metavar="RATE", help="of each host's link: 50mbit")
    parser.add_argument("--exchanges", nargs="+", default=["dense", "topk,density=0.01"], metavar="KIND,OPTION=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--devices-per-host", type=int, default=2)
    args, changes = parse(parser)
    with exit_codes():
        for exchange in args.exchanges:  # A mistake is told before the first run.
            base = jaxdl.load(args.config, [*exchange_flags(exchange), *changes])
        if base.task.best_mode != "max":
            raise ConfigError(
                f"--config {args.config}: of {base.task.best_metric} less is better; that is not looked for."
            )
        runs = [
            run(args, changes, base.task.best_metric, exchange, rate, seed)
            for seed in args.seeds
            for rate in args.rates
            for exchange in args.exchanges
        ]
    report(args, runs)


def run(
    args: argparse.Namespace, changes: list[str], metric: str, exchange: str, rate: str, seed: int
) -> dict[str, Any]:
    """Trains until the target is reached, or to the end; returns the time, the steps and the bytes."""
    workdir = args.workdir / f"{folder_name(exchange)}_{rate}_seed{seed}"
    print(f"--- {exchange} at {rate}, seed {seed}: {workdir}", flush=True)
    hosts, devices = str(args.hosts), str(args.devices_per_host)
    launch = ["netns", "--hosts", hosts, "--devices-per-host", devices, "--rate", rate]
    mesh = ["--mesh.replica", hosts, "--mesh.fsdp", devices, "--mesh.cpu-devices", devices]
    flags = ["--config", str(args.config), "--seed", str(seed), *mesh, *exchange_flags(exchange), *changes]

    same_request(workdir, {"launch": launch, "flags": flags})

    def found(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        return reached(rows, workdir, f"eval/{metric}", args.target)

    if found(read_rows(workdir)) is None and not finished(workdir):
        train_on_hosts(launch, workdir, flags, until=lambda rows: found(rows) is not None)
    times = found(read_rows(workdir)) or {"seconds": None}
    return {"exchange": exchange, "rate": rate, "seed": seed, **times}


def reached(rows: list[dict[str, Any]], workdir: Path, metric: str, target: float) -> dict[str, Any] | None:
    """Seconds of training and steps until the evaluation that reached the target; None while none has."""
    seconds, step = 0.0, 0
    examples = json.loads((workdir / "config.json").read_text())["batch_size"] if rows else 0
    for row in rows:
        if "examples_per_sec" in row:
            seconds += (row["step"] - step) * examples / row["examples_per_sec"]
            step = row["step"]
        if (row.get(metric) or 0) >= target:
            return {"seconds": seconds, "steps": row["step"], metric: row[metric]}
    return None


def report(args: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """Prints the table, writes and draws the figures."""
    table = Table(title=f"{args.config}: training time to {args.target:g}, {len(args.seeds)} seeds")
    for heading in ("link", "exchange", "seconds: median", "least", "most", "steps: median", "faster: median", "each"):
        table.add_column(heading, justify="left" if heading == "exchange" else "right")
    summary = []
    for rate in args.rates:
        first = {one["seed"]: one["seconds"] for one in select(runs, rate, args.exchanges[0])}
        for exchange in args.exchanges:
            found = [one for one in select(runs, rate, exchange) if one["seconds"] is not None]
            if len(found) < len(args.seeds):
                table.add_row(rate, exchange, f"reached by {len(found)} of {len(args.seeds)} seeds")
                continue
            seconds = [one["seconds"] for one in found]
            ratios = [first[one["seed"]] / one["seconds"] for one in found if first[one["seed"]] is not None]
            median = statistics.median(ratios) if ratios else float("nan")
            summary.append(
                {"rate": rate, "exchange": exchange, "seconds": statistics.median(seconds), "faster": ratios}
            )
            table.add_row(
                rate,
                exchange,
                *(f"{pick(seconds):.1f}" for pick in (statistics.median, min, max)),
                f"{statistics.median(one['steps'] for one in found):g}",
                f"{median:.2f} x",
                ", ".join(f"{ratio:.2f}" for ratio in ratios),
            )
    Console(width=140).print(table)
    (args.workdir / "times.json").write_text(json.dumps({"runs": runs, "summary": summary}, indent=2) + "\n")
    draw(args, runs)
    print(f"written: {args.workdir / 'times.json'}, {args.workdir / 'times.png'}")


def select(runs: list[dict[str, Any]], rate: str, exchange: str) -> list[dict[str, Any]]:
    """The runs of an exchange at a rate."""
    return [one for one in runs if (one["rate"], one["exchange"]) == (rate, exchange)]


def draw(args: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """The time of each run, a panel for each rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(args.rates) + 1, 0.7 * len(args.exchanges) + 1.6), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, rate in zip(figure.subplots(1, len(args.rates), sharey=True, squeeze=False)[0], args.rates, strict=True):
        for place, exchange in enumerate(args.exchanges):
            seconds = [one["seconds"] for one in select(runs, rate, exchange) if one["seconds"] is not None]
            axes.plot(seconds, [place] * len(seconds), "o", alpha=0.8)
        axes.margins(x=0.1, y=0.4)
        axes.set(title=f"{rate} a host", xlabel=f"seconds of training to {args.target:g}")
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(args.exchanges)), [one.replace(",", ",\n") for one in args.exchanges])
        axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    figure.savefig(args.workdir / "times.png")


if __name__ == "__main__":
    main()
