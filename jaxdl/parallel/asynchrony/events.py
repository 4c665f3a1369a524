"""What happens at the syncer and what it decides: plain values, which are also the lines of its tape.

Times are integers in microseconds since the syncer first began, so that they add up exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SECOND_US = 1_000_000

Verdict = Literal["kept", "over", "repeated", "unknown", "not finite", "stale"]
"""What became of a delta: kept for the next merge, or why it was dropped."""


@dataclass(frozen=True)
class Member:
    """A learner as the syncer knows it."""

    life: str = ""
    """The name of its process, which is another one after each start."""
    round: int = 0
    """The last of its deltas that arrived, counted from 1 in each life."""
    clock: int = 0
    """Rounds of all lives."""
    present: bool = False
    done: bool = False
    """Whether it has finished, so that no learner waits for it."""
    working: bool = False
    """Whether it has an anchor and computes; else it waits for one."""
    since_us: int = 0
    """When it last came or went."""
    released_us: int = 0
    """When it got its last anchor."""
    speed: float | None = None
    """Steps per second in its last round."""
    losses: int = 0
    """How often its process ended and it came as another one, or its delta was not finite, since its last one that was
    finite."""
    missed_us: int = 0
    """When the first of these failures was: when that process was lost, or when the delta arrived."""


@dataclass(frozen=True)
class Join:
    """A learner has connected."""

    at_us: int
    learner: int
    life: str
    round: int = 0
    """Its last round that the syncer answered."""
    working: bool = False
    """Whether it has an anchor, because only its connection was lost."""
    resumes: str = ""
    """From where it goes on, in its own words; empty for a fresh start."""


@dataclass(frozen=True)
class Leave:
    """A learner's connection is over."""

    at_us: int
    learner: int
    finished: bool
    why: str = ""


@dataclass(frozen=True)
class Arrive:
    """A delta has arrived."""

    at_us: int
    learner: int
    round: int
    version: int
    """The version of the anchor that its learner started from."""
    anchor: str
    """The SHA-256 of that anchor."""
    weight: float
    """The learner's weight in a merge, such as the number of its examples or tokens."""
    steps: int
    delta: str
    """The SHA-256 of the delta as it was sent."""
    finite: bool = True


@dataclass(frozen=True)
class Tick:
    """Time has passed: the time that `wake_us` named."""

    at_us: int


Event = Join | Leave | Arrive | Tick


@dataclass(frozen=True)
class Pending:
    """A delta that waits for the next merge."""

    learner: int
    round: int
    weight: float
    steps: int
    staleness: int
    at_us: int
    round_us: int
    """How long its learner took for it."""


@dataclass(frozen=True)
class Standing:
    """What the policy knows: a function of the events so far."""

    members: Mapping[int, Member]
    version: int = 0
    steps: int = 0
    """Steps of all learners that were merged."""
    pending: tuple[Pending, ...] = ()
    quorum_us: int | None = None
    """Since when the next merge has its quorum."""
    over: bool = False
    begun: bool = False
    """Whether a learner has ever come."""
    at_us: int = 0
    """The time of the last event."""


@dataclass(frozen=True)
class Part:
    """A delta in a merge, and by what it is multiplied."""

    learner: int
    round: int
    factor: float


@dataclass(frozen=True)
class Merge:
    """Decision: the anchor moves by these deltas, in this order, and gets this version."""

    at_us: int
    version: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Release:
    """Decision: this learner gets the anchor of this version, and goes on for `steps` steps unless the run is over."""

    at_us: int
    learner: int
    round: int
    """The round that this answers."""
    version: int
    steps: int
    over: bool = False


Decision = Merge | Release


@dataclass(frozen=True)
class Outcome:
    """What follows from an event."""

    standing: Standing
    decisions: tuple[Decision, ...]
    verdict: Verdict | None = None
    """What became of the delta, if one arrived."""


_PLAIN = ("version", "steps", "quorum_us", "over", "begun", "at_us")


def standing_to_json(standing: Standing) -> dict[str, Any]:
    """The standing as JSON; `standing_from_json` gives an equal one."""
    fields = {name: getattr(standing, name) for name in _PLAIN}
    members = {str(learner): vars(member) for learner, member in standing.members.items()}
    return fields | {"members": members, "pending": [vars(pending) for pending in standing.pending]}


def standing_from_json(fields: Mapping[str, Any]) -> Standing:
    """The standing that `standing_to_json` wrote. Raises KeyError and TypeError for anything else."""
    rest = {name: fields[name] for name in _PLAIN}
    members = {int(learner): Member(**member) for learner, member in fields["members"].items()}
    return Standing(members, pending=tuple(Pending(**entry) for entry in fields["pending"]), **rest)
