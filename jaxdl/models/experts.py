"""Experts: many MLPs, of which each token passes the few that a router chooses.

Rows of tokens are sorted by expert, and each product takes the rows of all experts at once
(`jaxdl.parallel.collectives.grouped`). No token is left out for the sake of another, unless a device has no room for
its rows.

Where `fsdp` divides the number of experts they are spread over its devices, and are never gathered: tokens are brought
to them, and the results back (`jaxdl.parallel.collectives.experts`). Else each device gathers the experts and computes
its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxdl.models.blocks import MLP, Init
from jaxdl.models.elementwise import swiglu
from jaxdl.parallel import sharding
from jaxdl.parallel.collectives.experts import Spread, spread
from jaxdl.parallel.gathering import experts_axis
from jaxdl.parallel.sharding import EXPERT, ROUTER
from jaxdl.parallel.zigzag import split_axes

LOAD, LOST, LARGEST = "experts/load", "experts/lost", "experts/largest_load"
"""Metrics: the choices of each expert, [layer, expert]; the share of choices without a row; the load of the busiest
expert over the mean load, the mean of the layers."""
_UP, _DOWN = (EXPERT, "embed", "mlp"), (EXPERT, "mlp", "embed")


class Balance(nnx.Variable):
    """What is added to the scores of experts when they are chosen. It has no gradient."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What the routers of the layers so far have done, or that of one layer."""

    load: jax.Array
    """float32 [layer, expert]: tokens that chose each, of the layers so far in the last rows; of one layer [expert]."""
    lost: jax.Array
    """float32: choices for which a device had no room."""
    penalties: dict[str, jax.Array]
    """`balance` and `z`, the sums over layers of losses."""
    train: bool = field(default=False, metadata={"static": True})
    """Whether rows are limited to `row_buffer`: in evaluation all have room."""

    @classmethod
    def nothing(cls, num_layers: int, num_experts: int, *, train: bool) -> Seen:
        """Before the first layer."""
        zero = jnp.float32(0)
        return cls(jnp.zeros((num_layers, num_experts), jnp.float32), zero, {"balance": zero, "z": zero}, train)

    def after(self, layer: Seen) -> Seen:
        """The same with one more layer."""
        load = jnp.concatenate([self.load[1:], layer.load[None]])
        penalties = {name: value + layer.penalties[name] for name, value in self.penalties.items()}
        return Seen(load, self.lost + layer.lost, penalties, self.train)


def _nonzero(total: jax.Array) -> jax.Array:
    """A sum of scores to divide by: those of a sigmoid may all be 0."""
    return jnp.maximum(total, jnp.finfo(jnp.float32).tiny)


def load_metrics(load: np.ndarray) -> dict[str, float]:
    """Of a load [layer, expert]: of each layer that of the busiest expert over the mean, `LARGEST/LAYER`; and
    `experts/entropy`, that of the shares over the one of even shares, the mean of the layers."""
    load = np.asarray(load, np.float64)
    share = load / np.maximum(load.sum(axis=1, keepdims=True), 1)
    entropy = -np.sum(share * np.log(np.where(share > 0, share, 1)), axis=1) / np.log(load.shape[1])
    largest = {f"{LARGEST}/{layer}": float(value) for layer, value in enumerate(share.max(axis=1) * load.shape[1])}
    return {"experts/entropy": float(entropy.mean())} | largest


class Experts(nnx.Module):
    """A router and its experts, SwiGLU each, and perhaps one more that computes every token.

    `config` is a `jaxdl.models.moe.MixtureOfExperts`.
    """

    def __init__(self, config: Any, rngs: nnx.Rngs, init: Init):
        num, embed, hidden = config.num_experts, config.embed_dim, config.hidden_dim
        self.router = init.kernel(rngs, (embed, num), ("embed", ROUTER), fan_in=embed)
        for name in ("gate", "up"):
            setattr(self, name, init.kernel(rngs, (num, embed, hidden), _UP, fan_in=embed))
        self.down = init.kernel(rngs, (num, hidden, embed), _DOWN, fan_in=hidden, residual=True)
        shared = config.shared_dim
        self.shared = MLP(rngs, "swiglu", embed_dim=embed, hidden_dim=shared, init=init) if shared else None
        self.bias = Balance(jnp.zeros((num,), jnp.float32), axes=("norm",)) if config.balance == "bias" else None
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]."""
        return self.routed(x)[0]

    def routed(self, x: jax.Array, counted: jax.Array | None = None, *, train: bool = False) -> tuple[jax.Array, Seen]:
        """`(what the experts add to x, what the router did)`.

        Tokens that are not `counted`, bool [batch, length], pass no expert but the shared one. In training a device has
        room for the rows of `row_buffer` alone.
        """
        config = self.config
        # Rounded logits would choose other experts.
        logits = jnp.matmul(x.astype(jnp.float32), self.router[...], precision=lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits) if config.router == "softmax" else jax.nn.sigmoid(logits)
        preferred = scores if self.bias is None else scores + self.bias[...]
        chosen = lax.top_k(lax.stop_gradient(preferred), config.experts_per_token)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.normalized:
            weights = weights / _nonzero(weights.sum(axis=-1, keepdims=True))
        if counted is not None:
            chosen = jnp.where(counted[..., None], chosen, config.num_experts)
        hidden, lost = self._computed(x, config.routed_scale * weights, chosen, train=train)
        if self.shared is not None:
            hidden = hidden + self.shared(x)
        ones = jnp.ones(x.shape[:2], jnp.float32) if counted is None else counted.astype(jnp.float32)
        num = jnp.maximum(ones.sum(), 1)
        load = jnp.sum(jax.nn.one_hot(chosen, config.num_experts), axis=(0, 1, 2))
        chance = jnp.sum(scores / _nonzero(scores.sum(-1, keepdims=True)) * ones[..., None], axis=(0, 1)) / num
        even = config.num_experts * jnp.sum(load / (num * config.experts_per_token) * chance)
        z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * ones) / num
        return hidden, Seen(lax.stop_gradient(load), lax.stop_gradient(lost), {"balance": even, "z": z})

    def _computed(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, *, train: bool
    ) -> tuple[jax.Array, jax.Array]:
        """`(the weighted sums of the chosen experts' results, choices without a row)`."""
        layout = sharding.current_layout()
        kernels = [getattr(self, name)[...] for name in ("gate", "up", "down")]
        axis = None if layout is None else experts_axis(layout, _UP, kernels[0].shape)
        axes = () if layout is None else layout.batch_axes(x.shape[0])
        room = self.config.row_buffer if train else None
        length_axes = split_axes(layout, x.shape[1])
        num, dispatch = self.config.num_experts, self.config.dispatch
        how = Spread(num, room, axis, axes, length_axes, layout, swiglu, dispatch)
        if layout is None or not how.names:
            return how.computed(x, weights, chosen, *kernels)
        return spread(how, x, weights, chosen, kernels)
