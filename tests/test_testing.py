"""check_exchange: the kinds of jaxdl pass, and each fault is one message. An exchange in a file of a user."""

import dataclasses
import json
import re

import jax.numpy as jnp
import pytest
from jax import lax
from mistakes import refusal

from jaxdl.core import kinds as all_kinds
from jaxdl.core.config import ConfigError
from jaxdl.exchange import (
    Auto,
    DeMo,
    Dense,
    Gradients,
    Linear,
    Link,
    Machine,
    PowerSGD,
    Quantized,
    Sign,
    TopK,
    kinds,
    predict,
)
from jaxdl.exchange.dense import DenseExchange
from jaxdl.exchange.testing import check_exchange
from jaxdl.performance.bench import __main__ as bench
from jaxdl.performance.bench.exchange import exchanges, parse_command
from jaxdl.training.experiment import Experiment

PASS = [
    Dense(wire_dtype="bfloat16"),
    pytest.param(TopK(), marks=pytest.mark.slow),
    pytest.param(Quantized(bits=4, error_feedback=True), marks=pytest.mark.slow),
    pytest.param(Sign(), marks=pytest.mark.slow),
    pytest.param(PowerSGD(), marks=pytest.mark.slow),
    pytest.param(DeMo(), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("exchange", PASS, ids=lambda one: one.label)
def test_the_kinds_of_jaxdl_pass(exchange):
    check_exchange(exchange)


def test_every_kind_is_among_them():
    configs = [one if isinstance(one, Dense | Quantized | TopK) else one.values[0] for one in PASS]
    assert {one.kind for one in configs} == set(kinds())


MINE = '''
import jax
import jax.numpy as jnp
from jaxdl.exchange import Linear

class OneInFour(Linear):
    """A random one of every four entries, the same one in all replicas; the others wait in the residual."""
    def shorten(self, x, key):
        return jnp.pad(x, (0, -x.size % 4)).reshape(-1, 4)[:, jax.random.randint(key, (), 0, 4)]
    def lengthen(self, y, size, key):
        rows = jnp.zeros((y.size, 4)).at[:, jax.random.randint(key, (), 0, 4)].set(y)
        return rows.reshape(-1)[:size]
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A file in a folder outside the repository with an exchange of ten lines."""
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    monkeypatch.chdir(tmp_path)
    with all_kinds.forgotten():
        yield path


def test_an_exchange_of_ten_lines_is_a_kind(mine):
    parse_command(["--import", "mine.py"])
    kind = kinds()["one_in_four"]
    check_exchange(kind())
    assert kind().distortion == (2, -0.25)
    cost = predict(kind(), Gradients({"bias": (1001,), "kernel": (100, 101)}, 8), Machine({"replica": Link(1e-5, 1e8)}))
    assert cost.sent_bytes == 2 * 7 / 8 * 4 * (1001 + 2525)  # The bias is too small, the kernel is filled up to 10,100.
    auto = Auto(candidates=("one_in_four",), bandwidth_gbps=0.1, latency_us=1)
    assert auto.configs(4) == [Dense(), kind()]
    experiment = Experiment(exchange=auto, steps=3)
    assert Experiment.from_json(experiment.to_json()) == experiment
    assert Experiment(steps=3).replaced({"exchange": "one_in_four", "exchange.min_elements": 3}).exchange.kind


@pytest.mark.slow
def test_an_exchange_of_ten_lines_in_the_bench(mine, capsys):
    options = "--devices 8 --mesh.fsdp 2 --num-elements 30000 --num-repeats 1 --methods threshold --kinds one_in_four"
    bench.main(["exchange", "--import", "mine.py", *options.split(), "--json", "rows.json"])
    assert "one_in_four" in capsys.readouterr().out
    rows = {row["exchange"]: row for row in json.loads((mine.parent / "rows.json").read_text())["exchanges"]}
    assert rows.keys() == {"dense float32", "dense bfloat16", "dense float16", "one_in_four"}
    assert rows["one_in_four"]["predicted"]["sent_bytes"] == rows["one_in_four"]["sent_bytes"]
    assert rows["one_in_four"]["compression"] == pytest.approx(4, rel=0.05)
    assert rows["one_in_four"]["config"]["class"] == f"{mine}:OneInFour"


def test_the_options_that_choose_exchanges(mine, capsys):
    labels = [one.label for one in exchanges(parse_command(["--import", "mine.py"]))]
    assert len(labels) == len(set(labels)) > 10
    assert labels[-1] == "one_in_four"
    assert "--kinds nine: there is no such" in refusal(capsys, "exchange", "--kinds", "nine", run=bench.main)
    assert "--import it.py: not a Python file" in refusal(capsys, "exchange", "--import", "it.py", run=bench.main)
    mine.write_text("1 / 0")
    said = refusal(capsys, "exchange", "--import", "mine.py", run=bench.main)
    assert "--import mine.py, line 1: ZeroDivisionError" in said


# Each fault is one message


def faulty(change):
    """A dense exchange with a fault: `change(mean, state, metrics, axis)` of what the right one returns."""

    @dataclasses.dataclass(frozen=True)
    class FaultyExchange(DenseExchange):
        def update(self, grads, state, *, axis, key):
            return change(*super().update(grads, state, axis=axis, key=key), axis)

    class Faulty(Dense, kind=None):
        def undelayed(self, layout):
            return FaultyExchange(self, layout)

    return Faulty()


def wrong_mean(mean, state, metrics, axis):
    return mean | {"odd": mean["odd"] * 1.01}, state, metrics


def constant(mean, state, metrics, axis):
    return mean | {"bias": mean["bias"] + 1}, state, metrics


def no_number(mean, state, metrics, axis):
    return mean | {"kernel": jnp.log(mean["kernel"])}, state, metrics


def wrong_dtype(mean, state, metrics, axis):
    return mean | {"half": mean["half"].astype(jnp.float32)}, state, metrics


def no_bytes(mean, state, metrics, axis):
    return mean, state, {name: x for name, x in metrics.items() if name != "residual_norm"}


def wrong_bytes(mean, state, metrics, axis):
    return mean, state, metrics | {f"bytes_sent/{axis}": metrics[f"bytes_sent/{axis}"] / 2}


def sends_more(mean, state, metrics, axis):
    more = lax.psum(lax.pcast(jnp.ones(20000), axis, to="varying"), axis)
    return (
        mean | {"scalar": mean["scalar"] + 0 * more[0]},
        state,
        metrics | {f"bytes_sent/{axis}": metrics[f"bytes_sent/{axis}"] + 2 * 80000 * 3 / 4},
    )


def fails(mean, state, metrics, axis):
    raise TypeError("no such thing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_mean, "gradient odd: after 4 steps the means add up to something else than the gradients, by .*"),
        (constant, "gradient bias: zeros in, but not zeros out"),
        (wrong_dtype, r"the mean of gradient half is float32\[64, 48\], not bfloat16\[64, 48\]"),
        (no_bytes, "update returned no metric residual_norm"),
        (
            wrong_bytes,
            "the metric bytes_sent/replica is [0-9,]+, but the collectives of the program send",
        ),
        (sends_more, "`cost` predicts [0-9,]+ bytes over replica, but the program sends [0-9,]+"),
        (fails, "TypeError: no such thing"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_one_message(change, words):
    with pytest.raises(AssertionError, match=rf"^Faulty, on replica 4 x fsdp 2: {words}.*\.$") as error:
        check_exchange(faulty(change))
    assert len(str(error.value).splitlines()) == 1


class EverySecond(Linear, kind=None):
    def shorten(self, x, key):
        return x[::2]

    def lengthen(self, y, size, key):
        return jnp.zeros(size).at[::2].set(y)


def test_a_residual_that_loses_something():
    class Lossy(EverySecond, kind=None):
        def send(self, message, context):
            sent = super().send(message, context)
            return dataclasses.replace(sent, residual={name: 0.9 * x for name, x in sent.residual.items()})

    with pytest.raises(AssertionError, match="after 4 steps the means and residuals add up to something"):
        check_exchange(Lossy())


def test_rounding_that_is_not_unbiased():
    class Biased(EverySecond, kind=None):
        @property
        def distortion(self):
            return 1, 0

    with pytest.raises(AssertionError, match="its distortion says that rounding is unbiased, but the mean over 4 keys"):
        check_exchange(Biased(error_feedback=False))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Dense, "is not the config of a gradient exchange"),
        (Auto(), "is not the config of a gradient exchange"),
        (TopK(dense_names=("embed",)), "exchange.dense_names embed: no gradient has such a name"),
    ],
)
def test_what_cannot_be_checked(given, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_exchange(given)
