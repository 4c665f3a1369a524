"""What a step of a decoder needs whose layers are split over `tensor`, by the profile of one that is not."""

from __future__ import annotations

import dataclasses

from jaxdl.performance.planner.decoder import Decoder
from jaxdl.performance.planner.memory import Fit
from jaxdl.performance.planner.steptime import Profile

_SUMS = 4
"""Sums over `tensor` in a layer: after attention and after the MLP, and of the gradients of their inputs."""
_WHOLE = 0.25
"""About the part of the activations that is the residual stream and its norms, which each device has whole."""


def tensor_profile(alone: Profile, size: int, decoder: Decoder) -> Profile:
    """The profile with layers split over `size` devices: an estimate, in place of steps that are compiled."""
    activations = alone.temporary.of_example * (_WHOLE + (1 - _WHOLE) / size)
    summed = decoder.tokens(1) * decoder.width * decoder.itemsize
    return dataclasses.replace(
        alone,
        temporary=Fit(alone.temporary.fixed / size, alone.temporary.divided / size, activations),
        passes_sec=Fit(alone.passes_sec.fixed, alone.passes_sec.divided, alone.passes_sec.of_example / size),
        other_sec=alone.other_sec.scaled(1 / size),
        fsdp_bytes=alone.fsdp_bytes / size,
        tensor_bytes=Fit(of_example=_SUMS * decoder.num_layers * 2 * (size - 1) / size * summed),
        tensor_messages=_SUMS * decoder.num_layers,
    )
