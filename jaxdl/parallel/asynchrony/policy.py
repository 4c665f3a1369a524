"""When the syncer merges, what it merges, and who may go on: pure functions of the events so far.

A learner takes the anchor (the common parameters), makes some steps of its own, and sends back the delta: the anchor
that it started from minus its parameters. The version of the anchor is the number of merges so far; the staleness of a
delta is the number of merges since its learner took the anchor. The syncer, the simulator and the replay of a tape all
call `decide`. No clock is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pydantic
from pydantic import Field

from jaxdl.core.config import Config
from jaxdl.parallel.asynchrony.events import (
    SECOND_US,
    Arrive,
    Decision,
    Event,
    Join,
    Leave,
    Member,
    Merge,
    Outcome,
    Part,
    Pending,
    Release,
    Standing,
    Tick,
    Verdict,
)

RULES = 3
"""The rules that `decide` follows by default; a tape says which ones its syncer had, and 1 if it says nothing.

By the rules 1 a quorum counted every learner that was connected, also one that `max_ahead` held, and a learner that
came back kept a clock beyond everyone's reach: learners could wait for each other for ever. By the rules 2 a learner
that came back began its `return_sec` anew each time: who came and died again and again, or sent nothing finite, was
waited for for ever. A tape of such a syncer is still replayed as it went. By the rules 3 a learner has failed that
comes as another process than before, or whose delta is not finite; who fails twice in a row is not waited for. Lost
connections are no failures, nor is a restart of the syncer.
"""
DESERTED_SEC = 600.0
"""A syncer whose learners have all been gone for so long ends, although the run is not over."""


class Policy(Config):
    """When deltas are merged, which are too old, and how far learners may run ahead of each other."""

    learners: int = Field(default=2, ge=1)
    """Number of learners."""
    every_steps: int = Field(default=32, ge=1)
    """Steps of a learner between two exchanges with the syncer."""
    total_steps: int | None = Field(default=None, ge=1)
    """End of the run, in steps of all learners together that were merged; None: when all learners have finished."""
    quorum: int | None = Field(default=None, ge=1)
    """Deltas that a merge needs, None for half of the learners. It does not wait for a learner that has finished, is
    gone for `return_sec`, fails again and again, or is held by `max_ahead`."""
    grace_sec: float = Field(default=0.0, ge=0)
    """Seconds that a merge waits for further deltas once it has its quorum."""
    grace_share: float | None = Field(default=None, gt=0)
    """The wait is this share of a round's duration instead, less the time until the quorum, at most `grace_sec`."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Deltas of a larger staleness are dropped."""
    max_ahead: int | None = Field(default=None, ge=0)
    """Rounds that a learner may be ahead of the slowest one before it waits (stale synchronous parallel)."""
    staleness_rate: bool = False
    """Whether a delta of staleness s counts 1 / (1 + s)."""
    equal_time: bool = False
    """Whether a slower learner makes fewer steps in a round, in proportion to its speed (dynamic local updates)."""
    return_sec: float = Field(default=60.0, ge=0)
    """Seconds for which a quorum still counts on a learner that was lost, or has not come yet. Who fails twice in a row
    is not waited for, so long after the first time, until a delta of it can be merged."""

    @property
    def needed(self) -> int:
        """The quorum."""
        return -(-self.learners // 2) if self.quorum is None else self.quorum

    @pydantic.model_validator(mode="after")
    def _has_effect(self) -> Policy:
        if self.quorum is not None and self.quorum > self.learners:
            raise ValueError(f"quorum {self.quorum}: there are only {self.learners} learners. Choose at most that.")
        if self.grace_share is not None and not self.grace_sec:
            raise ValueError("grace_share has no effect while grace_sec, the longest wait, is 0. Set grace_sec too.")
        return self


def first_standing(policy: Policy) -> Standing:
    """The standing before the first event."""
    return Standing({learner: Member() for learner in range(policy.learners)})


def decide(policy: Policy, standing: Standing, event: Event, *, known: bool = True, rules: int = RULES) -> Outcome:
    """What follows from an event at the syncer.

    `known` says whether an arriving delta started from an anchor that the syncer made. Events must be given in the
    order of their times, and a `Tick` at each time that `wake_us` names. `rules` other than `RULES` are for old tapes.

    As long as a learner is connected and the run is not over, one of them computes, or `wake_us` names a time at which
    a merge is made or a learner goes on; a learner that comes back computes at once, unless a delta of it waits for a
    merge. Nobody waits for ever for learners that come and go, or send nothing that can be merged
    (`tests/test_asynchrony_waiting.py` searches all short sequences of events, and their cycles).
    """
    verdict = None
    standing = replace(standing, at_us=event.at_us)
    match event:
        case Join():
            standing = _joined(policy, standing, event, rules)
        case Leave():
            standing = _left(standing, event)
        case Arrive():
            standing, verdict = _arrived(policy, standing, event, known, rules)
        case Tick():
            pass
    if standing.over and isinstance(event, Join):
        standing, release = _released(policy, standing, event.learner, event.at_us)
        return Outcome(standing, (release,), verdict)
    standing, merge = _merged(policy, standing, event.at_us, rules)
    decisions: list[Decision] = [merge] if merge else []
    for learner in _who_may_go_on(policy, standing, just_over=merge is not None and standing.over):
        standing, release = _released(policy, standing, learner, event.at_us)
        decisions.append(release)
    return Outcome(standing, tuple(decisions), verdict)


def wake_us(policy: Policy, standing: Standing) -> int | None:
    """When a `Tick` is due if nothing else happens before; None if nothing waits for time to pass."""
    members = standing.members
    if standing.pending and standing.quorum_us is not None:
        return standing.quorum_us + _grace_us(policy, standing)
    awaited = [*members.values()] if standing.pending else []
    held = {pending.learner for pending in standing.pending}
    if any(member.present and not member.working and learner not in held for learner, member in members.items()):
        awaited += [member for member in members.values() if member.present]  # Those that `max_ahead` lets it wait for.
    ends = [_awaited_until_us(policy, member) for member in awaited]
    return min((at_us for at_us in ends if at_us is not None and at_us > standing.at_us), default=None)


def is_finished(policy: Policy, standing: Standing, at_us: int) -> bool:
    """Whether every learner has finished, or is gone for so long that it is not waited for.

    That is `return_sec` once the run is over, and before at least `DESERTED_SEC`: all of them may have to start again.
    """

    gone_us = _us(policy.return_sec if standing.over else max(policy.return_sec, DESERTED_SEC))
    return standing.begun and all(
        member.done or (not member.present and at_us >= member.since_us + gone_us)
        for member in standing.members.values()
    )


def _joined(policy: Policy, standing: Standing, event: Join, rules: int) -> Standing:
    members = dict(standing.members)
    if not standing.begun:  # Those that come later are waited for from now on.
        members = {learner: replace(member, since_us=event.at_us) for learner, member in members.items()}
    member = members[event.learner]
    clock = _clock_beside(policy, member.clock, members.values(), event.at_us, rules)
    if rules > 2 and member.life not in ("", event.life) and not member.done:
        member = _failed(member, member.since_us)
    members[event.learner] = replace(
        member,
        life=event.life,
        round=max(member.round, event.round) if event.life == member.life else event.round,
        clock=clock,
        present=True,
        done=False,
        working=event.working and event.life == member.life,
        since_us=event.at_us,
    )
    return replace(standing, members=members, begun=True)


def _left(standing: Standing, event: Leave) -> Standing:
    member = replace(
        standing.members[event.learner], present=False, working=False, done=event.finished, since_us=event.at_us
    )
    return replace(standing, members={**standing.members, event.learner: member})


def _failed(member: Member, at_us: int) -> Member:
    return replace(member, losses=member.losses + 1, missed_us=member.missed_us if member.losses else at_us)


def _awaited_until_us(policy: Policy, member: Member) -> int | None:
    """When it is no longer waited for; None for as long as it is here.

    Who failed once is waited for when it is back. Who failed twice since its last delta may go on so for ever: all of
    that together is one absence.
    """
    if member.losses > 1:
        return member.missed_us + _us(policy.return_sec)
    return None if member.present else member.since_us + _us(policy.return_sec)


def _is_awaited(policy: Policy, member: Member, at_us: int) -> bool:
    until_us = _awaited_until_us(policy, member)
    return not member.done and (until_us is None or at_us < until_us)


def _clock_beside(policy: Policy, clock: int, others: Iterable[Member], at_us: int, rules: int = RULES) -> int:
    """The clock of a learner that is counted from now on, beside those that are here and waited for.

    It neither holds the others back nor may run ahead because it was away. Nor is it held: it may have run ahead while
    these were away, and would wait for rounds that it need not.
    """
    present = [member for member in others if member.present]
    clocks = [member.clock for member in present if _is_awaited(policy, member, at_us)]
    slowest = min(clocks or [member.clock for member in present], default=None)
    if slowest is None:
        return clock
    clock = max(clock, slowest)
    return clock if policy.max_ahead is None or rules == 1 else min(clock, slowest + policy.max_ahead)


def _arrived(policy: Policy, standing: Standing, event: Arrive, known: bool, rules: int) -> tuple[Standing, Verdict]:
    member = standing.members[event.learner]
    staleness = standing.version - event.version
    if event.round <= member.round or not member.working:
        waiting = replace(member, working=False)
        return replace(standing, members={**standing.members, event.learner: waiting}), "repeated"
    verdict: Verdict = "kept"
    if standing.over:
        verdict = "over"
    elif not known or staleness < 0:
        verdict = "unknown"
    elif not event.finite:
        verdict = "not finite"
    elif policy.max_staleness is not None and staleness > policy.max_staleness:
        verdict = "stale"
    round_us, clock = max(1, event.at_us - member.released_us), member.clock + 1
    if rules > 2 and verdict == "not finite":
        member = _failed(member, event.at_us)
    elif member.losses and verdict != "unknown":  # Its anchor was lost with the syncer's process, or it is old.
        if not _is_awaited(policy, member, event.at_us):
            others = [other for learner, other in standing.members.items() if learner != event.learner]
            clock = _clock_beside(policy, clock, others, event.at_us)
        member = replace(member, losses=0)
    member = replace(
        member,
        round=event.round,
        clock=clock,
        working=False,
        speed=event.steps * SECOND_US / round_us,
    )
    standing = replace(standing, members={**standing.members, event.learner: member})
    if verdict != "kept":
        return standing, verdict
    pending = Pending(event.learner, event.round, event.weight, event.steps, max(0, staleness), event.at_us, round_us)
    return replace(standing, pending=(*standing.pending, pending)), verdict


def _merged(policy: Policy, standing: Standing, at_us: int, rules: int) -> tuple[Standing, Merge | None]:
    """The standing after a merge, if one is due; else with the time of the quorum, if it was reached now."""
    if not standing.pending:
        return standing, None
    waiting = {pending.learner for pending in standing.pending}
    if standing.quorum_us is None:
        if len(waiting) < min(policy.needed, max(1, _expected(policy, standing, at_us, rules))):
            return standing, None
        standing = replace(standing, quorum_us=at_us)
    assert standing.quorum_us is not None
    others = any(member.working for member in standing.members.values())
    if others and at_us < standing.quorum_us + _grace_us(policy, standing):
        return standing, None
    steps = standing.steps + sum(pending.steps for pending in standing.pending)
    merge = Merge(at_us, standing.version + 1, tuple(_parts(policy, standing.pending)))
    over = policy.total_steps is not None and steps >= policy.total_steps
    return replace(
        standing, version=merge.version, steps=steps, pending=(), quorum_us=None, over=standing.over or over
    ), merge


def _expected(policy: Policy, standing: Standing, at_us: int, rules: int) -> int:
    """Learners of which the next merge may have a delta.

    Those whose delta is here, and of those that are waited for who compute or are about to, or may still come back.
    Who is held by `max_ahead` is not among them: it may be waiting for a learner whose delta waits for this merge.
    """
    awaited = {learner: member for learner, member in standing.members.items() if _is_awaited(policy, member, at_us)}
    absent = {learner for learner, member in awaited.items() if not member.present}
    present = {learner: member for learner, member in awaited.items() if member.present}
    if rules == 1:
        return len(absent) + len(present)
    working = {learner for learner, member in present.items() if member.working}
    soon = awaited.keys() & _who_may_go_on(policy, standing, just_over=False)
    return len(absent | working | soon | {pending.learner for pending in standing.pending})


def _parts(policy: Policy, pending: tuple[Pending, ...]) -> Iterator[Part]:
    """The factors of a weighted mean, each slowed down by its staleness if so asked. Python floats, see `outer`."""
    total = sum(change.weight for change in pending)
    for change in pending:
        slower = 1.0 / (1 + change.staleness) if policy.staleness_rate else 1.0
        yield Part(change.learner, change.round, change.weight / total * slower)


def _grace_us(policy: Policy, standing: Standing) -> int:
    """How long a merge that has its quorum waits for further deltas.

    With `grace_share` it is share * (duration of a round - time until the quorum) within [0, grace_sec]: the adaptive
    grace of Decoupled DiLoCo (arXiv 2604.21428, eq. 3) with the mean round of the deltas at hand as what time there is.
    """
    if policy.grace_share is None:
        return _us(policy.grace_sec)
    assert standing.quorum_us is not None
    first = [pending for pending in standing.pending if pending.at_us <= standing.quorum_us]
    round_us = sum(pending.round_us for pending in first) / len(first)
    waited_us = standing.quorum_us - first[0].at_us
    return min(_us(policy.grace_sec), max(0, int(policy.grace_share * (round_us - waited_us))))


def _who_may_go_on(policy: Policy, standing: Standing, *, just_over: bool) -> list[int]:
    present = {learner: member for learner, member in standing.members.items() if member.present}
    if just_over:
        return list(present)
    held = {pending.learner for pending in standing.pending}
    awaited = (member.clock for member in present.values() if _is_awaited(policy, member, standing.at_us))
    slowest = min(awaited, default=None)
    return [
        learner
        for learner, member in present.items()
        if not member.working
        and learner not in held
        and (standing.over or policy.max_ahead is None or slowest is None or member.clock - slowest <= policy.max_ahead)
    ]


def _released(policy: Policy, standing: Standing, learner: int, at_us: int) -> tuple[Standing, Release]:
    member = standing.members[learner]
    steps = policy.every_steps
    if policy.equal_time and member.speed is not None:
        fastest = max(other.speed or 0.0 for other in standing.members.values() if other.present)
        steps = max(1, int(member.speed / fastest * policy.every_steps)) if fastest else steps
    release = Release(at_us, learner, member.round, standing.version, steps, standing.over)
    member = replace(member, working=True, released_us=at_us)
    return replace(standing, members={**standing.members, learner: member}), release


def _us(seconds: float) -> int:
    return round(seconds * SECOND_US)
