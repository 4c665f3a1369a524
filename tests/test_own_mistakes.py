"""Parts of a user's own, other than models, that fail: one message each, before anything is compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mistakes import refusal
from runs import tiny_experiment

import jaxdl
from jaxdl import FromFunctions, FromModule, Loss, Optax, Schedule
from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.exchange import GradientLayout, Linear
from jaxdl.optim import SGD
from jaxdl.optim.build import build_schedule
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.run.plan.validate import fit_task, task_inputs
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Classification

HERE = rf"\({re.escape(__file__)}:\d+\)"
"""The place that a message names: a line of this file."""


def own(part, **members):
    """An object of a kind of one's own with these methods."""
    with forgotten():
        return type("Own", (part,), members)()


# Tasks


def sums_with(**changes):
    """A method `sums` that changes those of classification; None removes one."""

    def sums(self, outputs, batch, *, train):
        found = Classification().sums(outputs, batch, train=train) | {
            name: change(outputs) if callable(change) else change for name, change in changes.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    return sums


def no_train(self, outputs, batch):
    return {}


def branches(self, outputs, batch, *, train):
    return {} if outputs.sum() > 0 else None


def looks_up(self, batch, *rest):
    return batch["missing"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"sums": sums_with(weight=None)}, r"task own: sums\(.*\) returned loss, correct, .*, without \"weight\""),
        ({"sums": sums_with(loss=None)}, 'without "loss". Add it'),
        (
            {"sums": sums_with(mine=lambda x: x[:, 0])},
            r"'mine' is float32 \[2\], not a float32 scalar. Sum it over the",
        ),
        ({"sums": sums_with(mine=0.5)}, "'mine' is an object of type float, not an array. Return a float32 scalar"),
        ({"sums": sums_with(loss=lambda x: jnp.int32(0))}, "'loss' is int32. It must be float32, to have a gradient"),
        ({"sums": lambda self, outputs, batch, *, train: [1]}, "returned an object of type list. Return a dictionary"),
        ({"sums": no_train}, rf"task own {HERE}: TypeError: no_train\(\) got an unexpected keyword argument 'train'"),
        ({"sums": branches}, rf"task own {HERE}: it asks whether an array is true"),
        ({"weight": lambda self, batch: jnp.ones(2)}, r"weight\(\) is float32 \[2\], not a float32 scalar"),
        ({"augmented": looks_up}, rf"task own {HERE}: KeyError: 'missing'\."),
        ({"inputs": looks_up}, rf"task own {HERE}: KeyError: 'missing'\."),
        (
            {"metrics": lambda self, sums, spec: {"mine": sums["mine"]}},
            rf"task own {HERE}: KeyError: 'mine'. The sums are correct, correct_top5, loss, weight\.",
        ),
        (
            {"metrics": lambda self, sums, spec: {"mine": 1.0}},
            r"task own: metrics\(\) returned mine, without best_metric = 'accuracy'",
        ),
    ],
)
def test_a_task_that_fails(members, message):
    spec, task = tiny_experiment().data.build().train.spec, own(Classification, **members)

    def outputs(batch):
        return jax.ShapeDtypeStruct((len(batch["image"]), 4), jnp.float32)

    def traced():
        task_inputs(task, spec, spec.blank())
        fit_task(task, spec, outputs)

    with pytest.raises(ConfigError, match=message) as error:
        traced()
    assert "\n" not in str(error.value)
    impossible = own(Classification, metrics=lambda self, sums, spec: {"accuracy": 1 / (sums["loss"] - sums["weight"])})
    fit_task(impossible, spec, outputs)  # Of sums that are made up, which says nothing.


# Schedules


