"""Learners that come, go and wait: who is waited for, and that something can always happen next; tapes of rules."""

import itertools

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from jaxdl.parallel.asynchrony.centre import Centre, as_json, centre_of
from jaxdl.parallel.asynchrony.events import Arrive, Join, Leave, Merge, Tick, standing_from_json
from jaxdl.parallel.asynchrony.outer import Outer
from jaxdl.parallel.asynchrony.policy import RULES, Policy, decide, first_standing, is_finished, wake_us
from jaxdl.parallel.asynchrony.replay import replay
from jaxdl.parallel.asynchrony.simulator import Round, Simulation, Stay, decided, simulated

SECOND = 1_000_000


def as_saved(standing, policy):
    """The standing that a syncer goes on from."""
    centre = Centre(policy, Outer())
    centre.begin(np.zeros(0, np.float32))
    centre.standing = standing
    return standing_from_json(centre.saved().fields["standing"])


class Search:
    """All short sequences of events at a policy, each state once; times count in half a `return_sec`."""

    half_us = 30 * SECOND

    def __init__(self, rules=RULES, **policy):
        self.policy, self.rules = Policy(**{"every_steps": 1, "return_sec": 60.0} | policy), rules
        self.seen, self.edges = {}, []

    def tell(self, standing, event, known=True):
        while (wake := wake_us(self.policy, standing)) is not None and wake <= event.at_us:
            standing = decide(self.policy, standing, Tick(wake), rules=self.rules).standing
        return decide(self.policy, standing, event, known=known, rules=self.rules).standing

    def delta(self, standing, learner, finite=True, known=True):
        """After its next delta, or the same once more, if it reconnected while that waits for a merge."""
        again = learner in {pending.learner for pending in standing.pending}
        number = standing.members[learner].round + (not again)
        arrive = Arrive(standing.at_us, learner, number, standing.version, "", 1.0, 1, "", finite)
        return self.tell(standing, arrive, known=known)

    def restart(self, standing):
        """After a restart of the syncer from what it saved just now."""
        standing = as_saved(standing, self.policy)
        for learner in standing.members:
            standing = self.tell(standing, Leave(standing.at_us, learner, False))
        return standing

    def following(self, standing):
        at = standing.at_us
        yield "time", None, self.tell(standing, Tick(at + self.half_us))
        for learner, member in standing.members.items():
            if member.present:
                yield "kill", learner, self.tell(standing, Leave(at, learner, False))
            else:
                yield "return", learner, self.tell(standing, Join(at, learner, f"{member.life}."))
                if member.life:  # Its process computed on, or has its last delta still.
                    again = Join(at, learner, member.life, member.round, working=True)
                    yield "reconnect", learner, self.tell(standing, again)
            if member.working:
                yield "delta", learner, self.delta(standing, learner)
                yield "not finite", learner, self.delta(standing, learner, finite=False)
                yield "unknown", learner, self.delta(standing, learner, known=False)
        yield "restart", None, self.restart(standing)

    def idle_for_ever(self, standing):
        """Who is connected, and gets no anchor although all others send their deltas and time passes."""
        idle = {learner for learner, member in standing.members.items() if member.present and not member.working}
        for _ in range((2 + (self.policy.max_ahead or 0)) * self.policy.learners):
            working = [learner for learner, member in standing.members.items() if member.working]
            wake = wake_us(self.policy, standing)
            if not idle or (not working and wake is None):
                break
            standing = standing if working else self.tell(standing, Tick(wake))
            for learner in working:
                standing = self.delta(standing, learner) if standing.members[learner].working else standing
                idle -= {one for one, member in standing.members.items() if member.working}
            idle -= {one for one, member in standing.members.items() if member.working}
        return idle

    def state(self, standing):
        """What the future depends on."""
        at, members = standing.at_us, standing.members.values()
        low = min(member.clock for member in members)
        return (
            standing.begun,
            tuple(
                (
                    one.working,
                    one.clock - low,
                    one.present or min(at - one.since_us, 2 * self.half_us),
                    one.life != "",
                    min(one.losses, 2),
                    one.losses > 0 and min(at - one.missed_us, 2 * self.half_us),
                )
                for one in members
            ),
            frozenset(pending.learner for pending in standing.pending),
            standing.quorum_us is None or at - standing.quorum_us,
        )

    def stuck(self, depth):
        """The first sequence after which somebody waits for ever, or is idle on its return; None without one."""
        first = first_standing(self.policy)
        front, self.seen = [((), first)], {self.state(first): (0, first)}
        for turn in range(depth + 1):
            reached = []
            for path, standing in front:
                number = self.seen[self.state(standing)][0]
                for name, learner, after in self.following(standing):
                    state, is_new = self.state(after), False
                    if state not in self.seen and turn < depth:  # The last turn only closes cycles.
                        self.seen[state], is_new = (len(self.seen), after), True
                    usual = name not in ("unknown", "restart")  # The syncer's process does not fail for ever.
                    if usual and state in self.seen and after.version == standing.version:
                        self.edges.append((number, self.seen[state][0], name, learner))
                    if not is_new:
                        continue
                    reached.append(((*path, (name, learner)), after))
                    waits = learner in {pending.learner for pending in after.pending}
                    back_idle = name == "return" and not after.members[learner].working and not waits
                    if back_idle or self.idle_for_ever(after):
                        return reached[-1][0]
            front = reached
        return self.waits_in_a_cycle()

    def waits_in_a_cycle(self):
        """Events that can come again and again, and a learner that is connected and never gets an anchor meanwhile.

        Time passes, no merge is made, and each of the others that computes sends its delta or dies some time, also one
        whose connections break again and again. None if there is no such cycle among the states that were seen.
        """
        standings = [standing for _, standing in self.seen.values()]
        idle = np.array([[one.present and not one.working for one in each.members.values()] for each in standings])
        for waiting, left_out in itertools.product(range(self.policy.learners), ("", "reconnect")):
            edges = [
                one for one in self.edges if idle[one[0], waiting] and idle[one[1], waiting] and one[2] != left_out
            ]
            ends = np.array([edge[:2] for edge in edges], int).reshape(-1, 2).T
            graph = csr_matrix((np.ones(len(edges)), ends), shape=(len(idle), len(idle)))
            parts = connected_components(graph, directed=True, connection="strong")[1]
            cycles = {}
            for start, end, name, learner in edges:
                if parts[start] == parts[end]:
                    cycles.setdefault(parts[start], set()).add((name, learner))
            for part, events in cycles.items():
                states = np.flatnonzero(parts == part)
                moved = {learner for name, learner in events if name in ("return", "delta", "not finite")}
                for one in range(self.policy.learners):
                    computes = all(standings[i].members[one].working for i in states)
                    if not computes and ("reconnect", one) not in events:
                        moved.add(one)
                if ("time", None) in events and len(moved) == self.policy.learners:
                    return waiting, sorted(events, key=str)
        return None


