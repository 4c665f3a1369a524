"""Experts: many MLPs, of which each token passes the few that a router chooses.

Rows of tokens are sorted by expert, and each product takes the rows of all experts at once
(`jaxdl.parallel.collectives.grouped`). No token is left out for the sake of another, unless a device has no room for
its rows.

Where `fsdp` divides the number of experts they are spread over its devices, and are never gathered: tokens are, each
device computes its experts for all of them, and the results are reduce-scattered. Else each device gathers the experts
and computes its own tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxdl.models.blocks import MLP, Init
from jaxdl.models.elementwise import swiglu
from jaxdl.parallel import sharding
from jaxdl.parallel.collectives.grouped import give_rows, grouped_product, places, take_rows
from jaxdl.parallel.collectives.primitive import in_one
from jaxdl.parallel.sharding import EXPERT, ROUTER, Layout, experts_axis

if TYPE_CHECKING:
    from jaxdl.models.mixture import Mixture

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

    @classmethod
    def nothing(cls, num_layers: int, num_experts: int) -> Seen:
        """Before the first layer."""
        zero = jnp.float32(0)
        return cls(jnp.zeros((num_layers, num_experts), jnp.float32), zero, {"balance": zero, "z": zero})

    def after(self, layer: Seen) -> Seen:
        """The same with one more layer."""
        load = jnp.concatenate([self.load[1:], layer.load[None]])
        penalties = {name: value + layer.penalties[name] for name, value in self.penalties.items()}
        return Seen(load, self.lost + layer.lost, penalties)


class Experts(nnx.Module):
    """A router and its experts, SwiGLU each, and perhaps one more that computes every token."""

    def __init__(self, config: Mixture, rngs: nnx.Rngs, init: Init):
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

    def routed(self, x: jax.Array, counted: jax.Array | None = None) -> tuple[jax.Array, Seen]:
        """`(what the experts add to x, what the router did)`; tokens that are not `counted`, bool, have no load."""
        config = self.config
        # Rounded logits would choose other experts.
        logits = jnp.matmul(x.astype(jnp.float32), self.router[...], precision=lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits) if config.router == "softmax" else jax.nn.sigmoid(logits)
        preferred = scores if self.bias is None else scores + self.bias[...]
        chosen = lax.top_k(lax.stop_gradient(preferred), config.experts_per_token)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.normalized:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        hidden, lost = self._computed(x, config.routed_scale * weights, chosen)
        if self.shared is not None:
            hidden = hidden + self.shared(x)
        ones = jnp.ones(x.shape[:2], jnp.float32) if counted is None else counted.astype(jnp.float32)
        num = jnp.maximum(ones.sum(), 1)
        load = jnp.sum(jax.nn.one_hot(chosen, config.num_experts) * ones[..., None, None], axis=(0, 1, 2))
        chance = jnp.sum(scores / scores.sum(-1, keepdims=True) * ones[..., None], axis=(0, 1)) / num
        even = config.num_experts * jnp.sum(load / (num * config.experts_per_token) * chance)
        z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * ones) / num
        return hidden, Seen(lax.stop_gradient(load), lax.stop_gradient(lost), {"balance": even, "z": z})

    def _computed(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`(the weighted sums of the chosen experts' results, choices without a row)`."""
        layout = sharding.current_layout()
        kernels = [getattr(self, name)[...] for name in ("gate", "up", "down")]
        axis = None if layout is None else experts_axis(layout, _UP, kernels[0].shape)
        axes = () if layout is None else layout.batch_axes(x.shape[0])
        how = _How(self.config.num_experts, self.config.row_buffer, axis, axes, layout)
        if layout is None or not (axes or axis):
            return how.computed(x, weights, chosen, *kernels)
        return _spread(how, x, weights, chosen, kernels)


