"""Makes the optimizer of a run from its config; one that jaxdl does not know is tried on shapes before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdl.core.config import ConfigError
from jaxdl.core.patterns import check_patterns, matches
from jaxdl.core.user_code import depends_on, select_arguments, user_code
from jaxdl.optim.averages import keeps_average
from jaxdl.optim.freezing import param_names
from jaxdl.optim.optimizers import Optimizer
from jaxdl.optim.own import is_transformation
from jaxdl.optim.rates import Rates, num_counts, scale_by_factors
from jaxdl.optim.schedules import Schedule
from jaxdl.parallel.sharding import LogicalAxes, Params

_TRIED_RATES = 1000
_UPDATE = "An update gets the gradients, its state and the parameters, no loss and no other function"


def make_optimizer(config: Optimizer, axes: LogicalAxes, shapes: Params) -> optax.GradientTransformationExtraArgs:
    """The optimizer of parameters with these logical axes and shapes; its `update` needs the extra argument `rates`.

    Raises ConfigError for one that cannot be used, and for a rate factor that no parameter has.
    """
    optimizer = _build_checked(config, axes, shapes) if config.checked else config.build(axes)
    if not config.rate_factors:
        return optimizer
    return scale_by_factors(optimizer, _factors(config.rate_factors, shapes))


def check_average(opt_state: optax.OptState, config: Optimizer, ema_decay: float | None) -> None:
    """Raises ConfigError for settings that do not go with an optimizer that averages the parameters itself.

    `opt_state` is the optimizer's state or its shapes.
    """
    if not keeps_average(opt_state):
        return
    if ema_decay is not None:
        raise ConfigError(
            f"--step.ema-decay {ema_decay:g}: {config.label} averages the parameters itself, and evaluates that "
            "average. Set --step.ema-decay None."
        )
    if config.rate_factors:
        raise ConfigError(
            f"--optimizer.rate-factors: {config.label} averages the parameters itself, so a factor of its updates "
            "would not be one of the learning rate. Leave it out, or choose an optimizer that does not average."
        )


def _factors(factors: Mapping[str, float], shapes: Params) -> Any:
    """The factor of each parameter: that of the first pattern that selects it, or 1."""
    names = param_names(shapes)
    check_patterns(factors, names, "--optimizer.rate-factors")
    selected = [next((factor for pattern, factor in factors.items() if matches(name, pattern)), 1.0) for name in names]
    return jax.tree.unflatten(jax.tree.structure(shapes), selected)


def _build_checked(config: Optimizer, axes: LogicalAxes, shapes: Params) -> optax.GradientTransformationExtraArgs:
    """The built optimizer, whose `init` and `update` have been traced. Raises ConfigError with what is wrong."""
    label = config.label
    with user_code(f"{label}: build()", of=config.build):
        built = config.build(axes)
    if not is_transformation(built):
        raise ConfigError(
            f"{label}: build() returned {type(built).__name__}, not an optax transformation. Return one, such as "
            "optax.chain(optax.scale_by_adam(), jaxdl.optim.scale_by_learning_rate())."
        )
    optimizer = optax.with_extra_args_support(built)
    with user_code(f"{label}: init()", of=built.init):
        state = jax.eval_shape(optimizer.init, shapes)
    if num_counts(state) != 1:
        raise ConfigError(
            f"{label}: its chain has {num_counts(state) or 'no'} jaxdl.optim.scale_by_learning_rate(), and needs one: "
            "it applies the learning rate of the schedule, and counts the updates."
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ConfigError(
                f"{label}: its state has a random key ({_name(path)}), which no checkpoint can hold. Keep it as "
                "jax.random.key_data, or choose another optimizer."
            )

    def update(grads: Any, state: Any, params: Any, learning_rate: Any) -> Any:
        rates = Rates(learning_rate, config.momentum_at(learning_rate))
        return optimizer.update(grads, state, params, rates=rates)

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    trace = jax.make_jaxpr(update, return_shape=True)
    texts = [f"{name}={value!r}" for name, value in getattr(config, "arguments", {}).items() if isinstance(value, str)]
    advice = f"It was given {', '.join(texts)}" if texts else _UPDATE
    with user_code(f"{label}: update()", advice, of=built.update):
        jaxpr, (updates, new_state) = trace(shapes, state, shapes, scalar)
    _check_like(f"{label}: the updates differ from the parameters", updates, shapes, dtypes=False)
    _check_like(f"{label}: update() returns another state than init()", new_state, state, dtypes=True)
    if not depends_on(jaxpr, len(jaxpr.jaxpr.invars) - 1):
        raise ConfigError(
            f"{label}: its updates do not depend on the learning rate, so --schedule and --optimizer.learning-rate "
            "would have no effect after the start. Choose another optimizer."
        )
    return optimizer


def _check_like(what: str, given: Any, wanted: Any, *, dtypes: bool) -> None:
    """Raises ConfigError when two trees of shapes differ in structure, shapes or dtypes, with the first difference."""
    here, there = (
        {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]} for tree in (given, wanted)
    )
    for name in [*there, *here]:
        if name not in here or name not in there:
            raise ConfigError(f"{what}: {name} is {'missing' if name in there else 'not in them'}.")
        leaf, other = here[name], there[name]
        if leaf.shape != other.shape or (dtypes and leaf.dtype != other.dtype):
            raise ConfigError(
                f"{what}: {name} is {leaf.dtype} {list(leaf.shape)}, not {other.dtype} {list(other.shape)}."
            )
    if jax.tree.structure(given) != jax.tree.structure(wanted):
        raise ConfigError(f"{what}: they are trees of other types.")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def build_schedule(schedule: Schedule, *, peak: float, total_steps: int, steps_per_epoch: float) -> tuple[Any, Any]:
    """(learning rate, cycle) as functions of the step. Raises ConfigError for a schedule that does not fit the run."""
    length = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    what, functions = schedule.users_name, []
    calls = (("build", schedule.build, {"peak": peak, **length}), ("cycle", schedule.cycle, length))
    for method_name, method, values in calls:
        with user_code(what, of=method):
            made: Any = method(**select_arguments(method, values))
        name = f"{what}: {method_name}()"
        if what is not None and not callable(made):
            raise ConfigError(f"{name} returned {made!r}. Return a function of the step, such as lambda step: peak.")
        with user_code(what, of=made):
            rate = jax.eval_shape(lambda step, made=made: jnp.asarray(made(step)), jnp.int32(0))
        if rate.shape or not any(jnp.issubdtype(rate.dtype, kind) for kind in (jnp.integer, jnp.floating)):
            raise ConfigError(f"{name}: of a step it is {rate.dtype} {list(rate.shape)}. Return one float32 number.")
        # A user's function may return a number of Python, or whole numbers.
        functions.append(made if what is None else lambda step, made=made: jnp.asarray(made(step), jnp.float32))
    return functions[0], functions[1]


def check_rates(schedule: Schedule, rates: Callable[[Any], Rates], total_steps: int) -> None:
    """Raises ConfigError when a user's schedule gives no learning rate for one of up to 1,000 steps of the run."""
    if schedule.users_name is None:
        return
    steps = np.unique(np.linspace(0, total_steps - 1, min(total_steps, _TRIED_RATES)).astype(np.int32))
    learning_rates = np.asarray(
        jax.jit(lambda steps: jax.lax.map(lambda step: rates(step).learning_rate, steps))(steps)
    )
    wrong = ~(np.isfinite(learning_rates) & (learning_rates >= 0))
    if wrong.any():
        step, rate = steps[wrong][0], learning_rates[wrong][0]
        raise ConfigError(
            f"{schedule.users_name}: the learning rate of step {step + 1} is {rate:.3g}. Return 0 or more."
        )
