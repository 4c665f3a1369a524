"""Sharding: the rules by table, and what they do to real arrays and to the compiled step."""

import contextlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.config import ConfigError
from jaxdl.data import SyntheticText
from jaxdl.experiment import Experiment, load
from jaxdl.mesh import MeshConfig, batch_sharding, make_mesh
from jaxdl.models import Transformer
from jaxdl.optim import LAMB
from jaxdl.report.explanation import readable_bytes
from jaxdl.run.build import make_initial_state, make_plan
from jaxdl.sharding import (
    Layout,
    ShardingConfig,
    constrain,
    explain,
    gather,
    gather_params,
    is_spec,
    lookup,
    named,
    param_specs,
    spec_axes,
    statistics_axis,
    use_layout,
    without_axis,
)
from jaxdl.state import param_bytes_per_device
from jaxdl.step import StepConfig, make_train_step
from jaxdl.tasks import LanguageModelling
from jaxdl.train import main

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
    assert without_axis(spec, "fsdp") == P(None, "tensor", None)
    assert spec_axes(spec) == ("tensor", "fsdp", "fsdp")


@pytest.mark.parametrize(
    ("tensor", "changes", "message"),
    [
        (8, {}, r"--mesh.tensor 8: it divides no dimension .* \(their sizes are 4, 12\). Choose a divisor"),
        (8, {"tensor_dims": ("mlp",)}, r"\(their sizes are 12\)"),
        (2, {"tensor_dims": ("nothing",)}, r"\(their sizes are none\)"),
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


@pytest.mark.parametrize(
    ("replica", "fsdp", "tensor"), [(1, 8, 1), (1, 4, 2), (1, 1, 8), (2, 2, 2), (4, 2, 1)], ids=lambda size: str(size)
)
def test_parameter_bytes_fall_by_fsdp_times_tensor(replica, fsdp, tensor, whole_bytes, on_one_device):
    """Read off the arrays' own shards, with the optimizer's state and the moving average."""
    mesh = MeshConfig(replica=replica, fsdp=fsdp, tensor=tensor)
    plan, state, per_device = plan_state_and_bytes(TEXT.replaced({"mesh": mesh, "step": StepConfig(ema_decay=0.9)}))
    assert whole_bytes == sum(4 * math.prod(x.shape) for x in jax.tree.leaves(plan.parts.network.param_shapes))
    # The vectors of the norms, 0.2 % of the parameters, are below `min_shard_elements` and stay whole.
    assert whole_bytes / per_device == pytest.approx(fsdp * tensor, rel=0.02)
    assert param_bytes_per_device(state.ema_params) == per_device
    assert param_bytes_per_device((state.opt_state[0].mu, state.opt_state[0].nu)) == 2 * per_device
    for leaf in jax.tree.leaves(state):
        assert len({shard.data.nbytes for shard in leaf.addressable_shards}) == 1, "all devices hold equally much"
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(on_one_device), strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg="initial parameters are equal on every mesh")
    # Rows of `explain` say the same, parameter by parameter.
    rows = explain(plan.parts.state_spec.shapes.params, plan.parts.state_spec.params, plan.parts.layout.mesh)
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


def test_replicated_parameters_are_whole_on_every_device(whole_bytes):
    assert plan_state_and_bytes(TEXT.replaced({"sharding.param_sharding": "replicated"}))[2] == whole_bytes


# Gathering


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2), (1, 4, 2)])
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
    assert whole.sharding.is_equivalent_to(NamedSharding(ours.mesh, without_axis(spec, "fsdp")), 2)
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


@pytest.mark.parametrize("sizes", [None, (1, 8, 1), (2, 2, 2), (1, 1, 8)])
@pytest.mark.parametrize("batch", [16, 6])
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


# The compiled step

SMALL = TEXT.replaced({"model": Transformer(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=192)})


def lowered(experiment):
    plan = make_plan(experiment)
    rows = plan.splits.train.batch(np.arange(experiment.batch_size))
    return plan, make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), rows)


