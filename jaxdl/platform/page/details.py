"""What the page of one run shows besides its curves: its files, each read as far as it can be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdl.core.files import (
    CHECKPOINTS_FOLDER,
    DAMAGED_FOLDER,
    FAILURE_FILE,
    FAILURES_FOLDER,
    HALT_FILE,
    INIT_FILE,
    LEFT_FOLDER,
    MANIFEST_FILE,
    PLAN_FILE,
    REPORT_FILE,
    STATUS_FILE,
    SUMMARY_FILE,
    step_folder,
)
from jaxdl.parallel.cluster.consistency import flat
from jaxdl.platform.page.files import Tail, Unreadable, json_or_problem, names_in, read_tail, read_whole, signature
from jaxdl.platform.page.runs import as_shown

TEXT_BYTES = 1 << 16
"""So much of the end of a text is shown."""
PICTURE_BYTES = 16 << 20
MOST_CHECKPOINTS, MOST_FILES, MOST_FIELDS = 100, 12, 2_000
_META = "meta/metadata"


@dataclass(frozen=True)
class Text:
    """A file that is shown as text."""

    name: str
    text: str
    cut: int = 0
    """Bytes before it that are not shown."""


@dataclass(frozen=True)
class Failure:
    """One of `failures/N`."""

    number: int
    facts: Mapping[str, Any]
    texts: list[Text]
    at: float | None


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    step: int
    at: float | None
    num_bytes: int | None
    score: float | None


@dataclass
class Details:
    """The files of a run."""

    command: str = ""
    process: str = ""
    skipped: str = ""
    halt: bool = False
    """Whether it was asked to halt, and has not yet."""
    config: list[tuple[str, str]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    origin: list[tuple[str, str]] = field(default_factory=list)
    """init.json and plan.json, as far as they are there."""
    diverged: Text | None = None
    failures: list[Failure] = field(default_factory=list)
    checkpoints: list[Saved] = field(default_factory=list)
    not_listed: int = 0
    """Checkpoints that are there, and not in the list."""
    damaged: list[str] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    """(name, version) of each picture."""
    problems: list[str] = field(default_factory=list)


def fields_of(values: Any) -> list[tuple[str, str]]:
    """(dotted name, value as text) of a JSON object, at most `MOST_FIELDS`."""
    flattened = flat(values) if isinstance(values, dict) else {}
    return [(as_shown(name), as_text(value)) for name, value in list(flattened.items())[:MOST_FIELDS]]


def as_text(value: Any) -> str:
    """A value of JSON as text of one line."""
    return as_shown(value if isinstance(value, str) else json.dumps(value))[:2_000]


def read_details(workdir: Path, config: Any) -> Details:
    """The files of a run, whose config has been read. Raises nothing."""
    found = Details(config=fields_of(config))
    status = json_or_problem(workdir, STATUS_FILE, found.problems)
    process = status.get("process") if isinstance(status, dict) else None
    if isinstance(process, dict):
        found.command = as_text(process.get("command", ""))
        found.process = as_text(f"process {process.get('pid')} on {process.get('host')} since {process.get('since')}")
    if isinstance(status, dict):
        found.skipped = as_text(status.get("skipped") or "")
    summary = json_or_problem(workdir, SUMMARY_FILE, found.problems)
    found.summary = {} if not isinstance(summary, dict) else summary
    for name in (INIT_FILE, PLAN_FILE):
        fields = fields_of(json_or_problem(workdir, name, found.problems))
        found.origin += [(f"{name}: {key}", value) for key, value in fields[:40]]
    found.halt = signature(workdir / HALT_FILE) is not None
    found.diverged = read_text(workdir, REPORT_FILE)
    _read_failures(workdir, found)
    _read_checkpoints(workdir, found)
    found.pictures = [
        (name, f"{known[0]}-{known[1]}")
        for name in names_in(workdir)
        if is_picture(name) and (known := signature(workdir / name)) is not None
    ]
    return found


def read_text(workdir: Path, name: str) -> Text | None:
    """The end of a text in a workdir; None without one. One that cannot be read says why."""
    try:
        tail: Tail = read_tail(workdir / name, workdir, TEXT_BYTES)
    except FileNotFoundError:
        return None
    except Unreadable as error:
        return Text(as_shown(name), f"[{error}]")
    return Text(as_shown(Path(name).name), tail.text, tail.start)


def _read_failures(workdir: Path, found: Details) -> None:
    numbers = sorted((int(name) for name in names_in(workdir / FAILURES_FOLDER) if name.isdecimal()), reverse=True)
    for number in numbers[:MOST_FILES]:
        folder = f"{FAILURES_FOLDER}/{number}"
        facts = json_or_problem(workdir, f"{folder}/{FAILURE_FILE}", found.problems)
        names = [name for name in names_in(workdir / folder) if name.endswith(".txt")]
        texts = [text for name in names[:MOST_FILES] if (text := read_text(workdir, f"{folder}/{name}")) is not None]
        if len(names) > MOST_FILES:
            texts.append(Text("", f"[and {len(names) - MOST_FILES} more files in {folder}]"))
        known = signature(workdir / folder / FAILURE_FILE)
        at = None if known is None else known[0] / 1e9
        found.failures.append(Failure(number, facts if isinstance(facts, dict) else {}, texts, at))


def _read_checkpoints(workdir: Path, found: Details) -> None:
    folder = workdir / CHECKPOINTS_FOLDER
    prefix = step_folder("")
    names = [name.removeprefix(prefix) for name in names_in(folder) if name.startswith(prefix)]
    steps = sorted((int(name) for name in names if name.isdecimal()), reverse=True)
    found.not_listed = max(0, len(steps) - MOST_CHECKPOINTS)
    for step in steps[:MOST_CHECKPOINTS]:
        path = f"{CHECKPOINTS_FOLDER}/{step_folder(step)}"
        names = (f"{path}/{MANIFEST_FILE}", f"{path}/{_META}")
        listed, meta = (json_or_problem(workdir, name, found.problems) for name in names)
        files = listed.get("files") if isinstance(listed, dict) else None
        sizes = [of[0] for of in files.values() if isinstance(of, list) and of] if isinstance(files, dict) else []
        known = signature(workdir / path / MANIFEST_FILE)
        score = meta.get("score") if isinstance(meta, dict) else None
        found.checkpoints.append(
            Saved(
                step,
                None if known is None else known[0] / 1e9,
                sum(size for size in sizes if isinstance(size, int)) if sizes else None,
                float(score) if isinstance(score, int | float) else None,
            )
        )
    for name in (DAMAGED_FOLDER, LEFT_FOLDER):
        found.damaged += [as_shown(f"{CHECKPOINTS_FOLDER}/{name}/{inner}") for inner in names_in(folder / name)]


def is_picture(name: str) -> bool:
    """Whether a file of a workdir is shown as a picture, by its name."""
    return name.endswith(".png") and not name.startswith(".")


def read_picture(folder: Path, name: str) -> bytes:
    """The bytes of a picture in a folder. Raises FileNotFoundError, and Unreadable for what is none."""
    if not is_picture(name) or name not in names_in(folder):
        raise FileNotFoundError(name)
    content = read_whole(folder / name, folder, PICTURE_BYTES)
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise Unreadable("it is no PNG picture")
    return content
