"""Runs that wait in the queue of a cluster, which chooses their nodes: where they are, and how many they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from jaxdl.platform.fleet.engine import Engine
from jaxdl.platform.fleet.member import RUNNING, Member
from jaxdl.platform.fleet.members import PLACED, Members
from jaxdl.platform.fleet.resources import Amounts, Room


def follow(member: Member, engine: Engine, known: Members) -> None:
    """Takes in where the engine has placed an attempt, or that it waits again."""
    given = engine.nodes_of(member.submission, member.attempt)
    if given is None:
        return
    nodes = tuple(given)
    if nodes and (not member.placed or set(nodes) != set(member.nodes)):
        _write(member, known, nodes, placed=True)
    elif member.placed and not nodes and engine.waits(member.submission, member.attempt):
        _write(member, known, member.nodes, placed=False)


def resize(member: Member, num_nodes: int, engine: Engine, known: Members) -> bool:
    """Gives an attempt that waits another number of nodes; False if it has begun, or must be stopped for that."""
    if member.placed or not num_nodes or not engine.resize(member.submission, member.attempt, num_nodes):
        return False
    _write(member, known, ("",) * num_nodes, placed=False)
    return True


def _write(member: Member, known: Members, nodes: tuple[str, ...], *, placed: bool) -> None:
    resized = len(nodes) != len(member.nodes)
    values = {"attempt": member.attempt, "nodes": nodes, "placed": placed, "resized": resized}
    known.write(PLACED, member, **values, reason=(member.decided if member.state == RUNNING else "") or member.reason)


def room_of(nodes: Mapping[str, Amounts], members: Iterable[Member]) -> Room:
    """What the runs that are alive leave of the nodes. One that waits for its nodes may get any that are free."""
    room, waiting = Room(nodes), []
    for member in members:
        if member.alive and member.placed:
            room.take(member.submission.needs, Counter(member.nodes))
        elif member.alive:
            waiting.append(member)
    for member in waiting:
        free = sum(room.most(member.submission.needs, node) for node in room.left)
        room.place(member.submission.needs, min(len(member.nodes), free))
    return room
