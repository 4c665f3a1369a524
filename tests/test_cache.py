"""The key-value cache: each token's logits are those of the whole text read at once, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.models import Transformer
from jaxdl.models.network import Call
from jaxdl.parallel import sharding
from jaxdl.parallel.compiler.hlo import is_collective, parse
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.parallel.sharding import Layout, ShardingConfig, named, param_specs

VOCAB, PADDED, STEPS = 16, 6, 5
LENGTHS = np.array([6, 3, 1, 4])  # Of the prompts.
SIZES = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "mlp_dim": 32}
MODELS = {
    "grouped heads": Transformer(num_kv_heads=2, **SIZES),
    "as GPT-2, unrolled": Transformer(
        positions="learned", max_length=16, norm="layer", mlp="gelu", biases="all", scan_layers=False,
        **SIZES,
    ),
    "window, prompts longer than it": Transformer(window=4, qk_norm=True, head_size=6, tied_embeddings=False, **SIZES),
    "window, longer than some": Transformer(window=8, scan_layers=False, **SIZES),
}  # fmt: skip
MESH = MeshConfig(replica=2, fsdp=2, tensor=2)
CASES = [
    ("grouped heads", MESH),
    pytest.param("as GPT-2, unrolled", None, marks=pytest.mark.slow),
    pytest.param("window, longer than some", None, marks=pytest.mark.slow),
    pytest.param("window, prompts longer than it", MESH, marks=pytest.mark.slow),
]


def made(model, mesh):
    """(network, parameters, what surrounds a trace)."""
    network = model.network([], vocab_size=VOCAB, dtype=jnp.float32)
    params, _ = jax.jit(network.init)(jax.random.key(2))
    if mesh is None:
        return network, params, None
    layout = Layout(ShardingConfig(min_shard_elements=1), make_mesh(mesh))
    specs = param_specs(layout, network.axes, network.param_shapes)
    return network, jax.device_put(params, named(layout.mesh, specs)), layout


def caller(network, layout):
    """A function that calls a method of the network, whose outputs are whole."""

    def call(params, *inputs, method="__call__"):
        with sharding.use_layout(layout) if layout else jax.named_scope(""):
            return network.call(Call(train=False, method=method), params, {}, *inputs)[0]

    return call


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_cached_logits_are_those_of_the_whole_text(name, mesh):
    model = MODELS[name]
    network, params, layout = made(model, mesh)
    call = caller(network, layout)
    texts = np.random.default_rng(4).integers(0, VOCAB, (len(LENGTHS), PADDED + STEPS)).astype(np.int32)
    whole = np.asarray(jax.jit(call)(params, texts))

    prompts = np.where(np.arange(PADDED) < LENGTHS[:, None], texts[:, :PADDED], 9)
    prefill = jax.jit(lambda params, *inputs: call(params, *inputs, PADDED + STEPS, method="prefill"))
    decode = jax.jit(lambda params, *inputs: call(params, *inputs, method="decode"))
    rows, found = np.arange(len(LENGTHS)), []
    logits, cache = prefill(params, prompts, LENGTHS)
    decode = decode.lower(params, texts[:, 0], cache, jnp.asarray(LENGTHS)).compile()
    assert cache.key.shape[2] == min(model.window or PADDED + STEPS, PADDED + STEPS), "slots"
    for step in range(STEPS):
        found.append(np.asarray(logits[:, 0]))
        tokens, positions = texts[rows, LENGTHS + step], jnp.asarray(LENGTHS + step)
        logits, cache = decode(params, tokens, cache, positions)
    expected = [whole[rows, LENGTHS + step - 1] for step in range(STEPS)]
    np.testing.assert_allclose(np.stack(found), np.stack(expected), rtol=1e-5, atol=1e-5)
    if layout:
        assert set(jax.tree.leaves(tuple(cache.key.sharding.spec))) == {"replica", "fsdp", "tensor"}
        instructions = [one for inside in parse(decode.as_text()).computations.values() for one in inside.values()]
        sent = {size for one in instructions if is_collective(one) for _, shape in one.shapes for size in shape}
        assert sent, "parameters are gathered"
        assert model.window or PADDED + STEPS not in sent, "no device sends its part of the cache"


def test_rows_at_one_position_need_no_scatter():
    network, params, _ = made(MODELS["grouped heads"], None)
    call = caller(network, None)
    texts = np.random.default_rng(5).integers(0, VOCAB, (2, 4)).astype(np.int32)
    whole = np.asarray(jax.jit(call)(params, texts))
    logits, cache = jax.jit(lambda params, *x: call(params, *x, 4, method="prefill"))(
        params, texts[:, :1], np.array([1, 1])
    )
    decode = jax.jit(lambda params, *inputs: call(params, *inputs, method="decode"))
    assert "scatter" not in decode.lower(params, texts[:, 1], cache, 1).as_text()
    for position in (1, 2, 3):
        logits, cache = decode(params, texts[:, position], cache, position)
        np.testing.assert_allclose(logits[:, 0], whole[:, position], rtol=1e-5, atol=1e-5)
