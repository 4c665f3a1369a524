"""Runs as jobs of Slurm: the policy decides how many nodes each has, Slurm which, and when, among the jobs of others.

The folder of the fleet, and those of the runs, must be the same on all nodes. An attempt is a job of its own, whose
script writes how it ended. Slurm does not queue these jobs again (--no-requeue): the fleet alone starts a run again,
whatever ended it. All jobs of a run have one name, and Slurm runs one job of a name at a time (--dependency=singleton),
so that also a job that a killed server had on its way to Slurm runs beside no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.parallel.cluster import exits
from jaxdl.parallel.lease import IN_USE
from jaxdl.platform.fleet.engine import LOST, Ending, Engine, exit_code, exit_reason
from jaxdl.platform.fleet.journal import sync_folder
from jaxdl.platform.fleet.keeper import EXIT_FILE, OUTPUT_FILE
from jaxdl.platform.fleet.resources import Amounts
from jaxdl.platform.fleet.slurm_calls import (
    SlurmJob,
    Unanswered,
    Unsure,
    call,
    describe_end,
    names_of,
    read_jobs,
    read_nodes,
    resize_waiting,
    state_in_accounts,
)
from jaxdl.platform.fleet.slurm_script import ASKED_TO_END, JOB_FILE, LIMIT, PREEMPTED, script_of
from jaxdl.platform.fleet.store import Store, Submission
from jaxdl.platform.launch.jobs import slurm

if TYPE_CHECKING:
    from jaxdl.platform.fleet.member import Member

SCRIPT_FILE = "job.sh"
UNSURE_FILE = "unanswered"
"""In the folder of an attempt for whose job Slurm was asked, and did not answer: when that was."""
_LOOK_SEC, _STOP_AGAIN_SEC = 5.0, 30.0
"""How often Slurm is asked what there is, and to stop a job that it was asked to stop: it serves others too."""
_TAIL_BYTES = 4096
_SAVED = (ASKED_TO_END, 130)
_LEAST_GRACE_SEC = 10.0
"""What a job has to save and end after Slurm has taken the request."""
_UNSURE_SEC = 300.0
"""How long a job that Slurm may have taken, without an answer, is waited for."""
_ENDS_NOW = "COMPLETING"
_WHY: Mapping[str, str] = {LIMIT: "its time limit was reached", PREEMPTED: "its nodes were taken for another job"}


class OnSlurm(Engine):
    """A run has one process on each of its nodes, with all that the node has."""

    name = "slurm"
    options = ("partition", "account", "qos", "time", "sbatch")
    shares_nodes = False

    def __init__(
        self,
        store: Store,
        num_nodes: int,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        time: str | None = None,
        sbatch: str | None = None,
    ) -> None:
        super().__init__(store, num_nodes)
        self._partition, self._folder = partition, store.folder.absolute()
        chosen = {"partition": partition, "account": account, "qos": qos, "time": time}
        self._chosen = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
        try:
            self._chosen += shlex.split(sbatch or "")
        except ValueError as error:
            raise ConfigError(f"--sbatch {sbatch}: {error}") from None
        self._reserved = any(word.startswith("--reservation") for word in self._chosen)
        self._prefix = f"jaxdl-{hashlib.sha256(str(self._folder).encode()).hexdigest()[:8]}"
        self._known: dict[str, Amounts] = {}
        self._jobs: dict[tuple[str, int], SlurmJob] = {}
        self._places: dict[str, tuple[str, ...]] = {}
        self._looked, self._silent = 0.0, ""
        self._asked: dict[tuple[str, str], float] = {}
        self._told: dict[str, float] = {}
        """Job -> when Slurm first took the request to stop it."""
        self._read()
        if not self._known:
            where = f"--partition {partition}" if partition else "the default partition"
            raise ConfigError(f"{where}: Slurm knows no node there that is in service. `sinfo` lists the partitions.")

    def look(self) -> bool:
        """Asks Slurm what there is; False while it does not answer."""
        if time.monotonic() - self._looked < _LOOK_SEC:
            return True
        try:
            self._read()
        except ConfigError as error:
            self._silent = f"{error} Nothing is decided until Slurm answers."
            return False
        self._silent = ""
        return True

    def problems(self) -> list[str]:
        """That Slurm does not answer, and what it says instead."""
        counts = {int(has.get("gpus", 0)) for has in self._known.values()}
        fewest, text = min(counts, default=0), " or ".join(map(str, sorted(counts)))
        differ = f"nodes have {text} GPUs, and each job uses {fewest} of a node" if len(counts) > 1 else ""
        return [problem for problem in (self._silent, differ) if problem]

    def out_of_service(self, nodes: Collection[str]) -> set[str]:
        """Those that are not up, or were taken out of service. What is beyond --nodes is not lost."""
        return set(nodes).difference(self._known).union(self.store.lost_nodes().intersection(nodes))

    def _read(self) -> None:
        try:
            nodes, jobs = read_nodes(self._partition, reserved=self._reserved), read_jobs(self._folder)
            shown = {job.nodes for job in jobs if job.nodes}
            self._places = {text: self._places.get(text) or names_of(text) for text in shown}
        except Unanswered as error:
            raise ConfigError(f"--engine slurm: {error}.") from None
        self._known, self._jobs = nodes, {}
        for job in jobs:
            match job.script.relative_to(self._folder).parts:
                case ("runs", run, "attempts", attempt, str(name)) if name == SCRIPT_FILE and attempt.isdecimal():
                    self._jobs[run, int(attempt)] = job
        self._looked = time.monotonic()

    def nodes(self) -> list[str]:
        """As many nodes of the partition that are up as the fleet may use: first those that it has."""
        return list(self.resources())

    def resources(self) -> Mapping[str, Amounts]:
        """What Slurm says that the nodes have: cpus, gpus, memory-gb (1e9 bytes of it)."""
        mine = {name for job in self._jobs.values() if job.alive for name in self._places.get(job.nodes, ())}
        up = sorted(self._known.keys() - self.store.lost_nodes(), key=lambda name: (name not in mine, name))
        return {name: self._known[name] for name in up[: self.num_nodes]}

    def start(self, run: Submission, attempt: int, nodes: Sequence[str]) -> bool:
        """Submits a job for as many nodes as these; False if a job of the run is there that has not ended.

        What Slurm refuses ends with code 1, and what it says is in the output of the attempt.
        """
        folder = self._attempt(run.name, attempt)
        try:
            self._read()
        except ConfigError:
            return False
        earlier = [job for (name, _), job in self._jobs.items() if name == run.name and job.alive]
        for job in earlier:  # Its attempt counts as over: a killed server had it on its way to Slurm.
            if self._is_due("stop", job):
                self._ask_to_save(job)
        if earlier:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        gpus = int(min((has.get("gpus", 0) for has in self._known.values()), default=0))
        job = slurm.SlurmJob(nodes=len(nodes), gpus_per_node=gpus, save_sec=max(1, round(self.grace_sec)))
        replace_file(folder / SCRIPT_FILE, script_of(job, run, attempt, folder).encode())
        if run.needs:
            return self._refuse(folder, exits.MISTAKE, "--needs: on Slurm a run has whole nodes. Submit it without.")
        try:
            number = call(self._submission(job, run, folder)).strip().split(";")[0]
        except Unsure as error:
            print(f"warning: {error}", file=sys.stderr, flush=True)
            replace_file(folder / UNSURE_FILE, f"{time.time()}\n".encode())
            return True
        except Unanswered as error:
            return self._refuse(folder, 1, str(error))
        self._jobs[run.name, attempt] = SlurmJob(number, "PENDING", "", str(len(nodes)), "", folder / SCRIPT_FILE)
        return True

    def _submission(self, job: slurm.SlurmJob, run: Submission, folder: Path) -> list[str]:
        lost = sorted(self._known.keys() & self.store.lost_nodes())
        options = {
            "job-name": f"{self._prefix}-{run.name}",
            "dependency": "singleton",
            "nodes": f"{job.nodes}-{job.nodes}",
            "gpus-per-node": job.gpus_per_node or None,
            "mem": 0,
            "signal": slurm.time_signal(job.save_sec),
            "output": str(folder / OUTPUT_FILE).replace("%", "%%"),
            "open-mode": "append",
            "chdir": run.folder,
            "exclude": ",".join(lost) or None,
        }
        words = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return ["sbatch", "--parsable", *self._chosen, *words, "--exclusive", "--no-requeue", str(folder / SCRIPT_FILE)]

    def _refuse(self, folder: Path, code: int, why: str) -> bool:
        with (folder / OUTPUT_FILE).open("a", encoding="utf-8") as output:
            output.write(f"fleet: {why}\n")
        content = {"code": code, "at": time.time(), "why": why}
        replace_file(folder / EXIT_FILE, json.dumps(content).encode())
        return True

    def stop(self, run: Submission, attempt: int) -> None:
        """A job that waits is cancelled; the script of one that runs sends SIGTERM to its processes, once."""
        job = self._jobs.get((run.name, attempt))
        if job is not None and job.alive and self._is_due("stop", job):
            self._ask_to_save(job)
        elif self._is_unsure(run, attempt):  # If Slurm has it after all, `end_strays` ends it.
            self._refuse(self._attempt(run.name, attempt), ASKED_TO_END, "stopped before Slurm has shown its job")

    def end_strays(self, runs: Mapping[str, Member]) -> None:
        """Ends jobs of attempts that are over: of one that Slurm took without an answer nobody may have known."""
        for (name, attempt), job in self._jobs.items():
            if not job.alive or job.state == _ENDS_NOW or not self._is_over(name, attempt, runs.get(name)):
                continue
            told = self._told.get(job.number)
            if told is not None and time.monotonic() - told >= self.grace_sec:
                if self._is_due("kill", job):
                    self._tell("scancel", job.number)
            elif self._is_due("stop", job):
                print(f"warning: the job of an attempt that is over is ended: {job.script}", file=sys.stderr)
                self._ask_to_save(job)

    def _is_over(self, name: str, attempt: int, known: Member | None) -> bool:
        """Whether it is certain that an attempt is over; of a run that is not known, if its folder was removed."""
        if known is not None:  # A later attempt may be of a server that has taken over.
            return attempt < known.attempt or (attempt == known.attempt and not known.alive)
        runs = self._folder / "runs"
        return runs.is_dir() and not (runs / name).exists()

    def _ask_to_save(self, job: SlurmJob) -> None:
        if self._end(job):
            self._told.setdefault(job.number, time.monotonic())
        else:  # Slurm has not answered: it is asked in the next turn.
            self._asked.pop(("stop", job.number), None)

    def _is_due(self, what: str, job: SlurmJob) -> bool:
        """Whether a job was not asked that lately."""
        now, key = time.monotonic(), (what, job.number)
        if now - self._asked.get(key, -math.inf) < _STOP_AGAIN_SEC:
            return False
        self._asked[key] = now
        return True

    def _end(self, job: SlurmJob) -> bool:
        """Asks a job to save and end, or cancels it if it waits; whether Slurm took that."""
        # Slurm does not cancel a job that has begun meanwhile; it is then told the other way.
        waits = not job.waits or self._tell("scancel", "--state=PENDING", job.number)
        return self._tell("scancel", "--state=RUNNING", "--batch", "--signal=USR2", job.number) and waits

    def kill(self, run: Submission, attempt: int) -> None:
        """Cancels the job: Slurm kills what does not end. One that could not be asked to save before is asked first."""
        job = self._jobs.get((run.name, attempt))
        if job is None or not job.alive:
            return
        told = self._told.get(job.number)
        if told is None:
            self._ask_to_save(job)
        elif time.monotonic() - told >= min(self.grace_sec, _LEAST_GRACE_SEC) and self._is_due("kill", job):
            self._tell("scancel", job.number)

    def _tell(self, *command: str) -> bool:
        """Whether Slurm did it, or there is nothing to do."""
        self._looked = 0.0
        try:
            call(command)
        except Unanswered as error:
            if "Invalid job id" not in str(error) and "already" not in str(error):
                print(f"warning: {error}", file=sys.stderr, flush=True)
                return False
        return True

    def poll(self, run: Submission, attempt: int) -> int | None:
        """The exit code of an attempt, `LOST` without one; None while its job has not ended."""
        job = self._jobs.get((run.name, attempt))
        if (job is not None and job.alive) or self._may_come(run, attempt):
            return None
        code = exit_code(self._attempt(run.name, attempt) / EXIT_FILE)
        if code == exits.MISTAKE and self._in_use(run.name, attempt):
            return exits.BROKEN  # It is no mistake that would be made again.
        if code != LOST or job is None:
            return code
        # The script did not begin, was killed, or could not write.
        began = job.nodes != ""
        return {"COMPLETED": 0, "CANCELLED": LOST if began else ASKED_TO_END}.get(job.state, LOST)

    def _is_unsure(self, run: Submission, attempt: int) -> bool:
        """Whether Slurm was asked for a job, did not answer, and has not shown it or any of its files."""
        folder = self._attempt(run.name, attempt)
        known = (run.name, attempt) in self._jobs or (folder / EXIT_FILE).exists() or (folder / JOB_FILE).exists()
        return not known and (folder / UNSURE_FILE).exists()

    def _may_come(self, run: Submission, attempt: int) -> bool:
        """Whether Slurm may soon show a job of which it is unsure."""
        if not self._is_unsure(run, attempt):
            return False
        try:
            asked = float((self._attempt(run.name, attempt) / UNSURE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return abs(time.time() - asked) < _UNSURE_SEC

    def explain_end(self, run: Submission, attempt: int) -> Ending:
        """What Slurm, or the script, says of the end of an attempt."""
        path = self._attempt(run.name, attempt) / EXIT_FILE
        said = exit_reason(path)
        if why := _WHY.get(said):
            saved = exit_code(path) in _SAVED
            text = why if saved else f"{why}, and it did not save"
            return Ending(text, taken=said == PREEMPTED, in_time=said == LIMIT and saved)
        if self._in_use(run.name, attempt):
            return Ending("what ran on a lost node still trains in its workdir")
        if self._is_unsure(run, attempt):
            again = (self._attempt(run.name, attempt - 1) / UNSURE_FILE).exists()
            return Ending("Slurm did not answer when it was asked for the job, and has shown none", taken=not again)
        job = self._jobs.get((run.name, attempt))
        state = job.state if job else ""
        if job is None and (number := self._number(run.name, attempt)):
            state = state_in_accounts(number)
        what, taken = describe_end(state)
        if job is not None and job.nodes and taken:
            what = f"{what} ({job.nodes})"
        return Ending(what or said, taken)

    def nodes_of(self, run: Submission, attempt: int) -> tuple[str, ...] | None:
        """Where Slurm has placed an attempt; empty while it waits, None (as it was) while it ends."""
        job = self._jobs.get((run.name, attempt))
        if job is not None and job.state == _ENDS_NOW:  # Only the nodes where something has not ended are named.
            return None
        return self._places.get(job.nodes, ()) if job is not None and job.alive else ()

    def waits(self, run: Submission, attempt: int) -> str:
        """Why the job of an attempt waits, by the word that Slurm has for it; empty if it does not."""
        job = self._jobs.get((run.name, attempt))
        if self._may_come(run, attempt):
            return "Slurm has not said whether it took the job"
        if job is None or not job.waits:
            return ""
        reason = f", {job.reason}" if job.reason not in ("", "None") else ""
        return f"waits in Slurm's queue for {job.num_nodes} nodes (job {job.number}{reason})"

    def resize(self, run: Submission, attempt: int, num_nodes: int) -> bool:
        """Gives the job of an attempt another number of nodes, if it has not begun; whether it did."""
        job = self._jobs.get((run.name, attempt))
        if job is None or not job.waits:
            return False
        self._looked = 0.0
        try:
            resize_waiting(job.number, num_nodes)
        except Unanswered:  # It has begun, say: then it is stopped as others are.
            return False
        self._jobs[run.name, attempt] = replace(job, reason="", num_nodes=str(num_nodes))
        return True

    def _attempt(self, name: str, attempt: int) -> Path:
        return self._folder / "runs" / name / "attempts" / str(attempt)

    def _in_use(self, name: str, attempt: int) -> bool:
        """Whether an attempt was refused its workdir: an earlier one may live on, on a node that Slurm has lost."""
        with contextlib.suppress(OSError), (self._attempt(name, attempt) / OUTPUT_FILE).open("rb") as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return attempt > 1 and IN_USE.encode() in output.read()
        return False

    def _number(self, name: str, attempt: int) -> str:
        """The number of a job that Slurm may have forgotten, as its script has written it; empty without."""
        try:
            return PurePath((self._attempt(name, attempt) / JOB_FILE).read_text(encoding="utf-8").strip()).name
        except (OSError, ValueError):
            return ""
