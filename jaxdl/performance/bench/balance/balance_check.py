"""The test that comes before all times of `python -m jaxdl.bench balance`: are the steps right?

The losses of three steps, and the change of the parameters in the first, are compared with those of one device. An
exchange that compresses is emulated there: the same exchange under `jax.vmap`, whose axis stands in for the replicas,
without a mesh and without messages. What it sends is checked besides, since a wrong formula would be wrong on both
sides: means and residuals together must be the gradients.

Losses hardly tell a wrong mean from one that is rounded to 16 bits. The first change does: it is the mean gradient
times the learning rate. A device whose part is missing, or counted twice, changes it by 1/n of that part, for n
devices. Rounding changes it by a few units of the last digit of the parts' magnitudes (`rounding`), which is less for
up to some 30 devices where the computation is in bfloat16, 40 where the sum alone is, and a thousand in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.exchange import PER_REPLICA, ExchangeConfig, by_name
from jaxdl.parallel.mesh import Axis
from jaxdl.performance.bench.balance.balance_run import Clock, batch_of, first_devices, first_steps
from jaxdl.performance.bench.balance.balance_work import Work, make_work_plan
from jaxdl.training.run.compile import programs
from jaxdl.training.run.plan.build import Plan
from jaxdl.training.step import local_gradients, update_state

_REPLICA = Axis.REPLICA.value
NUM_STEPS = 3
EXACT, EMULATED, ROUNDED = 1e-5, 1e-4, 2.0**-6
"""Relative differences of losses that are allowed: of sums in another order; of choices that such a difference changes,
of a few entries; and of 16-bit numbers."""
LOST = 0.5
"""Of an exchange without residuals: how far its mean may be from the gradients' mean, relative to that."""
_UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of a rounding."""
_COMPUTED = {"float32": 2.0**10, "bfloat16": 8.0}
"""Roundings of a gradient, by the computation's dtype: sums over texts and tokens in another order, and the roundings
of activations that these bring about, layer after layer. Generous for float32, where it costs nothing."""
_CHOSEN = {"float32": 1e-3, "bfloat16": 2.0**-5}
"""How far the first change of an exchange that compresses may be from its emulation, by the computation's dtype: of
choices that rounding changes. Replicas choose different entries, so one that is missing changes more than 1/n."""
_KEPT = 1e-5
"""How far means and residuals together may be from the gradients, relative to the largest one."""


@dataclass(frozen=True)
class Checked:
    """An exchange, or a sum, and how far it is from what it should give."""

    name: str
    reference: str
    """What it was compared with."""
    difference: float
    """The largest relative one."""
    bound: float

    @property
    def fine(self) -> bool:
        """Whether it is right."""
        return self.difference <= self.bound  # Not for NaN.


def check_all(
    work: Work, exchanges: Mapping[str, ExchangeConfig], *, replicas: int, inner: int, precision: str, clock: Clock
) -> list[Checked]:
    """Checks every exchange on `replicas` of `inner` devices; all processes get the same answers."""
    every = replicas * inner
    alone = _plan(dataclasses.replace(work, examples=work.examples * every), None, 1, 1, precision)
    (expected, change), spread = first_steps(alone, NUM_STEPS), spread_of(alone, every)
    checks = []
    for name, config in exchanges.items():
        if not config.compresses:
            plan = _plan(work, config, replicas, inner, precision)
            bound = EXACT if config.distortion == (0, 0) and precision == "float32" else ROUNDED
            here, moved = first_steps(plan, NUM_STEPS)
            checks.append(Checked(name, "one device", _difference(here, expected), bound))
            allowed = spread * rounding(config, precision, every)
            checks.append(Checked(name, "first change of one device", _distance(moved, change), allowed))
            continue
        # Emulated are replicas of one device each.
        plan = _plan(work, config, every, 1, precision)
        emulated, kept, lost, changed = emulate(plan, alone, config)
        bound = EMULATED if precision == "float32" else ROUNDED
        here, moved = first_steps(plan, NUM_STEPS)
        checks.append(Checked(name, "emulated on one device", _difference(here, emulated), bound))
        checks.append(Checked(name, "first change, emulated", _distance(moved, changed), _CHOSEN[precision]))
        if kept is not None:
            checks.append(Checked(name, "means and residuals", kept, _KEPT))
        if lost is not None:
            checks.append(Checked(name, "means", lost, LOST))
    return [dataclasses.replace(check, difference=max(clock.every(check.difference), key=or_inf)) for check in checks]


def or_inf(value: float) -> float:
    """The value, infinity for NaN: a key for `max`, which otherwise may not see it."""
    return math.inf if math.isnan(value) else value


def _plan(work: Work, config: ExchangeConfig | None, replicas: int, inner: int, precision: str) -> Plan:
    """A plan on the first devices of the run; of a single device, on one of this process."""
    count = replicas * inner
    devices = first_devices(count) if count > 1 else jax.local_devices()[:1]
    return make_work_plan(work, config, replicas=replicas, inner=inner, precision=precision, devices=devices)


def _difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative one; NaN if a number is not finite."""
    far = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return max(far) if all(map(math.isfinite, far)) else math.nan


