"""What nodes have and hosts need of it: names of resources with amounts, and the room that is left on nodes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jaxdl.core.errors import ConfigError

Amounts = Mapping[str, float]
"""Resource -> how much of it, such as gpus -> 8."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_SLACK = 1e-9
"""Of an amount: sums of parts, ten times 0.1, say, are not exact."""


def parse_amounts(text: str, option: str) -> dict[str, float]:
    """The amounts of `gpus=1,cpus=4`. Raises ConfigError, with the option's name, for what is none."""
    amounts: dict[str, float] = {}
    for part in text.split(","):
        name, equals, amount = part.strip().partition("=")
        try:
            number = float(amount)
        except ValueError:
            number = math.nan
        if not equals or not _NAME.fullmatch(name) or not 1e-6 <= number <= 1e15:
            said = f"{part or 'nothing'!r} is no NAME=NUMBER above 0 (1e-6 to 1e15)"
            raise ConfigError(f"{option} {text}: {said}. Write gpus=1,cpus=4.")
        if name in amounts:
            raise ConfigError(f"{option} {text}: {name} is given twice.")
        amounts[name] = number
    return amounts


def parse_nodes(words: Iterable[str]) -> list[dict[str, float]]:
    """What each node has, of `4x:gpus=8,cpus=64 2x:cpus=128`. Raises ConfigError for what is none."""
    nodes = []
    for word in words:
        count, colon, amounts = word.partition("x:")
        if not colon or not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"--have {word}: write a number of nodes and what each has, such as 4x:gpus=8,cpus=64.")
        nodes += [parse_amounts(amounts, "--have") for _ in range(int(count))]
    return nodes


def format_amounts(amounts: Amounts) -> str:
    """As it is typed: gpus=1,cpus=4."""
    return ",".join(f"{name}={amount:g}" for name, amount in amounts.items())


def most_hosts(needs: Amounts, has: Amounts) -> int:
    """How many hosts find what they need in these amounts."""
    return int(min(has.get(name, 0.0) / need * (1 + _SLACK) + _SLACK for name, need in needs.items()))


class Room:
    """What is left of nodes: hosts take of it, each what it needs, or a whole node if it needs nothing by name."""

    def __init__(self, nodes: Mapping[str, Amounts]) -> None:
        self.left = {name: dict(has) for name, has in nodes.items()}
        self.num_hosts = dict.fromkeys(nodes, 0)
        self._total = totals(nodes)

    def most(self, needs: Amounts, node: str) -> int:
        """How many more hosts with these needs fit on a node; 0 on one that is not there."""
        if node not in self.left:
            return 0
        return most_hosts(needs, self.left[node]) if needs else int(not self.num_hosts[node])

    def holds(self, needs: Amounts, places: Mapping[str, int]) -> bool:
        """Whether each of these nodes has room for its number of hosts."""
        return all(self.most(needs, node) >= count for node, count in places.items())

    def take(self, needs: Amounts, places: Mapping[str, int]) -> None:
        """Puts hosts there; nodes that are not there are left out."""
        for node in self.left.keys() & places.keys():
            self.num_hosts[node] += places[node]
            left = self.left[node]
            for name in left:
                left[name] = max(0.0, left[name] - needs.get(name, 0.0) * places[node]) if needs else 0.0

    def put(self, needs: Amounts, places: Mapping[str, int]) -> bool:
        """Puts hosts there if all of them fit; whether they do."""
        fits = self.holds(needs, places)
        if fits:
            self.take(needs, places)
        return fits

    def find(self, needs: Amounts, num_hosts: int) -> dict[str, int] | None:
        """Places for `num_hosts` hosts, on few nodes, and on those with little room left; None if they do not fit.

        It is a best fit: nodes that hold most of the hosts come first, then those with the least left.
        """
        fits = {node: min(self.most(needs, node), num_hosts) for node in self.left}
        places: dict[str, int] = {}
        for node in sorted(fits, key=lambda name: (-fits[name], self._part_left(name))):
            if num_hosts and fits[node]:
                places[node] = min(fits[node], num_hosts)
                num_hosts -= places[node]
        return None if num_hosts else places

    def place(self, needs: Amounts, num_hosts: int) -> dict[str, int] | None:
        """Puts `num_hosts` hosts where `find` says; their places, None if they do not fit."""
        places = self.find(needs, num_hosts)
        if places is not None:
            self.take(needs, places)
        return places

    def _part_left(self, node: str) -> float:
        """What is left of a node as parts of all that there was, summed: a node without GPUs has less."""
        return sum(amount / self._total[name] for name, amount in self.left[node].items())


def totals(nodes: Mapping[str, Amounts]) -> dict[str, float]:
    """The sum over the nodes of each resource."""
    amounts: dict[str, float] = {}
    for has in nodes.values():
        for name, amount in has.items():
            amounts[name] = amounts.get(name, 0.0) + amount
    return amounts


def why_never(needs: Amounts, num_hosts: int, nodes: Mapping[str, Amounts]) -> str:
    """Why `num_hosts` hosts never fit on the nodes, even while nothing else runs; empty if they do."""
    if not needs:
        return f"it needs {num_hosts} nodes, and there are {len(nodes)}" if num_hosts > len(nodes) else ""
    if not any(nodes.values()):
        return "nothing is known of what the nodes have; `serve --have` says it"
    room = sum(most_hosts(needs, has) for has in nodes.values())
    if room >= num_hosts:
        return ""
    for name, need in needs.items():
        if not any(most_hosts({name: need}, has) for has in nodes.values()):
            return f"no node has {need:g} {name}"
    if not room:
        return f"no node has {format_amounts(needs)} together"
    return f"it needs {num_hosts} hosts with {format_amounts(needs)}, and all nodes hold {room}"


def hosts_of(places: Mapping[str, int], nodes: Sequence[str]) -> list[str]:
    """The node of each host, those of one node together, nodes in this order."""
    return [node for node in nodes for _ in range(places.get(node, 0))]
