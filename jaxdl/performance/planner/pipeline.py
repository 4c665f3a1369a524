"""What a pipeline costs: idle stages, messages between them, gathers, and inputs that wait for the backward pass.

The schedule is that of `jaxdl.training.step.pipeline`: 1F1B in lock step, in which S stages take as long as M + S - 1
turns for M micro-batches, and each stage but the last computes its forward pass twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxdl.training.step.turns import time_in_turns

FORWARD_SHARE = 1 / 3
"""The part of the passes that is the forward pass: the backward pass has two products for each of its."""


@dataclass(frozen=True)
class Turns:
    """The time of the passes in a pipeline."""

    turn_sec: float
    """A forward and a backward pass of a micro-batch on the slowest stage."""
    total_sec: float
    """All turns."""
    idle_sec: float
    """Those turns of them in which a stage waits."""


def turns(
    passes_sec: float,
    head_share: float,
    stages: int,
    microbatches: int,
    forward: float = FORWARD_SHARE,
    *,
    shares: tuple[float, float] | None = None,
) -> Turns:
    """The passes of a pipeline, if those of a micro-batch through the whole network take `passes_sec`.

    A stage computes its part of the layers, and the forward pass, the share `forward` of it, once more; the last
    computes no pass again, but the output layer, `head_share` of the whole work. `shares` are the parts of the layers
    of each stage but the last, and of the last; equal ones by default. All wait for the slowest.
    """
    if stages == 1:
        return Turns(passes_sec, microbatches * passes_sec, 0.0)
    layers, head, count = passes_sec * (1 - head_share), passes_sec * head_share, time_in_turns(stages, microbatches)
    each, last = shares or (1 / stages, 1 / stages)
    turn = max(layers * each * (1 + forward), layers * last + head)
    return Turns(turn, count * turn, (count - microbatches) * turn)


def gather_uses(itemsize: int, microbatches: int) -> float:
    """How often a stage sends what a step without stages sends over `fsdp` in a micro-batch.

    That step gathers each parameter twice, in the dtype of activations, and sums its float32 gradient once. A stage
    gathers once a step and sums in each micro-batch.
    """
    summed = 4 / (2 * itemsize + 4)
    return (1 - summed) / 2 + microbatches * summed


def activation_bytes(tokens: float, width: int, itemsize: int) -> float:
    """Bytes that a stage needs to send: activations of all tokens to the next, and gradients to the one before."""
    return 2 * tokens * width * itemsize


def table_bytes(stages: int, num_bytes: float) -> float:
    """Bytes that a stage sends to sum gradients of so many bytes over the stages, which all have these parameters."""
    return 2 * (stages - 1) / stages * num_bytes


def exchange_bytes(params: float, nodes: int, itemsize: float, compression: float = 1.0) -> float:
    """Bytes that a node sends in a step to sum gradients over nodes, compressed to this share of a dense exchange."""
    return compression * 2 * (nodes - 1) / nodes * params * itemsize


def break_even_tokens(
    node_bytes: float, width: int, itemsize: int, *, others: float = 0.0, sent_for_nothing: float = 0.0
) -> float:
    """Q*: the tokens of a step below which a pipeline over the nodes sends less than an exchange of `node_bytes`.

    With `exchange_bytes` that is c (N - 1) / N (P / d) (b_g / b_a). `others` are bytes that the pipeline sends besides
    activations and their gradients; of these `sent_for_nothing` are of no micro-batch, for each that is of one.
    """
    return max(0.0, node_bytes - others) / (activation_bytes(1, width, itemsize) * (1 + sent_for_nothing))


def rate_that_hides(params: float, width: int, itemsize: int, stages: int, flops_per_sec: float) -> float:
    """Bytes a second of a node beyond which the messages of its stage hide behind its work, 2 d b F S / (6 P)."""
    return 2 * width * itemsize * flops_per_sec * stages / (6 * params)