def shard_shapes(shapes, shardings):
    return [s.shard_shape(x.shape) for x, s in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)]


def test_the_step_gathers_weights_and_updates_shards():
    """The optimizer, LAMB with its norms, never makes a parameter, gradient or moment whole again."""
    plan, step = lowered(SMALL.replaced({"mesh": MeshConfig(replica=2, fsdp=4)}))
    compiled = step.compile()
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
    used = [(64, 192)] * 2 + [(192, 64)] + [(64, 4, 16)] * 3 + [(4, 16, 64), (128, 64)]
    expected = sorted(",".join(map(str, shape)) for shape in used)
    # And of biases and norm scales, which are replicated, each device exchanges a share and gathers the others'.
    small = sum(
        x.size
        for x, spec in zip(
            jax.tree.leaves(plan.parts.network.param_shapes),
            jax.tree.leaves(plan.parts.state_spec.params, is_leaf=is_spec),
            strict=True,
        )
        if not len(spec)
    )
    shares = [shape for shape in gathered if math.prod(map(int, shape.split(","))) == small]
    assert len(shares) == 1
    assert sorted(set(gathered) - set(shares)) == sorted(set(expected)), "each weight of one layer and the embedding"
    assert len(gathered) == len(expected) + 1, "once; nothing of parameters after the gradients"
    # What goes in and out of the step is one device's share, and no more than donated buffers come back.
    spec, mesh = plan.parts.state_spec, plan.parts.layout.mesh
    sizes = [x.dtype.itemsize for x in jax.tree.leaves(spec.shapes)]
    shapes = shard_shapes(spec.shapes, spec.shardings)
    state_bytes = sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pytest.approx(state_bytes, rel=0.01)
    assert memory.output_size_in_bytes == pytest.approx(state_bytes, rel=0.01)
    # The exchange reports what a ring all-reduce of these shards sends: 2 (n - 1) / n times their bytes.
    state = make_initial_state(plan)
    per_device = param_bytes_per_device(state.params)
    _, metrics = compiled(state, jax.device_put(plan.splits.train.batch(np.arange(16)), batch_sharding(mesh)))
    whole_bytes = 4 * small * 3 // 4  # Of what is replicated on the four devices, each sends a quarter.
    assert metrics["exchange/bytes_sent/replica"] == 2 * (2 - 1) / 2 * (per_device - whole_bytes)
    assert metrics["exchange/residual_norm"] == 0


@pytest.mark.parametrize(("fsdp", "tensor"), [(4, 1), (2, 2)])
def test_bytes_over_replica_are_those_of_the_shards(fsdp, tensor):
    """The dense exchange sends each device's own shard, once, in float32: counted in the lowered step."""
    mesh = MeshConfig(replica=2, fsdp=fsdp, tensor=tensor)
    plan, step = lowered(SMALL.replaced({"mesh": mesh}))
    spec = plan.parts.state_spec
    text = step.as_text()
    reduced = []
    for types in re.findall(r'"stablehlo.all_reduce"\(.*?\}\) : \((.*?)\) ->', text, flags=re.DOTALL):
        for shape, dtype in re.findall(r"tensor<((?:\d+x)*)(\w+)>", types):
            if shape:
                assert dtype == "f32"
                reduced.append(tuple(int(size) for size in shape.rstrip("x").split("x")))
    shards = shard_shapes(spec.shapes.params, spec.shardings.params)
    specs = jax.tree.leaves(spec.params, is_leaf=is_spec)
    sharded = [math.prod(shape) for shape, spec in zip(shards, specs, strict=True) if len(spec)]
    whole = [math.prod(shape) for shape, spec in zip(shards, specs, strict=True) if not len(spec)]
    # All shards in one buffer, each device's share of replicated ones in another, the two norms of the metrics, and the
    # sums of losses and the like with whether all is finite.
    small = 2 + sum(name.startswith("sums/") for name in step.out_info[1]) + 1
    assert sum(math.prod(shape) for shape in reduced) == sum(sharded) + math.ceil(sum(whole) / (fsdp * tensor)) + small


