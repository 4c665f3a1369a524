"""Sharding: the rules by table, and what they do to real arrays and to the compiled step."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticText
from jaxdl.models import Transformer
from jaxdl.optim import LAMB
from jaxdl.parallel.gathering import gather, gather_params
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.parallel.sharding import (
    Layout,
    ShardingConfig,
    constrain,
    named,
    param_specs,
    spec_axes,
    statistics_axis,
    use_layout,
    without_axes,
)
from jaxdl.parallel.token_vectors import lookup
from jaxdl.report import explain
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.state import param_bytes_per_device
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import LanguageModelling

P = PartitionSpec
TEXT = Experiment(
    model=Transformer(num_layers=2, embed_dim=128, num_heads=8, mlp_dim=256, tied_embeddings=False),
    data=SyntheticText(vocab_size=128, length=8, num_train=64, num_test=8),
    task=LanguageModelling(),
    optimizer=LAMB(),
    batch_size=16,
    steps=1,
)


def layout(replica, fsdp, tensor, *, num_devices=8, **config):
    mesh = make_mesh(MeshConfig(replica=replica, fsdp=fsdp, tensor=tensor), jax.devices()[:num_devices])
    return Layout(ShardingConfig(**config), mesh)


# The rules


@pytest.mark.parametrize(
    ("axes", "shape", "sizes", "config", "spec"),
    [
        # fsdp alone: the largest dimension that it divides; of equal ones the last.
        (("embed", "mlp"), (32, 64), (1, 8, 1), {}, P(None, "fsdp")),
        (("embed", "mlp"), (64, 32), (1, 8, 1), {}, P("fsdp")),
        (("embed", "mlp"), (64, 64), (1, 8, 1), {}, P(None, "fsdp")),
        (("embed", "mlp"), (32, 65), (1, 8, 1), {}, P("fsdp")),
        (("embed", "mlp"), (33, 65), (1, 8, 1), {}, P()),
        # tensor first, on the first of its dimensions that it divides; fsdp on the largest that is left.
        (("embed", "mlp"), (64, 512), (1, 4, 2), {}, P("fsdp", "tensor")),
        (("mlp", "embed"), (512, 64), (1, 4, 2), {}, P("tensor", "fsdp")),
        (("embed", "heads", "head_dim"), (64, 4, 16), (1, 4, 2), {}, P("fsdp", "tensor")),
        (("heads", "head_dim", "embed"), (4, 16, 64), (1, 4, 2), {}, P("tensor", None, "fsdp")),
        (("heads", "mlp"), (3, 512), (1, 4, 2), {}, P(None, ("tensor", "fsdp"))),
        (("heads", "mlp"), (4, 512), (1, 1, 8), {}, P(None, "tensor")),
        (("embed", "mlp"), (64, 512), (1, 1, 8), {"tensor_dims": ("embed",)}, P("tensor")),
        (("embed", "mlp"), (64, 512), (1, 8, 1), {"tensor_dims": ()}, P(None, "fsdp")),
        # Nothing else left for fsdp: the tensor dimension once more, if it can be cut into both.
        (("embed", "mlp"), (129, 6), (1, 4, 2), {}, P(None, "tensor")),
        # replica splits no parameter.
        (("embed", "mlp"), (64, 512), (8, 1, 1), {}, P()),
        (("embed", "mlp"), (64, 512), (2, 2, 2), {}, P("fsdp", "tensor")),
        # Stacked layers are never split, whatever their number.
        (("layers", "embed", "mlp"), (1024, 32, 64), (1, 8, 1), {}, P(None, None, "fsdp")),
        (("layers", "embed", "mlp"), (1024, 33, 65), (1, 8, 1), {}, P()),
        (("layers", "embed", "mlp"), (8, 64, 512), (1, 4, 2), {}, P(None, "fsdp", "tensor")),
        # Small ones stay whole; the size is that of one layer.
        (("norm",), (4096,), (1, 8, 1), {}, P()),
        (("norm",), (8,), (1, 8, 1), {"min_shard_elements": 1}, P()),
        (("embed", "mlp"), (8, 31), (1, 8, 1), {}, P()),
        (("embed", "mlp"), (32, 8), (1, 8, 1), {}, P("fsdp")),
        (("layers", "norm"), (1024, 128), (1, 8, 1), {}, P()),
        (("embed", "mlp"), (8, 16), (1, 4, 2), {}, P()),
        (("embed", "mlp"), (64, 512), (1, 4, 2), {"min_shard_elements": 10**6}, P()),
        # Plain data parallel inside the node; tensor is not touched by it.
        (("embed", "mlp"), (64, 512), (1, 8, 1), {"param_sharding": "replicated"}, P()),
        (("embed", "mlp"), (64, 512), (1, 4, 2), {"param_sharding": "replicated"}, P(None, "tensor")),
        # Convolutions and scalars.
        (("height", "width", "channel_in", "channel_out"), (3, 3, 9, 64), (1, 8, 1), {}, P(None, None, None, "fsdp")),
        (("height", "width", "channel_in", "channel_out"), (3, 3, 64, 9), (1, 4, 2), {}, P(None, None, "fsdp")),
        ((), (), (1, 8, 1), {}, P()),
    ],
)
def test_param_spec(axes, shape, sizes, config, spec):
    assert layout(*sizes, **config).param_spec(axes, shape) == spec


@pytest.mark.parametrize(
    ("axes", "shape", "sizes", "spec"),
    [
        # Stages split the layers of every parameter, biases too.
        (("layers", "embed", "mlp"), (4, 64, 64), {"stage": 2, "fsdp": 4}, P("stage", None, "fsdp")),
        (("layers", "norm"), (4, 64), {"stage": 2, "fsdp": 4}, P("stage")),
        (("vocab", "embed"), (64, 32), {"stage": 2, "fsdp": 4}, P("fsdp")),
        # The axes over which parameters are gathered split one dimension together where they can.
        (("embed", "mlp"), (32, 64), {"fsdp": 2, "context": 4}, P(None, ("fsdp", "context"))),
        (("embed", "mlp"), (64, 4), {"fsdp": 2, "context": 4}, P(("fsdp", "context"))),
        (("embed", "mlp"), (68, 66), {"fsdp": 2, "context": 4}, P("context", "fsdp")),
        (("embed", "mlp"), (32, 64), {"fsdp": 2, "context": 2, "tensor": 2}, P(("fsdp", "context"), "tensor")),
        # Experts are split over fsdp, so the other one splits another dimension.
        (("expert", "embed", "mlp"), (8, 32, 64), {"fsdp": 2, "context": 4}, P("fsdp", None, "context")),
    ],
)
def test_param_spec_over_stages_and_lengths(axes, shape, sizes, spec):
    mesh = make_mesh(MeshConfig(**{"fsdp": 1} | sizes))
    assert Layout(ShardingConfig(), mesh).param_spec(axes, shape) == spec


def test_activation_spec_and_what_is_manual():
    ours = layout(2, 2, 2)
    assert ours.activation_spec(("batch", "length", "mlp"), (8, 5, 64)) == P(("replica", "fsdp"), None, ("tensor",))
    assert ours.activation_spec(("batch", "heads"), (8, 3)) == P(("replica", "fsdp"), None)
    assert ours.activation_spec(("batch",), (6,)) == P(None)
    inside = Layout(ours.config, ours.mesh, manual=frozenset({"replica"}))
    assert inside.activation_spec(("batch", "mlp"), (6, 64)) == P(("fsdp",), ("tensor",))


def test_statistics_are_averaged_over_replicas_that_see_a_part_of_the_batch_each():
    assert statistics_axis() is None
    for replica, manual, axis in [(2, {"replica"}, "replica"), (2, set(), None), (1, {"replica"}, None)]:
        rules = layout(replica, -1, 1)
        with use_layout(Layout(rules.config, rules.mesh, manual=frozenset(manual))):
            assert statistics_axis() == axis


def test_specs_without_an_axis():
    spec = P(None, ("tensor", "fsdp"), "fsdp")
    assert without_axes(spec, "fsdp") == P(None, "tensor", None)
    assert spec_axes(spec) == ("tensor", "fsdp", "fsdp")


@pytest.mark.parametrize(
    ("tensor", "changes", "message"),
    [
        (8, {}, r"mesh.tensor=8: it divides none of the dimensions .* \(their sizes are 4, 12\). Choose another size"),
        (8, {"tensor_dims": ("mlp",)}, r"\(their sizes are 12\)"),
        (
            2,
            {"tensor_dims": ("nothing",)},
            r"logical axes \(embed, heads, mlp\) is among sharding",
        ),
        (4, {"min_shard_elements": 769}, r"split only parameters of fewer than 769 elements, and these stay whole"),
    ],
)
def test_a_tensor_axis_of_no_use_is_refused(tensor, changes, message):
    axes = {"a": ("embed", "mlp"), "b": ("heads", "embed")}
    shapes = {"a": jax.ShapeDtypeStruct((64, 12), "float32"), "b": jax.ShapeDtypeStruct((4, 64), "float32")}
    with pytest.raises(ConfigError, match=message):
        param_specs(layout(1, -1, tensor, **changes), axes, shapes)
    assert param_specs(layout(1, -1, 2), axes, shapes) == {"a": P("fsdp", "tensor"), "b": P("tensor", "fsdp")}


# Real arrays


def plan_state_and_bytes(experiment, num_devices=8):
    plan = make_plan(experiment, jax.devices()[:num_devices])
    state = make_initial_state(plan)
    return plan, state, param_bytes_per_device(state.params)


@pytest.fixture(scope="module")
def on_one_device():
    return plan_state_and_bytes(TEXT, 1)[1].params


@pytest.fixture(scope="module")
def whole_bytes(on_one_device):
    return param_bytes_per_device(on_one_device)


def test_parameter_bytes_fall_by_fsdp_times_tensor(whole_bytes, on_one_device):
    """Read off the arrays' own shards, with the optimizer's state and the moving average."""
    mesh = MeshConfig(replica=2, fsdp=2, tensor=2)
    plan, state, per_device = plan_state_and_bytes(TEXT.replaced({"mesh": mesh, "step": StepConfig(ema_decay=0.9)}))
    assert whole_bytes == sum(4 * math.prod(x.shape) for x in jax.tree.leaves(plan.parts.network.param_shapes))
    # The vectors of the norms, 0.2 % of the parameters, are below `min_shard_elements` and stay whole.
    assert whole_bytes / per_device == pytest.approx(2 * 2, rel=0.02)
    assert param_bytes_per_device(state.ema_params) == per_device
    assert param_bytes_per_device((state.opt_state[0].mu, state.opt_state[0].nu)) == 2 * per_device
    for leaf in jax.tree.leaves(state):
        assert len({shard.data.nbytes for shard in leaf.addressable_shards}) == 1, "all devices hold equally much"
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(on_one_device), strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg="initial parameters are equal on every mesh")
    # Rows of `explain` say the same, parameter by parameter.
    spec, parts = plan.parts.state_spec, plan.parts
    rows = explain(spec.shapes.params, spec.params, parts.layout.mesh, parts.network.axes)
    assert not any(row.by_size for row in rows)
    held = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params)]
    assert [row.bytes_per_device for row in rows] == held
    assert [row.shape for row in rows] == [leaf.shape for leaf in jax.tree.leaves(state.params)]
    assert [row.name for row in rows][:2] == ["embedding", "final_norm/scale"]


def test_parameter_bytes_fall_exactly_but_for_norm_scales(whole_bytes):
    plan, _, bytes_per_device = plan_state_and_bytes(TEXT.replaced({"sharding.min_shard_elements": 1, "mesh.fsdp": 8}))
    shapes = jax.tree_util.tree_flatten_with_path(plan.parts.network.param_shapes)[0]
    scales = sum(4 * math.prod(x.shape) for path, x in shapes if path[-1].key == "scale")
    assert 0 < scales < 0.02 * whole_bytes
    assert (bytes_per_device - scales) * 8 == whole_bytes - scales


@pytest.mark.slow
def test_replicated_parameters_are_whole_on_every_device(whole_bytes):
    assert plan_state_and_bytes(TEXT.replaced({"sharding.param_sharding": "replicated"}))[2] == whole_bytes


# Gathering


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)])
def test_gather_changes_no_value_and_splits_the_gradient_like_the_parameter(sizes):
    ours = layout(*sizes)
    axes, x = ("embed", "mlp"), np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    spec = ours.param_spec(axes, x.shape)
    assert "fsdp" in spec_axes(spec)
    placed = jax.device_put(x, NamedSharding(ours.mesh, spec))

    @jax.jit
    def forward_and_backward(x):
        with use_layout(ours):
            whole, back = jax.vjp(lambda x: gather(x, axes), x)
            return whole, back(2 * whole)[0]

    whole, gradient = forward_and_backward(placed)
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(gradient, 2 * x)
    assert whole.sharding.is_equivalent_to(NamedSharding(ours.mesh, without_axes(spec, "fsdp")), 2)
    assert gradient.sharding.is_equivalent_to(placed.sharding, 2)
    assert whole.addressable_shards[0].data.nbytes == placed.addressable_shards[0].data.nbytes * sizes[1]


def test_without_a_layout_nothing_is_moved():
    x = jnp.ones((64, 64))
    assert gather(x, ("embed", "mlp")) is x
    assert constrain(x, "batch", "mlp") is x


def test_gather_params_leaves_stacked_layers_to_their_layer():
    ours = layout(1, 8, 1)
    params = {"head": jnp.ones((64, 64)), "layers": jnp.ones((2, 64, 64)), "norm": jnp.ones(64)}
    axes = {"head": ("embed", "mlp"), "layers": ("layers", "embed", "mlp"), "norm": ("norm",)}
    placed = jax.device_put(params, named(ours.mesh, param_specs(ours, axes, params)))

    @jax.jit
    def gathered(params):
        with use_layout(ours):
            return gather_params(params, axes)

    shards = jax.tree.map(lambda x: x.addressable_shards[0].data.shape, gathered(placed))
    assert shards == {"head": (64, 64), "layers": (2, 64, 8), "norm": (64,)}


# Lookup


@pytest.mark.parametrize(("sizes", "batch"), [(None, 16), ((1, 8, 1), 16), ((2, 2, 2), 6), ((1, 1, 8), 16)])
def test_lookup_and_its_gradient(sizes, batch):
    """Rows are read, and their gradients added up where a token comes several times; 6 examples are not split."""
    random = np.random.default_rng(0)
    table = random.normal(size=(12, 4)).astype(np.float32)
    tokens, weight = random.integers(0, 12, (batch, 5)), random.normal(size=(batch, 5, 4)).astype(np.float32)

    @jax.jit
    def forward_and_backward(table, tokens):
        with use_layout(layout(*sizes)) if sizes else contextlib.nullcontext():
            rows, back = jax.vjp(lambda table: lookup(table, tokens), table)
            return rows, back(jnp.asarray(weight))[0]

    rows, gradient = forward_and_backward(table, tokens)
    expected = np.zeros((12, 4))
    np.add.at(expected, tokens, weight)
    np.testing.assert_array_equal(rows, table[tokens])
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_the_gradient_of_a_lookup_is_summed_in_float32():
    """In bfloat16 a sum of ones ends at 256."""
    tokens = jnp.zeros((8, 125), jnp.int32)
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(lookup(table, tokens).astype(jnp.float32))))
    table = jnp.ones((3, 2), jnp.bfloat16)
    assert gradient(table).dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient(table).astype(jnp.float32), [[1000, 1000], [0, 0], [0, 0]])


def test_axes_of_one_device_split_no_batch():
    assert layout(2, 4, 1).batch_axes(16) == ("replica", "fsdp")
    assert layout(1, 4, 2).batch_axes(16) == ("fsdp",)
    assert layout(1, 1, 2, num_devices=2).batch_axes(16) == ()
    assert layout(2, 4, 1).batch_axes(3) == ()
