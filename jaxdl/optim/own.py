"""`Optax`: any optimizer of optax, or a function that makes an optax transformation, as an optimizer of a run."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import optax
import pydantic
from optax.contrib import MuonDimensionNumbers

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import SOURCE
from jaxdl.core.reference import Reference, as_json, resolve
from jaxdl.core.user_code import check_given, check_known, parameters, takes_any
from jaxdl.optim.masks import decay_mask, layer_dims
from jaxdl.optim.optimizers import Optimizer
from jaxdl.optim.rates import follow_rates
from jaxdl.parallel.sharding import LogicalAxes, is_names

MATRICES = "matrices"
"""The value of a mask that stands for all weights but biases and norms."""
_MUON = "muon_weight_dimension_numbers"


class Optax(Optimizer, kind="optax"):
    """An optax optimizer by its name, or a function of `learning_rate` that makes an optax transformation.

        Optax("adam", learning_rate=1e-3, b2=0.95)
        Optax("contrib.muon", learning_rate=0.02, adam_learning_rate=3e-4)
        Optax(my_function, learning_rate=1e-3)

    All other arguments go to optax as they are. The learning rate follows the schedule of the run wherever the
    optimizer uses it, and so does any argument whose name ends in `_learning_rate`: each value is a peak. As in optax,
    weight decay is applied to all parameters unless there is a mask; `mask="matrices"` excludes biases and norms, as
    `AdamW` does. A stack of layers in one array is one parameter for optax; `contrib.muon` is told which dimensions of
    it are a matrix.
    """

    by_position: ClassVar[tuple[str, ...]] = ("transformation",)

    learning_rate: float = pydantic.Field(default=1e-3, gt=0, allow_inf_nan=False)
    """The peak learning rate; the schedule decides its course."""
    transformation: str | Reference = "adam"
    """The name of an optimizer in optax, such as lion or contrib.muon; or a function of yours, FILE:NAME."""
    arguments: dict[str, Any] = {}
    """Its further arguments, NAME=VALUE each."""

    def __init__(self, *args: Any, **values: Any) -> None:
        fields = {*type(self).model_fields, "kind", SOURCE}
        given = {name: value for name, value in values.items() if name in fields}
        arguments = {name: value for name, value in values.items() if name not in fields}
        if arguments:
            given["arguments"] = {**given.get("arguments", {}), **arguments}
        super().__init__(*args, **given)

    @pydantic.field_validator("transformation", mode="after")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if isinstance(value, str):
            if ":" in value:
                return resolve(value)
            _optimizer_of_optax(value)
            return value
        # One of optax's own functions is known by its name.
        name = value.__name__
        for path in (name, f"contrib.{name}"):
            if _optax_attribute(path) is value:
                return path
        return value

    @pydantic.field_validator("arguments", mode="after")
    @classmethod
    def _plain(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {name: _argument(name, value) for name, value in values.items()}

    @pydantic.field_serializer("arguments", when_used="json")
    def _serialize(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: as_json(value) for name, value in values.items()}

    @pydantic.model_validator(mode="after")
    def _arguments_fit(self) -> Optax:
        takes = parameters(self._factory)
        if "learning_rate" not in takes and not takes_any(takes):
            raise ValueError(
                f"{self.label} has no argument learning_rate, so the schedule could not set it. Write a function of "
                "learning_rate that returns the whole chain, such as def mine(learning_rate): return "
                "optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(learning_rate)), and give that: "
                "Optax(mine)."
            )
        check_known(self.label, takes, self.arguments)
        check_given(self.label, takes, {"learning_rate", *self.arguments}, "Optax")
        return self

    @property
    def label(self) -> str:
        """Its name in messages, `optax.adam`."""
        name = self.transformation
        return f"optax.{name}" if isinstance(name, str) else name.__name__  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def checked(self) -> bool:
        """True: jaxdl does not know what optax returns."""
        return True

    @property
    def momentum(self) -> float | None:
        """Its argument `momentum`, given or by default; an exchange with momentum of its own asks for it."""
        return self._number("momentum")

    @property
    def b1(self) -> float | None:
        """As `momentum`."""
        return self._number("b1")

    def _number(self, name: str) -> float | None:
        takes = parameters(self._factory)
        value = self.arguments.get(name, takes[name].default if name in takes else None)
        return value if isinstance(value, int | float) else None

    @property
    def _factory(self) -> Callable[..., Any]:
        transformation: Any = self.transformation
        return _optimizer_of_optax(transformation) if isinstance(transformation, str) else transformation

    def build(self, axes: LogicalAxes) -> optax.GradientTransformationExtraArgs:
        """The transformation of optax, which follows the schedule."""
        factory, peak = self._factory, self.learning_rate
        arguments = {
            name: decay_mask(axes) if value == MATRICES and name.endswith("mask") else value
            for name, value in self.arguments.items()
        }
        if _MUON in parameters(factory) and _MUON not in arguments:
            arguments[_MUON] = _muon_dimensions(axes)

        def make(learning_rate: Any) -> optax.GradientTransformation:
            given = {
                name: value * (learning_rate / peak) if _is_rate(name, value) else value
                for name, value in arguments.items()
            }
            made = factory(learning_rate=learning_rate, **given)
            if not is_transformation(made):
                raise ConfigError(
                    f"{self.label} returned {type(made).__name__}, not an optax transformation. Return one, such as "
                    "optax.adam(learning_rate)."
                )
            return made

        return follow_rates(make, peak)


def is_transformation(value: Any) -> bool:
    """Whether an object has the two functions of an optax transformation."""
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _is_rate(name: str, value: Any) -> bool:
    return name.endswith("_learning_rate") and isinstance(value, int | float)


def _muon_dimensions(axes: LogicalAxes) -> Any:
    """For each parameter that is a matrix, or a stack of matrices, its dimensions; None for the others.

    By default `optax.contrib.muon` takes arrays of two dimensions alone, and would leave stacked layers to Adam.
    """

    def dimensions(names: tuple[str, ...]) -> MuonDimensionNumbers | None:
        inside = [dim for dim in range(len(names)) if dim not in layer_dims(names)]
        return MuonDimensionNumbers(*inside) if len(inside) == 2 else None

    return jax.tree.map(dimensions, axes, is_leaf=is_names)


def _optax_attribute(path: str) -> Any:
    return functools.reduce(lambda node, part: getattr(node, part, None), path.split("."), optax)


def _optimizer_of_optax(path: str) -> Callable[..., Any]:
    """The function of this dotted name in optax. Raises ValueError when there is none."""
    function = _optax_attribute(path)
    if callable(function) and not isinstance(function, type):
        return function
    known = [*_takes_rate("", optax), *_takes_rate("contrib.", optax.contrib)]
    near = difflib.get_close_matches(path, known, n=3) or [name for name in known if name.endswith(f".{path}")]
    advice = f"Did you mean {' or '.join(near)}?" if near else "Give one of its optimizers, such as lion."
    raise ValueError(f"optax has no optimizer {path}. {advice}")


def _takes_rate(prefix: str, module: Any) -> list[str]:
    """The functions of a module of optax that take a learning rate."""
    functions = [
        (name, function) for name, function in vars(module).items() if inspect.isfunction(function) and name[0] != "_"
    ]
    return [prefix + name for name, function in functions if "learning_rate" in inspect.signature(function).parameters]


def _argument(name: str, value: Any) -> Any:
    """An argument as optax gets it: functions instead of their places, tuples instead of lists.

    Raises ValueError for what no JSON can hold.
    """
    if is_transformation(value):
        raise ValueError(
            f"{name} is an optax transformation, which config.json cannot hold. Write a function of learning_rate that "
            "makes the whole transformation, and give that: Optax(my_function)."
        )
    if isinstance(value, Mapping) and SOURCE in value:
        return resolve(value)
    if isinstance(value, Mapping):
        return {key: _argument(name, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_argument(name, inner) for inner in value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if callable(value):
        return resolve(value)
    raise ValueError(
        f"{name} is an object of type {type(value).__name__}, which config.json cannot hold. Give a number, a text, a "
        "list or a function at the top level of a file."
    )
