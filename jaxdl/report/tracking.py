"""The trackers of a run: started on its first process, told of its config and hosts, opened as the same run again."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.config import Config
from jaxdl.core.files import (
    CURVES_FILE,
    LOAD_PLOT_FILE,
    REPORT_FILE,
    SEARCH_FILE,
    SUMMARY_FILE,
    TRACKERS_FILE,
    TRACKERS_FOLDER,
    TRIALS_FOLDER,
)
from jaxdl.parallel.cluster.consistency import flat
from jaxdl.report.history import replace_file
from jaxdl.report.sender import Opening, Rows, Sender, num_measured
from jaxdl.report.summary import Devices, describe_devices, versions
from jaxdl.report.trackers import State, TrackedModel, TrackedRun, Tracker

KEPT_FILES = (SUMMARY_FILE, CURVES_FILE, LOAD_PLOT_FILE, REPORT_FILE)
"""The files of a workdir that trackers get, when the run ends."""
GIT_SEC = 10.0


class TrackersFile:
    """trackers.json: by which id each tracker knows the run, whether its rows are those of the run, and the hosts."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / TRACKERS_FILE
        self._lock = threading.Lock()
        self._runs: dict[str, dict[str, Any]] = {}
        self._devices: dict[str, Any] = {}
        self.changes: list[str] = []
        """How hosts and devices have changed, in words."""
        self.num_cuts = 0
        """How often this process has dropped rows."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            if self._path is not None:
                values = json.loads(self._path.read_bytes())
                runs = {kind: {"run": run["run"], "whole": bool(run["whole"])} for kind, run in values["runs"].items()}
                self._runs, self._devices, self.changes = runs, dict(values["devices"]), list(values["changes"])

    def run_of(self, kind: str) -> tuple[str | None, bool]:
        """(id, whether the rows there are the first rows of the run) of the run of a tracker; no id for a new one."""
        run = self._runs.get(kind, {"run": None, "whole": True})
        return run["run"], run["whole"]

    def note_cut(self) -> None:
        """Rows are going to be dropped from the history: what trackers have is no longer what they should have."""
        with self._lock:
            self.num_cuts += 1
            for run in self._runs.values():
                run["whole"] = False
            with contextlib.suppress(OSError):  # A disk that is full; this process knows.
                self._write()

    def note_run(self, kind: str, run_id: str | None, num_cuts: int) -> None:
        """A tracker has opened the run under this id; `num_cuts` as it was before. Raises OSError."""
        with self._lock:
            run = {"run": run_id, "whole": num_cuts == self.num_cuts}
            if self._runs.get(kind) != run:
                self._runs[kind] = run
                self._write()

    def note_devices(self, devices: Devices, step: int) -> None:
        """Notes hosts and devices, and how they differ from those of the process before."""
        now = {"hosts": devices["num_processes"], "devices": devices["num_devices"], "kind": devices["kind"]}
        with self._lock:
            then, self._devices = self._devices, now
            if then and then != now:
                changed = [
                    f"{name} {then.get(name)} -> {value}" for name, value in now.items() if then.get(name) != value
                ]
                self.changes.append(f"step {step}: {', '.join(changed)}")
            if then != now:
                with contextlib.suppress(OSError):
                    self._write()

    def _write(self) -> None:
        if self._path is None or not (self._runs or self._devices):
            return
        values = {"runs": self._runs, "devices": self._devices, "changes": self.changes}
        replace_file(self._path, (json.dumps(values, indent=2) + "\n").encode())


class Trackers:
    """All trackers of a run; without any, only that rows were dropped is noted, for a later process that has some.

    Args:
      trackers: the trackers; none on all processes but the first.
      folder: the workdir, if the run has one.
      config: the experiment, resolved.
      warn: shows a warning; called in other threads too, once for each tracker while the run trains.
    """

    def __init__(
        self, trackers: Sequence[Tracker], folder: Path | None, config: Config, warn: Callable[[str], None]
    ) -> None:
        self._trackers, self._folder, self._config, self._warn = trackers, folder, config, warn
        self._file = TrackersFile(folder)
        self._rows: Rows = ()
        self._begun = time.strftime("%Y-%m-%d %H:%M:%S")
        self._senders: list[Sender] = []

    def start(self, rows: Rows, step: int) -> None:
        """Starts to write these rows, and those that will be appended; the run is at this step."""
        self._rows = rows
        if self._trackers:
            self._file.note_devices(describe_devices(), step)
        for tracker in self._trackers:
            opening = functools.partial(self._opening, tracker)
            note = functools.partial(self._file.note_run, tracker.kind)
            sender = Sender(tracker, lambda: self._rows, num_measured(rows), opening, note, self._warn)
            self._senders.append(sender)
            sender.start()

    def before_cut(self) -> None:
        """Rows of the history are going to be dropped."""
        self._file.note_cut()

    def restart(self, rows: Rows) -> None:
        """The history is this list now: rows were dropped by a rollback."""
        self._file.note_cut()
        self._rows = rows

    def look(self) -> None:
        """Called after each row: warns of a tracker that is far behind."""
        for sender in self._senders:
            sender.look()

    def close(self, state: State, models: Mapping[str, TrackedModel] | None = None) -> None:
        """Hands over the files of the run, waits a bounded time until all is written, and warns of what is missing.

        `models` are its network in the forms that trackers ask for. May be called twice.
        """
        senders, self._senders = self._senders, []
        folder = self._folder
        files = [] if folder is None else [folder / name for name in KEPT_FILES if (folder / name).is_file()]
        for sender in senders:
            sender.end(state, files, (models or {}).get(sender.model_format))
        since = time.monotonic()
        for sender in senders:
            left = sender.wait(since)
            if left is not None:
                self._warn(left)

    def __bool__(self) -> bool:
        return bool(self._senders)

    def _opening(self, tracker: Tracker) -> Opening:
        num_cuts, rows, folder = self._file.num_cuts, self._rows, self._folder  # In this order: later cuts are noticed.
        run_id, whole = self._file.run_of(tracker.kind)
        run = TrackedRun(
            name=tracker.name or (name_of(folder) if folder is not None else self._begun),
            run_id=run_id,
            rows_changed=not whole,
            folder=None if folder is None else folder / TRACKERS_FOLDER,
            config=_flat(self._config),
            tags=self._tags(),
        )
        return Opening(rows, num_cuts, run)

    def _tags(self) -> dict[str, str]:
        devices = describe_devices()
        tags = {"hosts": devices["num_processes"], "devices": devices["num_devices"]}
        tags |= {"device_kind": devices["kind"], "platform": devices["platform"]}
        tags |= {f"version.{package}": version for package, version in versions().items()}
        tags |= {f"elastic.{number}": text for number, text in enumerate(self._file.changes, 1)}
        tags |= {} if self._folder is None else {"workdir": self._folder.absolute()}
        return {name: str(value) for name, value in tags.items()} | git_commit()


def name_of(workdir: Path) -> str:
    """What people call a run: the name of its workdir, and of the trial of a search `SEARCH/0003`."""
    path = workdir.resolve()
    search = path.parent.parent
    is_trial = path.parent.name == TRIALS_FOLDER and (search / SEARCH_FILE).is_file()
    return f"{search.name}/{path.name}" if is_trial else path.name


def git_commit() -> dict[str, str]:
    """The commit of the repository that the process was started in, and whether files differ from it; or nothing."""
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git.commit": commit, "git.changed": "yes" if changed else "no"}


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, timeout=GIT_SEC, check=True)
    return done.stdout.decode(errors="replace").strip()


def _flat(config: Config) -> dict[str, Any]:
    """Dotted field -> value; lists as JSON, which no tracker takes otherwise."""
    values = flat(config.model_dump(mode="json"))
    return {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in values.items()}
