"""What a planner knows of a decoder, or a mixture of experts: the sizes by which stages and lengths are split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxdl.core.config import ConfigError
from jaxdl.parallel.mesh import AXES, LENGTH_AXES, STAGE_AXES
from jaxdl.parallel.sharding import EXPERT, STACKED, is_names
from jaxdl.performance.planner.expert_cost import Mixture
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import Plan
from jaxdl.training.run.plan.validate import check_axes
from jaxdl.training.step.turns import room_for_layers


@dataclass(frozen=True)
class Decoder:
    """The sizes of a network of equal layers that reads texts."""

    num_layers: int
    width: int
    """Of the residual stream, which a stage sends to the next."""
    key_width: int
    """Of all keys of a token in one layer, and of its values."""
    vocab_size: int
    length: int
    """Tokens of an example."""
    itemsize: int
    """Bytes of an entry of an activation."""
    layer_weights: float
    """Weights of all layers that a token passes: of experts those that it is sent to."""
    stacked_share: float
    """The part of all trained parameters that is in layers; the rest, such as tables, is in every stage."""
    output_layers: float = 0.0
    """The work of the output layer, in that of a layer."""
    stages: tuple[int, ...] = ()
    """Into how many stages its layers can be divided, besides 1."""
    splits_length: bool = False
    """Whether its texts can be split over devices."""
    mixture: Mixture | None = None
    """Its experts, if it has any."""

    @property
    def head_share(self) -> float:
        """The part of the work on a token that is the output layer's, which the last stage has besides its layers."""
        head = self.vocab_size * self.width
        return head / (self.layer_weights + head)

    def room(self, stages: int) -> int:
        """For how many layers each stage has room. Raises ValueError where they cannot be divided so."""
        room = room_for_layers(self.num_layers, stages, self.output_layers)
        if room is None:
            raise ValueError(f"{self.num_layers} layers cannot be divided among {stages} stages")
        return room

    def shares(self, stages: int) -> tuple[float, float]:
        """The part of the layers that each stage but the last has, and the last."""
        each = self.room(stages) / self.num_layers
        return each, 1 - (stages - 1) * each

    def params_share(self, stages: int) -> float:
        """The part of the parameters for which a stage has room: of the layers its own, and all others."""
        return 1 - self.stacked_share * (1 - self.shares(stages)[0])

    def tokens(self, examples: float) -> float:
        """Tokens of so many examples."""
        return self.length * examples

    def can_split(self, ways: int) -> bool:
        """Whether a text can be split over so many devices: each has two chunks, an early and a late one."""
        return ways == 1 or (self.splits_length and self.length % (2 * ways) == 0)


def _can_have(experiment: Experiment, axes: Sequence[str], size: int) -> bool:
    """Whether a run of the experiment can have so many devices on these axes."""
    try:
        check_axes(experiment, dict.fromkeys(AXES, 1) | dict.fromkeys(axes, size))
    except ConfigError:
        return False
    return True


_SIZES = ("num_layers", "embed_dim", "kv_heads", "head_dim", "vocab_size")
"""What a model has to say of itself; one of a user's may be split and not say it."""


def decoder_of(plan: Plan) -> Decoder | None:
    """The sizes of the model of a plan; None for one that has no stages and reads whole texts alone."""
    parts, spec = plan.parts, cast(Any, plan.parts.data_spec)
    model = cast(Any, plan.experiment.model)  # Those that can be split have the sizes of decoders.
    if not (model.splits_layers or model.splits_length) or not all(hasattr(model, name) for name in _SIZES):
        return None
    axes, shapes = parts.trainable.of(parts.network.axes), parts.trainable.of(parts.network.filled.param_shapes)
    stacked = used = total = 0.0
    for names, x in zip(jax.tree.leaves(axes, is_leaf=is_names), jax.tree.leaves(shapes), strict=True):
        size = math.prod(x.shape)
        total += size
        if STACKED in names:
            stacked += size
            chosen = model.experts_per_token / model.num_experts if EXPERT in names else 1.0
            used += size * chosen
    num_layers, itemsize = model.num_layers, jnp.dtype(parts.precision.dtype).itemsize
    return Decoder(
        num_layers=num_layers,
        width=model.embed_dim,
        key_width=model.kv_heads * model.head_dim,
        vocab_size=model.vocab_size or spec.vocab_size,
        length=spec.length,
        itemsize=itemsize,
        layer_weights=used or total,
        stacked_share=stacked / max(total, 1.0),
        output_layers=0.0 if plan.experiment.optimizer.checked else model.output_layers(vocab_size=spec.vocab_size),
        stages=tuple(size for size in range(2, num_layers + 1) if _can_have(plan.experiment, STAGE_AXES, size)),
        splits_length=_can_have(plan.experiment, LENGTH_AXES, 2),
        mixture=_mixture(plan, itemsize),
    )


def _mixture(plan: Plan, itemsize: int) -> Mixture | None:
    """The experts of the model of a plan, if it has any, trained or not."""
    network, model = plan.parts.network, cast(Any, plan.experiment.model)
    axes = jax.tree.leaves(network.axes, is_leaf=is_names)
    shapes = [x.shape for x in jax.tree.leaves(network.filled.param_shapes)]
    weights = sum(math.prod(shape) for names, shape in zip(axes, shapes, strict=True) if EXPERT in names)
    if not weights or not hasattr(model, "dispatch"):
        return None
    return Mixture(
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        per_token=model.experts_per_token,
        width=model.embed_dim,
        hidden=model.hidden_dim,
        itemsize=itemsize,
        row_buffer=model.row_buffer,
        dispatch=model.dispatch,
        weights=weights,
    )
