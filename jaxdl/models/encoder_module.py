"""The network of an `jaxdl.models.Encoder`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.core.errors import ConfigError
from jaxdl.models.blocks import Attention, Init, linear
from jaxdl.models.dropout import RowKeys, dropout, fold
from jaxdl.models.elementwise import layer_norm
from jaxdl.models.layers import Head
from jaxdl.models.loop import body_of, through_each, through_layers
from jaxdl.models.products import add_bias
from jaxdl.models.rotary import Angles, rotary_angles
from jaxdl.parallel import sharding, token_vectors

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"]
_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
_EMBEDDED, _LAYERS, _POOLED, _CLASSIFIED = range(4)
"""Where a row's random keys are used."""


class _Rows(NamedTuple):
    """What attention must know of the texts."""

    num_tokens: jax.Array | None
    """int32 [batch], how many tokens of each row there are; None for all."""
    angles: Angles | None
    local_angles: Angles | None
    """Those of layers with a window."""


class Norm(nnx.Module):
    """`layer_norm` with a scale, and perhaps a bias, for each of `size` numbers."""

    def __init__(self, size: int, epsilon: float, *, bias: bool, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32), axes=("norm",))
        if bias:
            self.bias = nnx.Param(jnp.zeros((size,), jnp.float32), axes=("norm",))
        self.epsilon, self.dtype = epsilon, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size]."""
        scale, bias = self.scale[...], getattr(self, "bias", None)
        return layer_norm(x, scale, jnp.zeros_like(scale) if bias is None else bias[...], self.epsilon, self.dtype)


class MLP(nnx.Module):
    """f(x up) down, or (f(x gate) * (x up)) down."""

    def __init__(self, config: Any, rngs: nnx.Rngs, init: Init):
        embed, hidden = config.embed_dim, config.hidden_dim
        for name in ("gate", "up") if config.gated else ("up",):
            setattr(self, name, init.kernel(rngs, (embed, hidden), ("embed", "mlp"), fan_in=embed))
        self.down = init.kernel(rngs, (hidden, embed), ("mlp", "embed"), fan_in=hidden, residual=True)
        if config.biases:
            for name in ("gate", "up", "down") if config.gated else ("up", "down"):
                size = embed if name == "down" else hidden
                setattr(self, f"{name}_bias", nnx.Param(jnp.zeros((size,), jnp.float32), axes=("norm",)))
        self.activation, self.gated = config.activation, config.gated

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]."""
        hidden = _FUNCTIONS[self.activation](linear(self, "gate" if self.gated else "up", x))
        hidden = hidden * linear(self, "up", x) if self.gated else hidden
        return linear(self, "down", sharding.constrain(hidden, "batch", "length", "mlp"))


class Block(nnx.Module):
    """Attention and MLP, each with its norm; see `Encoder.norm_position`."""

    def __init__(self, config: Any, rngs: nnx.Rngs, index: int, *, dtype: DTypeLike):
        """`index` is the layer's."""
        init, norm = Init(config.init_stddev), functools.partial(_norm, config, dtype=dtype)
        window = config.window_of(index) if config.window is not None else None
        self.is_pre, self.dropout = config.norm_position == "pre", config.dropout
        if not self.is_pre or index:  # The embeddings are normed already.
            self.attention_norm = norm()
        self.attention = Attention(
            rngs,
            embed_dim=config.embed_dim,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            causal=False,
            window=None if window is None else window + 1,
            biases="all" if config.biases else "none",
            init=init,
            dropout=config.attention_dropout,
        )
        self.mlp_norm = norm()
        self.mlp = MLP(config, rngs, init)
        config.lora.add(self, rngs)

    def __call__(self, x: jax.Array, rows: _Rows, keys: jax.Array | None) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]; `keys` are the random keys of the rows in this layer."""
        angles = rows.angles if self.attention.window is None else rows.local_angles
        attention = functools.partial(self.attention, angles=angles, key_lengths=rows.num_tokens, keys=fold(keys, 2))
        return self._add("mlp", self._add("attention", x, attention, fold(keys, 0)), self.mlp, fold(keys, 1))

    def _add(
        self, name: str, x: jax.Array, part: Callable[[jax.Array], jax.Array], keys: jax.Array | None
    ) -> jax.Array:
        """The residual stream after a part, with its norm before or after the sum."""
        norm: Callable[[jax.Array], jax.Array] = getattr(self, f"{name}_norm", lambda x: x)
        total = x + dropout(part(norm(x) if self.is_pre else x), self.dropout, keys)
        return sharding.constrain(total if self.is_pre else norm(total), "batch", "length", "embed")


class Pooler(nnx.Module):
    """What the classifier reads: f(x dense), perhaps normed."""

    def __init__(self, config: Any, rngs: nnx.Rngs, *, dtype: DTypeLike):
        size = config.embed_dim
        self.dense = Init(config.init_stddev).kernel(rngs, (size, size), ("embed", "pooled"), fan_in=size)
        if config.head_biases:
            self.dense_bias = nnx.Param(jnp.zeros((size,), jnp.float32), axes=("norm",))
        if config.head_norm:
            self.norm = _norm(config, dtype=dtype)
        self.activation = config.head_activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, embed] -> [batch, embed]."""
        x = _FUNCTIONS[self.activation](linear(self, "dense", x))
        norm: Callable[[jax.Array], jax.Array] = getattr(self, "norm", lambda x: x)
        return norm(x)


