"""Time to a held-out loss with learners that do not wait for each other, against the same learners waiting.

python -m benchmarks.studies.measure_async --out runs/async
python -m benchmarks.studies.measure_async --out runs/kills --kills 10

Four learners on this machine train a small MLP on scikit-learn's digits. Pauses in each step, far longer than its
computation, make learner 3 three times as slow as the others; learner 1 is killed after some seconds and started again
from nothing. The settings differ only in when the syncer merges, and take turns. Learner 0 evaluates the anchor that it
has every 8 of its steps; seconds count from the moment at which all four have taken their first step, and nobody takes
a second one before. Afterwards each tape is replayed in this process, and its decisions are simulated.
Prints a table and writes `async.json` and `async.png`.

With `--kills` it makes so many runs instead, each with settings, victims and times of its own drawn from its number:
learners are killed at random, in every third run the syncer too. A run that takes too long fails; each tape is replayed
and, unless the syncer was killed, its decisions are simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxdl
from jaxdl.data import Digits
from jaxdl.exchange.agreement import Asynchronous
from jaxdl.models import FromFunctions
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.asynchrony.replay import Difference
from jaxdl.parallel.asynchrony.simulator import decided, simulated
from jaxdl.parallel.asynchrony.storage import TAPE_FILE, read_tape
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import ReportConfig, style
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.learners.replay import replay_runs

NUM_LEARNERS, SLOW, EVERY_STEPS = 4, 3, 16
"""Learners, the number of the slow one, and a learner's steps in a round."""
FAST_SEC, SLOW_SEC = 0.04, 0.12
"""Pause in each step."""
KILLED, KILLED_AFTER_SEC = 1, 6.0
LIMIT_SEC = 600.0
"""A run that takes longer is taken as hanging."""
SETTINGS = {
    "all wait for all": ["--quorum", "4"],
    "all wait for all, Nesterov": ["--quorum", "4", "--outer.learning-rate", "0.7", "--outer.momentum", "0.5"],
    "all wait, slow ones make fewer steps": ["--quorum", "4", "--equal-time"],
    "quorum 2, grace 0.1 s": ["--quorum", "2", "--grace-sec", "0.1", "--max-staleness", "8"],
    "quorum 1, delayed Nesterov": [
        "--quorum", "1", "--outer.learning-rate", "0.7", "--outer.momentum", "0.5", "--outer.every", "4",
    ],
}  # fmt: skip
LOOKS = dict(zip(SETTINGS, (style.INK, "#cc79a7", "#009e73", "#0072b2", "#d55e00"), strict=True))
Run = dict[str, Any]


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
        optimizer=SGD(learning_rate=0.005, momentum=0.9),
        schedule=Constant(),
        agreement=Asynchronous(),
        mesh=MeshConfig(replica=1),
        batch_size=16,
        steps=100_000,
        seed=learner,
        evaluation=EvaluationConfig(every_steps=8 if learner == 0 else 100_000),
        report=ReportConfig(every_steps=100, tensorboard=False, curves=False),
    )


