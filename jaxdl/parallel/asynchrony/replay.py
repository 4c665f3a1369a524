"""A recorded run again, in one process: the learners one after another, every decision and every anchor compared."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdl.parallel.asynchrony.centre import Record, Saved, as_json, centre_of
from jaxdl.parallel.asynchrony.codec import Codec, Encoder
from jaxdl.parallel.asynchrony.events import Arrive, Join, Leave, Release, Tick
from jaxdl.parallel.asynchrony.outer import Vector, digest
from jaxdl.parallel.asynchrony.simulator import Worker

NOT_COMPARED = ("begin", "saved", "restart")
_KEPT_ANCHORS = 4
"""Anchors kept for each learner: the one that it works from, and those before it after lost connections."""


class Difference(Exception):
    """The replay does not follow the tape; says at which line, what the tape has and what the replay found."""


@dataclass(frozen=True)
class Replayed:
    """What a replay found to be equal."""

    anchor: Vector
    num_merges: int
    num_events: int


def replay(records: Sequence[Record], workers: Callable[[int, str], Worker]) -> Replayed:
    """Runs the learners of a tape one after another, and merges as its syncer did.

    `workers` makes a learner from its number and the word with which it joined, empty for a fresh start; it must give
    the same deltas from the same anchors as in the run. Raises Difference at the first line that is not the same, and
    ValueError for a tape that has no beginning.
    """
    if not records or records[0]["kind"] != "begin":
        raise ValueError("the tape does not begin with the line `begin`")
    return _Replay(records, workers).run()


class _Replay:
    def __init__(self, records: Sequence[Record], workers: Callable[[int, str], Worker]) -> None:
        first = records[0]
        self._records, self._make, self._bits = records, workers, first["bits"]
        self._centre = centre_of(first, self._compare)
        self._line = 0
        """The tape's line, from 1, that is played."""
        self._next = 0
        """Index of the tape's record that the replay must produce next."""
        self._merges = 0
        self._learners: dict[tuple[int, str], _Learner] = {}
        self._lives: dict[int, str] = {}
        self._anchors: dict[int, OrderedDict[str, Vector]] = {}
        self._restarts = {record["position"] for record in records if record["kind"] == "restart"}
        self._saved: dict[int, Saved] = {}

    def run(self) -> Replayed:
        for index, record in enumerate(self._records):
            self._line = index + 1
            self._play(record)
            if index + 1 in self._restarts and self._centre.anchor is not None:
                self._saved[index + 1] = self._centre.saved()
        if (missing := self._following()) is not None:
            raise Difference(f"line {self._next + 1}: the tape has {_shown(missing)}, the replay nothing more.")
        if self._centre.anchor is None:
            raise ValueError("the tape ends before the first learner came")
        return Replayed(self._centre.anchor, self._merges, len(self._records))

    def _play(self, record: Record) -> None:
        fields = {name: value for name, value in record.items() if name not in ("kind", "verdict")}
        match record["kind"]:
            case "initial":
                # The learner of the next join gave it.
                join = next(record for record in self._records[self._line :] if record["kind"] == "join")
                self._begin(join)
            case "join":
                self._lives[record["learner"]] = record["life"]
                self._learner(record)
                self._tell(Join(**fields))
            case "leave":
                self._tell(Leave(**fields))
            case "tick":
                self._tell(Tick(**fields))
            case "arrive":
                self._arrive(record)
            case "restart":
                self._bits = record["bits"]
                self._centre = centre_of(record, self._compare)
                self._centre.go_on_from(self._saved[record["position"]])

    def _learner(self, join: Record) -> _Learner:
        key = join["learner"], join["life"]
        if key not in self._learners:
            self._learners[key] = _Learner(self._make(join["learner"], join["resumes"]), self._bits)
        return self._learners[key]

    def _begin(self, join: Record) -> None:
        anchor = self._learner(join).worker.initial()
        self._centre.begin(anchor)

    def _arrive(self, record: Record) -> None:
        learner = record["learner"]
        anchor = self._anchors.get(learner, {}).get(record["anchor"])
        if anchor is None:
            raise Difference(
                f"line {self._line}: learner {learner} worked from the anchor {record['anchor'][:12]}, which the "
                "replay never gave it."
            )
        learner_state = self._learners[learner, self._lives[learner]]
        sent = learner_state.sent(record["round"], anchor, record["steps"])
        event = Arrive(
            record["at_us"], learner, record["round"], record["version"], record["anchor"], sent.weight,
            record["steps"], sent.digest, sent.finite,
        )  # fmt: skip
        self._tell(event, sent.delta)

    def _tell(self, event: Any, delta: Vector | None = None) -> None:
        for decision in self._centre.handle(event, delta):
            if isinstance(decision, Release):
                assert self._centre.anchor is not None
                kept = self._anchors.setdefault(decision.learner, OrderedDict())
                kept[self._centre.anchor_hash] = self._centre.anchor
                kept.move_to_end(self._centre.anchor_hash)
                if len(kept) > _KEPT_ANCHORS:
                    kept.popitem(last=False)
            else:
                self._merges += 1

    def _following(self) -> Record | None:
        """The record that the replay must produce next; None at the end of the tape."""
        while self._next < len(self._records) and self._records[self._next]["kind"] in NOT_COMPARED:
            self._next += 1
        return self._records[self._next] if self._next < len(self._records) else None

    def _compare(self, record: Record) -> None:
        wanted = self._following()
        if wanted is None:
            return  # The tape ended, with its process, before what followed was written.
        record = as_json(record)
        if record != wanted:
            names = [name for name in wanted if record.get(name) != wanted[name]] or [*record]
            where = ", ".join(f"{name} {record.get(name)!r} instead of {wanted.get(name)!r}" for name in names)
            kinds = f"the tape has {_shown(wanted)}, the replay {_shown(record)}"
            raise Difference(f"line {self._next + 1}: {kinds}; it differs in {where}.")
        self._next += 1


@dataclass(frozen=True)
class _Sent:
    delta: Vector
    weight: float
    digest: str
    finite: bool


class _Learner:
    """A learner's process: its worker, what rounding left, and the last delta in case it was sent twice."""

    def __init__(self, worker: Worker, bits: Any) -> None:
        self.worker, self._bits = worker, bits
        self._encoder: Encoder | None = None
        self._last: tuple[int, _Sent] | None = None

    def sent(self, round: int, anchor: Vector, steps: int) -> _Sent:
        """What it sends in this round."""
        if self._last is not None and self._last[0] == round:
            return self._last[1]
        if self._encoder is None:
            self._encoder = Encoder(Codec(anchor.size, self._bits))
        delta, weight = self.worker.run(anchor, steps)
        data, finite = self._encoder.encode(delta)
        sent = _Sent(self._encoder.codec.decode(data), weight, digest(data), finite)
        self._last = round, sent
        return sent


def _shown(record: Record) -> str:
    who = f" of learner {record['learner']}" if "learner" in record else ""
    return f"`{record['kind']}`{who}"
