"""Layers that a user stacks: their biases and scales are those of single layers to optimizers and precision."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from runs import tiny_experiment

from jaxdl import Experiment, FromModule, restore, train
from jaxdl.core.config import ConfigError
from jaxdl.core.files import STACKS_FILE
from jaxdl.models import Network
from jaxdl.models.stacks import _stacks as stacks_of
from jaxdl.models.stacks import as_recorded, named_stacks
from jaxdl.optim import LAMB, AdamW, Muon, Rates, decay_mask, stacked_dims
from jaxdl.optim.muon import matrix_dims
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.precision import cast_weights
from jaxdl.parallel.sharding import is_names
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.run.plan.remarks import decayed_biases, earlier_stacks, unclear_stacks
from jaxdl.training.run.workdir.records import Workdir, stacks_file

X = jax.ShapeDtypeStruct((2, 6), jnp.float32)
SIZES = {"num_classes": 4, "num_features": 6, "dtype": jnp.float32}


class Block(nnx.Module):
    """Stock layers, and a gain and a product of its own."""

    def __init__(self, rngs):
        self.layer, self.norm = nnx.Linear(6, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs)
        self.gain, self.product = nnx.Param(jnp.ones(6)), nnx.Param(jnp.ones((6, 6)))

    def __call__(self, x):
        return self.norm(self.layer(x)) @ self.product[...] * self.gain[...]


class Net(nnx.Module):
    """A stack of blocks, one block beside it, and attention, whose biases have two dimensions in one layer."""

    def __init__(self, rngs, num_classes):
        make = nnx.vmap(Block, in_axes=(0,), out_axes=0)
        self.blocks, self.first = nnx.split_rngs(splits=3)(make)(rngs), Block(rngs)
        self.attention = nnx.MultiHeadAttention(2, 6, rngs=rngs, decode=False)
        self.head = nnx.Linear(6, num_classes, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(run(self.blocks, self.first(x)))


class Tower(nnx.Module):
    """A stack of three blocks, and beside it three rows that are no layers."""

    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block, in_axes=(0,), out_axes=0))(rngs)
        self.rows = nnx.Param(jnp.ones((3, 6)))
        made = [Block(rngs) for _ in range(2)]
        self.by_hand = nnx.merge(nnx.split(made[0])[0], jax.tree.map(lambda *x: jnp.stack(x), *map(nnx.state, made)))


class Towers(nnx.Module):
    def __init__(self, num_classes, *, rngs):
        self.tower, self.head = Tower(rngs), nnx.Linear(64, num_classes, rngs=rngs)

    def __call__(self, image):
        return self.head(image.reshape(len(image), -1))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        x = linen.LayerNorm()(linen.Dense(6)(x))
        return x * self.param("gain", linen.initializers.ones, (6,)), None


class LinenNet(linen.Module):
    num_classes: int

    @linen.compact
    def __call__(self, x):
        scan = linen.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        twice = linen.vmap(
            scan, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=(None, None), axis_size=2
        )
        x, _ = LinenBlock()(scan()(x, None)[0], None)
        return linen.Dense(self.num_classes)(twice()(x, None)[0].sum(0))


@pytest.mark.parametrize("model", [Net, LinenNet])
def test_stacked_parameters_are_those_of_their_layers(model):
    """By the parameters of the same network with single layers: a dimension more is a stack."""
    network = FromModule(model).network([X], **SIZES)
    flat = jax.tree.leaves_with_path(stacked_dims(network.axes), is_leaf=lambda node: isinstance(node, tuple))
    stacked = dict(flat)
    num_dims = {"kernel": 2, "bias": 1, "scale": 1, "gain": 1, "product": 2}
    weights, checked = jax.tree.leaves(decay_mask(network.axes)), 0
    cast = jax.eval_shape(lambda params: cast_weights(params, network.axes, jnp.bfloat16), network.param_shapes)
    names = jax.tree.leaves(network.axes, is_leaf=is_names)
    every = zip(jax.tree.leaves_with_path(network.param_shapes), weights, jax.tree.leaves(cast), names, strict=True)
    for (path, x), weight, rounded, axes in every:
        if "attention" in str(path):
            continue
        wanted = num_dims[path[-1].key]
        assert stacked[path] == tuple(range(x.ndim - wanted)), path
        assert weight == (wanted > 1), path
        assert (rounded.dtype == jnp.bfloat16) == (wanted > 1), path
        dims = matrix_dims(axes)
        assert (dims is not None) == (wanted > 1), path
        assert dims is None or (dims.reduction_axis, dims.output_axis) == ((x.ndim - 2,), (x.ndim - 1,)), path
        checked += x.ndim > wanted
    assert checked == {Net: 6, LinenNet: 10}[model]


def test_attention_is_not_taken_for_a_stack():
    network = FromModule(Net).network([X], **SIZES)
    assert not jax.tree.leaves(stacked_dims(network.axes["attention"]))


def test_rows_beside_a_stack_are_no_layers():
    """Whatever their number. A stack that is made of single layers, without `nnx.vmap`, is one."""
    network = Network(lambda rngs: Towers(4, rngs=rngs), "mine")
    found = named_stacks(network.axes)
    assert {name.rpartition("/")[0] for name in found} == {f"tower/{x}" for x in (
        "blocks", "blocks/layer", "blocks/norm", "by_hand", "by_hand/layer", "by_hand/norm")}  # fmt: skip
    assert set(found.values()) == {(0,)}
    assert len(found) == 12


def test_a_run_goes_on_with_the_stacks_that_it_began_with(tmp_path):
    """Those in its file; a run with checkpoints and no file began when none were known, and has such a state."""
    assert Workdir(None).read_stacks() is Workdir(tmp_path).read_stacks() is None
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    assert Workdir(tmp_path).read_stacks() == {}
    (tmp_path / STACKS_FILE).write_bytes(stacks_file({"blocks/bias": (0,), "blocks/kernel": (1,)})[STACKS_FILE])
    assert Workdir(tmp_path).read_stacks() == {"blocks/bias": (0,), "blocks/kernel": (1,)}
    (tmp_path / STACKS_FILE).write_text('{"blocks/bias": 2}')  # As it was written at first.
    assert Workdir(tmp_path).read_stacks() == {"blocks/bias": (0, 1)}
    (tmp_path / STACKS_FILE).write_text("[1")
    with pytest.raises(ConfigError, match="does not say which parameters are stacked"):
        Workdir(tmp_path).read_stacks()
    mesh = MeshConfig(replica=1, fsdp=1, tensor=1)
    experiment = tiny_experiment(model=FromModule(Towers), optimizer=Muon(), mesh=mesh)
    (tmp_path / STACKS_FILE).unlink()
    for workdir, is_matrix in ((Workdir(), False), (Workdir(tmp_path), True)):
        plan = make_plan(experiment, jax.devices()[:1], workdir=workdir)
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(plan.parts.state_spec.opt_shapes)]
        matrices = [one for one in names if "matrices" in one and "'tower']['blocks']['layer']['bias']" in one]
        assert bool(matrices) == is_matrix
        lines = [one for one in plan.reasons if "were not known to stack layers" in one]
        assert [("tower/blocks/gain" in one, "--init-from" in one) for one in lines] == [(True, True)] * is_matrix


class Attended(nnx.Module):
    def __init__(self, num_classes, channels, dtype, *, rngs):
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.last = nnx.Linear(4, num_classes, rngs=rngs)

    def __call__(self, image):
        x = image.reshape(len(image), -1, 4)
        return self.last(self.attention(x).mean(1))


def test_decayed_biases_are_named():
    experiment = Experiment(model=FromModule(Attended), optimizer=AdamW(weight_decay=0.1))
    network = Network(lambda rngs: Attended(4, 1, jnp.float32, rngs=rngs), "mine")
    (line,) = decayed_biases(experiment.optimizer, network, network.axes)
    assert "takes attention/key/bias, attention/query/bias, attention/value/bias: by" in line
    assert not decayed_biases(AdamW(weight_decay=0.0), network, network.axes)


def test_a_stack_does_not_change_what_is_computed():
    network = FromModule(Net).network([X], **SIZES)
    params, state = network.init(jax.random.key(0))
    x = np.ones((2, 6), np.float32)
    assert network.apply(params, state, x, train=False)[0].shape == (2, 4)


class LinenTower(linen.Module):
    """Blocks that are stacked along an axis of the user's choice."""

    axis: int
    length: int = 3

    @linen.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": self.axis}, "split_rngs": {"params": True}, "length": self.length}
        return linen.scan(LinenBlock, **axes)()(x, None)[0]


