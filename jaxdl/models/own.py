"""Models of a user's own without a config class: any flax module, or two functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import pydantic
from flax import linen, nnx
from pydantic_core import core_schema

from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import SOURCE
from jaxdl.core.reference import Reference, as_json, resolve
from jaxdl.core.user_code import check_given, check_known, parameters, takes_any, user_code
from jaxdl.models.config import Model, check_dtype
from jaxdl.models.functions import FunctionNetwork, blank, linen_network
from jaxdl.models.modes import mode_arguments
from jaxdl.models.network import Network

_RNGS = "rngs"
_LINEN = ("parent", "name")
"""Parameters of every linen module, which Flax sets."""
_KEYS = ("key", "rng")
"""Names of the argument of an `apply` that is a random key."""


class Argument:
    """The type of an argument that a user's code is called with: a JSON value, or a function or class with a name.

    Lists become tuples. A function or class is dumped as in `Reference`.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        del source, handler
        serialize = core_schema.plain_serializer_function_ser_schema(as_json, when_used="json")
        return core_schema.no_info_plain_validator_function(_argument, serialization=serialize)


def _argument(value: Any) -> Any:
    """The value of an argument. Raises ConfigError for one that cannot be written as JSON."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # A number of NumPy.
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_argument, value))
    if isinstance(value, Mapping) and SOURCE not in value and all(isinstance(name, str) for name in value):
        return {name: _argument(item) for name, item in value.items()}
    if isinstance(value, Mapping) or callable(value):
        return resolve(value)
    raise ConfigError(
        f"{value!r} cannot be written to config.json. Give a number, a string, True, False, None, a function or class "
        "with a name, or lists and dictionaries of these"
    )


class OwnModel(Model, kind=None):
    """What `FromModule` and `FromFunctions` share: the arguments that the user's code is called with."""

    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Argument]  # pyright: ignore[reportIncompatibleVariableOverride]
    example: ClassVar[str]
    """How to write one, for messages."""

    def __init__(self, *args: Any, **values: Any) -> None:
        cls = type(self)
        for name in (*cls.by_position[: len(args)], "kind", SOURCE):
            if args and name in values:
                raise ConfigError(f"{cls.__name__}(..., {name}=...): jaxdl uses this name itself. Rename the argument.")
        if missing := [name for name in cls.by_position[len(args) :] if name not in values]:
            raise ConfigError(f"{cls.__name__} needs {' and '.join(missing)}. Set it in Python: {cls.example}.")
        super().__init__(*args, **values)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def further_options(self) -> dict[str, Any]:
        """The arguments that are options of the command line, with their values: numbers, strings, True and False.

        They are those that are given, and those that the user's code has a default for.
        """
        fields = {*type(self).model_fields, "kind", SOURCE}
        defaults = {name: parameter.default for name, parameter in self._parameters().items() if name not in fields}
        return {
            name: value for name, value in (defaults | self.arguments).items() if type(value) in (bool, int, float, str)
        }

    @property
    def further_types(self) -> dict[str, Any]:
        """The types of `further_options`: of a number, any number, unless it is annotated as a whole one."""
        whole = [name for name, parameter in self._parameters().items() if parameter.annotation in (int, "int")]
        return {
            name: int | float if type(option) is int and name not in whole else type(option)
            for name, option in self.further_options.items()
        }

    def _parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of the user's code that arguments are for."""
        raise NotImplementedError

    def build(self, *args: Any, **sizes: Any) -> Callable[[nnx.Rngs], nnx.Module]:
        """Refused: `network` makes the network."""
        raise NotImplementedError(f"{type(self).__name__} makes no flax.nnx module by itself; call network()")

    def _filled(self, name: str, wanted: Mapping[str, Any], sizes: Mapping[str, Any], note: str = "") -> dict[str, Any]:
        """The arguments among `wanted`, and those of the sizes that are wanted besides; `note` is for the message."""
        user_arguments = {
            argument: value for argument, value in self.arguments.items() if argument in wanted or takes_any(wanted)
        }
        given = {
            argument: value
            for argument, value in sizes.items()
            if argument in wanted and argument not in user_arguments
        } | user_arguments
        others = f", and the data gives only {', '.join(sizes)}{note}"
        check_given(f"{self.users_name}: {name}", wanted, given, type(self).__name__, others)
        return given


