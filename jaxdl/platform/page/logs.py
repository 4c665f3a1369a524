"""What a run has printed, as far as a file has it: of its fleet, its search, or where its user sent it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxdl.core.files import LOGS_FOLDER
from jaxdl.platform.fleet.keeper import OUTPUT_FILE
from jaxdl.platform.fleet.store import RUNS
from jaxdl.platform.page.files import Tail, names_in, read_tail
from jaxdl.platform.page.runs import as_shown

ENDINGS = (".log", ".out", ".err", ".txt")
"""Files in a workdir that end so are taken for output."""
TAIL_BYTES = 1 << 16
MOST = 40


@dataclass(frozen=True)
class Log:
    """A file with output of a run."""

    label: str
    path: Path
    inside: Path
    """The folder that it may not lead out of."""


def find_logs(workdir: Path, fleet_runs: Sequence[tuple[Path, str]], *, is_trial: bool) -> list[Log]:
    """The files with output of a run, the ones that matter most first.

    `fleet_runs`: (folder, number) of the run in each fleet that has it.
    """
    found = []
    for fleet, number in fleet_runs:
        attempts = fleet / RUNS / number / "attempts"
        numbers = sorted((int(name) for name in names_in(attempts) if name.isdecimal()), reverse=True)
        for attempt in numbers:
            for name in names_in(attempts / str(attempt)):
                if name.endswith(OUTPUT_FILE):
                    label = f"fleet run {number}, attempt {attempt}" + ("" if name == OUTPUT_FILE else f", {name}")
                    found.append(Log(as_shown(label), attempts / str(attempt) / name, fleet))
    if is_trial:
        search = workdir.parent.parent
        path = search / LOGS_FOLDER / f"{workdir.name}.log"
        if path.exists():
            found.append(Log("of the search", path, search))
    found += [Log(as_shown(name), workdir / name, workdir) for name in names_in(workdir) if name.endswith(ENDINGS)]
    beside = [workdir.with_name(f"{workdir.name}{ending}") for ending in ENDINGS]
    found += [Log(as_shown(f"../{path.name}"), path, path.parent) for path in beside if path.is_file()]
    return found[:MOST]


def tail(log: Log) -> Tail:
    """The end of a log; what a terminal overwrites by carriage returns is left out.

    Raises FileNotFoundError, and Unreadable.
    """
    end = read_tail(log.path, log.inside, TAIL_BYTES)
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in end.text.split("\n")]
    return Tail("\n".join(lines), end.size, end.start)
