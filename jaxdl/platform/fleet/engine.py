"""Where the runs of a fleet run: an engine starts and stops them, says how they ended, and which nodes there are."""

from __future__ import annotations

import abc
import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.parallel.cluster import exits
from jaxdl.platform.fleet.journal import sync_folder
from jaxdl.platform.fleet.keeper import EXIT_FILE, KEEPER_FILE, OUTPUT_FILE
from jaxdl.platform.fleet.resources import Amounts, parse_nodes
from jaxdl.platform.fleet.store import Store, Submission
from jaxdl.platform.launch.netns import check_possible, parse_rate

if TYPE_CHECKING:
    from jaxdl.platform.fleet.member import Member

PIDS_FILE = "pids.json"
LOST = -1
"""In place of the exit code of an attempt that is gone without one, because it was killed with its keeper."""


class Ending(NamedTuple):
    """What a cluster says of the end of an attempt."""

    said: str = ""
    """In words; "" for nothing."""
    taken: bool = False
    """Whether the cluster took its nodes, or never gave it any: no failure of the run."""
    in_time: bool = False
    """Whether its time was over, and it had saved before: no failure of a run that has made steps."""


engines: dict[str, type[Engine]] = {}
"""Name -> kind of engine."""


class Engine(abc.ABC):
    """The calls behind which a kind of cluster is. A subclass registers itself by its name."""

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    """Options of `serve` that are for this engine: its constructor takes them."""
    gives_gpus: ClassVar[bool] = True
    """Whether a host has the GPUs that it asks for, or those of the node that it has alone; without any, and where this
    is False, it has one CPU device."""
    rehearses: ClassVar[bool] = False
    """Whether all nodes are processes of this machine: to rehearse what an engine for a cluster then does."""
    names_nodes: ClassVar[bool] = True
    """Whether `nodes` are machines. Else they are only as many as there are, and the cluster knows which."""
    shares_nodes: ClassVar[bool] = True
    """Whether hosts may share a node, by what they need of it."""
    grace_sec: float = 120.0
    """How long an attempt may take to save and end; its server sets it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        engines[cls.name] = cls

    def __init__(self, store: Store, num_nodes: int) -> None:
        self.store, self.num_nodes = store, num_nodes

    @abc.abstractmethod
    def nodes(self) -> list[str]:
        """The names of the nodes that are in service."""

    def out_of_service(self, nodes: Collection[str]) -> set[str]:
        """Which of these nodes, on which runs are or were, are lost."""
        return set(nodes).difference(self.nodes()) if self.names_nodes and nodes else set()

    def resources(self) -> Mapping[str, Amounts]:
        """What each node in service has, by name; nothing where that is not known."""
        return {name: {} for name in self.nodes()}

    @abc.abstractmethod
    def start(self, run: Submission, attempt: int, nodes: Sequence[str]) -> bool:
        """Starts a run with a host on each of these nodes, which may be there several times if it shares them.

        Returns False if something of it is still alive, so that nothing was started.
        """

    @abc.abstractmethod
    def stop(self, run: Submission, attempt: int) -> None:
        """Asks an attempt to save and end; returns at once. May be called again."""

    @abc.abstractmethod
    def kill(self, run: Submission, attempt: int) -> None:
        """Ends an attempt that does not save and end, by SIGKILL; returns at once. May be called again."""

    @abc.abstractmethod
    def poll(self, run: Submission, attempt: int) -> int | None:
        """The exit code of an attempt, `LOST` without one; None while it lives, or that is not known."""

    def waits(self, run: Submission, attempt: int) -> str:
        """Why a started attempt has no nodes yet, such as its place in a queue; "" where it has, or none waits."""
        del run, attempt
        return ""

    def problems(self) -> list[str]:
        """What keeps the engine from doing what it is asked, such as a cluster that does not answer."""
        return []

    def look(self) -> bool:
        """Called before each turn of the server; False: the cluster does not answer now, and nothing is decided."""
        return True

    def explain_end(self, run: Submission, attempt: int) -> Ending:
        """What the cluster says of the end of an attempt."""
        del run, attempt
        return Ending()

    def end_strays(self, runs: Mapping[str, Member]) -> None:
        """Ends what runs of attempts that are over, by what is known of all runs. Called in each turn."""
        del runs

    def nodes_of(self, run: Submission, attempt: int) -> Sequence[str] | None:
        """The nodes that an attempt has been given, none while it waits; None where the policy's choice is kept."""
        del run, attempt
        return None

    def resize(self, run: Submission, attempt: int, num_nodes: int) -> bool:
        """Gives an attempt that waits another number of nodes; False if that is not possible (any more)."""
        del run, attempt, num_nodes
        return False


