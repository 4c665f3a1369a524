"""A network as pure functions on plain pytrees: the NNX graph is traversed here once, never in the training loop."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdl.core.errors import ConfigError
from jaxdl.core.user_code import user_code
from jaxdl.models.dropout import RowKeys, row_keys
from jaxdl.models.features import layer_output
from jaxdl.models.logits import materialize
from jaxdl.models.loop import BESIDE_LOOP
from jaxdl.models.modes import call_modes, set_modes
from jaxdl.models.stacks import Dims, nnx_stacks, noted_shapes, with_stacks
from jaxdl.parallel.sharding import STACKED, UNNAMED, LogicalAxes, Params, is_names

ModelState = dict[str, Any]
"""What a network keeps besides parameters, by name, such as the running statistics of batch norm."""


@dataclass(frozen=True)
class Call:
    """How a network is called on its inputs."""

    train: bool
    key: jax.Array | None = None
    """For the random numbers of the call; None always draws the same ones. In evaluation there is no dropout."""
    rows: jax.Array | None = None
    """The numbers of the inputs' rows in the global batch, from which each row's own keys are made (`RowKeys`); None
    counts them."""
    reset_batch_stats: bool = False
    """Whether the new statistics of batch norm are of these inputs alone. All else that is kept then stays as it is."""
    materialize_logits: bool = True
    """False for outputs that may be `Logits`, which are not made yet."""
    method: str = "__call__"
    """The method of the module that is called; inputs of others may be trees of arrays, and static numbers."""
    layer: str | None = None
    """In evaluation, the layer whose output is returned; those after it are not computed: `jaxdl.models.features`."""


class Network:
    """An NNX module, split once: `init` and `apply` are pure and work on nested dictionaries of arrays.

    Attributes:
      axes: the logical axes of each parameter, a tuple of names each; see `jaxdl.parallel.sharding`. Without names of
      its own a
        parameter has `UNNAMED` for each dimension.
      looped: for each parameter, whether it is stacked over layers or given to their loop beside them; see
        `jaxdl.models.loop`.
      param_shapes: shape and dtype of each parameter.
      state_shapes: shape and dtype of all else that the module keeps, such as batch statistics.
      state_axes: the logical axes of these.
      is_random: whether the network draws random numbers in training, as dropout does.
      norms: the paths of the running statistics of `nnx.BatchNorm` in `state_shapes`.
      what: for a network of a user's code, its name in messages; else None.
      empty_layers: how many layers at the end of each stack are empty: room for stages of equal size.
      restacked: by parameter, where `axes` has the stacked dimensions that the run began with: these, and those of the
        module, which are others.
      unclear_stacks: the names of parameters whose shapes do not tell which of their dimensions counts layers, with the
        ones that were taken.
      key_argument: the argument of a user's function that is a random key, or empty.
      switches: further arguments of each call.
      reads_padding: whether the padding of a row would change what is made of other rows, or what the network keeps, so
        that it must be told where padding is (`jaxdl.data.DataSpec.segments`).
      next_change: of jaxdl's transformers: the next length of a text, above the one that is given, of which the tokens
        are read otherwise than in those before, so that a key-value cache is of no use any more; None: there is none.
    """

    reads_padding: bool = False
    next_change: Callable[[int], int | None] = staticmethod(lambda length: None)
    axes: LogicalAxes
    looped: dict[str, Any]
    param_shapes: Params
    state_shapes: ModelState
    state_axes: LogicalAxes
    is_random: bool
    norms: frozenset[tuple[str, ...]] = frozenset()
    empty_layers: int = 0
    _filled: Network | None = None
    restacked: Mapping[str, tuple[Dims, Dims]] = types.MappingProxyType({})
    unclear_stacks: tuple[str, ...] = ()
    key_argument: str = ""
    switches: Mapping[str, Any]

    def __init__(
        self, make: Callable[[nnx.Rngs], nnx.Module], what: str | None = None, given: Collection[str] = ()
    ) -> None:
        """`make` makes the module from random keys. Raises ConfigError for a module of a user that cannot be trained.

        `given` are the names of the arguments that the user has given to the module: its fields of these names are not
        changed in training.

        Trained is every `nnx.Param`. Other variables of floating-point numbers are state. Random keys (`nnx.Rngs`,
        `nnx.Dropout`) are new ones in each step: `Call.key`.
        """
        self.what, self.given, self.switches = what, given, {}
        if isinstance(make, nnx.Module) or not callable(make):
            raise ConfigError(
                f"{what or 'a network'}: build() returned an object of type {type(make).__name__}. Return a function "
                "that makes the flax.nnx module from random keys: return lambda rngs: Net(rngs=rngs)."
            )
        self._make = make
        with user_code(what, of=make):
            abstract = nnx.eval_shape(lambda: self._made(_rngs(0)))
        self._graphdef, params, keys, rest = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
        self._type = type(abstract)
        self.reads_padding = getattr(abstract, "reads_padding", self.reads_padding)
        self.next_change = getattr(abstract, "next_change", self.next_change)
        self._keys = [(path, variable) for path, variable in nnx.to_flat_state(keys)]
        self._param_names, self._state_names = Names(nnx.to_pure_dict(params)), Names(nnx.to_pure_dict(rest))
        axes = jax.tree.map(self._axes, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
        stacks = nnx_stacks(abstract)
        self.axes = with_stacks(self._param_names.named(nnx.to_pure_dict(axes), is_leaf=is_names), stacks)
        self.unclear_stacks = stacks.unclear
        looped = jax.tree.map(self._looped, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
        self.looped = self._param_names.named(nnx.to_pure_dict(looped))
        self.param_shapes = self._param_names.named(nnx.to_pure_dict(params))
        self.state_shapes = self._state_names.named(nnx.to_pure_dict(rest))
        of_state = jax.tree.map(self._axes, rest, is_leaf=lambda node: isinstance(node, nnx.Variable))
        self.state_axes = self._state_names.named(nnx.to_pure_dict(of_state), is_leaf=is_names)
        self.is_random = bool(self._keys)
        parts = [(path, part) for path, part in nnx.iter_graph(abstract) if isinstance(part, nnx.BatchNorm)]
        self.norms = frozenset((*map(str, path), name) for path, _ in parts for name in ("mean", "var"))
        check_arrays(what, self.param_shapes, self.state_shapes)

    def init(self, key: jax.Array) -> tuple[Params, ModelState]:
        """Fresh `(params, model_state)` from a random key; equal on every mesh."""
        with user_code(self.what):
            _, params, _, rest = nnx.split(self._made(_rngs(key)), nnx.Param, nnx.RngState, ...)
        named = self._param_names.named(nnx.to_pure_dict(params)), self._state_names.named(nnx.to_pure_dict(rest))
        return self._extended(*named) if self.empty_layers else named

    def with_empty_layers(self, number: int) -> Network:
        """The same network with so many more layers at the end of each stack, whose parameters are zeros.

        It can only be called in parts that do not read them: `jaxdl.training.step.stage`.
        """
        network = copy.copy(self)
        network.empty_layers, network._filled = number, self
        shapes = jax.eval_shape(network._extended, self.param_shapes, self.state_shapes)
        network.param_shapes, network.state_shapes = shapes
        return network

    @property
    def filled(self) -> Network:
        """The network without empty layers."""
        return self._filled or self

    def without_empty(self, params: Params, state: ModelState) -> tuple[Params, ModelState]:
        """Parameters and state of this network as `filled` takes them."""
        return without_layers(self.empty_layers, params, self.axes), without_layers(
            self.empty_layers, state, self.state_axes
        )

    def _extended(self, params: Params, state: ModelState) -> tuple[Params, ModelState]:
        def one(names: tuple[str, ...], x: Any) -> jax.Array:
            rows = self.empty_layers if STACKED in names else 0
            return jnp.concatenate([x, jnp.zeros((rows, *x.shape[1:]), x.dtype)]) if rows else x

        trees = zip((params, state), (self.axes, self.state_axes), strict=True)
        extended, of_state = (jax.tree.map(one, axes, tree, is_leaf=is_names) for tree, axes in trees)
        return extended, of_state

    def apply(
        self, params: Params, model_state: ModelState, *inputs: Any, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, ModelState]:
        """`call` in training or in evaluation, with all else as usual."""
        return self.call(Call(train=train, key=key), params, model_state, *inputs)

    def call(self, how: Call, params: Params, model_state: ModelState, *inputs: Any) -> tuple[Any, ModelState]:
        """`(outputs, model_state)` of the module called on `inputs`; in training the state has new batch statistics."""
        train = how.train
        state = (nnx.State(self._param_names.tree(params)), nnx.State(self._state_names.tree(model_state)))
        keys = self._key_state(how.key, how.rows, inputs if train else None)
        module = nnx.merge(self._graphdef, *state, keys, copy=True)
        if how.reset_batch_stats:
            for _, part in nnx.iter_graph(module):
                if isinstance(part, nnx.BatchNorm):
                    part.momentum = 0.0
        called = getattr(type(module), how.method)
        modes = {**call_modes(called, len(inputs), train=train), **self.switches}
        with user_code(self.what, called_on(inputs, train=train), of=called):
            if not train or not modes:
                set_modes(module, train=train, given=self.given)
            if how.layer is not None:
                return layer_output(module, how.layer, *inputs, **modes), model_state
            outputs = called(module, *inputs, **modes)
            after = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))
            after = like_before(self.what, self._state_names.named(after), model_state)
        if how.reset_batch_stats:
            keep = jax.tree_util.tree_map_with_path
            after = keep(lambda path, new, old: new if _names(path) in self.norms else old, after, model_state)
        return materialize(outputs) if how.materialize_logits else outputs, after

    def changed(self, change: Callable[[nnx.Module], None]) -> Network:
        """A network of the same parameters whose module `change` has changed after it was made."""

        def make(rngs: nnx.Rngs) -> nnx.Module:
            module = self._make(rngs)
            change(module)
            return module

        return Network(make, self.what, self.given)

    @property
    def called(self) -> Callable[..., Any]:
        """The user's function that is the network, or the method `__call__` of its module."""
        return self._type.__call__  # pyright: ignore[reportAttributeAccessIssue]

    def has(self, method: str) -> bool:
        """Whether the module has a method of this name."""
        return hasattr(self._type, method)

    def _made(self, rngs: nnx.Rngs) -> nnx.Module:
        # Names of mesh axes in a module's metadata are read here, not acted upon by Flax.
        with nnx.use_eager_sharding(False), noted_shapes():
            module = self._make(rngs)
        if not isinstance(module, nnx.Module):
            raise ConfigError(
                f"{self.what or 'a network'}: what makes the network returned an object of type "
                f"{type(module).__name__}, not a flax.nnx module."
            )
        if self.what is not None:
            check_callable(self.what, module)
        return module

    def _key_state(
        self, key: jax.Array | None, rows: jax.Array | None, inputs: Sequence[jax.Array] | None
    ) -> nnx.State:
        """The random keys of the module, each folded from `key`, and their counts, which are 0.

        Each row of `inputs` has its own; None in evaluation, where the number of rows may not be known.
        """
        flat = []
        for index, (path, variable) in enumerate(self._keys):
            variable_key = jax.random.fold_in(jax.random.key(0) if key is None else key, index)
            if isinstance(variable, RowKeys):
                numbers = jnp.arange(len(inputs[0])) if rows is None and inputs is not None else rows
                flat.append((path, variable_key if numbers is None else row_keys(variable_key, numbers)))
            elif isinstance(variable, nnx.RngKey):
                variable_key = variable_key if rows is None else jax.random.fold_in(variable_key, rows[0])
                flat.append((path, jax.random.split(variable_key, variable.shape) if variable.shape else variable_key))
            else:
                flat.append((path, jnp.zeros(variable.shape, variable.dtype)))
        return nnx.from_flat_state(flat)

    def _looped(self, variable: nnx.Variable) -> bool:
        return STACKED in self._axes(variable) or variable.get_metadata().get(BESIDE_LOOP, False)

    def _axes(self, variable: nnx.Variable) -> tuple[str, ...]:
        """The logical axes of a parameter, after `layers` when it is stacked."""
        metadata, ndim = variable.get_metadata(), len(variable.shape)
        axes = metadata.get("axes")
        if axes is None:
            names = metadata.get("out_sharding") or ()  # Those of `nnx.with_partitioning`.
            names = names if len(names) == ndim else (None,) * ndim
            return tuple(name if isinstance(name, str) else UNNAMED for name in names)
        if ndim - len(axes) not in (0, 1):
            raise ConfigError(f"{self.what}: a parameter of shape {variable.shape} has the logical axes {axes}.")
        return (STACKED, *axes) if ndim > len(axes) else tuple(axes)


