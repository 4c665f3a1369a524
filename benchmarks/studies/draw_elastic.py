"""A run resumed with fewer and with more hosts: does its loss stay among those of runs that kept all of theirs?

TFDS_DATA_DIR=... python -m benchmarks.studies.draw_elastic --config configs/fashion_mnist.py --steps 900 \\
    --workdir runs/elastic

Trains with `--hosts 4 2 3`: a third of the steps on 4 hosts, then SIGTERM, the next third on 2, the last on 3; and the
same with each of `--seeds` on the first number of hosts alone, to see how far apart seeds are. The global batch is the
same throughout, so it must divide by every number of hosts. The exchange is top-k with error feedback. Writes
`elastic.json` and `elastic.png` into the workdir. Everything after `--` changes the config of all runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import jaxdl
from benchmarks.studies.trials import parse, read_rows, same_request, train_on_hosts
from jaxdl.core.config import ConfigError
from jaxdl.report import style
from jaxdl.training.run.result import exit_codes

CHANGES = ("--exchange", "topk", "--exchange.density", "0.01", "--batch-size", "240", "--epochs", "None")
WINDOW_STEPS = 50
"""Losses are averaged over this many steps: single batches differ far more than runs do."""
_BAND = "#d5dae3"


def main() -> None:
    """Runs everything that is not finished, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 2, 3], help="one after the other")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args, changes = parse(parser)
    changes = [*CHANGES, "--steps", str(args.steps), *changes]
    with exit_codes():
        check(args, jaxdl.load(args.config, changes))  # A mistake is reported before the first run.
        elastic = run(args, changes, args.workdir / "elastic", args.hosts, args.seeds[0])
        whole = [run(args, changes, args.workdir / f"seed{seed}", args.hosts[:1], seed) for seed in args.seeds]
    report(args, elastic, whole)


def check(args: argparse.Namespace, base: jaxdl.Experiment) -> None:
    """Raises ConfigError for what could not be compared at the end."""
    if args.steps < WINDOW_STEPS:
        raise ConfigError(f"--steps {args.steps}: losses are averaged over {WINDOW_STEPS}. Give as many or more.")
    if len(args.seeds) < 2:
        raise ConfigError("--seeds: one seed has no spread. Give two or more.")
    if base.task.best_metric != "accuracy":
        raise ConfigError(f"--config {args.config}: its evaluation has no accuracy.")
    for number in args.hosts:
        if number < 1 or base.batch_size % number:
            raise ConfigError(f"--hosts {number}: the batch of {base.batch_size} cannot be split evenly over them.")


def run(args: argparse.Namespace, changes: list[str], workdir: Path, hosts: list[int], seed: int) -> dict[str, Any]:
    """Trains on each number of hosts in turn, for an equal share of the steps; returns losses, evaluation and stops."""
    same_request(workdir, {"config": str(args.config), "hosts": hosts, "seed": seed, "changes": changes})
    marks = workdir / "stops.json"
    stops: list[int] = json.loads(marks.read_text(encoding="utf-8")) if marks.exists() else []
    for index, number in enumerate(hosts[len(stops) :], len(stops)):
        limit = args.steps * (index + 1) // len(hosts)
        launch = ["local", "--hosts", str(number), "--devices-per-host", "1"]
        mesh = ["--mesh.replica", str(number), "--mesh.fsdp", "1", "--mesh.cpu-devices", "1"]
        train_on_hosts(
            launch,
            workdir,
            ["--config", str(args.config), "--seed", str(seed), *mesh, *changes],
            until=lambda rows, limit=limit: limit < args.steps and steps_done(rows) >= limit,
        )
        stops.append(steps_done(read_rows(workdir)))
        marks.write_text(json.dumps(stops), encoding="utf-8")
    rows = read_rows(workdir)
    accuracy = [value for row in rows for name, value in row.items() if name == "eval/accuracy"]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    return {"losses": losses, "accuracy": accuracy[-1], "stops": stops, "hosts": hosts, "seed": seed}


def steps_done(rows: list[dict[str, Any]]) -> int:
    """The last step that a run has reported."""
    return max((row["step"] for row in rows), default=0)


