"""What it costs to bring tokens to experts on other devices, in each of the two ways: bytes, seconds and memory.

The bytes are those of the program (`jaxdl.parallel.collectives.experts.sent_bytes`). Inside a node all devices are
joined alike. Where `fsdp` spans nodes, a gather goes around a ring, of which one device of a node sends to the next
node at the rate of the whole node; in an all-to-all every device sends its rows for other nodes at its share of that.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from jaxdl.exchange.cost import Link
from jaxdl.parallel.collectives.experts import (
    Dispatch,
    Way,
    rows_of_device,
    rows_of_pair,
    sent_bytes,
    way_of_fewer_bytes,
)

_NUMBER = 4
"""Bytes of the number of an expert, of a weight."""
_MESSAGES = {"gather": (4, 3, 3), "all_to_all": (3, 2, 3)}
"""Collectives of a layer: in its forward pass, in its backward pass, and when the forward pass is computed again."""
_COLLECTIVE = {"gather": "all_gather", "all_to_all": "all_to_all"}
_WORKING_ROWS = 2
"""Rows of the width of the network that a layer has while it works, besides those that are kept."""
_SENT_ROWS = 3
"""So many more it has in an all-to-all: rows that are sent, and that were received (of steps compiled for H100)."""
_WORKING_TOKENS = 2
"""Gathered tokens, of which a layer has these and their results, or the gradients of both."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a network's layers, and how tokens come to them."""

    num_layers: int
    num_experts: int
    per_token: int
    """Experts of a token."""
    width: int
    """Of the numbers of a token."""
    hidden: int
    """Hidden size of an expert."""
    itemsize: int
    """Bytes of an entry of an activation."""
    row_buffer: float
    dispatch: Dispatch
    """As the model has it."""
    weights: float
    """Of all experts of all layers."""

    def is_spread(self, fsdp: int) -> bool:
        """Whether parameters that are sharded over so many devices of `fsdp` are whole experts."""
        return fsdp > 1 and self.num_experts % fsdp == 0

    def way(self, size: int, tokens: float) -> Way:
        """How tokens are brought, if nothing else is said than the model does: a device has so many."""
        if self.dispatch != "auto":
            return self.dispatch
        return way_of_fewer_bytes(size, round(tokens), self.per_token, self.width * self.itemsize, self.row_buffer)


class Messages(NamedTuple):
    """What a device sends."""

    num_bytes: float
    collectives: int


def layer_messages(mixture: Mixture, way: Way, size: int, tokens: float, *, again: bool) -> Messages:
    """Of one layer in a forward and a backward pass, with so many `tokens` of each of `size` devices.

    With `again` the forward pass is computed twice, as far as the backward pass needs it: the results of gathered
    tokens are not summed again (XLA leaves that out); those that come back in an all-to-all are needed for the
    gradients of their weights.
    """
    tokens, width = round(tokens), mixture.width * mixture.itemsize
    forward = sent_bytes(way, size, tokens, mixture.per_token, width, mixture.row_buffer)
    choices, repeated = tokens * mixture.per_token, forward
    numbers = (size - 1) * _NUMBER * choices
    if way == "gather":
        repeated -= (size - 1) * tokens * width
    else:
        numbers = (size - 1) * _NUMBER * rows_of_pair(size, choices, mixture.row_buffer)
    counts = _MESSAGES[way]
    return Messages(2 * forward - numbers + again * repeated, counts[0] + counts[1] + again * counts[2])


@dataclass(frozen=True)
class Path:
    """What the messages of `size` devices of `fsdp` pass: links inside a node, or the network between nodes."""

    size: int
    fast: Link
    slow: Link
    """The share that a device has of its node's network, if all send."""
    of_node: int = 0
    """Devices of a node, if there are several nodes; else 0."""

    @property
    def ring(self) -> Link:
        """The link of a ring: each of its devices sends as much as the one that sends to the next node."""
        if not self.of_node:
            return self.fast
        return dataclasses.replace(self.slow, bytes_per_sec=self.slow.bytes_per_sec * self.of_node, curve=())

    def seconds(self, way: Way, sent: Messages) -> float:
        """Of messages, one after the other, each of an equal part of the bytes."""
        link, part = self.ring, 1.0
        if self.of_node and way == "all_to_all":
            link, part = self.slow, (self.size - self.of_node) / (self.size - 1)
        link = link.of(_COLLECTIVE[way])
        return sent.collectives * sum(link.seconds(self.size - 1, part * sent.num_bytes / sent.collectives))

    def node_bytes(self, way: Way, num_bytes: float) -> float:
        """Of the bytes that a device sends those that go to another node; of a ring its part of those of the node."""
        if not self.of_node:
            return 0.0
        return num_bytes * ((self.size - self.of_node) / (self.size - 1) if way == "all_to_all" else 1 / self.of_node)


@dataclass(frozen=True)
class Brought:
    """What tokens cost that are brought to experts and back."""

    way: Way
    num_bytes: float
    """That a device sends."""
    seconds: float
    node_bytes: float


def brought(mixture: Mixture, way: Way, path: Path, tokens: float, layers: float, *, again: bool) -> Brought:
    """The cost for so many `tokens` of a device, which pass so many `layers`."""
    sent = layer_messages(mixture, way, path.size, tokens, again=again)
    num_bytes = layers * sent.num_bytes
    return Brought(way, num_bytes, layers * path.seconds(way, sent), path.node_bytes(way, num_bytes))


def buffer_bytes(
    mixture: Mixture, way: Way, size: int, tokens: float, tensor: int = 1, kept_layers: float = 1
) -> float:
    """Temporary bytes of a device that it needs since experts are spread over `size` devices, with its `tokens`.

    A device that has all experts has a row for each choice of its tokens. Room for `row_buffer` times as many takes
    more in each of the layers that are kept for the backward pass (what enters an expert and leaves it, and two hidden
    numbers) and in the one that is at work (four more hidden numbers); gathered tokens come from all devices.
    """
    tokens, width, hidden = round(tokens), mixture.width, mixture.hidden / tensor
    choices = tokens * mixture.per_token
    if way == "gather":
        rows = rows_of_device(size * choices, mixture.num_experts // size, mixture.num_experts, mixture.row_buffer)
        besides = _WORKING_TOKENS * (size - 1) * tokens * width
    else:
        rows = size * rows_of_pair(size, choices, mixture.row_buffer)
        besides = _SENT_ROWS * rows * width
    kept, working = 2 * width + 2 * hidden, 4 * hidden + _WORKING_ROWS * width
    return mixture.itemsize * ((rows - choices) * (kept_layers * kept + working) + besides)


def computes_again(remat: str) -> bool:
    """Whether the backward pass computes experts again, which it does unless all is kept."""
    return remat not in ("", "none")


def kept_layers(remat: str, num_layers: int) -> int:
    """Of how many of a device's layers the rows of tokens are kept for the backward pass."""
    return 1 if computes_again(remat) else num_layers


def gathered_bytes(mixture: Mixture) -> float:
    """Of the arrays that `fsdp` sends in a micro-batch for experts that are gathered as other parameters are: twice
    in the dtype of activations, and the sum of their float32 gradients."""
    return mixture.weights * (2 * mixture.itemsize + 4)
