"""A fleet of real runs that is harmed, beside static partitions: is anything lost, and what does elasticity give?

python -m benchmarks.fleet.demo --out runs/fleet_demo

Ten runs on digits (benchmarks/fleet/demo_config.py) share six emulated nodes of this machine, under the policy of
`jaxdl.fleet` and then on fixed equal shares of two nodes, with the same arrivals. In both, runs, all processes of a
node, and the server are killed, in the same order and as soon after the same times as a run makes steps; whom it meets
depends on which runs those are. Each run is made once more on two devices of one process, never
resized or killed, to compare with. Ends with code 1 if a run was lost, an attempt was started twice, a step is missing
or there twice, or a result differs; prints a table, and writes fleet_demo.json and fleet_demo.png.

All nodes share the cores of this machine, so steps are paced (paced_train.py): a node works --step-sec for a
step. Starting a process costs real time of these cores, more than on nodes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxdl
from benchmarks import ROOT
from benchmarks.fleet.demo_report import Asked, check, measure, write_report
from jaxdl.platform.fleet.engine import PIDS_FILE
from jaxdl.platform.fleet.store import Store
from jaxdl.training.run.compile import shared_programs

CONFIG = ROOT / "benchmarks" / "fleet" / "demo_config.py"
NUM_NODES, STATIC_NODES = 6, 2


@dataclass(frozen=True)
class Harm:
    """What is killed, and when."""

    at_sec: float
    what: str
    """`run`: its launcher; `host`: one of its processes; `node`; `server`."""
    down_sec: float = 0.0
    """How long the node, or the server, is away."""


HARMS = (Harm(25, "run"), Harm(45, "server", 3), Harm(65, "node", 30), Harm(90, "host"), Harm(105, "server", 3))


def made_up(seed: int, steps: int) -> list[Asked]:
    """Ten runs: when they come, how long they are, and what they may have. Every third keeps two nodes."""
    draw = random.Random(seed)
    runs, at = [], 0.0
    for number in range(10):
        sizes = (2,) if number % 3 == 2 else draw.choice([(1, 2, 4), (1, 2, 3, 4), (1, 2, 3, 4, 6)])
        runs.append(Asked(f"run{number}", number, at, draw.randrange(steps // 2, 2 * steps, 10), sizes))
        at += draw.expovariate(1 / 10)
    return runs


class Played:
    """One play of the runs: the fleet's folder, its server, and what was done to it."""

    def __init__(
        self,
        folder: Path,
        asked: list[Asked],
        args: argparse.Namespace,
        *,
        static: bool = False,
        harms: Sequence[Harm] = HARMS,
    ) -> None:
        self.folder, self.asked, self._args, self._static, self.harms = folder, asked, args, static, harms
        self.store = Store(folder / "fleet")
        self.store.folder.mkdir(parents=True)
        (folder / "steps").mkdir()
        self.names: dict[str, str] = {}
        """Number in the fleet -> name of the run."""
        self.harmed: list[dict[str, Any]] = []
        self.began = time.time()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._server: subprocess.Popen[bytes] | None = None

    def play(self) -> None:
        """Returns when all runs have completed. Raises RuntimeError if that takes too long, or one has failed."""
        self._serve()
        plan = [(run.arrival_sec, lambda run=run: self._submit(run)) for run in self.asked]
        plan += [(harm.at_sec, lambda harm=harm: self._harm(harm)) for harm in self.harms]
        self._later = plan
        try:
            while self._later or not self._over():
                now = time.time() - self.began
                due = sorted((entry for entry in self._later if entry[0] <= now), key=lambda entry: entry[0])
                self._later = [entry for entry in self._later if entry[0] > now]
                for _, act in due:
                    act()
                if now > self._args.limit_sec:
                    raise RuntimeError(f"{self.folder}: not over after {now:.0f} s: {self.store.view()}")
                if self._over() and not any(entry[0] <= self.asked[-1].arrival_sec for entry in self._later):
                    return  # What would still be harmed has ended.
                time.sleep(0.1)
        except BaseException:
            self._cancel()
            raise
        finally:
            self._end_server()

    def _cancel(self) -> None:
        """Ends all runs: without a server they would train on."""
        if self._server is None:
            self._serve()
        for name in self.names:
            self.store.ask(name, "cancel")
        end = time.monotonic() + 60
        while time.monotonic() < end and any(run["nodes"] for run in self.store.view()["runs"]):
            time.sleep(0.5)

    def _over(self) -> bool:
        with contextlib.suppress(Exception):
            runs = self.store.view()["runs"]
            if failed := [run["run"] for run in runs if run["state"] in ("failed", "cancelled", "halted")]:
                raise SystemExit(f"{self.folder}: runs {failed} have not completed: see their output.txt")
            return len(runs) == len(self.asked) and all(run["state"] == "completed" for run in runs)
        return False

    def serve_command(self) -> list[str]:
        """The command of the fleet's server."""
        words = ["serve", "--state", str(self.store.folder), "--nodes", str(NUM_NODES), "--poll-sec", "0.25"]
        words += ["--between-sec", str(self._args.between_sec), "--resized", "0.34", "--fairness", "0.35"]
        return [sys.executable, "-m", "jaxdl.fleet", *words]

    def _serve(self) -> None:
        with (self.folder / "server.txt").open("ab") as log:
            self._server = subprocess.Popen(self.serve_command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def _submit(self, run: Asked) -> None:
        command = train_command(run, self.folder, self._args.step_sec)
        made = self.store.submit(command, (STATIC_NODES,) if self._static else run.sizes)
        self.names[made.name] = run.name

    def _harm(self, harm: Harm) -> None:
        """Kills what there is, a run that makes steps: it waits until there is one."""
        attempts = self._attempts()
        if harm.what != "server" and not attempts:
            self.later(1.0, lambda: self._harm(harm))
            return
        told: dict[str, Any] = {"what": harm.what, "at": time.time()}
        if harm.what == "server":
            self._end_server()
            self.later(harm.down_sec, self._serve)
        else:
            run, nodes, folder = attempts[len(self.harmed) % len(attempts)]
            index = len(self.harmed) % len(nodes)
            told |= {"run": self.names[run], "node": nodes[index]}
            if not self.kill(harm, nodes, index, folder):
                self.later(1.0, lambda: self._harm(harm))
                return
        self.harmed.append(told)

    def later(self, sec: float, act: Callable[[], None]) -> None:
        """Acts so many seconds from now."""
        self._later.append((time.time() - self.began + sec, act))

    def kill(self, harm: Harm, nodes: Sequence[str], index: int, folder: Path) -> bool:
        """Harms the attempt of this folder, on these nodes, at one of them; False if it has just ended."""
        if not (folder / PIDS_FILE).exists():
            return False
        pids = json.loads((folder / PIDS_FILE).read_text(encoding="utf-8"))
        try:
            os.kill(pids["launcher"] if harm.what == "run" else pids["hosts"][f"host{index}"], signal.SIGKILL)
        except ProcessLookupError:
            return False
        if harm.what == "node":
            self.store.set_lost_nodes([nodes[index]])
            self.later(harm.down_sec, lambda: self.store.set_lost_nodes([]))
        return True

    def _attempts(self) -> list[tuple[str, list[str], Path]]:
        """Runs, nodes and folders of the attempts that run now, as the journal says, and have made steps."""
        running = {}
        for event in map(json.loads, (self.store.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()):
            folder = self.store.folder / "runs" / event["run"] / "attempts" / str(event.get("attempt"))
            if event["what"] == "started":
                running[event["run"]] = (event["nodes"], folder, event["at"])
            elif event["what"] != "killed":
                running.pop(event["run"], None)
        ready = []
        for run, (nodes, folder, started) in sorted(running.items()):
            log = self.folder / "steps" / f"{self.names[run]}.jsonl"
            if log.exists() and log.stat().st_mtime > started + 6:
                ready.append((run, nodes, folder))
        return ready


def options_of(run: Asked) -> dict[str, object]:
    """What of the config is a run's own."""
    return {"--seed": run.seed, "--steps": run.steps}


def train_command(run: Asked, folder: Path, step_sec: float) -> list[str]:
    """The command of a run, as it is submitted."""
    log, workdir = folder / "steps" / f"{run.name}.jsonl", folder / run.name
    words = ["python", str(ROOT / "benchmarks" / "fleet" / "paced_train.py"), str(step_sec), str(log)]
    words += ["--config", str(CONFIG), "--workdir", str(workdir), "--mesh.replica", "{nodes}"]
    return words + [str(word) for pair in options_of(run).items() for word in pair]


def whole(asked: list[Asked], folder: Path) -> None:
    """Trains each run on two devices of this process, without pace, harm, fleet or launcher."""
    with shared_programs():
        for run in asked:
            options = {**options_of(run), "--mesh.replica": STATIC_NODES, "--mesh.cpu-devices": STATIC_NODES}
            words = [str(word) for pair in options.items() for word in pair]
            jaxdl.train(jaxdl.load(CONFIG, words), folder / run.name, quiet=True)


def compiled_once(out: Path) -> dict[str, str]:
    """Environment in which, as on a cluster, a run that starts again compiles nothing."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(out / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def new_folder(parser: argparse.ArgumentParser, out: Path) -> Path:
    """The folder `--out`, made, as an absolute path; the program exits with a message if it exists."""
    if out.exists():
        parser.error(f"--out {out}: it exists. Give a new folder.")
    out = out.absolute()
    out.mkdir(parents=True)
    return out


def main() -> None:
    """Plays, checks and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--steps", type=int, default=60, help="the runs have half to twice as many")
    parser.add_argument("--step-sec", type=float, default=1.0, help="what a step takes on one node")
    parser.add_argument("--between-sec", type=float, default=40.0, help="the least time between two changes of a run")
    parser.add_argument("--limit-sec", type=float, default=600.0, help="when a play is given up")
    args = parser.parse_args()
    out = new_folder(parser, args.out)
    os.environ |= compiled_once(out)
    began, asked = time.monotonic(), made_up(args.seed, args.steps)
    whole(asked, out / "whole")
    plays = {name: Played(out / name, asked, args, static=name == "static") for name in ("elastic", "static")}
    for play in plays.values():
        play.began = time.time()
        play.play()
    problems, compared = check(out, asked, list(plays))
    for name, play in plays.items():
        if len(play.harmed) < len(HARMS):
            problems.append(f"{name}: {len(play.harmed)} of {len(HARMS)} kills met something")
    if not compared:
        sys.exit("\n".join(problems))
    measures = measure(out, asked, {name: (play.began, play.harmed) for name, play in plays.items()}, NUM_NODES)
    write_report(out, asked, measures, compared, problems, NUM_NODES, time.monotonic() - began)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