def smoothed(losses: dict[int, float], ends: np.ndarray) -> np.ndarray:
    """The mean training loss of the WINDOW_STEPS steps before each of `ends`; each report is a mean since the last."""
    steps = np.array([0, *losses])
    totals = np.concatenate([[0], np.cumsum(np.diff(steps) * np.array(list(losses.values())))])
    return (np.interp(ends, steps, totals) - np.interp(ends - WINDOW_STEPS, steps, totals)) / WINDOW_STEPS


def report(args: argparse.Namespace, elastic: dict[str, Any], whole: list[dict[str, Any]]) -> None:
    """Prints, writes and draws the comparison."""
    ends = np.arange(WINDOW_STEPS, args.steps + 1, 10)
    curves = np.stack([smoothed(seed_run["losses"], ends) for seed_run in whole])
    mine = smoothed(elastic["losses"], ends)
    away = np.abs(mine - curves.mean(0)) / curves.std(0, ddof=1)
    inside = (mine >= curves.min(0)) & (mine <= curves.max(0))
    accuracies = [seed_run["accuracy"] for seed_run in whole]
    shown = {
        "ends": ends,
        "loss": mine,
        "least_of_seeds": curves.min(0),
        "most_of_seeds": curves.max(0),
        "deviations_from_mean": (mine - curves.mean(0)) / curves.std(0, ddof=1),
    }
    comparison = {
        "hosts": elastic["hosts"],
        "stops": elastic["stops"],
        "seeds": args.seeds,
        "window_steps": WINDOW_STEPS,
        "curves": {name: values.tolist() for name, values in shown.items()},
        "accuracy": elastic["accuracy"],
        "accuracies_of_seeds": accuracies,
        "share_of_curve_between_the_seeds": float(inside.mean()),
        "mean_deviations_from_mean": float(away.mean()),
        "most_deviations_from_mean": float(away.max()),
        "most_relative_distance_to_same_seed": float(np.max(np.abs(mine - curves[0]) / curves[0])),
        "most_relative_spread_of_seeds": float(np.max((curves.max(0) - curves.min(0)) / curves.mean(0))),
    }
    (args.workdir / "elastic.json").write_text(json.dumps(comparison, indent=2) + "\n", encoding="utf-8")
    (args.workdir / "elastic.png").write_bytes(figure(comparison))
    console = Console()
    console.print({name: value for name, value in comparison.items() if name != "curves"})
    console.print(f"picture: {args.workdir / 'elastic.png'}")


def figure(found: dict[str, Any]) -> bytes:
    """A PNG: the loss of the elastic run in the band of the seeds, and its distance from their mean.

    Args:
      found: what `report` writes to elastic.json.
    """
    curves, hosts, window = found["curves"], found["hosts"], found["window_steps"]
    color, ends = style.EXCHANGE_COLORS["topk"], curves["ends"]
    drawn = style.new_figure(9.5, 6.6, "Top-k with error feedback: one run resumed with fewer and more hosts")
    upper, lower = drawn.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    low, high = curves["least_of_seeds"], curves["most_of_seeds"]
    upper.fill_between(ends, low, high, color=_BAND, lw=0)
    upper.plot(ends, curves["loss"], color=color, lw=1.8)
    lower.axhspan(-2, 2, color=_BAND, lw=0)
    lower.plot(ends, curves["deviations_from_mean"], color=color, lw=1.4)
    style.dress(upper, y=f"training loss, mean of {window} steps")
    style.dress(lower, x="step", y="from the mean of the\nseeds, in standard\ndeviations")
    style.log_axis(upper, "y", [*low, *high, *curves["loss"]])
    lower.set_ylim(min(-2.6, *curves["deviations_from_mean"]), max(2.6, *curves["deviations_from_mean"]))
    for step in (0, *found["stops"]):
        for axes in (upper, lower):
            axes.axvline(step, color=style.GREY, lw=0.8, ls=":")
    style.legend(
        drawn,
        [
            style.line_entry(f"measured: hosts {' → '.join(map(str, hosts))}", color, lw=1.8),
            style.patch_entry(
                f"measured: range of {len(found['seeds'])} seeds on {hosts[0]} hosts throughout (below: 2 deviations)",
                color=_BAND,
            ),
        ],
        width=72,
    )
    segments = zip((0, *found["stops"]), hosts, strict=False)
    style.label_top(upper, [(step, f"{number} host{'s' * (number > 1)} from here") for step, number in segments])
    return style.png(drawn)


if __name__ == "__main__":
    main()