def learn(learner: int, out: Path, faster: float) -> None:
    """One learner: trains with pauses, and notes when it began and what it evaluated."""
    losses: list[tuple[float, float]] = []

    def stepped(info: Any) -> None:
        if not began(out, learner).exists():
            began(out, learner).write_text(str(time.time()), encoding="utf-8")
        while not all(began(out, other).exists() for other in range(NUM_LEARNERS)):
            time.sleep(0.02)
        time.sleep((SLOW_SEC if learner == SLOW else FAST_SEC) / faster)

    def evaluated(info: Any) -> None:
        losses.append((time.time(), info.metrics["loss"]))

    jaxdl.train(experiment_of(learner), quiet=True, on_step=stepped, on_evaluation=evaluated)
    if learner == 0:
        (out / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


def began(out: Path, learner: int) -> Path:
    """The file in which a learner writes when it took its first step."""
    return out / f"began-{learner}"


def wait_for_first_steps(out: Path) -> None:
    """Returns when all learners have taken a step. Exits when that takes too long."""
    end = time.monotonic() + LIMIT_SEC
    while not all(began(out, learner).exists() for learner in range(NUM_LEARNERS)):
        if time.monotonic() > end:
            sys.exit(f"{out}: HANGS, a learner did not begin within {LIMIT_SEC:g} s; see output.txt")
        time.sleep(0.01)


def run(options: Sequence[str], out: Path, faster: float, disturb: Callable[[Callable[[str], bool]], None]) -> float:
    """Runs the learners to their end; returns the seconds that this took. Exits when they fail or hang.

    `disturb` is called once they have been started. It gets a function that kills a process of a given name, and
    returns whether it was alive.
    """
    out.mkdir(parents=True)
    pids, since = out / "pids.json", time.monotonic()
    command = [sys.executable, "-m", "jaxdl.launch", "async", "--learners", str(NUM_LEARNERS)]
    command += ["--every-steps", str(EVERY_STEPS), "--folder", str(out / "syncer"), "--pids", str(pids), *options]
    command += ["--", "python", __file__, "--out", str(out), "--faster", str(faster), "--learner", "{learner}"]

    def kill(name: str) -> bool:
        pid = json.loads(pids.read_text(encoding="utf-8"))["processes"].get(name) if pids.exists() else None
        with_options = Path(f"/proc/{pid}/cmdline")
        if pid is None or not with_options.exists() or str(out) not in with_options.read_text(encoding="utf-8"):
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    with open(out / "output.txt", "w", encoding="utf-8") as output:
        line = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            disturb(lambda name: line.poll() is None and kill(name))
            code = line.wait(LIMIT_SEC)
        except subprocess.TimeoutExpired:
            sys.exit(f"{out}: HANGS, not over after {LIMIT_SEC:g} s; see output.txt")
        finally:
            line.kill()  # Its processes die with it.
    if code:
        sys.exit(f"{out}: ended with {code}; see output.txt")
    return time.monotonic() - since


def measure(name: str, out: Path, total_steps: int, target: float) -> Run:
    """One run of a setting. Seconds count from the moment when all have taken their first step."""
    zero = killed = 0.0

    def disturb(kill: Callable[[str], bool]) -> None:
        nonlocal zero, killed
        wait_for_first_steps(out)
        zero = max(
            float(began(out, learner).read_text(encoding="utf-8") or time.time()) for learner in range(NUM_LEARNERS)
        )
        time.sleep(max(0.0, zero + KILLED_AFTER_SEC - time.time()))
        killed = time.time()
        if not kill(f"learner{KILLED}"):
            sys.exit(f"{out}: learner {KILLED} was not there to be killed; see output.txt")

    run([*SETTINGS[name], "--total-steps", str(total_steps), "--restarts", "1"], out, 1.0, disturb)
    losses = [
        (round(at - zero, 3), round(loss, 5))
        for at, loss in json.loads((out / "losses.json").read_text(encoding="utf-8"))
    ]
    records = read_tape(out / "syncer" / TAPE_FILE)
    lost = next(record["at_us"] for record in records if record["kind"] == "leave" and record["learner"] == KILLED)
    merges = merges_of(records, lambda at_us: round(killed - zero + (at_us - lost) / 1e6, 3))
    return {
        "setting": name,
        "seconds": next((at for at, loss in losses if loss <= target), None),
        "steps_per_sec": speeds(records),
        "losses": losses,
        **merges,
        **checks(out / "syncer" / TAPE_FILE),
    }


def merges_of(records: Sequence[Mapping[str, Any]], seconds: Callable[[int], float]) -> Run:
    """The merges of a tape, each with its time, its learners and their staleness; and when the killed one was away."""
    version, merges, away = {}, [], []
    for record in records:
        if record["kind"] == "arrive":
            version[record["learner"]] = record["version"]
        elif record["kind"] == "merge":
            parts = [(part["learner"], record["version"] - 1 - version[part["learner"]]) for part in record["parts"]]
            merges.append((seconds(record["at_us"]), parts))
        elif record["kind"] in ("leave", "join") and record["learner"] == KILLED:
            away.append(seconds(record["at_us"]))
    return {"merges": merges, "away": away[1:3]}


def speeds(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Steps a second of each learner while it trains: the median of its rounds."""
    since: dict[int, int] = {}
    rates: dict[int, list[float]] = {}
    for record in records:
        if record["kind"] == "release":
            since[record["learner"]] = record["at_us"]
        elif record["kind"] == "arrive":
            rates.setdefault(record["learner"], []).append(
                record["steps"] * 1e6 / (record["at_us"] - since[record["learner"]])
            )
    return [round(statistics.median(rates.get(learner, [0.0])), 2) for learner in range(NUM_LEARNERS)]


def checks(tape: Path) -> Run:
    """What a replay of the tape and a simulation of its decisions find; empty words where all is equal."""
    records = read_tape(tape)
    replayed, other = "", ""
    try:
        replay_runs(tape, experiment_of, jax.devices()[:1])
    except Difference as difference:
        replayed = str(difference)
    try:
        pairs = zip(decided(records), simulated(records), strict=True)
        other = next(
            (f"{decision} on the tape, {again} simulated" for decision, again in pairs if decision != again), ""
        )
    except ValueError as error:
        other = str(error)
    return {
        "replay": replayed,
        "simulation": other,
        "restarts_of_syncer": sum(record["kind"] == "restart" for record in records),
        "joins": sum(record["kind"] == "join" for record in records),
        "num_merges": sum(record["kind"] == "merge" for record in records),
        "max_staleness": max((max(0, stale) for _, parts in merges_of(records, float)["merges"] for _, stale in parts)),
    }


def kill_at_random(number: int, out: Path) -> Run:
    """A run whose settings, victims and times are drawn from its number."""
    draw = random.Random(number)
    quorum, ahead, stale = draw.randint(1, 4), draw.choice([None, 1, 3]), draw.choice([None, 2, 8])
    options = ["--quorum", str(quorum), "--bits", draw.choice(["32", "8", "4"]), "--return-sec", "15"]
    options += ["--grace-sec", draw.choice(["0", "0.1"]), "--total-steps", "5000", "--restarts", "9"]
    options += ["--save-sec", "1"]
    options += [] if ahead is None else ["--max-ahead", str(ahead)]
    options += [] if stale is None else ["--max-staleness", str(stale)]
    victims = [f"learner{draw.randrange(NUM_LEARNERS)}" for _ in range(draw.randint(2, 4))]
    if number % 3 == 0:
        victims.insert(draw.randrange(1, len(victims) + 1), "syncer")
    pauses = [draw.uniform(0.5, 6) for _ in victims]
    killed: list[str] = []

    def disturb(kill: Callable[[str], bool]) -> None:
        if number % 2:  # In the others some are killed while they start.
            wait_for_first_steps(out)
        else:
            time.sleep(4.0)
        for victim, pause in zip(victims, pauses, strict=True):
            time.sleep(pause)
            if kill(victim):
                killed.append(victim)

    seconds = run(options, out, 2.0, disturb)
    return {"options": options, "killed": killed, "seconds": round(seconds, 1), **checks(out / "syncer" / TAPE_FILE)}


def figure(data: Mapping[str, Any]) -> bytes:
    """A PNG: the held-out loss over the seconds for each setting, and who took part in each merge of its first run."""
    names = [name for name in SETTINGS if any(run["setting"] == name for run in data["runs"])]
    drawn = style.new_figure(9.5, 3.4 + 1.15 * len(names), data["title"])
    grid = drawn.add_gridspec(1 + len(names), 1, height_ratios=[3.0, *[1.0] * len(names)])
    top = drawn.add_subplot(grid[0])
    last = max(at for run in data["runs"] for at, _ in run["losses"])
    for run in data["runs"]:
        seconds, losses = zip(*run["losses"], strict=True)
        top.plot(seconds, losses, "-", color=LOOKS[run["setting"]], lw=1.4, alpha=0.85)
    top.axhline(data["target"], color=style.GREY, lw=0.9, ls=":")
    everything = [loss for run in data["runs"] for _, loss in run["losses"]]
    style.dress(top, "Held-out loss of the anchor, a line for each run", x="", y="loss")
    style.log_axis(top, "y", everything)
    top.set_xlim(0, last)
    for place, name in enumerate(names):
        axes = drawn.add_subplot(grid[1 + place], sharex=top)
        run = next(run for run in data["runs"] if run["setting"] == name)
        for at, parts in run["merges"]:
            who = sorted(learner for learner, _ in parts)
            axes.plot([at] * len(who), who, "-", color=style.SPINE, lw=0.8, zorder=1)
            for learner, staleness in parts:
                shade = "none" if staleness else LOOKS[name]
                axes.plot(at, learner, "o", ms=3.6, mec=LOOKS[name], mfc=shade, mew=0.8, zorder=2)
        if len(run["away"]) == 2:
            axes.axvspan(*run["away"], ymin=(KILLED + 0.2) / 4, ymax=(KILLED + 0.8) / 4, color=style.GRID, zorder=0)
        label = "seconds since all four have taken their first step" if place == len(names) - 1 else ""
        style.dress(axes, f"{name}: learners in each merge", x=label)
        axes.set_yticks(range(NUM_LEARNERS), ["0", f"{KILLED} (killed)", "2", f"{SLOW} (slow)"], fontsize=style.SMALL)
        axes.set_ylim(-0.5, NUM_LEARNERS - 0.5)
    entries = [style.line_entry(name, LOOKS[name], lw=1.6) for name in names]
    entries += [
        style.line_entry("measured: delta from the newest anchor", style.GREY, "o", ls="", ms=4),
        style.line_entry("from an older anchor", style.GREY, "o", ls="", ms=4, mfc="none"),
        style.line_entry(f"held-out loss {data['target']:g}", style.GREY, ls=":"),
        style.patch_entry("learner 1 is away", color=style.GRID),
    ]
    style.legend(drawn, entries)
    return style.png(drawn)


def compare(args: argparse.Namespace) -> None:
    """Measures all settings in turn, and reports."""
    runs: list[Run] = []
    for repeat in range(args.repeats):
        for place, name in enumerate(SETTINGS):
            run = measure(name, args.out / f"{repeat}-{place}", args.total_steps, args.target)
            runs.append(run)
            print(f"{repeat} {name}: {run['seconds']} s to {args.target:g}; {shown(run)}", flush=True)
        data = {
            "title": "Four learners, one at a third of the speed, one killed and started again",
            "target": args.target,
            "runs": runs,
        }
        (args.out / "async.json").write_text(json.dumps(data) + "\n", encoding="utf-8")
        (args.out / "async.png").write_bytes(figure(data))
    print(f"\n{'':38} {'median s to ' + format(args.target, 'g'):>20} {'each':>22} {'faster':>7}")
    first = None
    for name in SETTINGS:
        each = [run["seconds"] for run in runs if run["setting"] == name]
        median = statistics.median(each) if None not in each else None
        first = median if first is None else first
        faster = f"{first / median:.2f}" if first and median else "-"
        print(f"{name:38} {median or '-':>20} {', '.join(map(str, each)):>22} {faster:>7}")


def shown(run: Run) -> str:
    """A run's checks in words."""
    words = f"{run['num_merges']} merges, staleness up to {run['max_staleness']}, {run['joins']} joins"
    same = run["replay"] or "equal, to the bit", run["simulation"] or "the same decisions"
    return f"{words}; replay: {same[0]}; simulation: {same[1]}"


def main() -> None:
    """Compares the settings, or kills at random, or is one learner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--target", type=float, default=0.2, help="held-out loss")
    parser.add_argument("--total-steps", type=int, default=1200, help="of all learners")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each setting")
    parser.add_argument("--kills", type=int, help="number of runs with random kills, instead of the comparison")
    parser.add_argument("--learner", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--faster", type=float, default=1.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.learner is not None:
        return learn(args.learner, args.out, args.faster)
    if args.out.exists():
        parser.error(f"--out {args.out}: it exists. Name a new folder.")
    if not args.kills:
        return compare(args)
    runs: list[Run] = []
    for number in range(args.kills):
        run = kill_at_random(number, args.out / str(number))
        runs.append(run)
        print(f"{number}: {run['seconds']} s, killed {', '.join(run['killed'])}; {shown(run)}", flush=True)
    (args.out / "kills.json").write_text(json.dumps(runs) + "\n", encoding="utf-8")
    if any(run["replay"] for run in runs):
        sys.exit("a tape was not replayed")


if __name__ == "__main__":
    main()