def without_layers(number: int, tree: Any, axes: LogicalAxes) -> Any:
    """A tree with these logical axes without the last layers of its stacks; None in it stays as it is."""
    return jax.tree.map(
        lambda names, x: x if x is None or STACKED not in names else x[: len(x) - number], axes, tree, is_leaf=is_names
    )


class _Keys(nnx.RngStream):
    """The keys of `nnx.RngStream`, whose count is replaced instead of written to.

    Flax asks an array that is written to, `count[...] += 1`, for its sharding. A traced array has none, and JAX
    searches all that was traced before for the words of that error: half of the time of building a ResNet-50.
    """

    def __call__(self) -> jax.Array:
        count = self.count.get_value()
        self.count.set_value(count + 1)
        return jax.random.fold_in(self.key.get_value(), count)


def _rngs(key: int | jax.Array) -> nnx.Rngs:
    """`nnx.Rngs(key)`, with keys that are drawn faster."""
    rngs = nnx.Rngs()
    rngs.default = _Keys(key, tag="default")  # pyright: ignore[reportAttributeAccessIssue]
    return rngs


class Names:
    """Between a pytree and nested dictionaries of its leaves, whose names are the parts of the leaves' paths."""

    def __init__(self, tree: Any) -> None:
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(tree)
        self._paths = [_names(path) for path, _ in flat]

    def named(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
        """The leaves of a tree by name. It may have leaves that the first one had not; they are left out."""
        flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
        leaves = {_names(path): leaf for path, leaf in flat}
        return self.from_leaves([leaves[path] for path in self._paths])

    def from_leaves(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Leaves by name, from their list in the order of the first tree."""
        tree: dict[str, Any] = {}
        for (*parents, last), leaf in zip(self._paths, leaves, strict=True):
            inner = tree
            for part in parents:
                inner = inner.setdefault(part, {})
            inner[last] = leaf
        return tree

    def tree(self, named: Mapping[str, Any]) -> Any:
        """The tree of the first one's structure with these leaves."""
        leaves = []
        for path in self._paths:
            leaf: Any = named
            for part in path:
                leaf = leaf[part]
            leaves.append(leaf)
        return self._treedef.unflatten(leaves)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of a path's parts; that of a tree which is a leaf itself is `value`."""
    texts = tuple(str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part)))) for part in path)
    return texts or ("value",)