class FromModule(OwnModel, kind="from_module"):
    """A flax.nnx or flax.linen module of your own, without a config class.

        model = FromModule(Net, hidden=32)

    where `class Net(nnx.Module)` is made as `Net(hidden=32, rngs=rngs)`. Of what the data knows (`num_classes`, and
    `channels` of images, `num_features` of arrays [example, feature], `vocab_size` of text) and of `dtype`, the dtype
    of the computation, the constructor gets those arguments that it takes; `rngs` it always gets. A function that
    returns a module does as well as a class.

    In `__call__(inputs, train)` the argument `train` (or `is_training`, `deterministic` and the like) tells whether the
    network is trained; without one, `nnx.Module.train()` and `eval()` set the layers' mode. A parameter has logical
    axes if it is made with `kernel_metadata={"axes": ("embed", "mlp")}` and the like; otherwise `fsdp` splits its
    largest dimension that it divides, and `tensor` keeps it whole. Each argument that is given here, or has a default,
    is an option if it is a number, a string, True or False: `--model.hidden 64`.
    """

    by_position: ClassVar[tuple[str, ...]] = ("module",)
    example: ClassVar[str] = "FromModule(Net, hidden=32)"

    module: Reference
    """The module's class, or a function that returns the module; its arguments are given beside it."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)  # Here so that type checkers know what is given by position.

    @pydantic.model_validator(mode="after")
    def _fits(self) -> FromModule:
        made = self.module
        if isinstance(made, type) and not issubclass(made, nnx.Module | linen.Module):
            raise ValueError(
                f"{made.__name__} is not a flax.nnx or flax.linen module. Derive it from nnx.Module; for functions "
                "there is FromFunctions(init, apply)"
            )
        if _RNGS in self.arguments:
            raise ValueError("rngs: jaxdl makes the random keys, from --seed. Remove it")
        check_known(self._name, self._parameters(), self.arguments)
        return self

    def _parameters(self) -> dict[str, inspect.Parameter]:
        all_parameters = parameters(self._function)
        return {name: parameter for name, parameter in all_parameters.items() if name not in (*_LINEN, _RNGS)}

    @property
    def _function(self) -> Callable[..., Any]:
        """The module's class, or the function that makes it."""
        assert callable(self.module)
        return self.module

    @property
    def _name(self) -> str:
        return self._function.__qualname__

    @property
    def users_name(self) -> str:
        """How messages name the user's code, `model my_model`."""
        return f"model {self._name}"

    def network(self, inputs: Sequence[jax.ShapeDtypeStruct], **sizes: Any) -> Network:
        """The network for inputs like these, [batch, ...] each."""
        make, wanted = self._function, parameters(self._function)
        if "dtype" not in wanted and "dtype" not in self.arguments:
            check_dtype(self.users_name, sizes, self._name)
        arguments = self._filled(self._name, self._parameters(), sizes)
        is_nnx = isinstance(make, type) and issubclass(make, nnx.Module)
        takes_rngs = _RNGS in wanted or (is_nnx and takes_any(wanted))
        if takes_rngs or is_nnx:
            return Network(
                lambda rngs: make(**arguments, **({_RNGS: rngs} if takes_rngs else {})), self.users_name, self.arguments
            )
        made: list[Any] = []
        with user_code(self.users_name, of=make):  # As shapes: what makes a module may make arrays.
            jax.eval_shape(lambda: made.append(make(**arguments)))
        if isinstance(made[0], linen.Module):
            return linen_network(made[0], inputs, self.users_name, self.arguments)
        return Network(lambda rngs: make(**arguments), self.users_name, self.arguments)


