"""Models of a user's own without a config class: any flax module, or two functions."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import pydantic
from flax import linen, nnx
from pydantic_core import core_schema

from jaxdl.errors import ConfigError
from jaxdl.kinds import SOURCE
from jaxdl.models.config import Model, check_dtype
from jaxdl.models.functions import FunctionNetwork, blank, linen_network
from jaxdl.models.network import Network
from jaxdl.models.user_code import mode_arguments, parameters, required, takes_any, user_code
from jaxdl.reference import Reference, as_json, resolved

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
        return {name: _argument(one) for name, one in value.items()}
    if isinstance(value, Mapping) or callable(value):
        return resolved(value)
    raise ConfigError(
        f"{value!r} cannot be written to config.json. Give a number, a string, True, False, None, a function or class "
        "with a name, or lists and dictionaries of these"
    )


class OwnModel(Model, kind=None):
    """What `FromModule` and `FromFunctions` share: the arguments that the user's code is called with."""

    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Argument]  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def argument_types(self) -> dict[str, Any]:
        """The types of the arguments that are options, by the types of their values."""
        types: dict[type, Any] = {bool: bool, int: int | float, float: float, str: str}
        return {name: types[type(one)] for name, one in self.arguments.items() if type(one) in types}

    def build(self, *args: Any, **sizes: Any) -> Callable[[nnx.Rngs], nnx.Module]:
        """Refused: `network` makes the network."""
        raise NotImplementedError(f"{type(self).__name__} makes no flax.nnx module by itself; call network()")

    def _filled(self, name: str, wanted: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments among `wanted`, and those of the sizes that are wanted besides."""
        own = {one: value for one, value in self.arguments.items() if one in wanted or takes_any(dict(wanted))}
        given = {one: value for one, value in sizes.items() if one in wanted and one not in own} | own
        missing = [one for one in required(dict(wanted)) if one not in given]
        if missing:
            raise ConfigError(
                f"{self.users_name}: {name} needs {', '.join(missing)}, and the data gives only "
                f"{', '.join(sizes)}. Give {'it' if len(missing) == 1 else 'them'} as in "
                f"{type(self).__name__}(..., {missing[0]}=...)."
            )
        return given


def _check_known(names: Sequence[str], wanted: Mapping[str, Any], what: str) -> None:
    """Raises ValueError for arguments that a user's code does not take."""
    known = [name for name in wanted if name not in (*_LINEN, _RNGS)]
    for name in names:
        if name not in known and not takes_any(dict(wanted)):
            near = difflib.get_close_matches(name, known, n=1)
            guess = f"Did you mean {near[0]}? " if near else ""
            raise ValueError(f"{what} takes no argument {name}. {guess}It takes {', '.join(known) or 'none'}")


class FromModule(OwnModel, kind="from_module"):
    """A flax.nnx or flax.linen module of your own, without a config class.

        model = FromModule(Net, hidden=32)

    where `class Net(nnx.Module)` is made as `Net(hidden=32, rngs=rngs)`. Of what the data knows (`num_classes` and
    `channels` of images, `vocab_size` of text) and of `dtype`, the dtype of the computation, the constructor gets those
    arguments that it takes; `rngs` it always gets. A function that returns a module does as well as a class.

    In `__call__(inputs, train)` the argument `train` (or `training`, `is_training`, `deterministic`) tells whether the
    network is trained; without one, `nnx.Module.train()` and `eval()` set the layers' mode. A parameter has logical
    axes if it is made with `kernel_metadata={"axes": ("embed", "mlp")}` and the like; otherwise `fsdp` splits its
    largest dimension that it divides, and `tensor` keeps it whole. Each argument is an option: `--model.hidden 64`.
    """

    module: Reference
    """The module's class, or a function that returns the module; its arguments are given beside it."""

    def __init__(self, module: Any = None, /, **values: Any) -> None:
        if module is not None:
            _check_free(values, ("module",), "FromModule")
            values["module"] = module
        elif "module" not in values:
            raise ConfigError("FromModule needs the class of a module: FromModule(Net, hidden=32). Set it in Python.")
        super().__init__(**values)

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
        _check_known(list(self.arguments), parameters(self._function), self._name)
        return self

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
        """See `Choice.users_name`."""
        return f"model {self._name}"

    def network(self, inputs: Sequence[jax.ShapeDtypeStruct], **sizes: Any) -> Network:
        """See `Model.network`."""
        make, wanted = self._function, parameters(self._function)
        if "dtype" not in wanted and "dtype" not in self.arguments:
            check_dtype(self.users_name, sizes, self._name)
        named = {name: one for name, one in wanted.items() if name not in (*_LINEN, _RNGS)}
        arguments = self._filled(self._name, named, sizes)
        is_nnx = isinstance(make, type) and issubclass(make, nnx.Module)
        takes_rngs = _RNGS in wanted or (is_nnx and takes_any(wanted))
        if takes_rngs or is_nnx:
            return Network(lambda rngs: make(**arguments, **({_RNGS: rngs} if takes_rngs else {})), self.users_name)
        made: list[Any] = []
        with user_code(self.users_name):  # As shapes: what makes a module may make arrays.
            jax.eval_shape(lambda: made.append(make(**arguments)))
        if isinstance(made[0], linen.Module):
            return linen_network(made[0], inputs, self.users_name)
        return Network(lambda rngs: make(**arguments), self.users_name)


class FromFunctions(OwnModel, kind="from_functions"):
    """A network of two functions of your own, without a config class.

        model = FromFunctions(init, apply, hidden=32)

    where `init(key, ...)` returns the parameters, any pytree of float32 arrays, and `apply(params, inputs, ...)` the
    outputs. Either also gets those of its arguments that are given here, or that the data knows (`num_classes` and
    `channels` of images, `vocab_size` of text), and `dtype`, the dtype of the computation. Other arguments of `init`
    without a default are a batch of zeros.

    `apply` gets `train` if it has that argument, and a random key if it has `key` or `rng`: another one for each step,
    micro-batch and replica. With an argument `state`, `apply(params, state, inputs, ...)` returns `(outputs, state)`
    and `init` returns `(params, state)`; floating-point numbers that are averaged over the replicas.
    """

    init: Reference
    """The function that makes the parameters."""
    apply: Reference
    """The function that is the network."""

    def __init__(self, init: Any = None, apply: Any = None, /, **values: Any) -> None:
        if init is not None and apply is not None:
            _check_free(values, ("init", "apply"), "FromFunctions")
            values |= {"init": init, "apply": apply}
        elif init is not None or not {"init", "apply"} <= values.keys():
            raise ConfigError("FromFunctions needs two functions: FromFunctions(init, apply). Set them in Python.")
        super().__init__(**values)

    @pydantic.model_validator(mode="after")
    def _fits(self) -> FromFunctions:
        init, apply = self._functions
        _check_known(list(self.arguments), parameters(init) | parameters(apply), f"{init.__name__} or {apply.__name__}")
        return self

    @property
    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        assert callable(self.init)
        assert callable(self.apply)
        return self.init, self.apply

    @property
    def users_name(self) -> str:
        """See `Choice.users_name`."""
        return f"model {self._functions[1].__qualname__}"

    def network(self, inputs: Sequence[jax.ShapeDtypeStruct], **sizes: Any) -> Network:
        """See `Model.network`."""
        (init, apply), what = self._functions, self.users_name
        for_init, for_apply = list(parameters(init).items())[1:], list(parameters(apply).items())
        if "dtype" not in {name for name, _ in for_init + for_apply} | self.arguments.keys():
            check_dtype(what, sizes, apply.__name__)
        has_state = len(for_apply) > 1 and for_apply[1][0] == "state"
        free = dict(for_apply[1 + has_state + len(inputs) :])
        keys = [name for name in _KEYS if name in free]
        modes = {name: free[name] for name in mode_arguments(free, train=True)}
        named = {name: one for name, one in free.items() if name not in modes and name not in keys}
        arguments = self._filled(apply.__name__, named, sizes)
        known = self.arguments.keys() | sizes.keys()
        zeros = [name for name in required(dict(for_init)) if name not in known]
        if zeros and len(zeros) != len(inputs):
            zeros = []  # They are no inputs; the next line says that they are missing.
        start = self._filled(init.__name__, {name: one for name, one in for_init if name not in zeros}, sizes)

        def make(key: jax.Array) -> tuple[Any, Any]:
            made = init(key, **dict(zip(zeros, blank(inputs), strict=False)), **start)
            return made if has_state else (made, {})

        def run(params: Any, state: Any, inputs: Sequence[jax.Array], train: bool, key: jax.Array | None) -> Any:
            more = arguments | mode_arguments(modes, train=train) | dict.fromkeys(keys, key)
            return apply(params, state, *inputs, **more) if has_state else (apply(params, *inputs, **more), state)

        return FunctionNetwork(make, run, what, is_random=bool(keys))


def _check_free(values: Mapping[str, Any], fields: Sequence[str], kind: str) -> None:
    """Raises ConfigError for arguments whose names jaxdl uses itself."""
    for name in (*fields, "kind", SOURCE):
        if name in values:
            raise ConfigError(f"{kind}(..., {name}=...): jaxdl uses this name itself. Rename the argument.")