def _distance(changes: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The norm of the difference, relative to that of what is expected."""
    squares = [np.square(a - b, dtype=np.float64).sum() for a, b in zip(changes, expected, strict=True)]
    return math.sqrt(sum(squares) / sum(np.square(x, dtype=np.float64).sum() for x in expected))


def rounding(config: ExchangeConfig, precision: str, num_devices: int) -> float:
    """How far a mean of `num_devices` gradients may be from the exact one, relative to the mean of their magnitudes.

    A sum of n terms in any order is wrong by n - 1 roundings of partial sums at most, and as a norm over many elements
    by about sqrt(n) of them (Higham and Mary 2019); one more is that of each term. The dtype is what the exchange says
    that it sums in (`ExchangeConfig.figures`).
    """
    dtypes = {name.partition("/")[2] for name in config.figures.collectives} & set(_UNITS)
    summed = max((_UNITS[name] for name in dtypes), default=_UNITS["float32"])
    return _COMPUTED[precision] * _UNITS[precision] + (1 + math.sqrt(num_devices)) * summed


def spread_of(alone: Plan, num_devices: int) -> float:
    """The norm of the mean magnitude of the gradients of `num_devices` parts of a batch over that of their mean."""

    def spread(state: Any, batch: Any) -> jax.Array:
        every = [x.astype(jnp.float32) for x in jax.tree.leaves(_gradients(alone, num_devices, state, batch)[0])]
        of_sizes, of_means = (sum(jnp.sum(average(x) ** 2) for x in every) for average in (_mean_size, _mean))
        return jnp.sqrt(of_sizes / of_means)

    return float(jax.jit(spread)(programs().initial_state(alone), batch_of(alone, 0)))


def _mean(x: jax.Array) -> jax.Array:
    return x.mean(0)


def _mean_size(x: jax.Array) -> jax.Array:
    return jnp.abs(x).mean(0)


def _gradients(alone: Plan, num_replicas: int, state: Any, batch: Any) -> tuple[Any, Any]:
    """(gradients, sums) of equal parts of a batch, `[replica, ...]`, as each replica would compute them."""
    parts = alone.parts
    factor = num_replicas / parts.task.weight(batch)
    rows = {name: x.reshape(num_replicas, -1, *x.shape[1:]) for name, x in batch.items()}

    def of_replica(local_rows: Any) -> Any:
        grads, sums, _, _ = local_gradients(parts, state.params, state.model_state, local_rows, factor, None)
        return jax.tree.map(lambda x: x[0], (grads, sums))

    return jax.lax.map(of_replica, rows)


def emulate(
    plan: Plan, alone: Plan, config: ExchangeConfig
) -> tuple[list[float], float | None, float | None, list[np.ndarray]]:
    """The losses of the steps of a plan whose replicas have one device each, emulated on the device of `alone`.

    Last, by how much the first step changes each parameter. Between them, how far means and residuals are from the
    gradients, relative to the largest one, and how far the means are, as a relative norm; None where the exchange does
    not promise it: with momentum of its own, or if it loses what it does not send.
    """
    num_replicas = plan.experiment.mesh.replica
    step = jax.jit(lambda *args: _emulated_step(plan, alone, config, *args))
    state, shapes = programs().initial_state(alone), alone.parts.network.param_shapes
    fresh = plan.parts.exchange.init(shapes)
    exchange_state = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_replicas, *jnp.shape(x))), fresh)
    losses, far, change = [], [], []
    for number in range(NUM_STEPS):
        before = jax.tree.leaves(state.params)
        state, exchange_state, loss, errors = step(state, exchange_state, batch_of(alone, number))
        if number == 0:
            change = [
                np.array(after - earlier) for after, earlier in zip(jax.tree.leaves(state.params), before, strict=True)
            ]
        losses.append(float(loss))
        far.append([float(error) for error in errors])
    kept, lost = (max(column, key=or_inf) for column in zip(*far, strict=True))
    has_residual = bool(fresh.get(PER_REPLICA, {}).get(config.unsent_name))
    if config.momentum_factor is not None:
        return losses, None, None, change
    if has_residual:
        return losses, kept, None, change
    return losses, None, lost if config.distortion[0] <= 1 else None, change


def _emulated_step(
    plan: Plan, alone: Plan, config: ExchangeConfig, state: Any, exchange_state: Any, batch: Any
) -> tuple[Any, Any, jax.Array, Any]:
    """One step, as `jaxdl.training.step` has it: `(state, exchange state, loss, the two errors)`."""
    parts, num_replicas = alone.parts, plan.experiment.mesh.replica
    _, exchange_key = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step))
    grads, sums = _gradients(alone, num_replicas, state, batch)

    def exchange(local_grads: Any, kept: Any) -> Any:
        return plan.parts.exchange.update(local_grads, kept, axis=_REPLICA, key=exchange_key)[:2]

    mean, new = jax.vmap(exchange, axis_name=_REPLICA)(grads, exchange_state)
    errors = _errors(grads, mean, exchange_state, new, config)
    state = update_state(parts, state, jax.tree.map(lambda x: x[0], mean), parts.layout)[0]
    loss = jnp.sum(sums["loss"]) / jnp.sum(sums["weight"])
    return state.replace(step=state.step + 1), new, loss, errors


def _errors(grads: Any, mean: Any, before: Any, after: Any, config: ExchangeConfig) -> tuple[jax.Array, jax.Array]:
    """(largest error of means and residuals over the largest gradient, norm of the means' error over the means')."""
    old, new = (state.get(PER_REPLICA, {}).get(config.unsent_name, {}) for state in (before, after))
    true, sent = ({name: x.astype(jnp.float32).mean(0) for name, x in by_name(tree).items()} for tree in (grads, mean))
    zero = jnp.float32(0)
    left = {
        name: x
        + (config.unsent_decay * old[name].sum(0) if name in old else zero)
        - (new[name].sum(0) if name in new else zero)
        for name, x in true.items()
    }
    largest = jnp.stack([jnp.abs(x).max() for x in left.values() if x.size]).max()
    wrong = jnp.stack([jnp.abs(sent[name] - x).max() for name, x in left.items() if x.size]).max()
    squares = [jnp.sum((sent[name] - x) ** 2) for name, x in true.items()]
    norm = jnp.sqrt(sum(squares, zero)) / jnp.sqrt(sum((jnp.sum(x**2) for x in true.values()), zero))
    return wrong / largest, norm
