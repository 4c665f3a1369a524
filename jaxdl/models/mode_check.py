"""A check that a network is evaluated in evaluation mode: it draws nothing then, and what it keeps stays as it is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Sequence
from typing import Any, Literal

import jax

from jaxdl.errors import ConfigError
from jaxdl.models.modes import without_inputs
from jaxdl.models.network import Network
from jaxdl.user_code import sources

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
    if not (wrong := [one for one in wrong if one not in allows]):
        return outputs
    what = network.what or "the network"
    does = {"random": "its outputs depend on a random key", "state": "what it keeps changes"}
    effect = {"random": "dropout would be on, with the same mask each time", "state": "batch norm would take the "
              "statistics of the batch"}  # fmt: skip
    raise ConfigError(
        f"{what}: in evaluation {' and '.join(does[one] for one in wrong)}, as in training, so "
        f"{', and '.join(effect[one] for one in wrong)}. {_advice(network, inputs, wrong)} Or, if this is meant, add "
        f"{' and '.join(wrong)} to --evaluation.allows."
    )


def _advice(network: Network, inputs: Sequence[Any], wrong: Collection[str]) -> str:
    """Sentences on how the network can be told whether it is trained."""
    name = network.called.__qualname__
    given = without_inputs(network.called, len(inputs))
    switches = {one: given[one].default for one in given if isinstance(given[one].default, bool)}
    for one, default in switches.items():
        flipped = copy.copy(network)
        flipped.switches = {one: not default}
        try:
            still = _traced(flipped, inputs)[1]
        except ConfigError:
            continue
        if not set(still) & set(wrong):
            better = "train" if default else "deterministic"
            return (
                f"With {one}={not default} of {name} it is not so. jaxdl does not know this name: rename the argument "
                f"{better}, or wrap the network in one that has an argument train and hands it on as {one}."
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
    found = sources(closed, [_KEY, *kept, *[_OTHERS] * others])
    of_outputs, of_state = found[: -len(kept) or None], found[len(found) - len(kept) :]
    wrong: list[Allowed] = []
    if any(mark & _KEY for mark in of_outputs):
        wrong.append("random")
    if any(mark & ~bit for mark, bit in zip(of_state, kept, strict=True)):
        wrong.append("state")
    return outputs, wrong
