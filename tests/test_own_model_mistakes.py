"""Models of a user's own that fail: one message each, with the user's file and line."""

import re
import textwrap

import pytest
from mistakes import refusal

MISTAKES = """
import jax, jax.numpy as jnp
from flax import linen, nnx
import jaxdl
from jaxdl.data import SyntheticImages

class Net(nnx.Module):
    def __init__(self, rngs, num_classes=4, hidden=None):
        self.layer = nnx.Linear(64, num_classes, rngs=rngs)
    def __call__(self, image):
        return self.layer(image.reshape(len(image), -1))

class Raises(Net):
    def __call__(self, image):
        return self.layer(image)

class Needs(Net):
    def __init__(self, width, rngs):
        super().__init__(rngs)

class Shape(Net):
    def __init__(self, rngs):
        super().__init__(rngs, 7)

class Pair(Net):
    def __call__(self, image):
        return super().__call__(image), image

class Counter(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.int32(0))

class NoKeys(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5)
    def __call__(self, image):
        return self.dropout(super().__call__(image))

class Half(Net):
    def __init__(self, rngs):
        self.layer = nnx.Linear(64, 4, rngs=rngs, param_dtype=jnp.bfloat16)

class Nan(Net):
    def __call__(self, image):
        return super().__call__(image) * jnp.nan

class LinenCounter(linen.Module):
    @linen.compact
    def __call__(self, image):
        self.variable("counts", "calls", lambda: jnp.int32(0))
        return linen.Dense(4)(image.reshape(len(image), -1))

class NoBuild(jaxdl.Model):
    pass

class Returns(jaxdl.Model):
    def build(self):
        return Net(nnx.Rngs(0))

class Fails(jaxdl.Model):
    def build(self):
        raise RuntimeError("not today")

def config(model=None):
    return jaxdl.Experiment(
        model=model or jaxdl.FromModule(Net), batch_size=16, steps=8, mesh={"cpu_devices": 8, "replica": 1},
        data=SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=96, num_test=40),
        report={"tensorboard": False, "curves": False},
    )
"""
FAILURES = {
    "jaxdl.FromModule(Raises)": r"model Raises, .*mine.py, line 14: TypeError: dot_general",
    "jaxdl.FromModule(Needs)": r"needs width, and the data gives only num_classes, channels, dtype. Give it as in "
    r"FromModule\(..., width=...\)",
    "jaxdl.FromModule(Shape)": r"outputs are float32 \[16, 7\], but task classification takes one array",
    "jaxdl.FromModule(Pair)": r"its outputs are a tuple of float32 \[16, 4\], float32 \[16, 8, 8, 1\], but task",
    "jaxdl.FromModule(Counter)": r"model Counter: the variable calls is int32. What a network keeps besides",
    "jaxdl.FromModule(LinenCounter)": r"model LinenCounter: the variable counts/calls is int32",
    "jaxdl.FromModule(NoKeys)": r"model NoKeys, .*mine.py, line 38: ValueError: `deterministic` is False, but",
    "jaxdl.FromModule(Half)": r"the parameter layer/bias is bfloat16. Parameters are kept in float32",
    "NoBuild()": r"NoBuild does not define build\(\), which every model needs",
    "Returns()": r"model returns: build\(\) returned an object of type Net. Return a function",
    "Fails()": r"model fails, .*mine.py, line 63: RuntimeError: not today",
}


@pytest.fixture(scope="module")
def mistakes_file(tmp_path_factory):
    """A config file with a function for each mistake, `f0`, `f1`..."""
    path = tmp_path_factory.mktemp("mistakes") / "mine.py"
    models = [*FAILURES, "jaxdl.FromModule(Nan)"]
    functions = [f"def f{number}():\n    return config({model})\n" for number, model in enumerate(models)]
    path.write_text(textwrap.dedent(MISTAKES).lstrip() + "\n".join(["", *functions]))
    return path


@pytest.mark.parametrize("number", range(len(FAILURES)), ids=list(FAILURES))
def test_a_model_that_fails_is_one_message(capsys, mistakes_file, number):
    message = refusal(capsys, "--config", f"{mistakes_file}:f{number}")
    assert re.search(list(FAILURES.values())[number], message), message
    assert "mine.py" in message or "model" in message


def test_a_model_that_is_nan_from_the_first_step_diverges(capsys, mistakes_file):
    assert "not finite" in refusal(capsys, "--config", f"{mistakes_file}:f{len(FAILURES)}", code=3)
