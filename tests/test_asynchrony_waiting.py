"""Learners that come, go and wait: something can always happen next; tapes of rules by which it could not."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from jaxdl.asynchrony.centre import as_json, centre_of
from jaxdl.asynchrony.events import Arrive, Join, Leave, Tick
from jaxdl.asynchrony.outer import Outer
from jaxdl.asynchrony.policy import RULES, Policy, decide, first_standing, wake_us
from jaxdl.asynchrony.simulator import Round, Simulation, Stay, decided, simulated

SECOND = 1_000_000


class Search:
    """All short sequences of events at a policy, each state once; times count in half a `return_sec`."""

    half_us = 30 * SECOND

    def __init__(self, rules=RULES, **policy):
        self.policy, self.rules = Policy(**{"every_steps": 1, "return_sec": 60.0} | policy), rules
        self.seen, self.edges = {}, []

    def tell(self, standing, event):
        while (wake := wake_us(self.policy, standing)) is not None and wake <= event.at_us:
            standing = decide(self.policy, standing, Tick(wake), rules=self.rules).standing
        return decide(self.policy, standing, event, rules=self.rules).standing

    def delta(self, standing, learner, finite=True):
        number = standing.members[learner].round + 1
        arrive = Arrive(standing.at_us, learner, number, standing.version, "", 1.0, 1, "", finite)
        return self.tell(standing, arrive)

    def following(self, standing):
        at = standing.at_us
        yield "time", None, self.tell(standing, Tick(at + self.half_us))
        for learner, member in standing.members.items():
            if member.present:
                yield "kill", learner, self.tell(standing, Leave(at, learner, False))
            else:
                yield "return", learner, self.tell(standing, Join(at, learner, f"{at} {member.clock}"))
            if member.working:
                yield "delta", learner, self.delta(standing, learner)
                yield "not finite", learner, self.delta(standing, learner, finite=False)

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
                    if state in self.seen and after.version == standing.version:
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

        Time passes, no merge is made, and each of the others that computes sends its delta or dies some time. None if
        there is no such cycle among the states that were seen.
        """
        standings = [standing for _, standing in self.seen.values()]
        idle = np.array([[one.present and not one.working for one in each.members.values()] for each in standings])
        for waiting in range(self.policy.learners):
            edges = [edge for edge in self.edges if idle[edge[0], waiting] and idle[edge[1], waiting]]
            ends = np.array([edge[:2] for edge in edges], int).reshape(-1, 2).T
            graph = csr_matrix((np.ones(len(edges)), ends), shape=(len(idle), len(idle)))
            parts = connected_components(graph, directed=True, connection="strong")[1]
            cycles = {}
            for start, end, name, learner in edges:
                if parts[start] == parts[end]:
                    cycles.setdefault(parts[start], set()).add((name, learner))
            for part, events in cycles.items():
                busy = [all(standings[i].members[one].working for i in np.flatnonzero(parts == part)) and one
                        for one in range(self.policy.learners)]  # fmt: skip
                moved = {learner for _, learner in events}
                if ("time", None) in events and all(one is False or one in moved for one in busy):
                    return waiting, sorted(events, key=str)
        return None


@pytest.mark.parametrize(("learners", "depth", "least"), [(2, 7, 3000), (3, 4, 4000)])
def test_something_can_always_happen_next(learners, depth, least):
    """Whatever comes, goes, arrives and takes time: nobody waits for ever, and who returns has work at once."""
    num_states = 0
    for quorum in range(1, learners + 1):
        for max_ahead in (None, 0, 1, 2):
            for grace_sec in (0.0, 10.0)[: 4 - learners]:
                search = Search(learners=learners, quorum=quorum, max_ahead=max_ahead, grace_sec=grace_sec)
                assert search.stuck(depth) is None, search.policy
                num_states += len(search.seen)
    assert num_states > least
    assert Search(rules=1, learners=learners, quorum=learners, max_ahead=0).stuck(depth) is not None


@pytest.mark.parametrize(("learners", "depth", "quorum", "max_ahead"), [(2, 4, 2, None), (3, 6, 1, 0)])
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
