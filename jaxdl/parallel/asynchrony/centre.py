"""The anchor and what moves it: `policy` decides, `outer` computes, every event that decided anything is recorded.

The syncer drives the same object from sockets, the simulator from a virtual clock, and the replay from a tape.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdl.parallel.asynchrony.events import (
    Arrive,
    Decision,
    Event,
    Member,
    Merge,
    Release,
    Standing,
    Tick,
    standing_from_json,
    standing_to_json,
)
from jaxdl.parallel.asynchrony.outer import Outer, Slow, Vector, digest, first_slow, mean_of, outer_step
from jaxdl.parallel.asynchrony.policy import RULES, Policy, decide, first_standing, wake_us

Record = dict[str, Any]
"""One line of a tape."""
MOST_VERSIONS = 1024
"""A delta that started from an anchor older than this many merges is unknown."""


@dataclass(frozen=True)
class Saved:
    """All of a centre, to go on from. The vectors are shared and never changed in place."""

    fields: Mapping[str, Any]
    anchor: Vector
    slow: Slow


class Centre:
    """Holds the anchor. `record` gets the events and the decisions in their order, as lines of a tape.

    `rules` are those of `policy.RULES`; other ones are for a tape that was recorded by them.
    """

    def __init__(
        self,
        policy: Policy,
        outer: Outer,
        record: Callable[[Record], object] = lambda record: None,
        *,
        rules: int = RULES,
    ) -> None:
        self.policy, self.outer = policy, outer
        self._rules = rules
        self.standing: Standing = first_standing(policy)
        self.anchor: Vector | None = None
        """None until a learner has given its initial parameters."""
        self._record = record
        self._slow = first_slow(outer, 0)
        self._hashes: dict[int, str] = {}
        self._deltas: dict[tuple[int, int], Vector] = {}

    @property
    def anchor_hash(self) -> str:
        """SHA-256 of the anchor."""
        return self._hashes[self.standing.version]

    @property
    def wake_us(self) -> int | None:
        """When a `Tick` is due."""
        return wake_us(self.policy, self.standing)

    def begin(self, anchor: Vector) -> None:
        """The anchor before the first merge: the initial parameters."""
        assert self.anchor is None
        assert anchor.dtype == np.float32
        self.anchor = anchor
        self._slow = first_slow(self.outer, anchor.size)
        self._hashes = {0: digest(anchor)}
        self._record({"kind": "initial", "size": anchor.size, "anchor": self._hashes[0]})

    def handle(self, event: Event, delta: Vector | None = None) -> tuple[Decision, ...]:
        """What follows from an event; `delta` comes with an `Arrive`. A merge has been made when this returns."""
        known = not isinstance(event, Arrive) or self._hashes.get(event.version) == event.anchor
        outcome = decide(self.policy, self.standing, event, known=known, rules=self._rules)
        has_quorum = outcome.standing.quorum_us != self.standing.quorum_us  # The grace begins, and ends at that time.
        if not isinstance(event, Tick) or outcome.decisions or has_quorum:
            verdict = {} if outcome.verdict is None else {"verdict": outcome.verdict}
            self._record({"kind": type(event).__name__.lower(), **vars(event), **verdict})
        if isinstance(event, Arrive) and outcome.verdict == "kept":
            assert delta is not None
            self._deltas[event.learner, event.round] = delta
        self.standing = outcome.standing
        for decision in outcome.decisions:
            match decision:
                case Merge():
                    self._merge(decision)
                    self._record({"kind": "merge", **dataclasses.asdict(decision), "anchor": self.anchor_hash})
                case Release():
                    self._record({"kind": "release", **vars(decision)})
        return outcome.decisions

    def _merge(self, merge: Merge) -> None:
        assert self.anchor is not None
        deltas = [self._deltas.pop((part.learner, part.round)) for part in merge.parts]
        mean = mean_of(deltas, [part.factor for part in merge.parts])
        self.anchor, self._slow = outer_step(self.outer, self.anchor, mean, self._slow, zeros_count=self._rules == 1)
        self._hashes[merge.version] = digest(self.anchor)
        self._hashes.pop(merge.version - MOST_VERSIONS, None)

    def saved(self) -> Saved:
        """A copy to go on from; deltas that wait for a merge are not in it, and count as never sent."""
        assert self.anchor is not None
        fields = {"standing": standing_to_json(_to_go_on_from(self.standing)), "count": self._slow.count}
        hashes = {str(version): text for version, text in self._hashes.items()}
        return Saved(fields | {"hashes": hashes}, self.anchor, self._slow)

    def go_on_from(self, saved: Saved) -> None:
        """Takes over a copy, made with as many learners or others. Raises ValueError for one that is not whole."""
        standing = standing_from_json(saved.fields["standing"])
        members = {learner: standing.members.get(learner, Member()) for learner in range(self.policy.learners)}
        self.standing = dataclasses.replace(standing, members=members)
        self._hashes = {int(version): str(text) for version, text in saved.fields["hashes"].items()}
        self.anchor, self._slow, self._deltas = saved.anchor, saved.slow, {}
        if self.anchor_hash != digest(self.anchor):
            raise ValueError("the anchor is not the one that was saved")


def _to_go_on_from(standing: Standing) -> Standing:
    """The standing before its pending deltas arrived, so that their learners may send them again.

    No failure of a learner is in it: when the syncer is started again, so may all of them be, and that is none. So the
    next process of each is forgiven, which -1 says.
    """
    members = {learner: dataclasses.replace(member, losses=-1) for learner, member in standing.members.items()}
    for pending in standing.pending:
        member = members[pending.learner]
        if member.round >= pending.round:
            members[pending.learner] = dataclasses.replace(member, round=pending.round - 1)
    return dataclasses.replace(standing, members=members, pending=(), quorum_us=None)


def centre_of(record: Record, tell: Callable[[Record], object]) -> Centre:
    """A centre as that whose tape has this line `begin` or `restart`."""
    return Centre(Policy(**record["policy"]), Outer(**record["outer"]), tell, rules=record.get("rules", 1))


def as_json(record: Record) -> Record:
    """A record as it comes back from a tape."""
    return json.loads(json.dumps(record))