class NnxTower(nnx.Module):
    """As `LinenTower`, with matrices of two sizes."""

    def __init__(self, axis, length=3, *, rngs):
        self.blocks = nnx.split_rngs(splits=length)(nnx.vmap(Block, in_axes=(0,), out_axes=axis))(rngs)
        self.wide = nnx.split_rngs(splits=length)(
            nnx.vmap(lambda rngs: nnx.Linear(6, 5, rngs=rngs), in_axes=(0,), out_axes=axis)
        )(rngs)

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("model", "axis", "optimizer"),
    [
        pytest.param(LinenTower, 1, Muon(), marks=pytest.mark.slow),
        pytest.param(NnxTower, -1, LAMB(weight_decay=0.1), marks=pytest.mark.slow),
        (NnxTower, -2, Muon()),
    ],
)
def test_layers_along_another_axis_are_updated_as_those_along_the_first(model, axis, optimizer):
    """By the updates of the same layers along the first; and biases and scales are no weights there either."""
    networks = [FromModule(model, axis=one).network([X], **SIZES) for one in (axis, 0)]
    values = [jax.tree.map(lambda x, key=key: draw(key, x.shape), networks[1].param_shapes) for key in range(2)]
    move = functools.partial(jax.tree.map, lambda x: jnp.moveaxis(x, 0, axis))
    found = []
    for network, (params, grads) in zip(networks, (map(move, values), values), strict=True):
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, network.param_shapes)
        made = optimizer.build(network.axes)

        def update(params, grads, made=made):
            return made.update(grads, made.init(params), params, rates=Rates(jnp.float32(0.1)))[0]

        found.append(jax.jit(update)(params, grads))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6), found[0], move(found[1])
    )
    casts = [
        jax.eval_shape(lambda x, net=net: cast_weights(x, net.axes, jnp.bfloat16), net.param_shapes) for net in networks
    ]
    assert jax.tree.map(lambda x: x.dtype, casts[0]) == jax.tree.map(lambda x: x.dtype, casts[1])


