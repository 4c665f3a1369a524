"""Whether a network is trained or evaluated: the arguments and the fields that tell it."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flax import linen, nnx

_IN_TRAINING = """train training is_train is_training in_training train_mode training_mode"""
_IN_EVALUATION = """deterministic use_running_average use_running_stats use_running_statistics inference is_inference
    inference_mode testing is_testing is_test test_mode eval evaluate evaluating evaluation is_eval is_evaluation
    eval_mode"""
TRAINING = dict.fromkeys(_IN_TRAINING.split(), True) | dict.fromkeys(_IN_EVALUATION.split(), False)
"""Names of arguments and fields that tell a network whether it is trained -> their value in training."""
_SWITCHES = ("enable_dropout", "use_dropout", "apply_dropout", "with_dropout", "dropout_enabled", "update_stats",
             "update_batch_stats", "update_running_stats")  # fmt: skip
"""Names of what is off in evaluation. In training it is on as an argument, beside no other; as a field it may be the
network's own setting, and stays as it is."""


def mode_arguments(parameters: Mapping[str, inspect.Parameter], *, train: bool) -> dict[str, bool]:
    """Those parameters of a function that tell whether the network is trained, with their values."""
    modes = {
        name: train == value for name, value in TRAINING.items() if name in parameters and is_switch(parameters[name])
    }
    more = [name for name in _SWITCHES if name in parameters and is_switch(parameters[name])]
    return modes | (dict.fromkeys(more, train) if not train or not modes else {})


def call_modes(function: Callable[..., Any], num_inputs: int, *, train: bool) -> dict[str, bool]:
    """`mode_arguments` of a method that is called on so many inputs; a parameter for an input is no mode."""
    return mode_arguments(without_inputs(function, num_inputs), train=train)


def without_inputs(function: Callable[..., Any], num_inputs: int) -> dict[str, inspect.Parameter]:
    """The parameters of a method but for `self` and for its inputs; one with a default of True or False is for none."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters
    taking = [name for name, parameter in parameters.items() if parameter.kind in positional][: 1 + num_inputs]
    return {
        name: parameter
        for name, parameter in parameters.items()
        if name not in taking or isinstance(parameter.default, bool)
    }


def is_switch(parameter: inspect.Parameter) -> bool:
    """Whether a parameter may be True or False: by default it is, or None, or it has no default."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.kind not in several and (
        parameter.default in (None, inspect.Parameter.empty) or isinstance(parameter.default, bool)
    )


def set_modes(module: nnx.Module, *, train: bool, given: Collection[str] = ()) -> None:
    """Sets the fields of a module and of those within it that tell whether it is trained, as `nnx.Module.eval` does.

    In training those that the user has `given` to the constructor stay.
    """
    (nnx.Module.train if train else nnx.Module.eval)(module)
    for _, part in nnx.iter_graph(module):
        if isinstance(part, nnx.Module):
            for name, value in _fields(vars(part), train=train, given=given).items():
                setattr(part, name, value)


def in_mode(module: linen.Module, *, train: bool, given: Collection[str] = ()) -> linen.Module:
    """A copy of a module, and of those that it was given, with the fields that tell whether it is trained.

    In training fields with another value than their default stay, and those `given`.
    """
    return _changed(module, train, given, {})


def _changed(value: Any, train: bool, given: Collection[str], made: dict[int, Any]) -> Any:
    """`in_mode` of what a module was given; `made` are the copies by the id of the module, which may be shared."""
    if type(value) in (list, tuple):
        after = [_changed(item, train, (), made) for item in value]
        return value if all(map(operator.is_, after, value)) else type(value)(after)
    if isinstance(value, Mapping):
        pairs = {name: _changed(item, train, (), made) for name, item in value.items()}
        return value if all(item is value[name] for name, item in pairs.items()) else pairs
    if not isinstance(value, linen.Module):
        return value
    if id(value) not in made:
        fields = {
            field.name: field
            for field in dataclasses.fields(value)
            if field.init and field.name not in ("parent", "name")
        }
        before = {name: getattr(value, name) for name in fields}
        after = {name: _changed(field_value, train, (), made) for name, field_value in before.items()}
        kept = {name for name, field in fields.items() if before[name] is not field.default} | set(given)
        after |= _fields(before, train=train, given=kept)
        differing = {name: field_value for name, field_value in after.items() if field_value is not before[name]}
        made[id(value)] = value.clone(**differing) if differing else value
    return made[id(value)]


def _fields(values: Mapping[str, Any], *, train: bool, given: Collection[str]) -> dict[str, bool]:
    modes = {name: train == value for name, value in TRAINING.items()} | (
        {} if train else dict.fromkeys(_SWITCHES, False)
    )
    kept = given if train else ()
    return {name: value for name, value in modes.items() if isinstance(values.get(name), bool) and name not in kept}