def check_callable(what: str, module: Any) -> None:
    """Raises ConfigError for a module of a user that has no method `__call__`."""
    if not callable(module):
        name = type(module).__name__
        raise ConfigError(f"{what}: {name} has no method __call__(self, inputs). Add one.")


def called_on(inputs: Sequence[Any], *, train: bool) -> str:
    """A sentence for messages about a call of a network."""
    shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in jax.tree.leaves(inputs) if hasattr(x, "dtype"))
    return f"It was called on {shapes} {'in training' if train else 'in evaluation'}"


def check_arrays(what: str | None, params: Params, state: ModelState) -> None:
    """Raises ConfigError for a network without parameters, and for arrays that cannot be trained or kept.

    Those are arrays of other dtypes, and a parameter and another array of the same name.
    """
    names = {_names(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    if not jax.tree.leaves(params):
        raise ConfigError(f"{what or 'a network'}: it has no parameters, so there is nothing to train.")
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if leaf.dtype != jnp.float32:
            raise ConfigError(
                f"{what or 'a network'}: the parameter {'/'.join(_names(path))} is {leaf.dtype}. Parameters are kept "
                "in float32: make it so (param_dtype=float32); --precision sets the dtype of the computation."
            )
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(
                f"{what or 'a network'}: the variable {'/'.join(_names(path))} is {leaf.dtype}. What a network keeps "
                "besides its parameters is averaged over the replicas, so it must be floating-point numbers: make it "
                "so, or make it an nnx.Param, a constant, or a number that is computed in the call."
            )
        if _names(path) in names:
            raise ConfigError(
                f"{what or 'a network'}: a parameter and an array of the state are both named "
                f"{'/'.join(_names(path))}, the name that --explain, --init-from and exports have for them. Rename one."
            )


def like_before(what: str | None, after: ModelState, before: ModelState) -> ModelState:
    """What a network keeps after a call, in the dtypes of before. Raises ConfigError for another shape."""

    def one(path: Any, new: jax.Array, old: jax.Array) -> jax.Array:
        if new.shape != old.shape:
            raise ConfigError(
                f"{what or 'a network'}: the variable {'/'.join(_names(path))} has shape {old.shape} before a call and "
                f"{new.shape} after it. Its shape must stay the same."
            )
        return new if new.dtype == old.dtype else new.astype(old.dtype)

    return jax.tree_util.tree_map_with_path(one, after, before)
