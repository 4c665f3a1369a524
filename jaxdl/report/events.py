"""What happens to a run besides training: rows of its history that have a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

EventKind = Literal[
    "resume",
    "restart",
    "rollback",
    "skipped",
    "damaged",
    "length",
    "settings",
    "start_over",
    "exchange",
    "checkpoint",
    "init",
    "other",
]
"""- resume: a process resumed from a checkpoint; restart: the launcher started the process again;
- rollback: back to an earlier checkpoint after a streak of bad steps;
- skipped: steps made no update, or an evaluation has no metrics: numbers were bad, or nothing counted;
- damaged: a checkpoint was damaged and quarantined; start_over: the checkpoints were unusable, and the run began again;
- length: the run was made longer or shorter; settings: those that `may_change` names have changed;
- exchange: the state of the exchange was changed to fit this mesh;
- checkpoint: one was not written; init: the run began with parameters of another run;
- other: a row of the first format that no kind is known of.
"""

WARNINGS: tuple[EventKind, ...] = ("rollback", "skipped", "damaged", "start_over", "checkpoint")
"""The kinds that a quiet run shows too."""

_FIRST_WORDS: dict[str, EventKind] = {
    "resumed from": "resume",
    "restarted": "restart",
    "went back": "rollback",
    "checkpoint step_": "damaged",
    "started over": "start_over",
    "the length changed": "length",
    "the checkpoint of step": "checkpoint",
    "no checkpoint of step": "checkpoint",
}
"""Rows of the first format have no kind; there it is known by how the text begins."""


class Event(NamedTuple):
    """Something that happened to a run after `step` steps, in words."""

    kind: EventKind
    step: int
    text: str

    def to_row(self) -> dict[str, Any]:
        """The row of the history."""
        return {"step": self.step, "event": self.text, "kind": self.kind}


def event_of(row: Mapping[str, Any]) -> Event | None:
    """The event that a row of the history records; None for a row of measurements."""
    text = row.get("event")
    if not isinstance(text, str):
        return None
    if row.get("kind"):
        return Event(row["kind"], row["step"], text)
    for words, kind in _FIRST_WORDS.items():
        if text.startswith(words):
            return Event(kind, row["step"], text)
    return Event("other", row["step"], text)