UNTIED = {"model.tied_embeddings": False, "step.microbatches": 2}


@pytest.mark.parametrize(
    ("replica", "fsdp", "tensor", "changes"),
    [
        (1, 8, 1, {}),
        (2, 4, 1, UNTIED),
        (2, 2, 2, {}),
        pytest.param(1, 2, 4, UNTIED, marks=pytest.mark.slow),
        pytest.param(8, 1, 1, UNTIED, marks=pytest.mark.slow),
    ],
)
def test_no_activation_of_all_data_shards_travels(replica, fsdp, tensor, changes):
    """Nothing as large as [batch, length, embed] of a replica: not for the gradient of the embedding either."""
    model = Transformer(num_layers=1, embed_dim=32, num_heads=4, mlp_dim=64)
    data = SyntheticText(vocab_size=96, length=40, num_train=64, num_test=8)
    mesh = MeshConfig(replica=replica, fsdp=fsdp, tensor=tensor)
    experiment = TEXT.replaced({"model": model, "data": data, "batch_size": 64, "mesh": mesh}).replaced(changes)
    plan, step = lowered(experiment)
    activation = 64 // replica // experiment.step.microbatches * 40 * 32
    collectives = r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    sizes = [
        math.prod(int(size) for size in shape.split(","))
        for types in re.findall(collectives, step.compile().as_text())
        for shape in re.findall(r"\w\[([\d,]+)\]", types)
    ]
    assert max(sizes) >= 96 * 32, "the table itself travels"
    # With whole gradients, `fsdp` and `tensor` 1, the exchange fuses all of them into one buffer.
    gradients = sum(x.size for x in jax.tree.leaves(plan.parts.network.param_shapes))
    assert max(size for size in sizes if fsdp * tensor > 1 or size != gradients) < activation


def test_explain_prints_the_table_and_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxdl.data import SyntheticText\n"
        "from jaxdl.experiment import Experiment\n"
        "from jaxdl.models import Transformer\n"
        "from jaxdl.tasks import LanguageModelling\n"
        "def config():\n"
        "    model = Transformer(num_layers=3, embed_dim=64, num_heads=4, mlp_dim=192)\n"
        "    data = SyntheticText(vocab_size=32, length=8, num_train=64, num_test=8)\n"
        "    return Experiment(model=model, data=data, task=LanguageModelling(), batch_size=16, steps=3)\n"
    )
    args = ["--mesh.replica", "2", "--mesh.tensor", "2", "--optimizer", "lars", "--workdir", str(tmp_path / "run")]
    main(["--config", str(file), *args, "--explain"])
    printed = capsys.readouterr().out
    lines = {words[1]: " ".join(words[2:]) for line in printed.splitlines() if len(words := line.split()) > 2}
    assert "parameters on replica 2 x fsdp 2 x tensor 2" in printed
    # 3 x 64 x 192 float32, the last two dimensions split over 4 devices.
    assert lines["layers/mlp/gate"].replace("│ ", "").startswith("3 x 64 x 192 -, fsdp, tensor 36 KiB")
    assert lines["layers/mlp_norm/scale"].replace("│ ", "").startswith("3 x 64 whole 768 B")
    network = make_plan(load(file)).parts.network
    names = {"/".join(key.key for key in path) for path, _ in jax.tree.leaves_with_path(network.param_shapes)}
    assert names <= set(lines)
    assert f"{sum(math.prod(x.shape) for x in jax.tree.leaves(network.param_shapes)):,}" in printed
    assert re.search(r"the compiled step needs [\d.]+ [KM]iB per device: .* of state and batch", printed)
    assert not (tmp_path / "run").exists()


def test_readable_bytes():
    assert [readable_bytes(n) for n in (0, 999, 1000, 18432, 2**20, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "18 KiB",
        "1 MiB",
        "5 GiB",
        "3 TiB",
    ]
