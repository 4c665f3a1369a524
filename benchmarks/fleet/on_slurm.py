"""A fleet of real runs on a real Slurm of this machine that is harmed: is anything lost, doubled, or different?

python -m benchmarks.fleet.on_slurm --out runs/fleet_on_slurm

Starts a cluster of four nodes (slurm_cluster.py: Slurm's daemons, root), serves a fleet there, and submits three runs
on digits (demo_config.py): one for two nodes, one for one, one for one or two. All jobs have a time limit that is
shorter than the runs. The server is killed, a job of a higher priority takes a node, and a node is killed, with what
runs there. A fourth run needs no fleet: its job file is that of `python -m jaxdl.launch slurm --requeue`, and reaches
its time limit too; its node is killed as well. Each run is made once more by `python -m jaxdl.train` on devices of one
process, to compare with. Ends with code 1 if a run was lost, two jobs of a run ran at a time, a step is missing or
there twice, a result differs, or something of that did not happen; prints a table, and writes fleet_on_slurm.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.fleet.demo import compiled_once, new_folder, train_command
from benchmarks.fleet.demo_report import Asked, check, lines, metrics, names_of, print_compared
from benchmarks.fleet.on_ray import train_whole
from benchmarks.fleet.slurm_cluster import SlurmCluster, missing, slurm_cluster
from jaxdl.platform.fleet.store import Store

NODES, GRACE_SEC = 4, 15
EVENTS = ("its time limit was reached", "taken for another job", "a node failed|out of service")
"""What must have happened to runs of the fleet: patterns of the reasons in its journal."""


class Play:
    """The fleet's folder, its server, and what is done to it."""

    def __init__(self, folder: Path, cluster: SlurmCluster, args: argparse.Namespace) -> None:
        self.folder, self._cluster, self._args = folder, cluster, args
        self.store = Store(folder / "fleet")
        self.store.folder.mkdir(parents=True)
        (folder / "steps").mkdir()
        self.problems: list[str] = []
        self._end = time.monotonic() + args.limit_sec
        self._server = self._serve()

    def _serve(self) -> subprocess.Popen[bytes]:
        words = ["serve", "--state", str(self.store.folder), "--engine", "slurm", "--partition", "main"]
        words += ["--nodes", str(NODES), "--time", self._args.time, "--grace-sec", str(GRACE_SEC)]
        words += ["--between-sec", "0", "--fairness", "1", "--resized", "1", "--until-idle"]
        with (self.folder / "server.txt").open("ab") as log:
            command = [sys.executable, "-m", "jaxdl.fleet", *words]
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def submit(self, run: Asked) -> None:
        """Submits a run."""
        self.store.submit(train_command(run, self.folder, self._args.step_sec), run.sizes)

    def kill_server(self, down_sec: float) -> None:
        """Kills the server, and starts another one later."""
        self._server.kill()
        self._server.wait()
        time.sleep(down_sec)
        self._server = self._serve()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Raises RuntimeError if it does not come true."""
        while not condition():
            if time.monotonic() > self._end:
                raise RuntimeError(f"{what}: not in time. See server.txt and output.txt in {self.folder}")
            if self._server.poll():
                raise RuntimeError(f"the server ended with code {self._server.returncode}: see server.txt")
            time.sleep(0.2)

    def wait_for_steps(self, name: str, count: int) -> None:
        """Returns when a run has made so many steps more."""
        path = self.folder / "steps" / f"{name}.jsonl"

        def made() -> int:
            return len(lines(path)) if path.exists() else 0

        before = made()
        self.wait_for(lambda: made() >= before + count, f"{name} makes {count} steps")

    def run_of(self, name: str) -> dict[str, Any]:
        """What `fleet status` says of a run."""
        number = next(key for key, value in self.names().items() if value == name)
        return next((run for run in self.store.view()["runs"] if run["run"] == number), {"nodes": [], "state": ""})

    def names(self) -> dict[str, str]:
        """Number in the fleet -> name."""
        paths = (self.store.folder / "runs").glob("*/submission.json")
        return {path.parent.name: Path(self.store.submission(path.parent.name).workdir or "").name for path in paths}

    def harm(self) -> None:
        """All that happens to the fleet, one after the other."""
        for name in ("run0", "run1", "run2"):
            self.wait_for_steps(name, 5)
        job = next(number for number, name, state in self._cluster.jobs() if state == "RUNNING" and "jaxdl" in name)
        refused = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, encoding="utf-8")
        if not refused.returncode:
            self.problems.append("Slurm queued a job of the fleet again")
        self.kill_server(3)
        self.wait_for_steps("run0", 10)
        urgent = self._cluster.submit("--partition=urgent", "--nodes=1", "--exclusive", "--wrap=sleep 15")
        self.wait_for(lambda: (urgent, "wrap", "COMPLETED") in self._cluster.jobs(), "the urgent job ends")
        self.wait_for(lambda: self.run_of("run0")["state"] == "running", "the first run has its nodes")
        self.wait_for_steps("run0", 10)
        node = self.run_of("run0")["nodes"][0]
        self._cluster.kill_node(node)
        time.sleep(20)
        self._cluster.start_node(node)
        self.wait_for_steps("run0", 1)

    def finish(self) -> None:
        """Waits until all runs have ended."""
        self.wait_for(lambda: self._server.poll() == 0, "all runs end")

    def close(self) -> None:
        """Ends the server; jobs end with the cluster."""
        if self._server.poll() is None:
            self._server.kill()
            self._server.wait()


def doubled_jobs(cluster: SlurmCluster) -> list[str]:
    """Jobs of one run that ran at the same time, by Slurm's own account."""
    times = defaultdict(list)
    for job in cluster.ended():
        if job["StartTime"] != "Unknown" and job["NodeCnt"] != "0":
            times[job["Name"]].append((job["StartTime"], job["EndTime"]))
    times.pop("wrap", None)
    return [f"two jobs {name} at a time: {first}, {second}" for name, ones in times.items()
            for first, second in pairwise(sorted(ones)) if second[0] < first[1]]  # fmt: skip