def exit_code(path: Path) -> int:
    """The exit code in the file of an attempt; `LOST` if there is none, or it is damaged."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["code"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return LOST


def exit_reason(path: Path) -> str:
    """Why an attempt has ended, as its file says; empty without."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8")).get("why", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _keeper_of(folder: Path) -> int | None:
    """The process that keeps an attempt by its command line, where Linux shows that; else None."""
    # One that a server of an earlier version started has the earlier name.
    names = (b"jaxdl.platform.fleet.keeper", b"jaxdl.fleet.keeper")
    wanted = {(name, os.fsencode(folder)) for name in names}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if not wanted.isdisjoint(itertools.pairwise(path.read_bytes().split(b"\0"))):
                return int(path.parent.name)
    return None


class Local(Engine):
    """Processes on this machine: a run on n nodes is `python -m jaxdl.launch local --hosts n`.

    What the nodes have (`have`, see `parse_nodes`) and hosts take of it is counted, and not enforced.

    Each run has a lock, an open file that the keeper and the launcher of an attempt inherit: as long as one lives, no
    other attempt starts, whatever server asks. The processes of the hosts are killed with their launcher.
    """

    name = "local"
    options = ("have",)
    gives_gpus = False
    rehearses = True
    launcher: ClassVar[str] = "local"
    """The command of `python -m jaxdl.launch`."""

    def __init__(self, store: Store, num_nodes: int, have: Sequence[str] | None = None) -> None:
        super().__init__(store, num_nodes)
        self._have = parse_nodes(have or ())
        if self._have and len(self._have) != num_nodes:
            raise ConfigError(f"--nodes {num_nodes}: --have speaks of {len(self._have)} nodes. Leave --nodes out.")
        self._keepers: list[subprocess.Popen[bytes]] = []

    def nodes(self) -> list[str]:
        """node0, node1, ... but for those that were taken out of service."""
        lost = self.store.lost_nodes()
        return [name for name in (f"node{number}" for number in range(self.num_nodes)) if name not in lost]

    def resources(self) -> Mapping[str, Amounts]:
        """What each node in service has, by name."""
        return {name: self._have[int(name.removeprefix("node"))] if self._have else {} for name in self.nodes()}

    def start(self, run: Submission, attempt: int, nodes: Sequence[str]) -> bool:
        """Starts a run; False if something of it is still alive. A command that cannot be started ends with a code."""
        lock = self._lock(run)
        if lock is None:
            return False
        try:
            folder = self.folder(run, attempt)
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
            command = self.command(run, nodes, folder.absolute())
            keeper = [sys.executable, "-m", "jaxdl.platform.fleet.keeper", str(folder.absolute()), str(lock), *command]
            # In a session of its own, and without the server's output: what ends the server is not for the runs.
            with (folder / OUTPUT_FILE).open("ab") as output:
                try:
                    started = subprocess.Popen(
                        keeper,
                        cwd=run.folder,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                        pass_fds=(lock,),
                    )
                except OSError as error:  # The folder where it was submitted is gone, say.
                    output.write(f"fleet: cannot be started in {run.folder}: {error.strerror}\n".encode())
                    code = json.dumps({"code": exits.MISTAKE, "at": time.time()})
                    replace_file(folder / EXIT_FILE, code.encode())
                    return True
            self._keepers.append(started)
        finally:
            os.close(lock)
        return True

    def command(self, run: Submission, nodes: Sequence[str], folder: Path) -> list[str]:
        """What runs on this machine for a run on these nodes; `folder` is that of the attempt."""
        options = ["--hosts", str(len(nodes)), "--pids", str(folder / PIDS_FILE)]
        options += self.launcher_options()
        return [sys.executable, "-m", "jaxdl.launch", self.launcher, *options, "--", *run.words(len(nodes))]

    def launcher_options(self) -> list[str]:
        """More options of the launcher."""
        return []

    def stop(self, run: Submission, attempt: int) -> None:
        """SIGTERM to the keeper, which forwards it."""
        if self.poll(run, attempt) is None and (pid := self._keeper(run, attempt)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill(self, run: Submission, attempt: int) -> None:
        """SIGKILL to the keeper and the launcher, with which the processes of the hosts end."""
        if self.poll(run, attempt) is None and (pid := self._keeper(run, attempt)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def poll(self, run: Submission, attempt: int) -> int | None:
        """The exit code of an attempt, `LOST` without one; None while it lives."""
        # Keepers that have ended are waited for: they would be zombies until the server ends.
        self._keepers = [keeper for keeper in self._keepers if keeper.poll() is None]
        lock = self._lock(run)
        if lock is None:  # Also for a moment after the code was written.
            return None
        os.close(lock)
        return exit_code(self.folder(run, attempt) / EXIT_FILE)

    def folder(self, run: Submission, attempt: int) -> Path:
        """Where the files of an attempt are."""
        return self.store.path_of(run.name) / "attempts" / str(attempt)

    def _keeper(self, run: Submission, attempt: int) -> int | None:
        folder = self.folder(run, attempt)
        try:
            return int(json.loads((folder / KEEPER_FILE).read_text(encoding="utf-8"))["pid"])
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):  # It is damaged.
            return _keeper_of(folder.absolute())

    def _lock(self, run: Submission) -> int | None:
        """The lock of a run as an open file; None if something of the run has it."""
        descriptor = os.open(self.store.path_of(run.name) / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor


class Netns(Local):
    """Emulated nodes: each run has a network of its own, with a namespace for each node and links of a limited rate."""

    name = launcher = "netns"
    options = ("rate", "have")

    def __init__(
        self, store: Store, num_nodes: int, rate: str | None = None, have: Sequence[str] | None = None
    ) -> None:
        check_possible()
        if rate is not None:
            parse_rate(rate)
        super().__init__(store, num_nodes, have)
        self._rate = rate

    def launcher_options(self) -> list[str]:
        """The option for the rate of the links."""
        return ["--rate", self._rate] if self._rate else []