class EncoderModule(nnx.Module):
    """The network of a `config`, a `jaxdl.models.Encoder`.

    Its blocks are `layers`, with a leading layer dimension in every parameter, or `layer_0`, `layer_1`... where they
    differ. The head is `pooler` and `classifier`.
    """

    def __init__(self, config: Any, rngs: nnx.Rngs, *, vocab_size: int, num_classes: int, dtype: DTypeLike):
        def table(rows: int, name: str) -> nnx.Param[jax.Array]:
            made = nnx.initializers.normal(config.init_stddev)(rngs.params(), (rows, config.embed_dim), jnp.float32)
            return nnx.Param(made, axes=(name, "embed"))

        self.embedding = table(vocab_size, "vocab")
        if config.positions == "learned":
            self.position_embedding = table(config.max_length + config.position_offset, "position")
        if config.num_types:
            self.type_embedding = table(config.num_types, "types")
        self.embedding_norm = _norm(config, dtype=dtype)
        if config.scan_layers:

            @nnx.split_rngs(splits=config.num_layers)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def stacked(layer_rngs: nnx.Rngs) -> Block:
                return Block(config, layer_rngs, 0, dtype=dtype)

            self.layers = stacked(rngs)
        else:
            for index in range(config.num_layers):
                setattr(self, f"layer_{index}", Block(config, rngs, index, dtype=dtype))
        if config.norm_position == "pre":
            self.final_norm = _norm(config, dtype=dtype)
        self.pooler = Pooler(config, rngs, dtype=dtype)
        self.classifier = Head(config.embed_dim, num_classes, rngs, dtype=dtype, stddev=config.init_stddev)
        drops = config.dropout or config.attention_dropout or config.classifier_dropout
        self.row_keys = RowKeys() if drops else None
        self.config, self.dtype = config, dtype

    def __call__(
        self, tokens: jax.Array, num_tokens: jax.Array | None = None, types: jax.Array | None = None, *, train: bool
    ) -> jax.Array:
        """Tokens, int32 [batch, length] -> logits, float32 [batch, num_classes].

        `num_tokens`, int32 [batch], are the tokens of each row, behind which there is padding; None: there is none.
        `types`, int32 like `tokens`, number the texts of a pair; None: all are 0. Raises ConfigError for more tokens
        than the network can read.
        """
        config, length = self.config, tokens.shape[1]
        if length > config.max_length:
            raise ConfigError(
                f"{length} tokens: the network reads {config.max_length} at most. Shorten the texts (--data.length), "
                "or train a network that reads more (--model.max-length)."
            )
        keys = self.row_keys[...] if train and self.row_keys is not None else None
        x = dropout(self._embedded(tokens, types), config.dropout, fold(keys, _EMBEDDED))
        x = self._through_layers(x, self._rows(length, num_tokens), fold(keys, _LAYERS))
        if config.norm_position == "pre":
            x = self.final_norm(x)
        pooled = self._pooled(x, num_tokens)
        if config.head_drops_input:
            pooled = self._drop(pooled, fold(keys, _POOLED))
        return self.classifier(self._drop(self.pooler(pooled), fold(keys, _CLASSIFIED)))

    def _drop(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        """[batch, embed] -> [batch, embed]."""
        return dropout(x[:, None], self.config.classifier_dropout, keys)[:, 0]

    def _embedded(self, tokens: jax.Array, types: jax.Array | None) -> jax.Array:
        """The normed sum of what is known of each token: itself, its place, its text."""
        config = self.config
        x = token_vectors.lookup(self.embedding[...], tokens, self.dtype)
        if config.num_types > 1 and types is not None:
            x = x + token_vectors.lookup(self.type_embedding[...], types, self.dtype)
        elif config.num_types:
            x = add_bias(x, self.type_embedding[...][0])
        if config.positions == "learned":
            rows = self.position_embedding[...][config.position_offset :][: tokens.shape[1]]
            x = add_bias(x, rows)
        return sharding.constrain(self.embedding_norm(x), "batch", "length", "embed")

    def _rows(self, length: int, num_tokens: jax.Array | None) -> _Rows:
        config, positions = self.config, jnp.arange(length)[None]
        if config.positions == "learned":
            return _Rows(num_tokens, None, None)
        whole, local = (
            rotary_angles(positions, config.head_dim, theta) for theta in (config.rope_theta, config.local_rope_theta)
        )
        return _Rows(num_tokens, whole, local)

    def _through_layers(self, x: jax.Array, rows: _Rows, keys: jax.Array | None) -> jax.Array:
        config = self.config

        def block(x: jax.Array, layer: Block, index: jax.Array | int) -> jax.Array:
            return layer(x, rows, fold(keys, index))

        if config.scan_layers:
            graphdef, state = nnx.split(self.layers)
            return through_layers(body_of(block, graphdef), x, state, remat=config.remat)[0]
        layers = [nnx.split(getattr(self, f"layer_{index}")) for index in range(config.num_layers)]
        bodies = {graphdef: body_of(block, graphdef) for graphdef, _ in layers}
        return through_each([(bodies[graphdef], state) for graphdef, state in layers], x, config.remat)

    def _pooled(self, x: jax.Array, num_tokens: jax.Array | None) -> jax.Array:
        """[batch, length, embed] -> [batch, embed]: the first token, or the mean of those that there are."""
        if self.config.pooling == "first":
            return x[:, 0]
        there = jnp.ones(x.shape[:2], bool) if num_tokens is None else jnp.arange(x.shape[1]) < num_tokens[:, None]
        total = jnp.sum(jnp.where(there[..., None], x.astype(jnp.float32), 0), axis=1)
        return (total / jnp.maximum(jnp.sum(there, axis=1, keepdims=True), 1)).astype(x.dtype)


def _norm(config: Any, *, dtype: DTypeLike) -> Norm:
    return Norm(config.embed_dim, config.norm_epsilon, bias=config.norm_biases, dtype=dtype)
