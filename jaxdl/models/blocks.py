"""The parts of transformers' blocks: norms, attention and MLPs. Decoders and encoder-decoders share them.

Where the norms stand, and what is added to what, is their caller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.models.attention import Weighing, attend
from jaxdl.models.elementwise import geglu, gelu, gelu_erf, layer_norm, rms_norm, swiglu
from jaxdl.models.lora import adapt
from jaxdl.models.products import add_bias, head_products, weight_product
from jaxdl.models.rotary import Angles, rotate
from jaxdl.parallel import sharding
from jaxdl.parallel.zigzag import Zigzag

NormKind = Literal["rms", "rms_plus_one", "layer"]
MLPKind = Literal["swiglu", "geglu", "gelu", "gelu_erf", "relu"]
GATES = {"swiglu": swiglu, "geglu": geglu}
"""The kinds of MLP with a gate, and what they compute of (x gate, x up)."""
Biases = Literal["none", "qkv", "attention", "all"]
IN_PRODUCT = "in_product"
"""Metadata of a parameter that `weight_product` and `head_products` alone use: true. Then it may be an
`jaxdl.parallel.collectives.fp8.Kernel`."""
_PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True)
class Init:
    """The initial kernels: normal numbers.

    Attributes:
      stddev: their standard deviation; None takes 1 / sqrt(fan-in) of each.
      residual_scale: a factor for those that add to the residual stream.
    """

    stddev: float | None = None
    residual_scale: float = 1.0

    def kernel(
        self, rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: int, residual: bool = False
    ) -> nnx.Param[jax.Array]:
        """A kernel with these logical axes; `residual` says that it adds to the residual stream."""
        stddev = 1 / math.sqrt(fan_in) if self.stddev is None else self.stddev
        init = nnx.initializers.normal((self.residual_scale if residual else 1) * stddev)
        return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes, **{IN_PRODUCT: True})


def linear(module: nnx.Module, name: str, x: jax.Array, num_contracted: int = 1) -> jax.Array:
    """`x` by the kernel `name` of a module, plus its adapter and its bias `<name>_bias` where there are, like `x`.

    `num_contracted` dimensions of `x`, and of the kernel, are contracted; a bias has one dimension for all features.
    """
    kernel, bias = getattr(module, name)[...], getattr(module, f"{name}_bias", None)
    product = weight_product(x, kernel, num_contracted=num_contracted)
    product = _plus_adapter(module, name, x, product, num_contracted)
    return product if bias is None else add_bias(product, bias[...].reshape(kernel.shape[num_contracted:]))


def _plus_adapter(
    module: nnx.Module, name: str, x: jax.Array, product: jax.Array, num_contracted: int = 1
) -> jax.Array:
    """The product of `x` with a kernel, plus its adapter."""
    adapter = adapt(module, name, x, num_contracted)
    return product if adapter is None else product + adapter


def _add_biases(module: nnx.Module, sizes: dict[str, int]) -> None:
    """Gives a module biases of zeros for the kernels of these names."""
    for name, size in sizes.items():
        setattr(module, f"{name}_bias", nnx.Param(jnp.zeros((size,), jnp.float32), axes=("norm",)))


def _scale(size: int, *, plus_one: bool = False) -> nnx.Param[jax.Array]:
    made = jnp.zeros if plus_one else jnp.ones
    return nnx.Param(made((size,), jnp.float32), axes=("norm",))


class RMSNorm(nnx.Module):
    """`rms_norm` (Zhang and Sennrich 2019) with a scale for each of `size` numbers; `plus_one` adds 1 to it."""

    def __init__(self, size: int, epsilon: float, *, dtype: DTypeLike, plus_one: bool = False):
        self.scale = _scale(size, plus_one=plus_one)
        self.epsilon, self.dtype, self.plus_one = epsilon, dtype, plus_one

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size]."""
        scale = self.scale[...]
        return rms_norm(x, 1 + scale if self.plus_one else scale, self.epsilon, self.dtype)