def test_a_schedule_takes_the_arguments_it_asks_for():
    made = own(Schedule, build=lambda self, peak: lambda step: jnp.float32(peak) / (step + 1))
    rate, cycle = build_schedule(made, peak=0.5, total_steps=10, steps_per_epoch=2)
    assert (rate(4), cycle(9)) == (pytest.approx(0.1), pytest.approx(0.1))
    whole = own(Schedule, build=lambda self: lambda step: 1)
    assert build_schedule(whole, peak=0.5, total_steps=10, steps_per_epoch=2)[0](3).dtype == jnp.float32


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda self, peak: peak, r"schedule own: build\(\) returned 0.5. Return a function of the step"),
        (lambda self: lambda step: jnp.ones(2), r"build\(\): of a step it is float32 \[2\]. Return one float32 number"),
        (
            lambda self, rate: None,
            rf"schedule own {HERE}: TypeError: .* missing 1 required positional argument: 'rate'",
        ),
        (lambda self: lambda: 1.0, rf"schedule own {HERE}: TypeError: .* takes 0 positional arguments but 1 was given"),
        (lambda self: lambda step: 1.0 if step < 3 else 0.5, rf"schedule own {HERE}: it asks whether an array is true"),
    ],
)
def test_a_schedule_that_fails(build, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(own(Schedule, build=build), peak=0.5, total_steps=10, steps_per_epoch=2)


def test_a_learning_rate_that_is_none_somewhere():
    made = own(Schedule, build=lambda self, peak: lambda step: peak * jnp.sqrt(5.0 - step))
    with pytest.raises(ConfigError, match=r"^schedule own: the learning rate of step 7 is nan. Return 0 or more"):
        make_plan(tiny_experiment(schedule=made, steps=20, mesh=MeshConfig(replica=2, fsdp=4)))


# Linear exchanges


@pytest.mark.parametrize(
    ("shorten", "lengthen", "message"),
    [
        (
            lambda x: x[::2],
            lambda y, size: jnp.repeat(y, 2)[1:],
            r"lengthen\(\) of float32 \[2048\] returned float32 \[4095",
        ),
        (
            lambda x: x[::2],
            lambda y, size: None,
            r"lengthen\(\) of .* returned an object of type NoneType. Return float32",
        ),
        (lambda x: x.reshape(2, -1), None, r"shorten\(\) of float32 \[4096\] returned float32 \[2, 2048\]"),
        (
            lambda x: jnp.float16(x),
            None,
            r"shorten\(\) of float32 \[4096\] returned float16 \[4096\]. Return float32 \[m\]",
        ),
        (lambda x: x @ jnp.ones(3), None, rf"exchange own: shorten\(\) {HERE}: TypeError: .* x is float32 \[4096\]\."),
    ],
)
def test_a_linear_exchange_that_fails(shorten, lengthen, message):
    members = {
        "shorten": lambda self, x, key: shorten(x),
        "lengthen": lambda self, y, size, key: lengthen(y, size),
    }
    exchange = own(Linear, **members)
    with pytest.raises(ConfigError, match=message):
        exchange.check({"kernel": (64, 64), "bias": (8,)}, GradientLayout(), 2)


def logits(params, image):
    return image.reshape(len(image), -1) @ params["kernel"]


def test_an_exchange_that_fails_in_the_step():
    exchange = own(Linear, shorten=lambda self, x, key: x, lengthen=lambda self, y, size, key: y, send=looks_up)
    exchange = exchange.replaced({"min_elements": 1})
    mesh = MeshConfig(replica=2, fsdp=1, tensor=1, cpu_devices=8)
    experiment = tiny_experiment(
        model=FromFunctions(init, logits), exchange=exchange, mesh=mesh, step=StepConfig(), optimizer=SGD()
    )
    with pytest.raises(ConfigError, match=rf"exchange own {HERE}: TypeError: 'Message' object is not subscriptable"):
        compile_train_step(make_plan(experiment, jax.devices()[:2]))


# What is written wrong


def init(key, image):
    return {"kernel": jnp.zeros((64, 4))}


def apply(params, image, scale=1.0):
    return image


def two_arguments(learning_rate, decay):
    return optax.sgd(learning_rate)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda: FromModule(two_arguments, 5, 3),
            r"takes its arguments by name after module: FromModule\(two_arg.*, NAME=5\)",
        ),
        (lambda: FromFunctions(init, apply, 3), r"by name after init and apply: FromFunctions\(init, apply, NAME=3\)"),
        (lambda: FromFunctions(init), r"FromFunctions needs apply. Set it in Python: FromFunctions\(init, apply\)"),
        (lambda: Optax("adam", 1e-3), r"by name after transformation, .*: Optax\('adam', learning_rate=0.001\)"),
        (lambda: Optax("adam", transformation="sgd"), "transformation is given twice, by position and by name"),
        (lambda: Loss(apply, "x"), r"Loss takes its arguments by name after fn, "),
        (lambda: SGD(0.1), r"SGD takes its arguments by name, learning_rate, .*: SGD\(learning_rate=0.1\)"),
        (lambda: Optax(two_arguments), r"two_arguments needs decay. Give it: Optax\(..., decay=...\)"),
        (
            lambda: Loss(functools.partial(apply, 3)),
            r"functools.partial\(apply, ...\) has no name .* Give apply with its",
        ),
        (lambda: Loss(3), "an object of type int is not a function or a class with a name"),
        (
            lambda: jaxdl.fit(FromModule, np.zeros(3), np.zeros(3)),
            r"fit: give the data by name: jaxdl.fit\(Net, train=",
        ),
        (
            lambda: tiny_experiment(optimizer=optax.adam(1e-3)),
            r"^optimizer: an optax transformation cannot be written to config.json. Write Optax\(\"adam\", lea",
        ),
        (lambda: tiny_experiment(optimizer="adam"), r"adam is an optimizer of optax: Optax\(\"adam\"\)"),
        (lambda: tiny_experiment(optimizer="adma"), "'adma' is a string; give an object: one of "),
        (
            lambda: tiny_experiment().replaced({"optimizer": "prodigy"}),
            "optimizer prodigy: there is no such kind; choose one of .* --optimizer.transformation contrib.prodigy",
        ),
    ],
)
def test_what_is_written_wrong(write, message):
    with pytest.raises(ConfigError, match=message):
        write()


def test_a_default_is_an_option():
    model = FromFunctions(init, apply)
    assert (model.further_options, model.arguments) == ({"scale": 1.0}, {})
    changed = tiny_experiment(model=model).replaced({"model.scale": 0.5}).model
    assert changed.arguments == {"scale": 0.5}


def sized(key, width: int = 3, height=2):
    return {}


def test_an_annotated_whole_number_takes_no_other():
    assert FromFunctions(sized, apply).further_types == {"width": int, "height": int | float, "scale": float}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("hidden = 64", "line 4: the field `hidden = 64` has no type. Write `hidden: int = 64`."),
        ("depth = 50", "line 4: the field depth has no type here. Write depth: TYPE = ..., as in the base class."),
        (
            "hidden: threading.Thread = None",
            "a field has the type <class 'threading.Thread'>, of which config.json can hold no",
        ),
    ],
)
def test_a_field_without_a_type(capsys, tmp_path, field, message):
    path = tmp_path / "mine.py"
    path.write_text(
        f"import jaxdl, threading\nfrom jaxdl.models import ResNet\n\nclass Mine(ResNet):\n    {field}\n\n"
        "def config():\n    return jaxdl.Experiment(model=Mine(), epochs=1)\n"
    )
    assert message in refusal(capsys, "--config", path)
