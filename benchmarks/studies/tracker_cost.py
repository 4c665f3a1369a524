"""The time of a step with and without trackers, also when the tracker's server is gone.

python -m benchmarks.studies.tracker_cost --trackers mlflow wandb trackio --steps 600 --repeats 5

Trains the digits experiment (or `--config`), a row of metrics every 10 steps, without evaluations and checkpoints; the
variants are interleaved, all in one process with the same compiled program. Each tracker is a variant, and all of them
together; `mlflow gone` has a server whose port is closed, `mlflow hangs` one that takes connections and never answers.
Prints, for each variant, the median over the repeats of the mean time of a step, and its range, in the first half of
the run, in which trackers open (MLflow makes a database), and in the second; the seconds that the run took beyond its
steps more than `none` did; and how many warnings each run gave. Everything after `--` changes the config.
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
from jaxdl.core.errors import command_line
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import shared_programs

FIRST = 20
"""The steps before are not measured: the run fills its caches."""


def main() -> None:
    """Runs all variants and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/digits.py")
    parser.add_argument("--trackers", nargs="+", default=["mlflow", "wandb", "trackio"])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("others", nargs="*", help="after --: options of the experiment")
    args = parser.parse_args()
    if args.steps <= 2 * FIRST or args.repeats < 1:
        parser.error(
            f"--steps: more than {2 * FIRST}, of which the first {FIRST} are not measured; --repeats: 1 or more"
        )
    with command_line(), closed_port() as gone, silent_port() as hangs, shared_programs():
        never = {"evaluation.every_steps": args.steps, "checkpoint.every_steps": args.steps, "report.curves": False}
        base = jaxdl.load(args.config, args.others).replaced({"epochs": None, "steps": args.steps, **never})
        variants = {"none": base} | {tracker: tracked(base, [tracker]) for tracker in args.trackers}
        variants["all"] = tracked(base, args.trackers)
        if "mlflow" in args.trackers:
            for name, port in (("mlflow gone", gone), ("mlflow hangs", hangs)):
                uri = {"report.trackers.mlflow.uri": f"http://127.0.0.1:{port}"}
                variants[name] = tracked(base, ["mlflow"]).replaced(uri)
        measurements = {name: [] for name in variants}
        measured(base)  # Compiles.
        for _ in range(args.repeats):
            for name, experiment in variants.items():
                measurements[name].append(measured(experiment))
                first, second, *_ = measurements[name][-1]
                print(f"{name}: {first * 1000:.2f}, {second * 1000:.2f} ms", file=sys.stderr, flush=True)
    rest = statistics.median(measurement[2] for measurement in measurements["none"])
    print(f"{'variant':14} {'first half, ms a step':>26} {'second half':>26} {'rest, s':>8}  warnings")
    for name, every in measurements.items():
        halves = [middle([measurement[half] * 1000 for measurement in every]) for half in (0, 1)]
        seconds = statistics.median(measurement[2] for measurement in every) - rest
        warnings = " ".join(str(measurement[3]) for measurement in every)
        print(f"{name:14} {halves[0]:>26} {halves[1]:>26} {seconds:8.1f}  {warnings}")


def middle(values: list[float]) -> str:
    """The median and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def tracked(experiment: Experiment, trackers: list[str]) -> Experiment:
    """The experiment with these trackers."""
    return experiment.replaced({"report.trackers": trackers})


def measured(experiment: Experiment) -> tuple[float, float, float, int]:
    """(mean seconds of a step in each half, seconds that the run took besides, number of warnings) of one run."""
    times: list[float] = []
    begin, said = time.perf_counter(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        jaxdl.train(experiment, Path(folder) / "run", quiet=True, on_step=lambda _: times.append(time.perf_counter()))
        spent = time.perf_counter() - begin
    warnings = sum(line.startswith("tracker ") for line in said.getvalue().splitlines())
    half, last = len(times) // 2, len(times) - 1
    first, second = (times[half] - times[FIRST]) / (half - FIRST), (times[last] - times[half]) / (last - half)
    return first, second, spent - (times[last] - times[0]), warnings


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
