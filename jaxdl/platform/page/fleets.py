"""A fleet as its page shows it: nodes, queue, runs, what its server decided and did."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.platform.fleet.journal import JOURNAL_FILE
from jaxdl.platform.fleet.member import ENDED, RESUMABLE
from jaxdl.platform.fleet.status_view import explain
from jaxdl.platform.fleet.store import Order, Store
from jaxdl.platform.page.files import Unreadable, read_tail
from jaxdl.platform.page.render import as_iso, as_number
from jaxdl.platform.page.runs import as_shown
from jaxdl.platform.page.scan import address_of_folder
from jaxdl.report.status.parsing import parse_json

SILENT_SEC = 30.0
"""A server that has not written what it sees for this long is called silent."""
MOST_EVENTS, MOST_RUNS = 200, 500
_JOURNAL_BYTES = 1 << 17
ORDERS: Mapping[str, Order] = {"hold": "hold", "resume": "run", "cancel": "cancel"}
"""What a button is called -> what the fleet is asked."""


@dataclass
class Fleet:
    """What is shown of a fleet."""

    problems: list[str] = field(default_factory=list)
    at: float | None = None
    silent: bool = False
    nodes: list[tuple[str, str]] = field(default_factory=list)
    """(node, its runs; empty without one)."""
    lost: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    not_listed: int = 0
    """Runs that have ended, and are not in the list."""
    not_seen: list[str] = field(default_factory=list)
    """Runs that were accepted, and that no server has seen."""
    decisions: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """The newest first: at, what, run, and the rest as text."""


def read_fleet(folder: Path) -> Fleet:
    """What the server of a fleet wrote last. Raises nothing."""
    found, store = Fleet(), Store(folder)
    try:
        view = store.view()
        _read_view(view, found)
        names = {str(run.get("run")) for run in view["runs"]}
        found.not_seen = [as_shown(name) for name in store.names() if name not in names]
        live = [run for run in view["runs"] if run.get("state") not in ENDED]
        found.decisions = [as_shown(line) for line in explain({**view, "runs": live})]
    except ConfigError as error:
        found.problems.append(as_shown(str(error)))
    except Exception as error:  # What is damaged in whatever way must not hide the rest.
        found.problems.append(as_shown(f"what its server wrote cannot be read: {type(error).__name__}: {error}"))
    _read_journal(folder, found)
    return found


def _read_view(view: Mapping[str, Any], found: Fleet) -> None:
    found.at = float(view["at"])
    found.silent = time.time() - found.at > SILENT_SEC
    found.nodes = [(as_shown(str(node)), as_shown(str(runs or ""))) for node, runs in view["nodes"].items()]
    found.lost = [as_shown(str(node)) for node in view.get("lost") or ()]
    for kind in ("problems", "engine"):
        found.problems += [as_shown(str(problem)) for problem in view.get(kind) or ()]
    live = [run for run in view["runs"] if run.get("state") not in ENDED]
    ended = [run for run in view["runs"] if run.get("state") in ENDED][::-1]
    found.not_listed = max(0, len(ended) - MOST_RUNS)
    for run in [*live, *ended[:MOST_RUNS]]:
        workdir = str(run.get("workdir") or "")
        found.runs.append(
            {
                "run": as_shown(str(run["run"])),
                "state": as_shown(str(run.get("state"))),
                "nodes": as_shown(", ".join(map(str, run.get("nodes") or ()))),
                "sizes": as_shown(", ".join(map(str, run.get("sizes") or ()))),
                "attempt": run.get("attempt"),
                "resized": run.get("resized"),
                "share": run.get("share"),
                "why": as_shown(str(run.get("reason") or "")),
                "workdir": as_shown(workdir),
                "id": address_of_folder(Path(workdir)) if workdir else "",
                "orders": orders_of(run.get("state")),
            }
        )


def orders_of(state: Any) -> list[str]:
    """What a run in a state may be asked, see `ORDERS`."""
    if state in ENDED:
        return ["resume"] if state in RESUMABLE else []
    return ["resume", "cancel"] if state == "held" else ["hold", "cancel"]


def _read_journal(folder: Path, found: Fleet) -> None:
    try:
        end = read_tail(folder / JOURNAL_FILE, folder, _JOURNAL_BYTES)
    except FileNotFoundError:
        return
    except Unreadable as error:
        found.problems.append(f"{JOURNAL_FILE}: {error}")
        return
    damaged = 0
    for line in end.text.split("\n")[:-1][::-1][:MOST_EVENTS]:
        try:
            event = parse_json(line)
            at = float(event.pop("at"))
            found.events.append(
                {
                    "at": at,
                    "what": as_shown(str(event.pop("what"))),
                    "run": as_shown(str(event.pop("run", ""))),
                    "rest": _rest_of(event),
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            damaged += 1
    if damaged:
        found.problems.append(f"{JOURNAL_FILE}: {damaged} of its last lines are damaged, and not shown")


def _rest_of(event: Mapping[str, Any]) -> str:
    """What else an event says, in a line."""
    words = []
    for name, value in event.items():
        if value in (None, "", [], 0, False) or name == "num_asked":
            continue
        text = ", ".join(map(str, value)) if isinstance(value, list) else as_number(value)
        if name == "not_before":
            text = as_iso(value)
        words.append(f"{name.replace('_', ' ')} {text}")
    return as_shown("; ".join(words))[:500]


def runs_of(folders: Sequence[Path]) -> dict[str, list[tuple[Path, str]]]:
    """Address of a workdir -> (folder, number) of its run in each fleet that has it."""
    found: dict[str, list[tuple[Path, str]]] = {}
    for folder in folders:
        try:
            runs = [
                (str(run["run"]), str(run["workdir"])) for run in Store(folder).view()["runs"] if run.get("workdir")
            ]
        except Exception:  # Its own page says what is wrong.
            continue
        for number, workdir in runs:
            if number.isdecimal():
                found.setdefault(address_of_folder(Path(workdir)), []).append((folder, number))
    return found
