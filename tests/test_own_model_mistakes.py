"""Models of a user's own that fail: one message each, with the user's file and line."""

import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from mistakes import refusal
from runs import tiny_experiment

from jaxdl import FromFunctions, FromModule, Model
from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.training.run.plan.validate import check_network

HERE = rf"\({re.escape(__file__)}:\d+\)"
"""The place that a message names: a line of this file."""
IMAGES = jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32)
SIZES = {"num_classes": 4, "channels": 1, "dtype": jnp.float32}


class Net(nnx.Module):
    def __init__(self, rngs, num_classes=4):
        self.layer = nnx.Linear(64, num_classes, rngs=rngs)

    def __call__(self, image):
        return self.layer(image.reshape(len(image), -1))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, image):
        return linen.Dense(4)(image.reshape(len(image), -1))


def init(key, image):
    return {"kernel": jax.random.normal(key, (image[0].size, 4))}


def apply(params, image):
    return image.reshape(len(image), -1) @ params["kernel"]


# It has no method that makes a network, or that is called


class NoCall(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(64, 4, rngs=rngs)


class LinenNoCall(linen.Module):
    pass


with forgotten():

    class Returns(Model):
        def build(self):
            return Net(nnx.Rngs(0))


# Its arguments are others


class Needs(Net):
    def __init__(self, width, rngs):
        super().__init__(rngs, width)


class LinenNeeds(LinenNet):
    width: int


def needs(key, image, width):
    return init(key, image)


def renamed(key, x):
    return init(key, x)


def only_params(params):
    return params


def no_input(key):
    return {"kernel": jax.random.normal(key, (64, 4))}


# Shapes


class Multiplies(Net):
    def __call__(self, image):
        return self.layer(image)


class LinenMultiplies(linen.Module):
    @linen.compact
    def __call__(self, image):
        return linen.Dense(4)(image) @ jnp.ones((3, 3))


def multiplies(params, image):
    return image @ params["kernel"]


class Seven(Net):
    def __init__(self, rngs):
        super().__init__(rngs, 7)


class LinenPixels(linen.Module):
    @linen.compact
    def __call__(self, image):
        return linen.Dense(4)(image)


class Pair(Net):
    def __call__(self, image):
        return super().__call__(image), image


def nothing(params, image):
    """Forgets to return."""
    apply(params, image)


# It raises while it is traced


class Branches(Net):
    def __call__(self, image):
        return super().__call__(image) if image.sum() > 0 else image


class LinenBranches(LinenNet):
    def __call__(self, image):
        return float(image.sum()) * super().__call__(image)


def adds_text(params, image):
    return image + "one"


# It keeps what cannot be kept


class Counter(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.int32(0))


class LinenCounter(LinenNet):
    @linen.compact
    def __call__(self, image):
        self.variable("counts", "calls", lambda: jnp.int32(0))
        return linen.Dense(4)(image.reshape(len(image), -1))


def counting(key, image):
    return init(key, image), {"calls": jnp.int32(0)}


def same_names(key, image):
    return init(key, image), {"kernel": jnp.zeros(3)}


def with_state(params, state, image):
    return apply(params, image), state


def without_state(params, state, image):
    return apply(params, image)


class Half(Net):
    def __init__(self, rngs):
        self.layer = nnx.Linear(64, 4, rngs=rngs, param_dtype=jnp.bfloat16)


# Dropout without its keys, or without its mode


class NoKeys(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, image):
        return self.dropout(super().__call__(image))


class LinenNoMode(LinenNet):
    @linen.compact
    def __call__(self, image):
        return linen.Dropout(0.5)(linen.Dense(4)(image.reshape(len(image), -1)))


def other_key(params, image, rngs):
    return apply(params, image) * jax.random.bernoulli(rngs, 0.5, (len(image), 4))


RAISED = r"It was called on float32 \[(2|16), 8, 8, 1\]"
FAILURES = [
    (FromModule(NoCall), r"model NoCall: NoCall has no method __call__\(self, inputs\). Add one."),
    (FromModule(LinenNoCall), r"model LinenNoCall: LinenNoCall has no method __call__\(self, inputs\). Add one."),
    (Returns(), r"model returns: build\(\) returned an object of type Net. Return a function"),
    (
        FromModule(Needs),
        r"Needs needs width, and the data gives only num_classes, channels, dtype. Give it: FromModule\(",
    ),
    (FromModule(LinenNeeds), "LinenNeeds needs width, and the data gives only num_classes, channels, dtype"),
    (
        FromFunctions(needs, apply),
        "needs needs width, and the data gives only num_classes, channels, dtype; only image",
    ),
    (FromFunctions(renamed, apply), "renamed needs x, .*; only image, as apply calls its inputs, would be zeros"),
    (FromFunctions(no_input, only_params), rf"model only_params {HERE}: TypeError: .* but 2 were given. {RAISED}"),
    (FromModule(Multiplies), rf"model Multiplies {HERE}: TypeError: dot_general requires .*\. {RAISED}"),
    (FromModule(LinenMultiplies), rf"model LinenMultiplies {HERE}: TypeError: dot_general requires .*\. {RAISED}"),
    (FromFunctions(init, multiplies), rf"model multiplies {HERE}: TypeError: dot_general requires .*\. {RAISED}"),
    (FromModule(Seven), r"model Seven: .* its outputs are float32 \[16, 7\], but task classification takes one array"),
    (
        FromModule(LinenPixels),
        r"LinenPixels: .* its outputs are float32 \[16, 8, 8, 4\], but task classification takes",
    ),
    (FromModule(Pair), r"its outputs are a tuple of float32 \[16, 4\], float32 \[16, 8, 8, 1\], but task"),
    (FromFunctions(init, nothing), r"model nothing: .* its outputs are nothing \(is there a return\?\), but task"),
    (
        FromModule(Branches),
        rf"model Branches {HERE}: it asks whether an array is true, .* Use jnp.where or jax.lax.cond",
    ),
    (FromModule(LinenBranches), rf"model LinenBranches {HERE}: it needs the number in an array, .* Keep it an array"),
    (FromFunctions(init, adds_text), rf"adds_text {HERE}: TypeError: .*: a value that is only known .* and 'str'"),
    (FromModule(Counter), "model Counter: the variable calls is int32. What a network keeps besides"),
    (FromModule(LinenCounter), "model LinenCounter: the variable counts/calls is int32. What a network keeps"),
    (FromFunctions(counting, with_state), "model with_state: the variable calls is int32. What a network keeps"),
    (FromFunctions(same_names, with_state), "a parameter and an array of the state are both named kernel"),
    (FromFunctions(init, with_state), r"init returned dict. .* return a pair: \(params, state\)"),
    (FromModule(Half), "the parameter layer/bias is bfloat16. Parameters are kept in float32"),
    (FromModule(NoKeys), rf"model NoKeys {HERE}: ValueError: `deterministic` is False, but no `rngs`"),
    (FromModule(LinenNoMode), rf"model LinenNoMode {HERE}: .*deterministic"),
    (FromFunctions(init, other_key), "other_key needs rngs, and the data gives only .* key or rng is a random key"),
]


@pytest.mark.parametrize(("model", "message"), FAILURES, ids=[message[:30] for _, message in FAILURES])
def test_a_model_that_fails_is_one_message(model, message):
    """Before anything is compiled."""
    experiment = tiny_experiment(model=model, task={"kind": "classification"})
    with pytest.raises(ConfigError) as error:
        check_network(experiment, model.network([IMAGES], **SIZES), experiment.data.build().train.spec, 1)
    said = str(error.value)
    assert re.search(message, said), said
    assert "\n" not in said
    assert "Tracer" not in said


MINE = """
import jax, jax.numpy as jnp
from flax import linen, nnx
import jaxdl
from jaxdl.data import SyntheticImages

class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(64, 4, rngs=rngs)
    def __call__(self, image):
        return self.layer(image.reshape(len(image), -1))

class Raises(Net):
    def __call__(self, image):
        return self.layer(image)

class Nan(Net):
    def __call__(self, image):
        return super().__call__(image) * jnp.nan

class LinenNan(linen.Module):
    @linen.compact
    def __call__(self, image):
        return linen.Dense(4)(image.reshape(len(image), -1)) * jnp.nan

class NoBuild(jaxdl.Model):
    pass

class Fails(jaxdl.Model):
    def build(self):
        raise RuntimeError("not today")

def made(model):
    return jaxdl.Experiment(
        model=model, batch_size=16, steps=8, mesh={"cpu_devices": 8, "replica": 1},
        data=SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=96, num_test=40),
        report={"tensorboard": False, "curves": False},
    )

def raises(): return made(jaxdl.FromModule(Raises))
def nan(): return made(jaxdl.FromModule(Nan))
def linen_nan(): return made(jaxdl.FromModule(LinenNan))
def no_build(): return made(NoBuild())
def fails(): return made(Fails())
"""


@pytest.mark.parametrize(
    ("function", "message", "code"),
    [
        ("raises", r"model Raises \(.*mine.py:14\): TypeError: dot_general", 2),
        ("no_build", r"NoBuild does not define build\(\), which every model needs", 2),
        ("fails", r"model fails \(.*mine.py:30\): RuntimeError: not today\.", 2),
        ("nan", "not finite", 3),
        pytest.param("linen_nan", "not finite", 3, marks=pytest.mark.slow),
    ],
)
def test_the_command_prints_it(capsys, tmp_path, function, message, code):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MINE).lstrip())
    said = refusal(capsys, "--config", f"{path}:{function}", code=code)
    assert re.search(message, said), said
