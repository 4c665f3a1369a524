"""Time to a held-out loss with learners that do not wait for each other, against the same learners waiting.

python scripts/measure_async.py --out runs/async

Four learners on this machine train a small MLP on scikit-learn's digits; pauses in each step make one of them three
times as slow as the others, and learner 1 is killed after some seconds and started again. The settings differ only in
when the syncer merges. Learner 0 evaluates the anchor that it has every 16 of its steps; seconds count from the moment
at which all four have taken a step; nobody takes a second one before. Afterwards each tape is replayed
in this process. Prints a table and writes `async.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxdl
from jaxdl.agreement import Asynchronous
from jaxdl.asynchrony.replay import Difference
from jaxdl.asynchrony.storage import TAPE_FILE, read_tape
from jaxdl.data import Digits
from jaxdl.evaluation import EvaluationConfig
from jaxdl.experiment import Experiment
from jaxdl.mesh import MeshConfig
from jaxdl.models import FromFunctions
from jaxdl.optim import SGD, Constant
from jaxdl.report import ReportConfig
from jaxdl.run.relearning import replay_runs

NUM_LEARNERS, SLOW = 4, 3
"""Learners, and the number of the slow one."""
FAST_SEC, SLOW_SEC = 0.04, 0.12
"""Pause in each step."""
KILLED, KILLED_AFTER_SEC = 1, 6.0
SETTINGS = {
    "all wait for all": ["--quorum", "4"],
    "quorum 2, grace 0.1 s": ["--quorum", "2", "--grace-sec", "0.1", "--max-staleness", "8"],
    "quorum 1, delayed momentum": [
        "--quorum", "1", "--outer.learning-rate", "0.7", "--outer.momentum", "0.5", "--outer.every", "4",
    ],
    "all wait for all, fewer steps for the slow": ["--quorum", "4", "--equal-time"],
}  # fmt: skip


def init(key: jax.Array, image: jax.Array, num_classes: int) -> dict[str, jax.Array]:
    """The parameters of the MLP."""
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (image[0].size, 64)) / 8,
        "first_bias": jnp.zeros(64),
        "second": jax.random.normal(second, (64, num_classes)) / 8,
        "second_bias": jnp.zeros(num_classes),
    }


def apply(params: dict[str, jax.Array], image: jax.Array) -> jax.Array:
    """The logits."""
    x = image.reshape(image.shape[0], -1)
    x = jax.nn.relu(x @ params["first"] + params["first_bias"])
    return x @ params["second"] + params["second_bias"]


def experiment_of(learner: int) -> Experiment:
    """The experiment of a learner."""
    return Experiment(
        data=Digits(),
        model=FromFunctions(init, apply),
        optimizer=SGD(learning_rate=0.02, momentum=0.9),
        schedule=Constant(),
        agreement=Asynchronous(),
        mesh=MeshConfig(replica=1),
        batch_size=16,
        steps=100_000,
        seed=learner,
        evaluation=EvaluationConfig(every_steps=16 if learner == 0 else 100_000),
        report=ReportConfig(every_steps=100, tensorboard=False, curves=False),
    )


def learn(learner: int, out: Path) -> None:
    """One learner: trains with pauses, and notes when it began and what it evaluated."""
    began = out / f"began-{learner}"
    losses = []

    def stepped(info: Any) -> None:
        if not began.exists():
            began.write_text(str(time.time()))
            while not all((out / f"began-{other}").exists() for other in range(NUM_LEARNERS)):
                time.sleep(0.02)
        time.sleep(SLOW_SEC if learner == SLOW else FAST_SEC)

    def evaluated(info: Any) -> None:
        losses.append((time.time(), info.metrics["loss"]))

    jaxdl.train(experiment_of(learner), quiet=True, on_step=stepped, on_evaluation=evaluated)
    if learner == 0:
        (out / "losses.json").write_text(json.dumps(losses))


def measure(name: str, options: list[str], out: Path, total_steps: int) -> list[tuple[float, float]]:
    """(seconds, held-out loss) of one setting."""
    out.mkdir(parents=True)
    pids = out / "pids.json"
    command = [sys.executable, "-m", "jaxdl.launch", "async", "--learners", str(NUM_LEARNERS), "--every-steps", "16"]
    command += ["--total-steps", str(total_steps), "--folder", str(out / "syncer"), "--restarts", "1"]
    command += ["--pids", str(pids), *options, "--", "python", __file__, "--out", str(out), "--learner", "{learner}"]
    line = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not all((out / f"began-{learner}").exists() for learner in range(NUM_LEARNERS)):
        assert line.poll() is None, f"{name}: the learners did not begin"
        time.sleep(0.05)
    time.sleep(KILLED_AFTER_SEC)
    os.kill(json.loads(pids.read_text())["processes"][f"learner{KILLED}"], signal.SIGKILL)
    assert line.wait() == 0, f"{name}: ended with {line.returncode}"
    zero = max(float((out / f"began-{learner}").read_text()) for learner in range(NUM_LEARNERS))
    return [(at - zero, loss) for at, loss in json.loads((out / "losses.json").read_text())]


def main() -> None:
    """Measures all settings, or is one learner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--target", type=float, default=0.15, help="held-out loss")
    parser.add_argument("--total-steps", type=int, default=2400, help="of all learners")
    parser.add_argument("--learner", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.learner is not None:
        return learn(args.learner, args.out)
    found = {}
    print(f"{'':45} {'s to ' + str(args.target):>10} {'s in all':>10} {'last loss':>10} {'merges':>7}  replay")
    for number, (name, options) in enumerate(SETTINGS.items()):
        folder = args.out / str(number)
        losses = measure(name, options, folder, args.total_steps)
        hit = next((at for at, loss in losses if loss <= args.target), None)
        tape = folder / "syncer" / TAPE_FILE
        merges = sum(one["kind"] == "merge" for one in read_tape(tape))
        try:
            replay_runs(tape, experiment_of, jax.devices()[:1])
            same = "equal, to the bit"
        except Difference as difference:
            same = str(difference)
        found[name] = {"seconds_to_target": hit, "losses": losses, "merges": merges, "replay": same}
        shown = "-" if hit is None else f"{hit:.1f}"
        print(f"{name:45} {shown:>10} {losses[-1][0]:>10.1f} {losses[-1][1]:>10.4f} {merges:>7}  {same}", flush=True)
    (args.out / "async.json").write_text(json.dumps({"target": args.target, "settings": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