def begin_job(run: Asked, folder: Path, args: argparse.Namespace, cluster: SlurmCluster) -> str:
    """Submits the job file of a run, which needs no fleet; the number of its job."""
    (folder / "steps").mkdir(parents=True)
    words = [word.replace("{nodes}", str(run.sizes[0])) for word in train_command(run, folder, args.step_sec)]
    options = ["--nodes", str(run.sizes[0]), "--gpus-per-node", "0", "--time", args.time, "--requeue"]
    options += ["--save-sec", str(GRACE_SEC), "--partition", "main"]
    command = [sys.executable, "-m", "jaxdl.launch", "slurm", *options, "--", sys.executable, *words[1:]]
    script = folder / "job.sbatch"
    script.write_text(
        subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout, encoding="utf-8"
    )
    return cluster.submit(f"--chdir={folder}", str(script))


def play_job(run: Asked, folder: Path, args: argparse.Namespace, cluster: SlurmCluster) -> list[str]:
    """Runs a job file to its end, through a time limit and the loss of a node; what was not as it should be."""
    job, end, killed = begin_job(run, folder, args, cluster), time.monotonic() + args.limit_sec, False
    log = folder / "steps" / f"{run.name}.jsonl"
    while (job, "jaxdl", "COMPLETED") not in cluster.jobs():
        said = cluster.control("show", "job", job)
        if any(f"JobState={state}" in said for state in ("FAILED", "CANCELLED", "TIMEOUT")) or time.monotonic() > end:
            return [f"{run.name}: its job has not completed: {said}"]
        steps = lines(log) if log.exists() else []
        again = "Restarts=0 " not in said and "JobState=RUNNING" in said
        if again and not killed and steps and time.time() - steps[-1]["at"] < 2:
            node = next(word for word in said.split() if word.startswith("BatchHost=")).partition("=")[2]
            cluster.kill_node(node)
            time.sleep(2)
            cluster.start_node(node)
            killed = True
        time.sleep(0.5)
    found, problems = cluster.control("show", "job", job), []
    if "Restarts=0 " in found or not killed:
        problems.append(f"{run.name}: it was not queued again, or its node not killed")
    return problems


def play_fleet(asked: list[Asked], folder: Path, args: argparse.Namespace, cluster: SlurmCluster) -> list[str]:
    """Serves all runs until they have ended; what was not as it should be."""
    play = Play(folder, cluster, args)
    try:
        for run in asked:
            play.submit(run)
        play.harm()
        play.finish()
    finally:
        play.close()
    reasons = " ".join(event["reason"] for event in lines(folder / "fleet" / "journal.jsonl"))
    missed = [f"nothing says: {what}" for what in EVENTS if not re.search(what, reasons)]
    attempts = len(list((folder / "fleet" / "runs").glob("*/attempts/*/job.sh")))
    jobs = len({job["JobId"] for job in cluster.ended() if job["Name"].startswith("jaxdl-")})
    counted = [] if jobs == attempts else [f"{attempts} attempts had {jobs} jobs"]
    return [*play.problems, *missed, *counted]


def main() -> None:
    """Plays, checks and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--steps", type=int, default=500, help="of the second run")
    parser.add_argument("--step-sec", type=float, default=0.4, help="what a step takes on one node")
    parser.add_argument("--time", default="3:00", help="the time limit of jobs")
    parser.add_argument("--limit-sec", type=float, default=900.0, help="when the play is given up")
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    out = new_folder(parser, args.out)
    os.environ |= compiled_once(out)
    began, folder = time.monotonic(), out / "slurm"
    asked = [
        Asked("run0", 0, 0.0, 3 * args.steps // 2, (2,)),
        Asked("run1", 1, 0.0, args.steps, (1,), whole_nodes=1),
        Asked("run2", 2, 0.0, args.steps // 2, (1, 2), whole_nodes=1),
    ]
    alone = Asked("job0", 3, 0.0, args.steps, (1,), whole_nodes=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Daemons end with the program.
    with slurm_cluster(out / "cluster", NODES) as cluster:
        problems = play_fleet(asked, folder, args, cluster)
        problems += play_job(alone, out / "job", args, cluster)
        problems += doubled_jobs(cluster)
    for run in (*asked, alone):
        train_whole(run, out / "whole")
    if metrics(out / "job" / alone.name) != metrics(out / "whole" / alone.name):
        problems.append(f"{alone.name}: its metrics are not those of the run that was never interrupted")
    found, compared = check(out, asked, ["slurm"])
    problems += found
    names = names_of(asked, folder)
    events = [f"{names[event['run']]} {event['what']}: {event['reason']}"
              for event in lines(folder / "fleet" / "journal.jsonl") if event["what"] in ("left", "ended")]  # fmt: skip
    content = {"problems": problems, "compared": compared, "ends": events, "wall_sec": time.monotonic() - began}
    (out / "fleet_on_slurm.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    console = Console()
    print_compared(console, compared, problems)
    for event in events:
        console.print(event, highlight=False)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