def draw(key, shape):
    return jax.random.normal(jax.random.key(key), shape)


class Changed(nnx.Module):
    """Parameters that are given another shape after they are made; squares along another axis, and what tells it."""

    def __init__(self, *, rngs):
        self.late, self.flat = nnx.Param(jnp.empty(0)), nnx.Param(jnp.zeros(12))
        self.late.set_value(jnp.ones((3, 4)))
        self.flat.set_value(jnp.ones((3, 4)))
        self.told, self.open = (
            nnx.split_rngs(splits=6)(nnx.vmap(make, out_axes=1))(rngs)
            for make in (Block, lambda r: nnx.Linear(6, 6, rngs=r))
        )
        self.wide = nnx.split_rngs(splits=6)(nnx.vmap(lambda rngs: nnx.Linear(2, 5, rngs=rngs), out_axes=1))(rngs)

    def __call__(self, x):
        return x


def test_a_shape_that_changes_is_no_stack():
    assert not [
        name for name in named_stacks(FromModule(Changed).network([X], **SIZES).axes) if name in ("late", "flat")
    ]


def test_layers_as_many_as_elements_are_along_the_axis_of_those_beside_them():
    """Where shapes tell it of none, the leading axis is taken, and it is said."""
    network = FromModule(Changed).network([X], **SIZES)
    dims = named_stacks(network.axes)
    names = [name for name in dims if name.startswith(("told", "open"))]
    assert len(names) == 8
    assert {dims[name] for name in names} == {(1,)}
    assert not unclear_stacks(network)
    network = FromModule(LinenTower, axis=0, length=6).network([X], **SIZES)
    assert set(named_stacks(network.axes).values()) == {(0,)}
    (line,) = unclear_stacks(network)
    assert "Dense_0/bias (dimension 0)" in line
    assert "out_axes=0 of nnx.vmap" in line


