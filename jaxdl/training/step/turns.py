"""The turns of a pipeline in lock step, of S stages and M micro-batches: see `jaxdl.training.step.pipeline`."""

from __future__ import annotations


def idle_share(stages: int, microbatches: int, *, splits_length: bool = False) -> float:
    """The part of the time in which a stage has nothing to do, (S - 1) / (M + S - 1).

    Stages whose devices split texts compute in all turns, for nothing in 2 (S - 1) of M + 2 (S - 1).
    """
    if splits_length:
        return 2 * (stages - 1) / num_turns(stages, microbatches)
    return (stages - 1) / (microbatches + stages - 1)


def kept_inputs(stages: int) -> int:
    """Micro-batches whose inputs a stage keeps, 2 S - 1."""
    return 2 * stages - 1 if stages > 1 else 0


def num_turns(stages: int, microbatches: int) -> int:
    """Turns of the program, each with two messages; in the first and the last S - 1 a stage has one pass, or none."""
    return microbatches + 2 * (stages - 1)