@pytest.mark.parametrize(
    ("learners", "depth", "least"), [(2, 5, 3000), pytest.param(3, 4, 4000, marks=pytest.mark.slow)]
)
def test_something_can_always_happen_next(learners, depth, least):
    """Whatever comes, goes, arrives and takes time: nobody waits for ever, and who returns has work at once."""
    num_states = 0
    for quorum in range(1, learners + 1):
        for max_ahead, grace_sec in ((None, 0.0), (0, 0.0), (1, 10.0 if learners == 2 else 0.0)):
            search = Search(learners=learners, quorum=quorum, max_ahead=max_ahead, grace_sec=grace_sec)
            assert search.stuck(depth) is None, search.policy
            num_states += len(search.seen)
    assert num_states > least
    assert Search(rules=1, learners=learners, quorum=learners, max_ahead=0).stuck(depth) is not None


@pytest.mark.parametrize(
    ("learners", "depth", "quorum", "max_ahead"), [(2, 4, 2, None), pytest.param(3, 5, 1, 0, marks=pytest.mark.slow)]
)
def test_nobody_waits_for_learners_that_come_and_die_again_and_again(learners, depth, quorum, max_ahead):
    """For a merge, or for them to catch up; by the rules 2 a cycle of their lives keeps the first one waiting."""
    waits = Search(rules=2, learners=learners, quorum=quorum, max_ahead=max_ahead).stuck(depth)
    assert waits is not None
    assert waits[0] == 0
    assert {name for name, _ in waits[1]} >= {"return", "kill", "time"}
    assert Search(learners=learners, quorum=quorum, max_ahead=max_ahead).stuck(depth) is None