def test_neighbours_that_differ_leave_a_stack_unclear():
    shapes = {("enc", "k"): ((3, 6, 5), (6, 5), None), ("dec", "k"): ((6, 5, 3), (6, 5), None)}
    square = {("mid", "k"): ((6, 6, 6), (6, 6), None)}
    assert stacks_of(shapes | square).unclear == ("mid/k (dimension 0)",)
    assert stacks_of({**square, ("mid", "w"): ((5, 4, 6), (5, 4), None)}).dims["mid", "k"] == (2,)
    assert stacks_of({("scalar",): ((3, 4), (), None), ("gain",): ((3,), (), None)}).dims == {
        ("scalar",): (),
        ("gain",): (0,),
    }


@pytest.mark.slow
def test_a_resumed_run_is_told_its_stacks(tmp_path, capsys):
    """Those of the file; without it, as an earlier version's run, none: in training and in evaluation."""
    mesh = MeshConfig(replica=1, fsdp=1, tensor=1)
    optimizer, step = LAMB(learning_rate=0.1), {"ema_decay": None}
    experiment = tiny_experiment(model=FromModule(Towers), optimizer=optimizer, mesh=mesh, steps=2, step=step)
    earlier, new = tmp_path / "earlier", tmp_path / "new"
    train(experiment, new, devices=jax.devices()[:1], max_steps=1, quiet=True)
    assert set(Workdir(new).read_stacks().values()) == {(0,)}
    shutil.copytree(new, earlier)
    (earlier / STACKS_FILE).unlink()
    capsys.readouterr()
    lines = {}
    for workdir in (new, earlier):
        train(experiment, workdir, devices=jax.devices()[:1])
        lines[workdir] = " ".join(capsys.readouterr().out.split())
    assert ["were not known to stack layers" in lines[one] for one in (new, earlier)] == [False, True]
    found = [restore(one) for one in (new, earlier)]
    assert [len(named_stacks(one.parts.network.axes)) for one in found] == [12, 0]
    assert not (earlier / STACKS_FILE).exists()


def test_the_line_on_earlier_stacks_says_which_way_they_differ():
    network = FromModule(LinenTower, axis=1).network([X], **SIZES)
    network.restacked = {"unknown": ((), (0,)), "moved": ((0,), (1,)), "gone": ((0,), ())}
    unknown, others = earlier_stacks(network)
    assert "unknown were not known to stack layers" in unknown
    assert "moved, gone stacked layers along other dimensions (stacks.json" in others
    assert all("also where it starts over" in line for line in earlier_stacks(network, start_over=True))


def test_named_layers_along_another_axis_are_as_recorded():
    """They are layers; a run that began when they were not keeps the rounding of its scales, and their decay."""
    axes = {"kernel": ("embed", "layers", "mlp"), "scale": ("embed", "layers"), "first": ("layers", "embed")}
    assert named_stacks(axes) == {"kernel": (1,), "scale": (1,)}
    assert as_recorded(axes, named_stacks(axes)) == axes
    begun = as_recorded(axes, {})
    assert decay_mask(axes) == {"kernel": True, "scale": False, "first": False}
    assert decay_mask(begun) == {"kernel": True, "scale": True, "first": False}
    shapes = {name: jnp.ones((2,) * len(names)) for name, names in axes.items()}
    for one in (axes, begun):
        dtypes = {name: x.dtype.name for name, x in cast_weights(shapes, one, jnp.bfloat16).items()}
        assert dtypes == {"kernel": "bfloat16", "scale": "float32", "first": "float32"}
