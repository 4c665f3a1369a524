"""The folder of a fleet: what was submitted and asked, by users, and the journal, by the server.

    server/lease.json       which process serves
    journal.jsonl           what the server did, a line each, on disk before it is done
    fleet.json, ended.json  the fleet as the server last saw it, for `status` and `explain`; runs that have ended apart
    lost.json               nodes that are out of service
    last.json               the highest number that a run ever had
    news/0007               something was submitted or asked of this run, and the server has not looked yet
    workdirs/0007-3f0a...   a hash of the workdir of this run, so that `submit` need not read what all others have
    runs/0007/submission.json, asked.json, lock, attempts/2/{keeper.json, exit.json, output.txt}

A submission is accepted once its file is on disk; no server need run for that. A file of one run that is damaged
concerns that run alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.core.inside import Unreadable, read_whole, real_inside
from jaxdl.platform.fleet.journal import JOURNAL_FILE, sync_folder
from jaxdl.platform.fleet.queued import queue
from jaxdl.platform.fleet.speed import Exchange
from jaxdl.platform.fleet.submission import DamagedFile, Submission, read_submission
from jaxdl.platform.fleet.workdirs import Workdirs

Order = Literal["run", "hold", "cancel", "remove"]
RUNS, SUBMISSION = "runs", "submission.json"
_ASKED, _LAST, _NEWS, _REMOVED = "asked.json", "last.json", "news", "removed"
_FEW = 5
VIEW_BYTES, _FORM_BYTES = 64 << 20, 1 << 16
"""The largest file that describes a fleet, and the largest that asks something of a run."""
FLEET_FILE, ENDED_FILE, LOST_FILE, SERVER_FOLDER = "fleet.json", "ended.json", "lost.json", "server"


def _few(names: Sequence[str]) -> str:
    """Names of runs in a message: of many, the first and the last ones."""
    shown = names if len(names) <= 2 * _FEW else [*names[:_FEW], "...", *names[-_FEW:]]
    return ", ".join(shown) or "none"


class Store:
    """The files of a fleet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._workdirs = Workdirs(folder / "workdirs")

    def submit(
        self,
        command: Sequence[str],
        sizes: Sequence[int],
        *,
        weight: float = 1.0,
        priority: int = 0,
        not_before: float = 0.0,
        needs: Mapping[str, float] | None = None,
        left_out: Mapping[int, str] | None = None,
        exchange: Exchange | None = None,
    ) -> Submission:
        """Accepts a run: when this returns it is on disk. Raises ConfigError for what cannot be.

        `left_out`, `exchange`: see `Submission`. The status of its workdir says that it waits.
        """
        if not command:
            raise ConfigError(
                "submit: there is no command. Give it after --: submit --max 4 -- python -m jaxdl.train ..."
            )
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"sizes {list(sizes)}: a run needs 1 node or more. Give --min, --max or --sizes.")
        if not 0 < weight < math.inf:
            raise ConfigError(f"--weight {weight:g}: it must be a number above 0.")
        if not math.isfinite(not_before):
            raise ConfigError("--delay-sec: it must be a number.")
        parent = self.folder / RUNS
        parent.mkdir(parents=True, exist_ok=True)
        made = Submission(
            "",
            tuple(command),
            tuple(sorted(set(sizes))),
            os.getcwd(),
            weight,
            priority,
            not_before,
            needs=dict(needs or {}),
            left_out={str(size): why for size, why in (left_out or {}).items()},
            exchange=exchange,
        )
        holder = None if made.workdir is None else self.holder(made.workdir)
        if holder is not None:
            raise ConfigError(
                f"--workdir {made.workdir}: run {holder} has it. Give another folder, or cancel that run first."
            )
        path = self._new_folder()
        made = dataclasses.replace(made, name=path.name, submitted=time.time())
        queue(made.command, made.workdir)  # Before a server sees the run, whose own status must be the last.
        replace_file(path / SUBMISSION, json.dumps(dataclasses.asdict(made), indent=2).encode())
        for folder in (path, parent, self.folder):
            sync_folder(folder)
        # It is accepted now. What is missing of the following, on a full disk, say, costs a server or `submit` a look.
        for keep in (lambda: self._write_last(int(path.name)), lambda: self._announce(made.name)):
            with contextlib.suppress(OSError):
                keep()
        self._workdirs.note(made.name, made.workdir)
        return made

    def _new_folder(self) -> Path:
        """Makes the folder of the next run."""
        number = 1 + self._last_number()
        while True:
            path = self.path_of(f"{number:04d}")
            try:
                path.mkdir()
            except FileExistsError:  # Somebody else submits at the same time.
                number += 1
            else:
                return path

    def _last_number(self) -> int:
        """The highest number that a run has, or had before it was removed: the journal may still speak of it."""
        names = [path.name for path in (self.folder / RUNS).iterdir()]
        there = max((int(name) for name in names if name.isdecimal()), default=0)
        try:
            return max(there, int(json.loads((self.folder / _LAST).read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):  # None of this version was submitted yet, or the file is damaged.
            with contextlib.suppress(FileNotFoundError):
                told = re.findall(rb'"run": "(\d+)"', (self.folder / JOURNAL_FILE).read_bytes())
                there = max([there, *map(int, told)])
            return there

    def holder(self, workdir: Path) -> str | None:
        """The first run whose workdir this is and may not be another's; None without one.

        Submissions are read of runs with this workdir alone, and once of those that an earlier version accepted.
        """
        if not (self.folder / RUNS).is_dir():
            return None
        names = (path.name for path in (self.folder / RUNS).iterdir())
        for name, is_noted in sorted(
            self._workdirs.candidates(names, workdir), key=lambda candidate: (len(candidate[0]), candidate)
        ):
            with contextlib.suppress(DamagedFile, FileNotFoundError, NotADirectoryError):
                other = self.submission(name)
                if not is_noted:
                    self._workdirs.note(name, other.workdir)
                if other.workdir == workdir and not self._is_free(name):
                    return name
        return None

    def _write_last(self, number: int) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError):  # Of runs that are removed there may be thousands.
            if number <= int(json.loads((self.folder / _LAST).read_text(encoding="utf-8"))):
                return
        replace_file(self.folder / _LAST, json.dumps(max(number, self._last_number())).encode())

    def _is_free(self, name: str) -> bool:
        """Whether a run's workdir may be another's: it was cancelled, or is to be removed."""
        with contextlib.suppress(DamagedFile):
            return self.order_of(name) in ("cancel", "remove")
        return False

    def names(self) -> list[str]:
        """The names of all runs, in their order."""
        names = (path.parent.name for path in (self.folder / RUNS).glob(f"*/{SUBMISSION}"))
        return sorted(names, key=lambda name: (len(name), name))

    def submission(self, name: str) -> Submission:
        """What was submitted. Raises DamagedFile, and FileNotFoundError if the run was removed."""
        return read_submission(self.folder / RUNS / name / SUBMISSION, self.folder)

    def submissions(self) -> list[Submission]:
        """All that were accepted, in their order, but those whose file is damaged."""
        submissions = []
        for name in self.names():
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                submissions.append(self.submission(name))
        return submissions

    def run_folder(self, name: str) -> Path:
        """The folder of a run. Raises ConfigError if there is none."""
        path = self.folder / RUNS / name.zfill(4)
        if not (path / SUBMISSION).is_file():
            raise ConfigError(f"run {name}: there is no such run in {self.folder}. There are: {_few(self.names())}.")
        self._check_inside(path / _ASKED)
        return path

    def _check_inside(self, path: Path) -> None:
        """Raises ConfigError for a path that leads out of the fleet: who may write here must not write elsewhere."""
        try:
            real_inside(path, self.folder)
        except Unreadable:
            raise ConfigError(f"{path}: a link leads out of the fleet's folder. Remove it.") from None

    def path_of(self, name: str) -> Path:
        """Where the folder of a run is, or would be."""
        return self.folder / RUNS / name

    def last_attempt(self, name: str) -> int:
        """The highest number of an attempt that has left files; 0 without any."""
        with contextlib.suppress(OSError):
            names = os.listdir(self.path_of(name) / "attempts")
            return max((int(name) for name in names if name.isdecimal()), default=0)
        return 0

    def ask(self, name: str, what: Order) -> None:
        """Asks the server to let a run run, to hold, cancel or, once it has ended, remove it.

        Raises ConfigError if there is none.
        """
        path = self.run_folder(name)
        # Larger than any before, also than one in a file that is damaged now.
        number = int(time.time() * 1000)
        with contextlib.suppress(DamagedFile):
            number = max(number, self.order_number(path.name) + 1)
        replace_file(path / _ASKED, json.dumps({"asked": what, "number": number}).encode())
        sync_folder(path)
        self._announce(path.name)

    def order_of(self, name: str) -> Order:
        """What was asked last. Raises DamagedFile."""
        return self._read_order(name)[0]

    def order_number(self, name: str) -> int:
        """A number that grows with all that is asked: a run that has ended may be asked to run once more.

        Raises DamagedFile.
        """
        return self._read_order(name)[1]

    def _read_order(self, name: str) -> tuple[Order, int]:
        path = self.folder / RUNS / name / _ASKED
        try:
            values = json.loads(read_whole(path, self.folder, _FORM_BYTES))
            order, number = values["asked"], values.get("number", 0)
            if order not in ("run", "hold", "cancel", "remove") or type(number) is not int:
                raise ValueError
        except FileNotFoundError:
            return "run", 0
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, Unreadable):
            raise DamagedFile(
                f"{path}: it is damaged, so it is not known whether run {name} was held or cancelled. Ask again: hold, "
                "resume or cancel."
            ) from None
        return order, number

    def _announce(self, name: str) -> None:
        """Says to the server that there is something new of a run."""
        (self.folder / _NEWS).mkdir(exist_ok=True)
        self._check_inside(self.folder / _NEWS / name)
        (self.folder / _NEWS / name).touch()

    def news(self, *, take: bool) -> set[str]:
        """The runs of which there is something new; with `take` they count as looked at from now on."""
        try:
            names = os.listdir(self.folder / _NEWS)
        except FileNotFoundError:
            return set()
        for name in names if take else ():
            (self.folder / _NEWS / name).unlink(missing_ok=True)
        return set(names)

    def remove(self, name: str) -> None:
        """Removes the folder of a run that has ended, not its workdir. No other run will have its number."""
        self._write_last(int(name) if name.isdecimal() else 0)
        try:
            self._workdirs.forget(name, self.submission(name).workdir)
        except (DamagedFile, FileNotFoundError, NotADirectoryError):
            self._workdirs.forget_any(name)
        removed = self.folder / _REMOVED
        removed.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (self.folder / RUNS / name).rename(removed / f"{name}-{secrets.token_hex(4)}")
        shutil.rmtree(removed, ignore_errors=True)

    def lost_nodes(self) -> set[str]:
        """Nodes that are out of service; those that the server last saw so, if the file is damaged."""
        try:
            return self._lost_nodes()
        except DamagedFile:
            with contextlib.suppress(ConfigError, TypeError):
                return set(self.view()["lost"])
            return set()

    def lost_problem(self) -> str:
        """What is wrong with the file of nodes that are out of service, if anything."""
        try:
            self._lost_nodes()
        except DamagedFile as error:
            return str(error)
        return ""

    def _lost_nodes(self) -> set[str]:
        path = self.folder / LOST_FILE
        try:
            names = json.loads(read_whole(path, self.folder, VIEW_BYTES))
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError
        except FileNotFoundError:
            return set()
        except (ValueError, RecursionError, Unreadable):
            raise DamagedFile(
                f"{path}: it is damaged; nodes that were out of service before still count so. Name one again with "
                "`nodes --lost` or `--back`."
            ) from None
        return set(names)

    def set_lost_nodes(self, names: Sequence[str]) -> None:
        """Takes these nodes, and no others, out of service."""
        replace_file(self.folder / LOST_FILE, json.dumps(sorted(names)).encode())

    def write_view(self, view: Mapping[str, Any]) -> None:
        """What `status` and `explain` show."""
        replace_file(self.folder / FLEET_FILE, json.dumps(view, indent=1).encode())

    def view(self) -> dict[str, Any]:
        """What the server wrote last. Raises ConfigError if there is nothing yet, and for a damaged file."""
        path = self.folder / FLEET_FILE
        try:
            view = json.loads(read_whole(path, self.folder, VIEW_BYTES))
            runs = {run["run"]: run for run in view["runs"]}
            if not {"at", "nodes"} <= view.keys():
                raise ValueError
        except FileNotFoundError:
            raise ConfigError(
                f"{self.folder}: no fleet is served there. Start one: python -m jaxdl.fleet serve --state {self.folder}"
            ) from None
        except Unreadable as error:
            raise ConfigError(f"{path}: {error}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ConfigError(
                f"{path}: it is damaged. A server writes it again: python -m jaxdl.fleet serve --state {self.folder}"
            ) from None
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError, RecursionError, Unreadable):
            ended = json.loads(read_whole(self.folder / ENDED_FILE, self.folder, VIEW_BYTES))
            ended = {run["run"]: run for run in ended}
            runs = ended | runs
        return view | {"runs": [runs[name] for name in sorted(runs, key=lambda name: (len(name), name))]}

    def write_ended(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """What `status` and `explain` show of runs that have ended; one that is in `write_view` too has not."""
        replace_file(self.folder / ENDED_FILE, json.dumps(runs).encode())