def away_one_after_the_other(rules):
    """The tape of two learners: 0 is lost for long, 1 goes on alone and is lost, both return, 0 first."""
    policy = Policy(learners=2, every_steps=4, total_steps=160, quorum=2, max_ahead=1, return_sec=60)
    tape = [as_json({"kind": "begin", "policy": policy.model_dump(), "outer": Outer().model_dump()})]
    tape[0] |= {"rules": rules} if rules > 1 else {}
    centre = centre_of(tape[0], tape.append)
    times = {0: [(0, 4, "a"), (90, None, "c")], 1: [(0.5, 88, "b"), (91, None, "d")]}
    Simulation(
        centre,
        {
            learner: [
                Stay(int(join * SECOND), leave and leave * SECOND, life, lambda number, steps: Round(SECOND))
                for join, leave, life in stays
            ]
            for learner, stays in times.items()
        },
    ).run()
    return tape, centre.standing


def test_a_tape_of_earlier_rules_is_played_by_them():
    tape, standing = away_one_after_the_other(rules=1)
    assert not standing.over, "by those rules both waited for ever"
    assert [member.clock for member in standing.members.values()][1] - standing.members[0].clock > 1
    assert simulated([as_json(record) for record in tape]) == decided([as_json(record) for record in tape])
    tape, standing = away_one_after_the_other(rules=RULES)
    assert standing.over
    assert all(member.done for member in standing.members.values())
    assert simulated([as_json(record) for record in tape]) == decided([as_json(record) for record in tape])


class Calls:
    """What a syncer is told of three learners, all of which a merge needs; they begin at 0 s."""

    def __init__(self, **policy):
        policy = {"learners": 3, "quorum": 3, "every_steps": 1, "return_sec": 60.0} | policy
        self.policy = Policy(**policy)
        self.standing, self.merges = first_standing(self.policy), []
        for learner in range(self.policy.learners):
            self.tell(Join(learner, learner, str(learner)))

    def tell(self, event, known=True):
        while (wake := wake_us(self.policy, self.standing)) is not None and wake <= event.at_us:
            self.decide(Tick(wake))
        self.decide(event, known)

    def decide(self, event, known=True):
        outcome = decide(self.policy, self.standing, event, known=known)
        self.standing = outcome.standing
        for decision in outcome.decisions:
            if isinstance(decision, Merge):
                self.merges.append((event.at_us / SECOND, sorted(part.learner for part in decision.parts)))

    def delta(self, second, learner, known=True):
        number = self.standing.members[learner].round + 1
        version = self.standing.version
        self.tell(Arrive(int(second * SECOND), learner, number, version, "", 1.0, 1, ""), known)

    def leave(self, second, *learners):
        for learner in learners:
            self.tell(Leave(int(second * SECOND), learner, finished=False))

    def join(self, second, learner, life=None):
        """Its process connects again, or another one."""
        member = self.standing.members[learner]
        self.tell(Join(int(second * SECOND), learner, life or member.life, member.round, working=life is None))


def test_who_loses_its_connection_again_and_again_is_waited_for():
    calls = Calls(max_ahead=1)
    calls.delta(100, 0)
    calls.delta(110, 2)
    for second in (150, 300, 301, 400):
        calls.leave(second, 1)
        calls.join(second + 0.5, 1)
    calls.delta(600, 1)
    assert calls.merges == [(600, [0, 1, 2])]


def test_who_dies_once_in_a_round_is_waited_for():
    calls = Calls()
    calls.delta(100, 0)
    calls.delta(110, 2)
    calls.leave(150, 1)
    calls.join(200, 1, "another")
    calls.leave(300, 1)
    calls.join(359, 1)  # Of the second process the connection alone.
    calls.delta(600, 1)
    assert calls.merges == [(600, [0, 1, 2])]
    assert calls.standing.members[1].losses == 0


