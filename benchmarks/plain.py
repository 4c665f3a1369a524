"""A decoder's training step in plain JAX, to hold jaxdl's beside: what it computes, without what a trainer adds.

`python -m benchmarks.train --config ... --against plain` times both on the device at hand, and
`python -m benchmarks.first_step` compiles both. No sharding, no exchange, no skipped steps, no metrics but the loss: a
list of layers, AdamW with clipping, bfloat16 products of float32 parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec, TextSpec
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.training.experiment import Experiment

Step = Callable[[Any, jax.Array], tuple[Any, jax.Array]]
"""(state, tokens [batch, length + 1]) -> (state, loss)."""


def make_plain_step(experiment: Experiment, spec: DataSpec) -> tuple[Callable[[int], None], str]:
    """A function that runs this many steps on resident tokens and waits for their end, and its description.

    Raises ConfigError for experiments that the plain step does not do.
    """
    step, make_state, tokens = plain_step(experiment, spec, flash=jax.default_backend() == "gpu")
    assert isinstance(spec, TextSpec)
    state = jax.jit(make_state)()
    batch = jax.random.randint(jax.random.key(1), tokens.shape, 0, spec.vocab_size, jnp.int32)

    def steps(number: int) -> None:
        nonlocal state
        for _ in range(number):
            state, loss = step(state, batch)
            if jax.default_backend() == "cpu":
                jax.block_until_ready(loss)
        jax.block_until_ready(state)

    return steps, f"plain JAX {jax.__version__}: layers in a list, AdamW with clipping"


def plain_step(
    experiment: Experiment, spec: DataSpec, *, flash: bool
) -> tuple[Any, Callable[[], Any], jax.ShapeDtypeStruct]:
    """The jitted `Step`, a function that makes its state, and the shape of its tokens.

    With `flash` attention in 16 bits is cuDNN's.
    """
    model, optimizer = experiment.model, experiment.optimizer
    if not isinstance(model, Transformer) or not isinstance(optimizer, AdamW) or not isinstance(spec, TextSpec):
        raise ConfigError("--against plain: only the transformer with AdamW is written in plain JAX.")
    if experiment.precision.kind not in ("float32", "bfloat16"):
        raise ConfigError(f"--against plain: --precision {experiment.precision.kind} is not written in plain JAX.")
    unusual = {"qk_norm": False, "window": None, "rope_scaling": None, "dropout": 0.0, "attention_dropout": 0.0}
    different = [f"model.{name}" for name, usual in unusual.items() if getattr(model, name) != usual]
    task = experiment.task
    different += [f"task.{name}" for name in ("z_loss", "label_smoothing") if getattr(task, name, 0.0)]
    different += ["model.lora"] if model.lora.rank else []
    if different:
        raise ConfigError(f"--against plain: {', '.join(different)}: not written in plain JAX. Leave it out.")
    dtype = jnp.bfloat16 if experiment.precision.kind == "bfloat16" else jnp.float32
    clip: Any = experiment.step.clip_norm
    kernel = "cudnn" if flash and dtype == jnp.bfloat16 else "xla"

    def make_state() -> Any:
        params = _params(model, spec.vocab_size, jax.random.key(0))
        return params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.int32(0)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, mean, square, number = state
        loss, grads = jax.value_and_grad(functools.partial(_loss, model, dtype, kernel))(params, tokens)
        if clip is not None:
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * jnp.minimum(1, clip / norm), grads)
        number, b1, b2 = number + 1, optimizer.b1, optimizer.b2
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mean, grads)
        square = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, square, grads)

        def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            direction = m / (1 - b1**number) / (jnp.sqrt(v / (1 - b2**number)) + optimizer.epsilon)
            decay = optimizer.weight_decay if p.ndim > 1 else 0.0
            return p - optimizer.learning_rate * (direction + decay * p)

        return (jax.tree.map(moved, params, mean, square), mean, square, number), loss

    tokens = jax.ShapeDtypeStruct((experiment.batch_size, spec.length + 1), jnp.int32)
    return jax.jit(step, donate_argnums=0), make_state, tokens


def _params(model: Transformer, vocab: int, key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 16 * model.num_layers + 8))
    embed, hidden, head_dim = model.embed_dim, model.hidden_dim, model.head_dim
    heads, kv_heads = model.num_heads * head_dim, model.kv_heads * head_dim

    def matrix(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(embed)} | ({"bias": jnp.zeros(embed)} if model.norm == "layer" else {})

    def layer() -> dict[str, Any]:
        made: dict[str, Any] = {"norm1": norm(), "norm2": norm()}
        sizes = {"query": (embed, heads), "key": (embed, kv_heads), "value": (embed, kv_heads), "out": (heads, embed)}
        sizes |= {"up": (embed, hidden), "down": (hidden, embed)}
        sizes |= {"gate": (embed, hidden)} if model.mlp == "swiglu" else {}
        made |= {name: matrix(*size) for name, size in sizes.items()}
        biased = {"none": (), "qkv": ("query", "key", "value"), "all": tuple(sizes)}[model.biases]
        return made | {f"{name}_bias": jnp.zeros(sizes[name][1]) for name in biased}

    params = {"table": matrix(vocab, embed), "norm": norm(), "layers": [layer() for _ in range(model.num_layers)]}
    params |= {} if model.tied_embeddings else {"head": matrix(embed, vocab)}
    return params | ({} if model.max_length is None else {"positions": matrix(model.max_length, embed)})


def _loss(model: Transformer, dtype: Any, kernel: Any, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    tokens, target = tokens[:, :-1], tokens[:, 1:]
    x = params["table"][tokens]
    if model.max_length is not None:
        x = x + params["positions"][: tokens.shape[1]]
    x = x.astype(dtype)
    for layer in params["layers"]:
        x = _block(model, kernel, x, layer)
    x = _norm(model, x, params["norm"])
    head = params["table"].T if model.tied_embeddings else params["head"]
    logits = (x @ head.astype(dtype)).astype(jnp.float32)
    of_target = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_target)


def _block(model: Transformer, kernel: Any, x: jax.Array, layer: dict[str, Any]) -> jax.Array:
    def linear(x: jax.Array, name: str) -> jax.Array:
        product, bias = x @ layer[name].astype(x.dtype), layer.get(f"{name}_bias")
        return product if bias is None else product + bias.astype(x.dtype)

    def projected(name: str) -> jax.Array:
        made = linear(hidden, name).reshape(*x.shape[:2], -1, model.head_dim)
        return _rotated(made, model.rope_theta) if model.positions == "rotary" and name != "value" else made

    hidden = _norm(model, x, layer["norm1"])
    query, key, value = (projected(name) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kernel)
    x = x + linear(mixed.reshape(*x.shape[:2], -1), "out")
    hidden = _norm(model, x, layer["norm2"])
    if model.mlp == "swiglu":
        return x + linear(jax.nn.silu(linear(hidden, "gate")) * linear(hidden, "up"), "down")
    activation = jax.nn.gelu if model.mlp == "gelu" else jax.nn.relu
    return x + linear(activation(linear(hidden, "up")), "down")


def _norm(model: Transformer, x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    wide = x.astype(jnp.float32)
    if model.norm == "layer":
        wide = wide - wide.mean(axis=-1, keepdims=True)
    unit = wide * lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + model.norm_epsilon)
    return (unit * params["scale"] + params.get("bias", 0.0)).astype(x.dtype)


def _rotated(x: jax.Array, theta: float) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
