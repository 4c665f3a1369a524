"""Layers that a user stacks: their biases and scales are those of single layers to optimizers and precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxdl import Experiment, FromModule
from jaxdl.models import Network
from jaxdl.optim import AdamW, decay_mask, num_stacked_dims
from jaxdl.optim.muon import matrix_dims
from jaxdl.precision import cast_weights
from jaxdl.run.remarks import decayed_biases
from jaxdl.sharding import is_names

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
    stacked = dict(jax.tree.leaves_with_path(num_stacked_dims(network.axes)))
    num_dims = {"kernel": 2, "bias": 1, "scale": 1, "gain": 1, "product": 2}
    weights, checked = jax.tree.leaves(decay_mask(network.axes)), 0
    cast = jax.eval_shape(lambda params: cast_weights(params, network.axes, jnp.bfloat16), network.param_shapes)
    names = jax.tree.leaves(network.axes, is_leaf=is_names)
    every = zip(jax.tree.leaves_with_path(network.param_shapes), weights, jax.tree.leaves(cast), names, strict=True)
    for (path, x), weight, rounded, axes in every:
        if "attention" in str(path):
            continue
        wanted = num_dims[path[-1].key]
        assert stacked[path] == x.ndim - wanted, path
        assert weight == (wanted > 1), path
        assert (rounded.dtype == jnp.bfloat16) == (wanted > 1), path
        dims = matrix_dims(axes)
        assert (dims is not None) == (wanted > 1), path
        assert dims is None or (dims.reduction_axis, dims.output_axis) == ((x.ndim - 2,), (x.ndim - 1,)), path
        checked += x.ndim > wanted
    assert checked == {Net: 6, LinenNet: 10}[model]


def test_attention_is_not_taken_for_a_stack():
    network = FromModule(Net).network([X], **SIZES)
    assert set(jax.tree.leaves(num_stacked_dims(network.axes["attention"]))) == {0}


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
    (line,) = decayed_biases(experiment, network)
    assert "takes attention/key/bias, attention/query/bias, attention/value/bias: by" in line
    assert not decayed_biases(experiment.replaced({"optimizer.weight_decay": 0.0}), network)


def test_a_stack_does_not_change_what_is_computed():
    network = FromModule(Net).network([X], **SIZES)
    params, state = network.init(jax.random.key(0))
    x = np.ones((2, 6), np.float32)
    assert network.apply(params, state, x, train=False)[0].shape == (2, 4)