class LayerNorm(nnx.Module):
    """`layer_norm` (Ba et al. 2016) with a scale and a bias for each of `size` numbers."""

    def __init__(self, size: int, epsilon: float, *, dtype: DTypeLike):
        self.scale = _scale(size)
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32), axes=("norm",))
        self.epsilon, self.dtype = epsilon, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size]."""
        return layer_norm(x, self.scale[...], self.bias[...], self.epsilon, self.dtype)


def make_norm(kind: NormKind, size: int, epsilon: float, *, dtype: DTypeLike) -> RMSNorm | LayerNorm:
    """The norm of this kind over `size` numbers; its results are in `dtype`."""
    if kind == "layer":
        return LayerNorm(size, epsilon, dtype=dtype)
    return RMSNorm(size, epsilon, dtype=dtype, plus_one=kind == "rms_plus_one")


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023), of a sequence to itself or to another one.

    The kernels keep heads and head_dim as separate dimensions, so that heads can be sharded without a reshape.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        *,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        causal: bool,
        num_kv_heads: int | None = None,
        window: int | None = None,
        biases: Biases = "none",
        qk_norm_epsilon: float | None = None,
        norms_all_heads: bool = False,
        norms_plus_one: bool = False,
        init: Init = Init(),
        dropout: float = 0.0,
        scale: float | None = None,
        cap: float | None = None,
        sinks: bool = False,
    ):
        """`causal`, `window` and `dropout` are those of `attend`, `cap` that of its `Weighing`; with `sinks` each head
        has one. `qk_norm_epsilon` norms queries and keys, each head by itself unless `norms_all_heads`, by one more
        than their scales with `norms_plus_one`. `scale` is the factor of scores, 1 / sqrt(head_dim) by default."""
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, heads in (("query", num_heads), ("key", kv_heads), ("value", kv_heads)):
            axes = ("embed", "heads" if name == "query" else "kv_heads", "head_dim")
            setattr(self, name, init.kernel(rngs, (embed_dim, heads, head_dim), axes, fan_in=embed_dim))
        shape, axes = (num_heads, head_dim, embed_dim), ("heads", "head_dim", "embed")
        self.out = init.kernel(rngs, shape, axes, fan_in=num_heads * head_dim, residual=True)
        sizes = dict.fromkeys(("key", "value"), kv_heads * head_dim) | {"query": num_heads * head_dim}
        _add_biases(self, {"none": {}, "qkv": sizes}.get(biases, {**sizes, "out": embed_dim}))
        if qk_norm_epsilon is not None:
            ways = (num_heads, kv_heads) if norms_all_heads else (1, 1)
            self.query_norm, self.key_norm = (_scale(num * head_dim, plus_one=norms_plus_one) for num in ways)
        if sinks:
            self.sinks = nnx.Param(jnp.zeros((num_heads,), jnp.float32), axes=("norm",))
        self.qk_norm_epsilon, self.causal, self.window, self.dropout = qk_norm_epsilon, causal, window, dropout
        self.norms_plus_one, self.cap = norms_plus_one, cap
        self.query_factor = 1.0 if scale is None else scale * math.sqrt(head_dim)

    def __call__(
        self,
        x: jax.Array,
        source: jax.Array | None = None,
        *,
        angles: Angles | None = None,
        limited: jax.Array | None = None,
        segments: jax.Array | None = None,
        key_segments: jax.Array | None = None,
        key_lengths: jax.Array | None = None,
        keys: jax.Array | None = None,
        order: Zigzag | None = None,
    ) -> jax.Array:
        """`x` [batch, length, embed] attends to itself, or to `source` [batch, key_length, embed]: shaped like `x`.

        `angles` rotate queries and keys; `limited`, `segments`, `key_segments`, `key_lengths` and `order` are those of
        `attend`; `keys` are the random keys of the rows, for dropout.
        """
        if source is None and self._heads_are_sharded_alike():
            kernels, biases = (
                [part[...] for part in (getattr(self, name + end, None) for name in _PROJECTIONS) if part is not None]
                for end in ("", "_bias")
            )
            products = head_products(x, kernels, biases)
            query, key, value = (
                _plus_adapter(self, name, x, product) for name, product in zip(_PROJECTIONS, products, strict=True)
            )
            query, (key, value) = self._query(query, angles), self._key_value(key, value, angles)
        else:
            query = self.queries(x, angles)
            key, value = self.keys_values(x if source is None else source, angles)
        mixed = attend(
            query,
            key,
            value,
            causal=self.causal,
            window=self.window,
            limited=limited,
            segments=segments,
            key_segments=key_segments,
            key_lengths=key_lengths,
            dropout=self.dropout,
            dropout_key=keys,
            order=order,
            weighing=self.weighing,
        )
        return self.merged(mixed)

    @property
    def weighing(self) -> Weighing:
        """What changes the weights of attention."""
        sinks = getattr(self, "sinks", None)
        return Weighing(self.cap, None if sinks is None else sinks[...])

    def queries(self, x: jax.Array, angles: Angles | None = None) -> jax.Array:
        """The queries of `x`, [batch, length, heads, head_dim]."""
        return self._query(linear(self, "query", x), angles)

    def keys_values(self, x: jax.Array, angles: Angles | None = None) -> tuple[jax.Array, jax.Array]:
        """The keys and the values of `x`, [batch, length, kv_heads, head_dim] each."""
        return self._key_value(linear(self, "key", x), linear(self, "value", x), angles)

    def merged(self, mixed: jax.Array) -> jax.Array:
        """What attention adds to the residual stream, [batch, length, embed], from the heads' mixed values."""
        mixed = sharding.constrain(mixed, "batch", "length", "heads", "head_dim")
        return linear(self, "out", mixed, 2)

    def _query(self, query: jax.Array, angles: Angles | None) -> jax.Array:
        placed = self._placed("query", query, angles)
        if self.query_factor != 1:
            placed = (self.query_factor * placed.astype(jnp.float32)).astype(placed.dtype)
        return sharding.constrain(placed, "batch", "length", "heads", "head_dim")

    def _key_value(self, key: jax.Array, value: jax.Array, angles: Angles | None) -> tuple[jax.Array, jax.Array]:
        key = sharding.constrain(self._placed("key", key, angles), "batch", "length", "kv_heads", "head_dim")
        return key, sharding.constrain(value, "batch", "length", "kv_heads", "head_dim")

    def _placed(self, name: str, x: jax.Array, angles: Angles | None) -> jax.Array:
        """Queries or keys `x`: normed, then rotated."""
        if self.qk_norm_epsilon is not None:
            scale: jax.Array = getattr(self, f"{name}_norm")[...]
            scale = 1 + scale if self.norms_plus_one else scale
            # Of one head, or of all.
            normed = jnp.reshape(x, x.shape if scale.shape[0] == x.shape[-1] else (*x.shape[:2], -1))
            x = jnp.reshape(rms_norm(normed, scale, self.qk_norm_epsilon, x.dtype), x.shape)
        return x if angles is None else rotate(x, angles)

    def _heads_are_sharded_alike(self) -> bool:
        """Whether each device has the keys and values of its queries."""
        layout = sharding.current_layout()
        if layout is None:
            return True
        heads, kv_heads = (getattr(self, name)[...].shape[1] for name in ("query", "key"))
        return layout.activation_spec(("heads",), (heads,)) == layout.activation_spec(("kv_heads",), (kv_heads,))