@pytest.mark.parametrize("restarts", [(25,), (25, 130, 200)])
@pytest.mark.parametrize("life", [None, "{second} {learner}"])
def test_all_are_waited_for_after_restarts_of_the_syncer(restarts, life):
    """Also by those whose anchor, or delta, was lost with it, and if all are started again."""
    calls = Calls()
    calls.delta(20, 0)
    for second in restarts:
        calls.standing = as_saved(calls.standing, calls.policy)
        calls.leave(second, 0, 1, 2)
        for learner in range(3):
            calls.join(second + learner, learner, life and life.format(second=second, learner=learner))
        calls.delta(second + 5, 0, known=False)
    calls.delta(280, 1, known=False)
    calls.delta(290, 2)
    calls.delta(300, 0)
    assert not calls.merges
    calls.delta(380, 1)
    assert calls.merges == [(380, [0, 1, 2])]


def test_one_failure_after_a_restart_of_all_is_the_first():
    calls = Calls()
    calls.standing = as_saved(calls.standing, calls.policy)
    calls.leave(25, 0, 1, 2)
    for learner in range(3):
        calls.join(26 + learner, learner, f"new {learner}")
    calls.leave(40, 1)
    calls.join(50, 1, "newer 1")
    calls.delta(100, 0)
    calls.delta(110, 2)
    calls.tell(Tick(150 * SECOND))
    assert not calls.merges
    calls.delta(200, 1)
    assert calls.merges == [(200, [0, 1, 2])]


def test_who_was_lost_before_a_restart_of_the_syncer_has_return_sec_from_then_on():
    calls = Calls()
    calls.leave(50, 1)
    calls.leave(100, 0, 1, 2)
    calls.join(101, 0)
    calls.join(101, 2)
    calls.delta(102, 0)
    calls.delta(103, 2)
    calls.tell(Tick(200 * SECOND))
    assert calls.merges == [(160, [0, 2])]


def test_the_run_is_not_over_while_a_learner_restarts():
    calls = Calls(learners=2, quorum=1, total_steps=1)
    for second, life in ((1, "b"), (5, "c"), (90, "d")):
        calls.leave(second, 1)
        calls.join(second + 4, 1, life)
    calls.leave(95, 1)
    calls.delta(100, 0)
    assert calls.standing.over
    calls.tell(Leave(101 * SECOND, 0, finished=True))
    assert not is_finished(calls.policy, calls.standing, 154 * SECOND)
    assert is_finished(calls.policy, calls.standing, 155 * SECOND)


class Nothing:
    """A learner of one parameter that stays as it is."""

    def initial(self):
        return np.zeros(1, np.float32)

    def run(self, anchor, num_steps):
        return np.zeros_like(anchor), 1.0


def test_a_tape_has_the_time_when_a_grace_began():
    """Learner 1 dies twice and computes on: from 61 s on the delta of learner 0 is a quorum, and 1 may come in time."""
    policy = Policy(learners=2, quorum=2, every_steps=1, grace_sec=10.0, return_sec=60.0)
    tape = [
        as_json(
            {"kind": "begin", "bits": 32, "rules": RULES, "policy": policy.model_dump(), "outer": Outer().model_dump()}
        )
    ]
    times = {0: [(0, None, "a")], 1: [(0.5, 1, "b"), (10, 11, "c"), (12, None, "d")]}
    Simulation(
        centre_of(tape[0], lambda record: tape.append(as_json(record))),
        {
            learner: [
                Stay(int(join * SECOND), leave and leave * SECOND, life, lambda number, steps: Round(20 * SECOND))
                if learner == 0 else
                Stay(int(join * SECOND), leave and leave * SECOND, life, lambda number, steps: None)
                for join, leave, life in stays
            ]
            for learner, stays in times.items()
        },
        lambda learner, resumes: Nothing(),
    ).run(end_us=100 * SECOND)  # fmt: skip
    merges = [record["at_us"] / SECOND for record in tape if record["kind"] == "merge"]
    assert merges[0] == 71
    assert replay(tape, lambda learner, resumes: Nothing()).num_merges == len(merges)
