"""A check that a network is evaluated in evaluation mode: it draws nothing then, and what it keeps stays as it is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import jax
from flax import linen, nnx

from jaxdl.core.errors import ConfigError
from jaxdl.core.user_code import depends_on, sources
from jaxdl.models.modes import without_inputs
from jaxdl.models.network import Network

Allowed = Literal["random", "state"]
"""What a network may do in evaluation: draw random numbers, or change what it keeps."""
_KEY, _OTHERS, _STATE = 1, 2, 2
"""Bits of what a result depends on: the random key; parameters and inputs; above them each leaf of the state."""


def check_evaluation(network: Network, inputs: Sequence[Any], allows: Collection[Allowed] = ()) -> Any:
    """The shapes of a network's outputs in evaluation, on inputs of these shapes.

    Raises ConfigError if its outputs depend on a random key, or if what it keeps is changed by the inputs: then it is
    evaluated as it is trained, with dropout or with the statistics of the batch. `allows` says which it may do.
    """
    outputs, wrong = _traced(network, inputs)
    if not (wrong := [kind for kind in wrong if kind not in allows]):
        return outputs
    what = network.what or "the network"
    does = {"random": "its outputs depend on a random key", "state": "what it keeps changes"}
    effect = {"random": "dropout would be on, with the same mask each time", "state": "batch norm would take the "
              "statistics of the batch"}  # fmt: skip
    raise ConfigError(
        f"{what}: in evaluation {' and '.join(does[kind] for kind in wrong)}, as in training, so "
        f"{', and '.join(effect[kind] for kind in wrong)}. {_advice(network, inputs, wrong)} Or, if this is meant, add "
        f"{' and '.join(wrong)} to --evaluation.allows."
    )


def idle_dropout(network: Network, inputs: Sequence[Any]) -> tuple[list[str], str]:
    """(the dropouts of a network that is never random in training, what to do), on inputs of these shapes.

    Known are the dropouts of flax with a rate above 0 and other modules with such a field (`dropout_rate`); none for a
    network whose outputs depend on a random key in training. Of functions that take a key and do not use it, too, there
    is something to do, without a dropout.
    """
    dropouts: dict[str, None] = {}
    has_more = True  # Networks of functions have no modules of their own: those of linen are seen when they are called.

    def note(module: nnx.Module) -> None:
        nonlocal has_more
        parts = [(path, part) for path, part in nnx.iter_graph(module) if isinstance(part, nnx.Module)]
        has_more = any(isinstance(field, linen.Module) for _, part in parts for field in vars(part).values())
        _note_dropouts(parts, dropouts)

    network.changed(note)
    if not dropouts and not has_more:
        return [], ""

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        _note_dropouts([(context.module.path, context.module)], dropouts)
        return call(*args, **kwargs)

    with linen.intercept_methods(intercept):
        is_random = _random_in_training(network, inputs)
    if is_random or not (dropouts or network.key_argument):
        return [], ""
    name = network.called.__qualname__
    for switch, default in _switches(network, inputs).items():
        try:
            becomes_random = _random_in_training(_flipped(network, switch, default), inputs)
        except ConfigError:
            continue
        if becomes_random:
            better = "deterministic" if default else "train"
            return list(dropouts), (
                f"With {switch}={not default} of {name} they do. jaxdl does not know this name: rename the "
                f"argument {better}, or wrap the network in one that has an argument train and hands it on as {switch}."
            )
    return list(dropouts), (
        f"Tell the network that it is trained: give {name} an argument train, which is True in training, and hand it "
        "on to the layers (deterministic=not train)."
    )


def _note_dropouts(parts: Iterable[tuple[Any, Any]], dropouts: dict[str, None]) -> None:
    """Adds the names of the modules among `parts`, (path, module), that are to drop something."""
    for path, part in parts:
        if not isinstance(part, nnx.Module | linen.Module):
            continue
        is_layer = isinstance(part, nnx.Dropout | linen.Dropout)
        fields = vars(part).items()
        rates = [value for name, value in fields if "dropout" in name or (is_layer and name == "rate")]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            dropouts["/".join(map(str, path)) or type(part).__name__] = None


def _random_in_training(network: Network, inputs: Sequence[Any]) -> bool:
    def trained(key: jax.Array, params: Any, state: Any, inputs: Sequence[Any]) -> Any:
        return network.apply(params, state, *inputs, train=True, key=key)[0]

    key = jax.eval_shape(functools.partial(jax.random.key, 0))
    closed = jax.make_jaxpr(trained)(key, network.param_shapes, network.state_shapes, tuple(inputs))
    return depends_on(closed, 0)


def _switches(network: Network, inputs: Sequence[Any]) -> dict[str, bool]:
    """The arguments of a network's call with a default of True or False, and this default."""
    given = without_inputs(network.called, len(inputs))
    return {name: given[name].default for name in given if isinstance(given[name].default, bool)}


def _flipped(network: Network, switch: str, default: bool) -> Network:
    """The network, called with the other value of a switch."""
    flipped = copy.copy(network)
    flipped.switches, flipped.is_random = {switch: not default}, True
    return flipped


def _advice(network: Network, inputs: Sequence[Any], wrong: Collection[str]) -> str:
    """Sentences on how the network can be told whether it is trained."""
    name = network.called.__qualname__
    for switch, default in _switches(network, inputs).items():
        try:
            still = _traced(_flipped(network, switch, default), inputs)[1]
        except ConfigError:
            continue
        if not set(still) & set(wrong):
            better = "train" if default else "deterministic"
            return (
                f"With {switch}={not default} of {name} it is not so. jaxdl does not know this name: rename the "
                f"argument {better}, or wrap the network in one that has an argument train and hands it on as {switch}."
            )
    return (
        f"Tell the network whether it is trained: give {name} an argument train, which is True in training, and hand "
        "it on to the layers (deterministic=not train, use_running_average=not train)."
    )


def _traced(network: Network, inputs: Sequence[Any]) -> tuple[Any, list[Allowed]]:
    """(the shapes of the outputs in evaluation, what of `Allowed` the network does then)."""

    def evaluated(key: jax.Array, state: Any, params: Any, inputs: Sequence[Any]) -> Any:
        return network.apply(params, state, *inputs, train=False, key=key)

    trace = jax.make_jaxpr(evaluated, return_shape=True)
    key = jax.eval_shape(functools.partial(jax.random.key, 0))
    closed, (outputs, state) = trace(key, network.state_shapes, network.param_shapes, tuple(inputs))
    kept = [_STATE << number for number in range(1, 1 + len(jax.tree.leaves(state)))]
    others = len(closed.jaxpr.invars) - 1 - len(kept)
    marks = sources(closed, [_KEY, *kept, *[_OTHERS] * others])
    of_outputs, of_state = marks[: -len(kept) or None], marks[len(marks) - len(kept) :]
    wrong: list[Allowed] = []
    if any(mark & _KEY for mark in of_outputs):
        wrong.append("random")
    if any(mark & ~bit for mark, bit in zip(of_state, kept, strict=True)):
        wrong.append("state")
    return outputs, wrong
