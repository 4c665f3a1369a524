"""Networks of pure functions: flax.linen modules, and a user's own `init` and `apply`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen

from jaxdl.core.config import ConfigError
from jaxdl.core.user_code import depends_on, user_code
from jaxdl.models.modes import call_modes, in_mode
from jaxdl.models.network import (
    Call,
    ModelState,
    Names,
    Network,
    called_on,
    check_arrays,
    check_callable,
    like_before,
)
from jaxdl.models.stacks import linen_stacks, with_stacks
from jaxdl.parallel.sharding import UNNAMED, Params

Init = Callable[[jax.Array], tuple[Any, Any]]
"""`init(key) -> (params, state)`, any pytrees."""
Apply = Callable[..., tuple[Any, Any]]
"""`apply(params, state, inputs, train, key, **switches) -> (outputs, state)`.

The key is None unless the function is random; the switches are further arguments of the user's function.
"""


class FunctionNetwork(Network):
    """A network of two pure functions, `Init` and `Apply`; for the attributes and methods see `Network`."""

    def __init__(
        self, init: Init, apply: Apply, what: str, *, is_random: bool, written: tuple[Any, Any], axes: Any = None
    ) -> None:
        """`written` are the user's functions in these two, for messages.

        `axes` is a tree like the parameters, of tuples of logical axes; None where they have none.
        """
        self.what, self.is_random, self._init, self._apply = what, is_random, init, apply
        self.given, self.switches = (), {}
        self._written = written
        with user_code(what, of=written[0]):
            params, state = jax.eval_shape(init, jax.random.key(0))
        self._param_names, self._state_names = Names(params), Names(state)
        if axes is None:
            axes = jax.tree.map(lambda x: (UNNAMED,) * len(x.shape), params)
        leaves = jax.tree.structure(params).flatten_up_to(axes)
        self.axes = self._param_names.from_leaves(leaves)
        self.looped = self._param_names.from_leaves([False] * len(leaves))
        self.param_shapes, self.state_shapes = self._param_names.named(params), self._state_names.named(state)
        check_arrays(what, self.param_shapes, self.state_shapes)

    def init(self, key: jax.Array) -> tuple[Params, ModelState]:
        """Fresh `(params, model_state)` from a random key."""
        with user_code(self.what, of=self._written[0]):
            params, state = self._init(key)
        return self._param_names.named(params), self._state_names.named(state)

    def changed(self, change: Callable[[Any], None]) -> Network:
        """Itself: functions have no module to change."""
        del change
        return self

    @property
    def called(self) -> Callable[..., Any]:
        """The user's function that is the network."""
        return self._written[1]

    def call(self, how: Call, params: Params, model_state: ModelState, *inputs: jax.Array) -> tuple[Any, ModelState]:
        """`(outputs, model_state)` of the functions; all outputs are made, and there are no `norms` to reset.

        Raises ConfigError for a layer: functions have none with names.
        """
        if how.layer is not None:
            raise ConfigError(
                f"layer {how.layer!r}: {self.what} is made of functions, which have no layers with names."
            )
        assert not how.reset_batch_stats
        key, rows, train = how.key, how.rows, how.train
        if self.is_random and key is None:
            key = jax.random.key(0)
        if key is not None and rows is not None:
            key = jax.random.fold_in(key, rows[0])
        trees = (self._param_names.tree(params), self._state_names.tree(model_state))
        with user_code(self.what, called_on(inputs, train=train), of=self._written[1]):
            outputs, after = self._apply(*trees, inputs, train, key if self.is_random else None, **self.switches)
            return outputs, like_before(self.what, self._state_names.named(after), model_state)


def blank(inputs: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
    """Inputs of zeros."""
    return tuple(jnp.zeros(x.shape, x.dtype) for x in inputs)


def linen_network(
    module: linen.Module, inputs: Sequence[jax.ShapeDtypeStruct], what: str, given: Collection[str] = ()
) -> FunctionNetwork:
    """The network of a flax.linen module for inputs like these.

    Trained is the collection `params`; other collections of floating-point numbers, such as `batch_stats`, are state.
    All streams of random numbers, such as `dropout`, come from the key of the call. The names of
    `linen.with_partitioning` are logical axes. `given` are the names of the fields that the user has set.
    """
    check_callable(what, module)
    call: Any = type(module).__call__
    modules = {train: in_mode(module, train=train, given=given) for train in (True, False)}
    modes: dict[bool, Any] = {train: call_modes(call, len(inputs), train=train) for train in (True, False)}

    def boxed(key: jax.Array) -> dict[str, Any]:
        return dict(modules[False].init(_streams(key), *blank(inputs), **modes[False]))

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = jax.tree.map(_unboxed, boxed(key), is_leaf=_is_box)
        return variables.pop("params", {}), variables

    def apply(
        params: Any, state: Any, inputs: Sequence[jax.Array], train: bool, key: jax.Array | None, **switches: Any
    ) -> Any:
        options: dict[str, Any] = modes[train] | switches
        if key is not None:
            options["rngs"] = _streams(key)
        variables = {"params": params, **state}
        if not train or not state:
            # A state that changes in evaluation is what `jaxdl.models.mode_check` looks for.
            with contextlib.suppress(*[] if train else [errors.ModifyScopeVariableError]):
                return modules[train].apply(variables, *inputs, **options), state
        return modules[train].apply(variables, *inputs, mutable=list(state), **options)

    with user_code(what, called_on(inputs, train=False), of=call):
        shapes, stacks = linen_stacks(lambda: jax.eval_shape(boxed, jax.random.key(0)))
        axes = with_stacks(jax.tree.map(_axes, shapes.get("params", {}), is_leaf=_is_box), stacks)
        is_random = _draws(init, apply, inputs)
    network = FunctionNetwork(init, apply, what, is_random=is_random, written=(call, call), axes=axes)
    network.unclear_stacks = stacks.unclear
    return network


def _streams(key: jax.Array) -> dict[str, jax.Array]:
    """Linen takes the stream `params` for every name that is not there."""
    return {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}


def _draws(init: Init, apply: Apply, inputs: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Whether the key plays a part in training, or in evaluation."""
    params, state = jax.eval_shape(init, jax.random.key(0))

    def outputs(train: bool, key: jax.Array, params: Any, state: Any, inputs: Sequence[jax.Array]) -> Any:
        return apply(params, state, inputs, train, key)

    for train in (True, False):
        closed = jax.make_jaxpr(functools.partial(outputs, train))(jax.random.key(0), params, state, tuple(inputs))
        if depends_on(closed, 0):
            return True
    return False


def _is_box(node: Any) -> bool:
    return isinstance(node, linen.meta.AxisMetadata)


def _unboxed(node: Any) -> Any:
    # `unbox` would act upon the names as if they were mesh axes.
    return getattr(node, "value", node) if _is_box(node) else node


def _axes(node: Any) -> tuple[str, ...]:
    names = getattr(node, "names", None) if _is_box(node) else None
    shape = _unboxed(node).shape
    if names is None or len(names) != len(shape):
        return (UNNAMED,) * len(shape)
    return tuple(name if isinstance(name, str) else UNNAMED for name in names)