class MLP(nnx.Module):
    """`swiglu` (Shazeer 2020): (silu(x gate) * (x up)) down, `geglu` with GELU in place of silu. `gelu` (its tanh form,
    the exact one is `gelu_erf`) and `relu`: f(x up) down."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        kind: MLPKind,
        *,
        embed_dim: int,
        hidden_dim: int,
        biases: bool = False,
        init: Init = Init(),
    ):
        """`biases` are for `up` and `down`."""
        for name in ("gate", "up") if kind in GATES else ("up",):
            setattr(self, name, init.kernel(rngs, (embed_dim, hidden_dim), ("embed", "mlp"), fan_in=embed_dim))
        self.down = init.kernel(rngs, (hidden_dim, embed_dim), ("mlp", "embed"), fan_in=hidden_dim, residual=True)
        _add_biases(self, {"up": hidden_dim, "down": embed_dim} if biases else {})
        self.kind: MLPKind = kind

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]."""
        if self.kind in GATES:
            hidden = GATES[self.kind](linear(self, "gate", x), linear(self, "up", x))
        elif self.kind in ("gelu", "gelu_erf"):
            kernel, bias = (getattr(self, name, None) for name in ("up", "up_bias"))
            assert kernel is not None
            hidden = (gelu if self.kind == "gelu" else gelu_erf)(
                _plus_adapter(self, "up", x, weight_product(x, kernel[...])),
                None if bias is None else bias[...],
            )
        else:
            hidden = jax.nn.relu(linear(self, "up", x))
        return linear(self, "down", sharding.constrain(hidden, "batch", "length", "mlp"))
