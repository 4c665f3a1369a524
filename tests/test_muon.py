"""Muon: which parameters are matrices, its updates against NumPy, and the same updates wherever the parameters lie."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from runs import tiny_experiment
from test_optim import assert_close, random_tree

from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticText
from jaxdl.models import Transformer
from jaxdl.optim import AdamW, Muon, Rates
from jaxdl.optim.muon import matrix_dims
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.tasks import LanguageModelling

AXES = {
    "stack": {
        "query": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "up": ("layers", "embed", "mlp"),
        "scale": ("layers", "norm"),
    },
    "table": ("vocab", "embed"),
}
SHAPES = {
    "stack": {"query": (2, 16, 4, 8), "out": (2, 4, 8, 16), "up": (2, 16, 24), "scale": (2, 16)},
    "table": (40, 16),
}
SPECS = {
    "stack": {
        "query": P(None, "fsdp", "tensor"),
        "out": P(None, "tensor", None, "fsdp"),
        "up": P(None, "fsdp", "tensor"),
        "scale": P(),
    },
    "table": P("tensor", "fsdp"),
}
PEAK, RATES = 0.02, (0.01, 0.02, 0.005)


def gradients(step):
    return random_tree(100 + step, SHAPES)


def updates(config, place=lambda tree: tree, run=jax.jit):
    """The updates of three steps, the parameters unchanged; `run` compiles one step."""
    optimizer = config.build(AXES)
    params = place(random_tree(0, SHAPES))
    state, found = jax.jit(optimizer.init)(params), []

    def update(grads, state, params, rate):
        return optimizer.update(grads, state, params, rates=Rates(rate))

    update = run(update)
    for step, rate in enumerate(RATES):
        given, state = update(place(gradients(step)), state, params, jnp.float32(rate))
        found.append(given)
    return found


CONFIG = Muon(learning_rate=PEAK, adam_learning_rate=PEAK / 8, weight_decay=0.1)


@functools.cache
def plain():
    """The updates of `CONFIG` on one device."""
    return updates(CONFIG)


@pytest.mark.parametrize(
    ("names", "rows", "columns"),
    [
        (("layers", "embed", "heads", "head_dim"), (1,), (2, 3)),
        (("embed", "kv_heads", "head_dim"), (0,), (1, 2)),
        (("layers", "heads", "head_dim", "embed"), (1, 2), (3,)),
        (("layers", "embed", "mlp"), (1,), (2,)),
        (("height", "width", "channel_in", "channel_out"), (0, 1, 2), (3,)),
        (("embed", "rank"), (0,), (1,)),
        (("rank", "heads", "head_dim"), (0,), (1, 2)),
        (("", ""), (0,), (1,)),
        (("embed", "layers", "mlp"), (0,), (2,)),
    ],
)
def test_matrices_inside_the_network(names, rows, columns):
    assert matrix_dims(names) == MuonDimensionNumbers(rows, columns)


@pytest.mark.parametrize(
    "names",
    [
        ("vocab", "embed"),
        ("embed", "vocab"),
        ("channel_in", "classes"),
        ("position", "embed"),
        ("height", "width", "channel_in", "embed"),
        ("layers", "norm"),
        ("norm",),
        (),
    ],
)
def test_embeddings_heads_and_vectors_are_none(names):
    assert matrix_dims(names) is None


def orthogonal(x):
    """Five iterations of the quintic of Jordan et al., on a matrix of norm 1."""
    x = x / np.linalg.norm(x)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if transposed else x


@pytest.mark.parametrize("scaling", ["width", "rms"])
def test_updates_against_numpy(scaling):
    """Every layer, and all heads together, is one matrix; the rest has AdamW at its own rate."""
    config = CONFIG.replaced({"scaling": scaling})
    params, found = random_tree(0, SHAPES), plain() if config == CONFIG else updates(config)
    rows = {"query": 16, "out": 32, "up": 16}
    for name, num_rows in rows.items():
        mean = np.zeros(SHAPES["stack"][name])
        for step, rate in enumerate(RATES):
            grads = gradients(step)["stack"][name].astype(np.float64)
            mean = 0.95 * mean + 0.05 * grads
            ahead = 0.95 * mean / (1 - 0.95 ** (step + 2)) + 0.05 * grads / (1 - 0.95 ** (step + 1))
            flat = ahead.reshape(2, num_rows, -1)
            num_columns = flat.shape[2]
            factor = np.sqrt(max(1, num_columns / num_rows))
            if scaling == "rms":
                factor = 0.2 * np.sqrt(max(num_rows, num_columns))
            wanted = np.stack([orthogonal(one) for one in flat]).reshape(mean.shape) * factor
            wanted = -rate * (wanted + 0.1 * params["stack"][name])
            np.testing.assert_allclose(found[step]["stack"][name], wanted, rtol=1e-3, atol=1e-4 * rate)
    others = AdamW(learning_rate=PEAK / 8, b2=0.95, weight_decay=0.1).build(AXES)
    state = others.init(params)
    for step, rate in enumerate(RATES):
        wanted, state = others.update(gradients(step), state, params, rates=Rates(jnp.float32(rate / 8)))
        for place in (lambda tree: tree["table"], lambda tree: tree["stack"]["scale"]):
            assert_close(place(found[step]), place(wanted), rtol=1e-5)


def on(mesh, tree, specs=SPECS):
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, specs)


def test_sharded_is_unsharded():
    mesh = make_mesh(MeshConfig(replica=1, fsdp=4, tensor=2))
    found = updates(CONFIG, functools.partial(on, mesh))
    assert found[-1]["stack"]["query"].sharding.spec == SPECS["stack"]["query"]
    for ours, wanted in zip(found, plain(), strict=True):
        assert_close(ours, wanted, rtol=1e-5)


@pytest.mark.slow
def test_as_the_inner_optimizer_of_each_replica():
    """In a region that is manual over `replica` alone: replicas differ, and nothing crosses `replica`."""
    mesh = make_mesh(MeshConfig(replica=2, fsdp=2, tensor=2))
    signs = np.array([1.0, -2.0], np.float32)
    stacked = jax.tree.map(lambda spec: P("replica", *spec), SPECS, is_leaf=lambda node: isinstance(node, P))
    optimizer = CONFIG.build(AXES)
    params = random_tree(0, SHAPES)
    state = jax.tree.map(lambda x: jnp.stack([x, x]), jax.jit(optimizer.init)(params))

    def one_replica(grads, state, params, rate):
        grads, state = jax.tree.map(lambda x: x[0], (grads, state))
        return jax.tree.map(lambda x: x[None], optimizer.update(grads, state, params, rates=Rates(rate)))

    each = P("replica")
    region = jax.shard_map(
        one_replica,
        mesh=mesh,
        in_specs=(each, each, P(), P()),
        out_specs=(each, each),
        axis_names={"replica"},
        check_vma=False,
    )
    params = on(mesh, params)
    programs = []
    for step, rate in enumerate(RATES):
        grads = jax.tree.map(lambda g: signs.reshape(2, *[1] * g.ndim) * g, gradients(step))
        given = (on(mesh, grads, stacked), state, params, jnp.float32(rate))
        programs = programs or [jax.jit(region).lower(*given).compile()]
        found, state = programs[0](*given) if step == 0 else jax.jit(region)(*given)
        wanted = plain()[step]
        assert_close(jax.tree.map(lambda x: x[0], found), wanted, rtol=1e-5)
    # A matrix that is orthogonal has lost its length: that of the other replica is minus this one, but for decay.
    decay = jax.tree.map(lambda x: -RATES[-1] * 0.1 * np.asarray(x), params)["stack"]["up"]
    ours, other = np.asarray(found["stack"]["up"]) - decay
    np.testing.assert_allclose(other, -ours, atol=2e-5)
    groups = re.findall(r"replica_groups=(\S+?), ", programs[0].as_text())
    assert groups
    assert not [group for group in groups if crosses(group)]


def crosses(text):
    """Whether a group of devices in HLO has some of both replicas, 0-3 and 4-7."""
    iota = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        count, size, dims, order = iota.groups()
        ids = np.arange(8).reshape([int(x) for x in dims.split(",")])
        ids = ids.transpose([int(x) for x in order.split(",")]) if order else ids
        groups = ids.reshape(int(count), int(size)).tolist()
    else:
        groups = [[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]
    return any(len({one // 4 for one in group}) > 1 for group in groups)


def test_in_a_transformer():
    """What the plan of a run makes of it: matrices have one moment, all else has two."""
    experiment = tiny_experiment(
        data=SyntheticText(vocab_size=16, length=8, num_train=64, num_test=16),
        model=Transformer(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32),
        task=LanguageModelling(),
        optimizer=Muon(),
        mesh=MeshConfig(replica=2, fsdp=2, tensor=2),
    )
    plan = make_plan(experiment, jax.devices()[:8])
    flat = jax.tree_util.tree_flatten_with_path(plan.parts.state_spec.shapes.opt_state)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, x in flat if x.ndim]
    moments = {name.split("inner_states/")[-1] for name in names}
    mus = {name for name in moments if "/mu/" in name}
    nus = {name.replace("/nu/", "/mu/") for name in moments if "/nu/" in name}
    assert nus < mus
    assert all(name.startswith("others/") for name in nus)
    assert any("embedding" in name for name in nus)
    assert any("query" in name for name in mus - nus)
    assert not any("norm" in name or "embedding" in name for name in mus - nus)


def test_named_parameters_have_adamw():
    dims = Muon(adam_names=("stack.up",)).matrices(AXES)["stack"]
    assert (dims["up"], dims["query"]) == (optax.MaskedNode(), MuonDimensionNumbers((1,), (2, 3)))


def test_beside_frozen_parameters_the_others_have_their_updates():
    axes = {"stack": {"up": None, "down": ("layers", "mlp", "embed")}, "table": None, "norm": ("norm",)}
    random = np.random.default_rng(0)
    params = {"stack": {"up": None, "down": random.normal(size=(2, 6, 4))}, "table": None, "norm": np.ones(4)}
    params = jax.tree.map(jnp.float32, params)
    alone = {"stack": {"down": params["stack"]["down"]}, "norm": params["norm"]}
    found = []
    for tree, names in ((params, axes), (alone, {"stack": {"down": axes["stack"]["down"]}, "norm": axes["norm"]})):
        optimizer = Muon().build(names)
        rates = Rates(jnp.float32(0.1), None)
        found.append(optimizer.update(tree, optimizer.init(tree), tree, rates=rates)[0])
    assert jax.tree.structure(found[0]) == jax.tree.structure(params)
    for ours, expected in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Muon(momentum=0.0), "nesterov = True has no effect at momentum = 0"),
        (lambda: Muon(num_iterations=0), "num_iterations"),
        (lambda: Muon(scaling="height"), "scaling"),
        (lambda: Muon().build({"table": ("vocab", "embed")}), "no parameter is a matrix inside the network"),
        (lambda: Muon(adam_names=("hed",)).build(AXES), "optimizer.adam_names hed: no parameter has such a name"),
        (lambda: Muon(adam_names=("stack",)).build(AXES), "or fewer optimizer.adam_names"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
