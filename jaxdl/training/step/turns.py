"""The turns of a pipeline in lock step, of S stages and M micro-batches: see `jaxdl.training.step.pipeline`."""

from __future__ import annotations

_FORWARD, _BACKWARD = 1, 2
"""The work of the passes of a layer: the backward pass has two products for each of the forward pass."""


def idle_share(stages: int, microbatches: int) -> float:
    """The part of the time in which a stage has nothing to do, (S - 1) / (M + S - 1)."""
    return (stages - 1) / time_in_turns(stages, microbatches)


def kept_inputs(stages: int) -> int:
    """Micro-batches whose inputs a stage keeps, 2 S - 1."""
    return 2 * stages - 1 if stages > 1 else 0


def time_in_turns(stages: int, microbatches: int) -> int:
    """The time of a step in turns of a forward and a backward pass, M + S - 1.

    The program has S - 1 turns more: in the first and the last S - 1 only one of the passes is computed.
    """
    return microbatches + stages - 1


def num_messages(stages: int, microbatches: int) -> int:
    """Messages between two neighbours in both directions, 2 M + 3 (S - 1); in the last S - 1 turns one is left out."""
    return 2 * microbatches + 3 * (stages - 1)


def room_for_layers(layers: int, stages: int, output_layers: float = 0.0) -> int | None:
    """Layers of each stage but the last, which has those that are left, perhaps none; None where there are too few.

    The last stage also has the output layer, with the work of `output_layers` layers. But it computes the forward pass
    once, and the others twice: first to send what they yield, and again for the backward pass. The slowest stage is as
    fast as it can be.
    """
    if stages == 1:
        return layers

    def slowest(room: int) -> float:
        rest = layers - (stages - 1) * room
        return max((2 * _FORWARD + _BACKWARD) * room, (_FORWARD + _BACKWARD) * (rest + output_layers))

    return min(range(-(-layers // stages), layers // (stages - 1) + 1), key=slowest, default=None)
