"""The folder of a fleet: what was submitted and asked, by users, and the journal, by the server.

    server/lease.json       which process serves
    journal.jsonl           what the server did, a line each, on disk before it is done
    fleet.json              the fleet as the server last saw it, for `status` and `explain`
    lost.json               nodes that are out of service
    runs/0007/submission.json, asked.json, lock, attempts/2/{keeper.json, exit.json, output.txt}

A submission is accepted once its file is on disk; no server need run for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxdl.errors import ConfigError
from jaxdl.fleet.queued import queue
from jaxdl.fleet.speed import Exchange
from jaxdl.writing import replace_file

Asked = Literal["run", "hold", "cancel"]
_RUNS, _SUBMISSION, _ASKED, _JOURNAL = "runs", "submission.json", "asked.json", "journal.jsonl"
FLEET_FILE, LOST_FILE, SERVER_FOLDER = "fleet.json", "lost.json", "server"


@dataclass(frozen=True)
class Submission:
    """A run as a user submitted it."""

    name: str
    """Its number in the fleet, such as 0007."""
    command: tuple[str, ...]
    """`{nodes}` stands for the number of nodes."""
    sizes: tuple[int, ...]
    """The numbers of nodes that it may have; of hosts, if it shares nodes."""
    folder: str
    """Where the command is run."""
    weight: float = 1.0
    priority: int = 0
    not_before: float = 0.0
    """Unix time before which it does not start."""
    submitted: float = 0.0
    needs: Mapping[str, float] = field(default_factory=dict)
    """Resource -> how much of it each host takes of its node; empty: a whole node."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Numbers of nodes, or hosts, that were asked for and are not in `sizes` -> why the run cannot have them."""
    exchange: Exchange | None = None
    """What its gradient exchange takes, None where that is not known."""

    def words(self, num_nodes: int) -> list[str]:
        """The command on so many nodes, or hosts."""
        return words_on(self.command, num_nodes)

    @property
    def workdir(self) -> Path | None:
        """The workdir that the command names."""
        for number, word in enumerate(self.command):
            name, equals, value = word.partition("=")
            if name == "--workdir":
                following = self.command[number + 1 : number + 2]
                return Path(self.folder) / (value if equals else following[0]) if equals or following else None
        return None


def _exchange(values: dict[str, Any] | None) -> Exchange | None:
    """The field `exchange` of a submission from its JSON, which has no numbers as keys."""
    if values is None:
        return None
    seconds = {int(size): float(sec) for size, sec in values["seconds"].items()}
    return Exchange(values["network"], values["batch_size"], seconds)


def words_on(command: Sequence[str], num_nodes: int) -> list[str]:
    """A command on so many nodes, or hosts."""
    return [word.replace("{nodes}", str(num_nodes)) for word in command]


class Store:
    """The files of a fleet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
        parent = self.folder / _RUNS
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
        for other in self.submissions():
            if made.workdir is not None and other.workdir == made.workdir and self.asked(other.name) != "cancel":
                raise ConfigError(
                    f"--workdir {made.workdir}: run {other.name} has it. Give another folder, or cancel that run first."
                )
        number = 1 + max((int(path.name) for path in parent.iterdir() if path.name.isdigit()), default=0)
        while True:
            path = parent / f"{number:04d}"
            try:
                path.mkdir()
                break
            except FileExistsError:  # Somebody else submits at the same time.
                number += 1
        made = dataclasses.replace(made, name=path.name, submitted=time.time())
        queue(made.command, made.workdir)  # Before a server sees the run, whose own status must be the last.
        replace_file(path / _SUBMISSION, json.dumps(dataclasses.asdict(made), indent=2).encode())
        for one in (path, parent, self.folder):
            sync_folder(one)
        return made

    def submissions(self) -> list[Submission]:
        """All that were accepted, in their order. Raises ConfigError for a damaged file."""
        found = []
        for path in sorted((self.folder / _RUNS).glob(f"*/{_SUBMISSION}")):
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
                lists = {name: tuple(values[name]) for name in ("command", "sizes")}
                found.append(Submission(**(values | lists | {"exchange": _exchange(values.get("exchange"))})))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(f"{path}: this is no submission ({error}). Remove its folder.") from None
        return found

    def run_folder(self, name: str) -> Path:
        """The folder of a run. Raises ConfigError if there is none."""
        path = self.folder / _RUNS / name.zfill(4)
        if not (path / _SUBMISSION).is_file():
            known = ", ".join(one.name for one in self.submissions()) or "none"
            raise ConfigError(f"run {name}: there is no such run in {self.folder}. There are: {known}.")
        return path

    def ask(self, name: str, what: Asked) -> None:
        """Asks the server to let a run run, to hold or to cancel it. Raises ConfigError if there is none."""
        path = self.run_folder(name)
        asked = {"asked": what, "number": self.num_asked(path.name) + 1}
        replace_file(path / _ASKED, json.dumps(asked).encode())
        sync_folder(path)

    def asked(self, name: str) -> Asked:
        """What was asked last."""
        return self._asked(name)["asked"]

    def num_asked(self, name: str) -> int:
        """How often something was asked: a run that has ended may be asked to run once more."""
        return self._asked(name).get("number", 0)

    def _asked(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.folder / _RUNS / name / _ASKED).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {"asked": "run"}

    def lost_nodes(self) -> set[str]:
        """Nodes that are out of service."""
        try:
            return set(json.loads((self.folder / LOST_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return set()

    def set_lost_nodes(self, names: Sequence[str]) -> None:
        """Takes these nodes, and no others, out of service."""
        replace_file(self.folder / LOST_FILE, json.dumps(sorted(names)).encode())

    def write_view(self, view: Mapping[str, Any]) -> None:
        """What `status` and `explain` show."""
        replace_file(self.folder / FLEET_FILE, json.dumps(view, indent=1).encode())

    def view(self) -> dict[str, Any]:
        """What the server wrote last. Raises ConfigError if there is nothing yet."""
        try:
            return json.loads((self.folder / FLEET_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.folder}: no fleet is served there. Start one: python -m jaxdl.fleet serve --state {self.folder}"
            ) from None


class Journal:
    """What the server did: appended and on disk before it is done, read again by the next server."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._path, self._read_only = folder / _JOURNAL, read_only
        if read_only:
            return
        self._path.touch()
        sync_folder(folder)
        whole = self._path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):  # A server was killed while it wrote: that line was not acted on.
            with self._path.open("rb+") as file:
                file.truncate(end)

    def write(self, what: str, **values: Any) -> None:
        """Appends an event; returns when it is on disk. Does nothing if this only reads."""
        if self._read_only:
            return
        line = json.dumps({"what": what, "at": time.time(), **values})
        with self._path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def events(self) -> Iterator[dict[str, Any]]:
        """All events, the first one first; not a line that is being written."""
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    yield json.loads(line)


def sync_folder(path: Path) -> None:
    """Brings new names in a folder to the disk, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
