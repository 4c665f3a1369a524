"""Checks for classes of your own, to be called in your tests.

from jaxdl.testing import check_exchange

def test_my_exchange():
    check_exchange(MyExchange())
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import without_frames
from jaxdl.exchange import (
    ExchangeConfig,
    GradientLayout,
    Gradients,
    Link,
    Machine,
    exchanged_on_mesh,
    init_on_mesh,
    predict,
    state_specs,
)
from jaxdl.exchange.base import PER_REPLICA
from jaxdl.exchange.resplit import resplit
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.compiler.wire_bytes import sent_bytes
from jaxdl.parallel.mesh import FILLING_AXIS, MODEL_AXES, Axis, MeshConfig

_NUM_DEVICES = 8
_INNER = (FILLING_AXIS, *MODEL_AXES)
_AXES = (Axis.REPLICA.value, *_INNER)
_ROWS = 64
_LEAST_ELEMENTS = 3072
_SPECS = {
    "kernel": PartitionSpec(*_INNER),
    "layers": PartitionSpec(None, *reversed(_INNER)),
    "half": PartitionSpec(_INNER[1]),
    "odd": PartitionSpec(),
    "bias": PartitionSpec(),
    "scalar": PartitionSpec(),
    "empty": PartitionSpec(),
}
"""How the gradients lie inside a replica: split over both inner axes, one or none."""
_METRICS = ("bytes_sent/replica", "compression", "residual_norm", "residual_ratio")
_EXACT, _ROUNDED = 1e-5, 2.0**-6
"""The error allowed in a mean, relative to the largest gradient: of float32 sums, and of sums of 16 bits."""
_NOISE = 0.6
"""Means over several keys must have this share of the error of one at most, if rounding is unbiased: a half of it on
average for four, whatever the gradients."""
_ENOUGH_ELEMENTS = 1000
"""Of a gradient of fewer elements the mean error is not certain enough."""
_MOST_MISPREDICTED = 0.1
Arrays = dict[str, np.ndarray]


@without_frames
def check_exchange(exchange: ExchangeConfig, *, num_steps: int = 4) -> None:
    """Checks what every gradient exchange must do, on random gradients and 8 virtual CPU devices.

    The gradients are large and small, stacked, odd-sized, empty, of 32 and 16 bits, and lie on replica 4 x fsdp 2 and
    on replica 2 x fsdp 2 x tensor 2. Checked is that

    - the mean is right: as it is where the exchange does not compress; else after adding the residual (the means so far
      and the residuals are the true means so far); on average, for unbiased rounding without a residual;
    - gradients of zero give zero, equal inputs equal bits, and all devices have the same mean;
    - the state carries over from 4 replicas to 2 and what was not sent is sent there; a single replica has the same;
    - the metrics report the bytes of the program's collectives, and `cost` predicts about as many;
    - with `delay_steps` 1 the means are those of the step before.

    It takes some seconds to compile. Give an exchange whose warm-ups are shorter than `num_steps`.

    Raises:
      AssertionError: the exchange does something else, or fails; one message says what, where and by how much.
      ConfigError: it is no config of an exchange, its options do not fit the gradients, or JAX runs on other devices.
    """
    if not isinstance(exchange, ExchangeConfig):
        raise ConfigError(
            f"check_exchange: {exchange!r} is not the config of a gradient exchange. Give an object of a class derived "
            "from jaxdl.exchange.Compressed or ExchangeConfig."
        )
    start_devices(MeshConfig(replica=-1, fsdp=1, cpu_devices=_NUM_DEVICES))
    exchange = exchange.replaced({"delay_steps": 0})
    several = _checked_run(exchange, (4, 2, 1), num_steps)
    inner = _checked_run(exchange, (2, 2, 2), num_steps)
    with _in(exchange, "its state of 4 replicas on 2"):
        _check_resplit(several, inner)
    with _in(exchange, "delay_steps = 1"):
        _check_delayed(exchange, inner)


class _Run:
    """An exchange on a mesh: its compiled update, and what some steps of it did."""

    def __init__(self, exchange: ExchangeConfig, sizes: tuple[int, int, int]) -> None:
        self.exchange, self.sizes = exchange, dict(zip(_AXES, sizes, strict=True))
        count = math.prod(sizes)
        self.mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple(self.sizes))
        self.inner = {axis: self.sizes[axis] for axis in _INNER if self.sizes[axis] > 1}
        self.specs = {
            name: PartitionSpec(*(axis if axis in self.inner else None for axis in spec))
            for name, spec in _SPECS.items()
        }
        self.shapes = _shapes(exchange)
        self.layout = GradientLayout(specs=self.specs, inner=self.inner, stacked=frozenset({"layers"}))
        built = exchange.build(self.layout)
        self.places = state_specs(built, self.shapes, self.specs, self.mesh)
        self.init = jax.jit(lambda: init_on_mesh(built, self.shapes, self.specs, self.mesh))
        update = exchanged_on_mesh(built, self.specs, self.places, self.mesh)
        self.lowered = jax.jit(update).lower(self.on_mesh(self.gradients(0)), self.init(), jax.random.key(0))
        self.update = self.lowered.compile()
        self.there: Arrays = {name: np.zeros(shape.shape) for name, shape in self.shapes.items()}
        """The sum of the true means so far; where the exchange forgets, earlier ones count less."""
        self.sent: Arrays = {name: np.zeros(shape.shape) for name, shape in self.shapes.items()}
        """The same of the means so far."""
        self.state = self.init()
        self.metrics: dict[str, float] = {}

    @property
    def residual(self) -> Arrays:
        """What has not been sent yet, of all replicas; empty if the exchange keeps nothing."""
        unsent = self.state.get(PER_REPLICA, {}).get(self.exchange.unsent_name, {})
        return {name: np.asarray(x, np.float64).sum(axis=0) for name, x in unsent.items()}

    def gradients(self, seed: int) -> Arrays:
        """Random gradients of very different sizes, of all replicas: `[replica, *shape]`."""
        draw, replicas = np.random.default_rng(seed), self.sizes[Axis.REPLICA]
        return {
            name: (draw.standard_normal((replicas, *x.shape)) * 10.0 ** (number % 3 - 1)).astype(x.dtype)
            for number, (name, x) in enumerate(self.shapes.items())
        }

    def on_mesh(self, gradients: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The gradients where the step has them."""
        places = {name: PartitionSpec(Axis.REPLICA.value, *spec) for name, spec in self.specs.items()}
        return {name: jax.device_put(x, NamedSharding(self.mesh, places[name])) for name, x in gradients.items()}

    def one(self, gradients: Mapping[str, np.ndarray], state: Any, seed: int) -> tuple[dict[str, jax.Array], Any, Any]:
        """(mean, new state, metrics) of one update; nothing of the run changes."""
        return self.update(self.on_mesh(gradients), state, jax.random.key(seed))

    def step(self, seed: int) -> None:
        """One step with other gradients, counted in `there` and `sent`."""
        gradients = self.gradients(seed)
        true = {name: x.astype(np.float64).mean(axis=0) for name, x in gradients.items()}
        mean, self.state, metrics = self.one(gradients, self.state, seed)
        for name, x in mean.items():
            shape = self.shapes[name]
            _require(
                (x.shape, x.dtype) == (shape.shape, shape.dtype),
                f"the mean of gradient {name} is {x.dtype}{list(x.shape)}, not {shape.dtype}{list(shape.shape)}",
            )
            _require(np.isfinite(np.asarray(x, np.float32)).all(), f"the mean of gradient {name} is not finite")
            _require(_same_everywhere(x), f"gradient {name}: devices that hold the same part of the mean differ")
            for sums, new in ((self.sent, np.asarray(x, np.float64)), (self.there, true[name])):
                sums[name] = self.exchange.unsent_decay * sums[name] + new
        missing = [name for name in _METRICS if name not in metrics]
        _require(not missing, f"update returned no metric {', '.join(missing)}")
        self.metrics = {name: float(value) for name, value in metrics.items()}
        wrong = [name for name, value in self.metrics.items() if not math.isfinite(value)]
        _require(not wrong, f"the metric {', '.join(wrong)} is not finite")


