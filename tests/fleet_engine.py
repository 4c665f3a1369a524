"""What the tests of a fleet's server share: an engine on which nothing runs, and a server on made-up time."""

import itertools
from collections import Counter

from jaxdl.platform.fleet.engine import LOST, Engine
from jaxdl.platform.fleet.journal import Journal
from jaxdl.platform.fleet.policy import Rules
from jaxdl.platform.fleet.resources import Room
from jaxdl.platform.fleet.server import Server, Settings
from jaxdl.platform.fleet.store import Store

SETTINGS = Settings(Rules(fairness=1.0, resized=1.0, solve_sec=60.0), between_sec=0.0, failures=3)


class Killed(Exception):
    """In place of the death of the server."""


class MadeUp(Engine):
    """Runs of `work` turns on one node, which know the steps that they have saved; what lives outlives the server."""

    name = "made up"

    def __init__(self, store, num_nodes, work=6, have=None):
        super().__init__(store, num_nodes)
        self.have = have or [{}] * num_nodes
        self.work, self.done, self.ends_at = work, {}, {}
        self.live, self.codes, self.starts = {}, {}, []
        self.deaf = set()  # Runs that ignore SIGTERM.
        self.stops_with = 143

    def nodes(self):
        lost = self.store.lost_nodes()
        return [f"node{number}" for number in range(self.num_nodes) if f"node{number}" not in lost]

    def resources(self):
        return {name: self.have[int(name.removeprefix("node"))] for name in self.nodes()}

    def start(self, run, attempt, nodes):
        if run.name in self.live:
            return False
        needs, room = {one.name: one.needs for one in self.store.submissions()}, Room(self.resources())
        for name, (_, others) in self.live.items():
            room.take(needs[name], Counter(others))
        assert room.holds(run.needs, Counter(nodes)), "a node has what its hosts take, or one that takes all of it"
        self.live[run.name] = (attempt, tuple(nodes))
        self.starts.append((run.name, attempt, len(nodes)))
        return True

    def stop(self, run, attempt):
        if self.live.get(run.name, (0,))[0] == attempt and run.name not in self.deaf:
            del self.live[run.name]
            self.codes[run.name, attempt] = self.stops_with

    def kill(self, run, attempt):
        if self.live.get(run.name, (0,))[0] == attempt:
            del self.live[run.name]

    def poll(self, run, attempt):
        if self.live.get(run.name, (0,))[0] == attempt:
            return None
        return self.codes.get((run.name, attempt), LOST)

    def tick(self):
        """A turn of all that lives."""
        for name, (attempt, nodes) in list(self.live.items()):
            self.done[name] = self.done.get(name, 0) + len(nodes)
            if self.done[name] >= self.work:
                del self.live[name]
                self.codes[name, attempt] = self.ends_at.get(name, 0)


def fleet(folder, nodes=4, **options):
    store = Store(folder)
    folder.mkdir(exist_ok=True)
    engine = MadeUp(store, nodes, **options)
    clock = itertools.count(1000.0)
    return store, engine, lambda: Server(store, engine, SETTINGS, now=lambda: next(clock))


def dying_write(draw):
    """`Journal.write` of a server that may be killed before it has written an event, and after."""
    written = Journal.write

    def write(journal, what, **values):
        if draw.random() < 0.1:
            raise Killed
        written(journal, what, **values)
        if draw.random() < 0.1:
            raise Killed

    return write


def submit(store, sizes=(1, 2, 4), **options):
    return store.submit(["python", "-m", "jaxdl.train"], sizes, **options).name


def states(server):
    return {name: member.state for name, member in server.members.items()}
