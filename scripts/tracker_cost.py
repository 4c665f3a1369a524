"""The time of a step with and without trackers, also when the tracker's server is gone.

python scripts/tracker_cost.py --trackers mlflow wandb trackio --steps 600 --repeats 5

Trains the digits experiment (or `--config`), a row of metrics every 10 steps, without evaluations and checkpoints; the
variants are interleaved, all in one process with the same compiled program. Each tracker is a variant, and all of them
together; `mlflow gone` has a server whose port is closed, `mlflow hangs` one that takes connections and never answers.
Prints, for each variant, the median over the repeats of the mean time of a step (from step 51 on) and its range, the
seconds that the run took beyond its steps up to that of `none`, and how many warnings it gave. Everything after `--`
changes the config.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jaxdl
from jaxdl.errors import command_line
from jaxdl.experiment import Experiment
from jaxdl.run.compile import shared_programs

FIRST = 50
"""The steps before are not measured: the trackers open then, at the same time as the run fills its caches."""


def main() -> None:
    """Runs all variants and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/digits.py")
    parser.add_argument("--trackers", nargs="+", default=["mlflow", "wandb", "trackio"])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("others", nargs="*", help="after --: options of the experiment")
    args = parser.parse_args()
    with command_line(), closed_port() as gone, silent_port() as hangs, shared_programs():
        never = {"evaluation.every_steps": args.steps, "checkpoint.every_steps": args.steps, "report.curves": False}
        base = jaxdl.load(args.config, args.others).replaced({"epochs": None, "steps": args.steps, **never})
        variants = {"none": base} | {one: tracked(base, [one]) for one in args.trackers}
        variants["all"] = tracked(base, args.trackers)
        if "mlflow" in args.trackers:
            for name, port in (("mlflow gone", gone), ("mlflow hangs", hangs)):
                uri = {"report.trackers.mlflow.uri": f"http://127.0.0.1:{port}"}
                variants[name] = tracked(base, ["mlflow"]).replaced(uri)
        found = {name: [] for name in variants}
        measured(base)  # Compiles.
        for _ in range(args.repeats):
            for name, experiment in variants.items():
                found[name].append(measured(experiment))
                print(f"{name}: {found[name][-1][0] * 1000:.2f} ms", file=sys.stderr, flush=True)
    rest = statistics.median(one[1] for one in found["none"])
    print(f"{'variant':14} {'ms a step':>10} {'range':>16} {'rest, s':>8}  warnings")
    for name, every in found.items():
        steps = [one[0] * 1000 for one in every]
        seconds = statistics.median(one[1] for one in every) - rest
        spread = f"{min(steps):.2f} to {max(steps):.2f}"
        warnings = " ".join(str(one[2]) for one in every)
        print(f"{name:14} {statistics.median(steps):10.2f} {spread:>16} {seconds:8.1f}  {warnings}")


def tracked(experiment: Experiment, trackers: list[str]) -> Experiment:
    """The experiment with these trackers."""
    return experiment.replaced({"report.trackers": trackers})


def measured(experiment: Experiment) -> tuple[float, float, int]:
    """(mean seconds of a step, seconds that the run took besides, number of warnings) of one run."""
    times: list[float] = []
    begin, said = time.perf_counter(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        jaxdl.train(experiment, Path(folder) / "run", quiet=True, on_step=lambda _: times.append(time.perf_counter()))
        spent = time.perf_counter() - begin
    warnings = sum(line.startswith("tracker ") for line in said.getvalue().splitlines())
    return (times[-1] - times[FIRST]) / (len(times) - 1 - FIRST), spent - (times[-1] - times[0]), warnings


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


if __name__ == "__main__":
    main()