@dataclass(frozen=True)
class _How:
    """How the devices of `axes`, over which tokens are split, compute experts that are spread over `axis`."""

    num_experts: int
    row_buffer: float
    axis: str | None
    axes: tuple[str, ...]
    layout: Layout | None

    @property
    def names(self) -> tuple[str, ...]:
        """The axes of both."""
        return tuple(dict.fromkeys((*self.axes, *((self.axis,) if self.axis else ()))))

    def specs(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """Of what has a row for each example, of kernels, and of what each device has for itself, [device, ...]."""
        return PartitionSpec(self.axes or None), PartitionSpec(self.axis), PartitionSpec(self.names)

    def on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function on each device of `names`."""
        assert self.layout is not None
        mesh = None if self.layout.manual else self.layout.mesh
        return jax.shard_map(
            in_one(function), mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.names)
        )

    def computed(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, *kernels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What a device returns of `Experts._computed`, for its tokens [batch, length, embed] and its experts."""
        shape, num = x.shape, kernels[0].shape[0]
        x, weights, chosen = (part.reshape(-1, part.shape[-1]) for part in (x, weights, chosen))
        gathered = self.axis is not None and self.axis in self.axes
        if gathered:
            x, weights, chosen = (lax.all_gather(part, self.axis, tiled=True) for part in (x, weights, chosen))
        varying = tuple(name for name in self.names if name != self.axis)
        if varying:  # Their gradients are summed over these axes, in float32.
            kernels = tuple(lax.pcast(kernel, varying, to="varying") for kernel in kernels)
        first = num * lax.axis_index(self.axis) if self.axis else 0
        result, lost = self._local(x, weights, chosen, first, kernels)
        if self.axis is not None:
            result = lax.psum_scatter(result, self.axis, tiled=True) if gathered else lax.psum(result, self.axis)
        if self.names:
            lost = lax.psum(lost, self.names)
        return result.reshape(shape), lost

    def _local(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, first: Any, kernels: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """What the experts from `first` on add to each token of `x` [token, embed], and choices without a row."""
        num, choices = kernels[0].shape[0], chosen.size
        group = chosen.reshape(-1) - first
        group = jnp.where((group >= 0) & (group < num), group, num).astype(jnp.int32)
        even = choices * num / self.num_experts
        most = choices if num == self.num_experts else min(choices, math.ceil(self.row_buffer * even))
        choice, row, sizes, lost = places(group, num, most)
        rows, (gate, up, down) = take_rows(x, choice, row), kernels
        hopper = self._is_hopper() and x.dtype == jnp.bfloat16
        hidden = swiglu(*(grouped_product(rows, kernel, sizes, hopper=hopper) for kernel in (gate, up)))
        results = give_rows(grouped_product(hidden, down, sizes, hopper=hopper), choice, row)
        each = results.reshape(*chosen.shape, -1).astype(jnp.float32)
        return jnp.sum(each * weights[..., None], axis=1).astype(x.dtype), lost.astype(jnp.float32)

    def _is_hopper(self) -> bool:
        if self.layout is None:
            return False
        device = self.layout.mesh.devices.flat[0]
        return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Pullback:
    """The structure of a function that `jax.vjp` returns, whose leaves are arrays."""

    treedef: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(
    how: _How, x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`how.computed` on each device.

    What a device keeps for the backward pass leaves one `shard_map` and enters another. JAX (0.10), which would do the
    same, splits it by the axes of the surrounding `shard_map` too, in an order that XLA refuses.
    """
    return _spread_forward(how, x, weights, chosen, kernels)[0]


def _spread_forward(
    how: _How, x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: list[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    structures: list[Any] = []

    def device(x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: list[jax.Array]) -> Any:
        def of_device(x: jax.Array, weights: jax.Array, kernels: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            return how.computed(x, weights, chosen, *kernels)

        result, pullback, lost = jax.vjp(of_device, x, weights, kernels, has_aux=True)
        leaves, treedef = jax.tree.flatten(pullback)
        structures.append(treedef)
        return result, lost, [leaf[None] for leaf in leaves]

    tokens, experts, each = how.specs()
    mapped = how.on_devices(device, (tokens, tokens, tokens, experts), (tokens, PartitionSpec(), each))
    result, lost, leaves = mapped(x, weights, chosen, kernels)
    return (result, lost), (leaves, _Pullback(structures[-1]))


def _spread_backward(how: _How, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    leaves, pullback = residuals
    tokens, experts, each = how.specs()

    def device(leaves: list[jax.Array], cotangent: jax.Array) -> Any:
        return jax.tree.unflatten(pullback.treedef, [leaf[0] for leaf in leaves])(cotangent)

    mapped = how.on_devices(device, (each, tokens), (tokens, tokens, experts))
    x_gradient, weights_gradient, kernel_gradients = mapped(leaves, cotangents[0])
    return x_gradient, weights_gradient, None, kernel_gradients


_spread.defvjp(_spread_forward, _spread_backward)