class FromFunctions(OwnModel, kind="from_functions"):
    """A network of two functions of your own, without a config class.

        model = FromFunctions(init, apply, hidden=32)

    where `init(key, ...)` returns the parameters, any pytree of float32 arrays, and `apply(params, inputs, ...)` the
    outputs. Either also gets those of its arguments that are given here, or that the data knows (`num_classes` and
    `channels` of images, `vocab_size` of text), and `dtype`, the dtype of the computation. An argument of `init` with
    the name of an input of `apply` is a batch of zeros.

    `apply` gets `train` if it has that argument, and a random key if it has `key` or `rng`: another one for each step,
    micro-batch and replica. With an argument `state`, `apply(params, state, inputs, ...)` returns `(outputs, state)`
    and `init` returns `(params, state)`; floating-point numbers that are averaged over the replicas.
    """

    by_position: ClassVar[tuple[str, ...]] = ("init", "apply")
    example: ClassVar[str] = "FromFunctions(init, apply)"

    init: Reference
    """The function that makes the parameters."""
    apply: Reference
    """The function that is the network."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)  # Here so that type checkers know what is given by position.

    @pydantic.model_validator(mode="after")
    def _fits(self) -> FromFunctions:
        init, apply = self._functions
        check_known(f"{init.__name__} or {apply.__name__}", self._parameters(), self.arguments)
        return self

    def _parameters(self) -> dict[str, inspect.Parameter]:
        init, apply = (list(parameters(function).items())[1:] for function in self._functions)
        given = (mode_arguments(dict(apply), train=True).keys() - self.arguments.keys()) | {"state", *_KEYS}
        return {name: parameter for name, parameter in init + apply if name not in given}

    @property
    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        assert callable(self.init)
        assert callable(self.apply)
        return self.init, self.apply

    @property
    def users_name(self) -> str:
        """How messages name the user's code, `model my_model`."""
        return f"model {self._functions[1].__qualname__}"

    def network(self, inputs: Sequence[jax.ShapeDtypeStruct], **sizes: Any) -> Network:
        """The network for inputs like these, [batch, ...] each."""
        (init, apply), what = self._functions, self.users_name
        for_init, for_apply = list(parameters(init).items())[1:], list(parameters(apply).items())
        if "dtype" not in {name for name, _ in for_init + for_apply} | self.arguments.keys():
            check_dtype(what, sizes, apply.__name__)
        has_state = len(for_apply) > 1 and for_apply[1][0] == "state"
        free = dict(for_apply[1 + has_state + len(inputs) :])
        keys = [name for name in _KEYS if name in free]
        modes = {name: free[name] for name in mode_arguments(free, train=True)}
        # A value that the user gave holds in training; in evaluation the mode does.
        user_modes = {name: self.arguments[name] for name in modes if name in self.arguments}
        named = {name: parameter for name, parameter in free.items() if name not in modes and name not in keys}
        arguments = self._filled(apply.__name__, named, sizes, f"; an argument {' or '.join(_KEYS)} is a random key")
        read = [name for name, _ in for_apply[1 + has_state :]][: len(inputs)]
        zeros = [name for name in read if name in dict(for_init) and name not in self.arguments]
        note = f"; only {' and '.join(read)}, as {apply.__name__} calls its inputs, would be zeros" if read else ""
        start = self._filled(
            init.__name__, {name: parameter for name, parameter in for_init if name not in zeros}, sizes, note
        )

        def make(key: jax.Array) -> tuple[Any, Any]:
            batch = dict(zip(read, blank(inputs), strict=False))
            made = init(key, **{name: batch[name] for name in zeros}, **start)
            if has_state and not (isinstance(made, tuple) and len(made) == 2):
                raise ConfigError(
                    f"{what}: {init.__name__} returned {type(made).__name__}. Since {apply.__name__} has the argument "
                    "state, return a pair: (params, state)."
                )
            return made if has_state else (made, {})

        def run(
            params: Any, state: Any, inputs: Sequence[jax.Array], train: bool, key: jax.Array | None, **switches: Any
        ) -> Any:
            mode = mode_arguments(modes, train=train) | (user_modes if train else {})
            more = arguments | mode | dict.fromkeys(keys, key) | switches
            if not has_state:
                return apply(params, *inputs, **more), state
            made = apply(params, state, *inputs, **more)
            if not (isinstance(made, tuple) and len(made) == 2):
                raise ConfigError(
                    f"{what}: it returned {type(made).__name__}. Since it has the argument state, return a pair: "
                    "(outputs, state)."
                )
            return made

        network = FunctionNetwork(make, run, what, is_random=bool(keys), written=(init, apply))
        network.key_argument = " and ".join(keys)
        return network
