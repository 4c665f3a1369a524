"""The workdir of a run: its lease, its config, the exchange that was chosen, and the examples it trains on."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.errors import as_typed
from jaxdl.core.files import (
    CONFIG_FILE,
    SEARCH_FILE,
)
from jaxdl.core.user_code import user_code
from jaxdl.parallel.cluster import BROKEN, MISTAKE, current, exits
from jaxdl.parallel.cluster.agree import of_first_process
from jaxdl.parallel.cluster.consistency import flat
from jaxdl.parallel.lease import Lease
from jaxdl.parallel.lease.shared import check_shared
from jaxdl.report import replace_file
from jaxdl.report.trackers import Tracker


def check_workdir(workdir: str | Path | None) -> Path | None:
    """The workdir as a path, if a folder can be of that name. Raises ConfigError; nothing is made."""
    if workdir is None:
        return None
    if not isinstance(workdir, str | Path):
        raise ConfigError(f"--workdir {workdir!r}: not a path. Give the folder of the run as a text or a Path.")
    text = os.fspath(workdir)
    if not text.strip():
        raise ConfigError("--workdir '': empty. Give the folder of the run, or leave it out.")
    try:
        os.fsencode(text)
        for folder in (path := Path(text).absolute(), *path.parents):
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"--workdir {text}: {folder} is a file, not a folder. Choose another --workdir.")
            if folder.is_symlink() and not folder.exists():
                raise ConfigError(
                    f"--workdir {text}: {folder} is a link to {os.readlink(folder)}, which is not there. Make that "
                    "folder, or choose another --workdir."
                )
    except OSError as error:
        raise refused(Path(text), error) from None
    except UnicodeError:
        raise ConfigError(f"--workdir {text!r}: no file can have this name. Choose another --workdir.") from None
    if "\0" in text:
        raise ConfigError(f"--workdir {text!r}: a path has no NUL in it. Choose another --workdir.")
    if os.path.exists(path / SEARCH_FILE):
        raise ConfigError(f"--workdir {text}: it is the folder of a search ({SEARCH_FILE}). Choose another --workdir.")
    return Path(text)


def check_trackers(trackers: Sequence[Tracker], workdir: Path | None) -> None:
    """Raises ConfigError, on all processes, when one of the trackers cannot track the run on the first process."""

    def check() -> bytes:
        for tracker in trackers:
            with user_code(tracker.users_name, of=tracker.check):
                tracker.check(workdir)
        return b""

    if trackers:
        of_first_process(check, slow=True)


def make_lease(
    workdir: Path,
    on_loss: Callable[[], None] = lambda: None,
    on_move: Callable[[Path | None], None] = lambda moved: None,
) -> Lease:
    """The lease of a workdir, which ends the process (code 75), with the reason, when another run takes it over.

    It does so with 2 when the folder itself is renamed or removed: a restart would begin at step 0 in a new one.
    `on_loss` or `on_move` is called first, this with the new place of the folder.
    """

    def end(reason: str, code: int = BROKEN) -> None:
        member = current()
        if member is not None:
            member.report_failure(reason, code)
        exits.end_process(reason, code)

    def lost(reason: str) -> None:
        on_loss()
        end(reason)

    def moved(reason: str, place: Path | None) -> None:
        on_move(place)
        end(reason, MISTAKE)

    return Lease(workdir, lost, lambda text: print(as_typed(text), flush=True), on_move=moved)


def take_lease(lease: Lease, then: Callable[[], bytes] = lambda: b"") -> bytes:
    """Takes the lease on the first process, for the whole run; the others wait. What `then` returns there, on all.

    Raises ConfigError, on all processes, when another run holds it or the workdir cannot be written.
    """

    def acquire() -> bytes:
        lease.acquire()
        return then()

    return of_first_process(acquire, slow=True)


def is_of_this_run(workdir: Path, config: Config, identity: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Whether the workdir is new, or has a run of the same config, as `claim_workdir` will find it. Raises nothing."""
    path = workdir / CONFIG_FILE
    try:
        return not path.exists() or identity(json.loads(path.read_bytes())) == identity(json.loads(config.to_json()))
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def claim_workdir(
    workdir: Path,
    config: Config,
    identity: Callable[[dict[str, Any]], dict[str, Any]],
    files: Mapping[str, bytes] | None = None,
    later: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Makes the workdir this run's own, or resumes an earlier run of the same config in it. The lease is held.

    `identity` takes away the fields that may change between runs (the mesh, reports...). Writes `config.json`,
    and `files` by their names, unless they are so already: a run may resume on a disk that is full now. The fields in
    `later`, which are no part of the identity, are returned as they were when they differ; then `config.json` is not
    written: `write_config` does that, once it is known that they may change.

    Raises ConfigError, on all processes, with the difference when the workdir belongs to another config; when it cannot
    be written; and when it is not the same folder for all of them.
    """
    check_shared(workdir)
    return json.loads(of_first_process(lambda: _claim(workdir, config, identity, files or {}, later)))


def read_file(path: Path) -> bytes:
    """The content of a file of the workdir, on all processes; empty when there is none.

    Raises ConfigError, on all processes, when it cannot be read.
    """

    def read() -> bytes:
        try:
            return path.read_bytes() if path.is_file() else b""
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}. Make it readable, or choose another --workdir.") from None

    return of_first_process(read)


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file of the workdir, whole or not at all, on the first process. Raises ConfigError, on all of them."""

    def write() -> bytes:
        try:
            replace_file(path, content)
        except OSError as error:
            raise refused(path.parent, error) from None
        return b""

    of_first_process(write)


def write_config(workdir: Path, config: Config) -> None:
    """Replaces `config.json`. Raises ConfigError, on all processes, when it cannot be written."""
    write_file(workdir / CONFIG_FILE, (config.to_json() + "\n").encode())


def _claim(
    workdir: Path,
    config: Config,
    identity: Callable[[dict[str, Any]], dict[str, Any]],
    files: Mapping[str, bytes],
    later: Sequence[str],
) -> bytes:
    """The fields in `later` as JSON if they differ from those in the workdir, `null` otherwise."""
    path = workdir / CONFIG_FILE
    wanted, change = {CONFIG_FILE: (config.to_json() + "\n").encode()}, None
    try:
        earlier = path.read_bytes() if path.exists() else None
        if earlier is not None:
            _compare(path, earlier, config, identity)
            there, here = json.loads(earlier), json.loads(config.to_json())
            if any(there.get(name) != here[name] for name in later):
                wanted, change = {}, {name: there.get(name) for name in later}
        for name, content in (wanted | dict(files)).items():
            if not (workdir / name).exists() or (workdir / name).read_bytes() != content:
                replace_file(workdir / name, content)
    except OSError as error:
        raise refused(workdir, error) from None
    return json.dumps(change).encode()


def _compare(path: Path, earlier: bytes, config: Config, identity: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    try:
        there, here = identity(json.loads(earlier)), identity(json.loads(config.to_json()))
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(f"{path}: not a config any more. Restore it, or choose another --workdir.") from None
    if there != here:
        lines = difflib.unified_diff(_lines(there), _lines(here), "in the workdir", "asked for now", n=0, lineterm="")
        changes = "\n".join("  " + line for line in lines if not line.startswith("@@"))
        raise ConfigError(
            f"--workdir {path.parent} belongs to a run of a different config:\n{changes}\n"
            "Choose another --workdir, or the settings of the run that is there."
        )


def refused(workdir: Path, error: OSError) -> ConfigError:
    """The error of a workdir that cannot be written."""
    return ConfigError(f"--workdir {workdir}: {error.strerror}. Choose a writable folder.")


def _lines(config: Mapping[str, Any]) -> list[str]:
    """A config as sorted lines `dotted.field = value`."""
    return sorted(f"{name} = {json.dumps(value)}" for name, value in flat(config).items())