def _shapes(exchange: ExchangeConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Gradients of which some are large enough to be compressed."""
    wanted = max(_LEAST_ELEMENTS, 1.25 * getattr(exchange, "min_elements", 0))
    columns = 4 * math.ceil(wanted / _ROWS / 4)
    shapes = {
        "kernel": (_ROWS, columns),
        "layers": (2, _ROWS // 2, columns),
        "half": (_ROWS, columns),
        "odd": (_ROWS - 3, columns + 3),
        "bias": (24,),
        "scalar": (),
        "empty": (0, 8),
    }
    dtypes = {"half": jnp.bfloat16}
    return {name: jax.ShapeDtypeStruct(shape, dtypes.get(name, jnp.float32)) for name, shape in shapes.items()}


def _checked_run(exchange: ExchangeConfig, sizes: tuple[int, int, int], num_steps: int) -> _Run:
    """A run of several steps, checked. Raises AssertionError."""
    where = " x ".join(f"{axis} {size}" for axis, size in zip(_AXES, sizes, strict=True) if size > 1)
    with _in(exchange, f"on {where}"):
        exchange.check(
            {name: x.shape for name, x in _shapes(exchange).items()}, GradientLayout(), num_replicas=sizes[0]
        )
        run = _Run(exchange, sizes)
        _check_zeros(run)
        _check_same_bits(run)
        for step in range(num_steps):
            run.step(step)
        _check_means(run, num_steps)
        _check_bytes(run)
        _check_single_replica(run)
    return run


def _check_zeros(run: _Run) -> None:
    zeros = {name: np.zeros_like(x) for name, x in run.gradients(0).items()}
    mean, state, _ = run.one(zeros, run.state, 0)
    for name, x in mean.items():
        _require(not np.any(np.asarray(x, np.float32)), f"gradient {name}: zeros in, but not zeros out")
    for name, x in state.get(PER_REPLICA, {}).get(run.exchange.unsent_name, {}).items():
        _require(not np.any(np.asarray(x)), f"gradient {name}: gradients of zero leave a residual")


def _check_same_bits(run: _Run) -> None:
    gradients = run.gradients(0)
    first, other = ({name: np.asarray(x) for name, x in run.one(gradients, run.state, 0)[0].items()} for _ in range(2))
    for name, x in first.items():
        _require(x.tobytes() == other[name].tobytes(), f"gradient {name}: equal inputs and keys gave different means")


def _check_means(run: _Run, num_steps: int) -> None:
    """That nothing is lost: the sums of means and residuals are those of the gradients."""
    exchange, residual = run.exchange, run.residual
    if exchange.momentum_factor is not None:
        return  # Means are of momentum then, whose past is cut where entries were sent.
    for name, there in run.there.items():
        if exchange.compresses and not residual and exchange.distortion[0] > 1:
            continue  # What is not sent is lost, as the config says.
        largest = max(np.abs(there).max(initial=0), np.abs(run.sent[name]).max(initial=0))
        rounds = run.shapes[name].dtype == jnp.bfloat16 or (not exchange.compresses and exchange.distortion != (0, 0))
        allowed = num_steps * largest * (_ROUNDED if rounds else _EXACT)
        if exchange.compresses and not residual:
            if there.size >= _ENOUGH_ELEMENTS:
                _check_unbiased(run, name)
        else:
            left = residual.get(name, 0.0)
            error = np.abs(run.sent[name] + left - there).max(initial=0)
            said = "means and residuals" if name in residual else "means"
            _require(
                error <= allowed,
                f"gradient {name}: after {num_steps} steps the {said} add up to something else than the gradients, "
                f"by {error:.3g} of {largest:.3g}" + ("" if name in residual else "; it keeps no residual of it"),
            )


def _check_unbiased(run: _Run, name: str) -> None:
    """That the error of a mean becomes smaller on average over several keys."""
    gradients, state = run.gradients(0), run.init()
    true = gradients[name].astype(np.float64).mean(axis=0)
    means = [np.asarray(run.one(gradients, state, seed)[0][name], np.float64) for seed in range(4)]
    single = np.mean([np.linalg.norm(x - true) for x in means])
    average = np.linalg.norm(np.mean(means, axis=0) - true)
    rounding = 2.0**-7 * np.linalg.norm(true) if run.shapes[name].dtype == jnp.bfloat16 else 1e-5
    _require(
        average <= _NOISE * single + rounding,
        f"gradient {name}: its distortion says that rounding is unbiased, but the mean over 4 keys is wrong by "
        f"{average:.3g}, that of one key by {single:.3g}",
    )


def _check_bytes(run: _Run) -> None:
    """That the metric, the program and the prediction agree on the bytes over `replica`."""
    if "common" in run.state:
        return  # Warm-ups: the program has the collectives of every stage.
    slow = Axis.REPLICA.value
    reported, sent = run.metrics[f"bytes_sent/{slow}"], sent_bytes(run.lowered, run.mesh)[slow]
    _require(
        abs(reported - sent) <= 1e-6 * sent,
        f"the metric bytes_sent/{slow} is {reported:,.0f}, but the collectives of the program send {sent:,.0f} bytes",
    )
    local = {name: NamedSharding(run.mesh, run.specs[name]).shard_shape(x.shape) for name, x in run.shapes.items()}
    machine = Machine(dict.fromkeys((slow, *run.inner), Link(1e-5, 1e9)))
    predicted = predict(run.exchange, Gradients(local, run.sizes[slow], run.layout), machine).sent_bytes
    _require(
        abs(predicted - sent) <= _MOST_MISPREDICTED * sent,
        f"`cost` predicts {predicted:,.0f} bytes over {slow}, but the program sends {sent:,.0f}",
    )


def _check_single_replica(run: _Run) -> None:
    several, alone = (
        jax.eval_shape(lambda exchange=exchange: exchange.init(run.shapes))
        for exchange in (run.exchange.build(GradientLayout()), run.exchange.build_single_replica(GradientLayout()))
    )
    _require(
        jax.tree.structure(several) == jax.tree.structure(alone),
        "build_single_replica makes another state than build, so that a run could not go through one replica",
    )


def _check_resplit(before: _Run, after: _Run) -> None:
    """That a stored state resumes with another number of replicas, and nothing of it is lost."""
    mesh = after.mesh
    wanted = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for (name, x), spec in zip(_flat(after.init()).items(), _flat(after.places).values(), strict=True)
    }
    stored = {name: jnp.asarray(np.asarray(x)) for name, x in _flat(before.state).items()}
    split = resplit(stored, wanted, fresh=lambda: _flat(after.init()))
    for name, x in split.items():
        if PER_REPLICA in name.split(".")[1:2]:
            sums = [np.asarray(state, np.float64).sum(axis=0) for state in (x, stored.get(name, x))]
            error = np.abs(sums[0] - sums[1]).max(initial=0)
            _require(error <= 1e-4, f"{name}: its sum over the replicas changes by {error:.3g}")
    restored = jax.tree.unflatten(jax.tree.structure(after.init()), list(split.values()))
    after.state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), restored, after.init())
    after.there, after.sent = ({name: x.copy() for name, x in sums.items()} for sums in (before.there, before.sent))
    for step in (10, 11):
        after.step(step)
    _check_means(after, 6)


def _check_delayed(exchange: ExchangeConfig, run: _Run) -> None:
    """That a delayed exchange returns the means of the step before; `run` is on replica 2 x fsdp 2 x tensor 2."""
    late = _Run(exchange.replaced({"delay_steps": 1}), (2, 2, 2))
    state, previous = run.init(), {name: np.zeros_like(x) for name, x in run.gradients(0).items()}
    for step in range(3):
        mean, late.state, _ = late.one(run.gradients(step), late.state, step)
        expected, state, _ = run.one(previous, state, step)
        previous = run.gradients(step)
        for name, x in mean.items():
            ours, theirs = np.asarray(x, np.float64), np.asarray(expected[name], np.float64)
            error = np.abs(ours - theirs).max(initial=0)
            _require(
                error <= 1e-5 * max(1.0, np.abs(theirs).max(initial=0)),
                f"gradient {name}: step {step} has not the mean of the step before, but differs by {error:.3g}",
            )


def _flat(state: Any) -> dict[str, Any]:
    """The arrays of a state by their paths in the train state."""
    leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, PartitionSpec))[0]
    return {f"exchange_state.{jax.tree_util.keystr(path, simple=True, separator='.')}": x for path, x in leaves}


def _same_everywhere(x: jax.Array) -> bool:
    """Whether devices that hold the same part of an array have the same bits."""
    parts: dict[str, set[bytes]] = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return all(len(contents) == 1 for contents in parts.values())


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)


@contextlib.contextmanager
def _in(exchange: ExchangeConfig, where: str) -> Iterator[None]:
    """Failures inside name the exchange and what was checked; a ConfigError already says what to do."""
    try:
        yield
    except ConfigError:
        raise
    except AssertionError as error:
        _fail(exchange, where, str(error), None)
    except Exception as error:
        _fail(exchange, where, f"{type(error).__name__}: {error}", error)


def _fail(exchange: ExchangeConfig, where: str, what: str, cause: Exception | None) -> NoReturn:
    raise AssertionError(f"{type(exchange).__name__}, {where}: {what}.") from cause
