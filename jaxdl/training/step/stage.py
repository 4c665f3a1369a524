"""One stage of a pipeline: what it computes of the network, what it sends, and its parameters by kind.

It is inside a `shard_map` that is manual over the stages. The network has the methods `enter`, `inside` and `leave` of
`jaxdl.models.decoder.TransformerModule`. A stage's parameters are those stacked over layers; the others, such as
tables, are on all stages. The last stage may have fewer layers than there is room for, see
`jaxdl.training.step.turns.room_for_layers`; what is behind them in its stacks is not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdl.models.logits import add_remarks
from jaxdl.models.network import Call, without_layers
from jaxdl.parallel.collectives.primitive import alike
from jaxdl.parallel.mesh import STAGE_AXES, platform
from jaxdl.parallel.sharding import STACKED, Layout, LogicalAxes, Params, is_names, is_spec, without_axes
from jaxdl.training.state import ModelState
from jaxdl.training.step.network import gathered_params, run_network, with_gathered
from jaxdl.training.step.parts import Batch, Parts, Sums

(STAGE,) = STAGE_AXES
Leaves = list[Any]


def num_stages(layout: Layout) -> int:
    """The number of stages of a mesh."""
    return layout.mesh.shape.get(STAGE, 1)


class Divided(NamedTuple):
    """The leaves of trained parameters, or of their gradients."""

    stacked: Leaves
    """Those of the layers of a stage."""
    rest: Leaves
    """Those that all stages have."""


NO_GRADS = Divided([], [])


@dataclass(frozen=True)
class Stage:
    """A stage, of all stages of a replica in one program.

    Attributes:
      parts: of the step.
      layout: with the manual axes.
      params: those of a stage.
      batch: micro-batches, `[num, rows, ...]`.
      key: of the step, for a network that draws random numbers.
      rows: the numbers of the rows, `[num, rows]`, if there is a key.
      train: whether the network is trained, or evaluated.
      gathered: the parameters of a stage that are split inside it, gathered once for all micro-batches.
    """

    parts: Parts
    layout: Layout
    params: Params
    batch: Batch
    key: jax.Array | None = None
    rows: jax.Array | None = None
    train: bool = True
    gathered: Params = field(default_factory=dict)

    @property
    def ready(self) -> Self:
        """The same with parameters that are gathered: to be done first.

        Its arrays are typed as different on all devices of the manual axes. Else the gradient of a parameter that all
        stages have would be summed over them in each turn.
        """
        params = self._varying(self.params)
        gathered = gathered_params(self.parts, self.layout, params)
        return replace(self, params=params, batch=self._varying(dict(self.batch)), gathered=gathered)

    # Parts of the network

    def _run(
        self, method: str, trained: Divided, state: ModelState, number: jax.Array, *inputs: Any, empty: int = 0
    ) -> Any:
        """A method of the network, with these of its trained parameters, on a micro-batch.

        Of stacks the last `empty` layers are left out.
        """
        rows = None if self.rows is None else at(self.rows, number)
        call = Call(train=self.train, key=self.key, rows=rows, materialize_logits=False, method=method)
        network, given = self.parts.network, state
        used, gathered = self.parts.trainable.merged(self._joined(trained), self.params), self.gathered
        if empty:
            used, gathered = (without_layers(empty, tree, network.axes) for tree in (used, gathered))
            state = without_layers(empty, state, network.state_axes)
        outputs, after = run_network(self.parts, self.layout, with_gathered(used, gathered), state, call, *inputs)
        return outputs, _with_rest(empty, after, given, network.state_axes) if empty else after

    def _first(
        self, trained: Divided, state: ModelState, number: jax.Array, active: jax.Array, x: jax.Array
    ) -> jax.Array:
        """What a stage reads: the first what the network does, the others `x`."""
        return self._either(
            active & (self._index == 0),
            lambda: (self._enter(trained, state, number), NO_GRADS, ()),
            lambda: (x, NO_GRADS, ()),
        )[0]

    def _enter(self, trained: Divided, state: ModelState, number: jax.Array) -> jax.Array:
        """What the first stage reads."""
        return self._run("enter", trained, state, number, *self._tokens(number))[0]

    def _inside(
        self, trained: Divided, x: jax.Array, state: ModelState, number: jax.Array, is_last: bool | jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], ModelState]]:
        """`(x, (remarks, state))` after this stage's layers, fewer if it is known to be the last."""
        run = functools.partial(self._run, "inside", trained, state, number, x, *self._tokens(number))
        empty = self._num_empty if is_last is True else 0
        if empty and empty == self.layout.stage_layers:  # All layers are on other stages.
            remarks = jax.eval_shape(run)[0][1]
            return x, ({name: jnp.zeros(value.shape, value.dtype) for name, value in remarks.items()}, state)
        (y, remarks), state = run(empty=empty)
        return y, (remarks, state)

    def _by_length(self, work: Callable[[bool | jax.Array], Any]) -> Any:
        """`work(whether this is the last stage)`, known when it is traced if that stage has fewer layers."""
        is_last = self._index == self._last
        if not self._num_empty:
            return work(is_last)
        return self._either(is_last, lambda: work(True), lambda: work(False))

    def _leave(self, trained: Divided, x: jax.Array, state: ModelState, number: jax.Array) -> Sums:
        """The task's sums of a micro-batch, from what the last layer gives."""
        outputs = self._run("leave", trained, state, number, x)[0]
        return self.parts.task.sums(outputs, self._microbatch(number), train=self.train)

    def _remarked(self, sums: Sums, remarks: dict[str, jax.Array], number: jax.Array) -> Sums:
        weight = self.parts.task.weight(self._microbatch(number))
        return add_remarks(sums, remarks, weight, train=self.train)

    def _tokens(self, number: jax.Array) -> tuple[jax.Array, ...]:
        return self.parts.task.inputs(self._microbatch(number), self.parts.data_spec)

    def _microbatch(self, number: jax.Array) -> Batch:
        return {name: at(x, number) for name, x in self.batch.items()}

    def _blank(self, state: ModelState) -> tuple[jax.Array, Sums]:
        """Zeros like what a stage sends on, and like the sums of a micro-batch."""
        trained, number = self._trained, jnp.int32(0)

        def outputs() -> tuple[jax.Array, Sums]:
            x = self._varying(self._enter(trained, state, number))
            y, (remarks, _) = self._inside(trained, x, state, number, is_last=False)
            return x, self._remarked(self._leave(trained, y, state, number), remarks, number)

        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(outputs))

    # Numbers and trees

    @property
    def _index(self) -> jax.Array:
        """The number of this stage."""
        return lax.axis_index(STAGE)

    @property
    def _last(self) -> int:
        """The number of the last stage."""
        return num_stages(self.layout) - 1

    @property
    def _num_empty(self) -> int:
        """How many layers fewer the last stage has than the others."""
        return self.parts.network.empty_layers

    @property
    def _num_microbatches(self) -> int:
        return len(next(iter(self.batch.values())))

    def _number(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`(the number of a micro-batch, whether it is one)`; the first is that of some micro-batch in any case."""
        clipped = jnp.clip(number, 0, self._num_microbatches - 1)
        return clipped, clipped == number

    def _sent(self, x: jax.Array, by: int) -> jax.Array:
        """What the stage `by` before this one has; zeros where there is none."""
        stages = range(self._last + 1)
        return lax.ppermute(x, STAGE, [(stage, stage + by) for stage in stages if stage + by in stages])

    def _in_order(self, x: jax.Array, before: jax.Array) -> jax.Array:
        """`x`, on CPUs not before another array of its shape is there.

        There messages that do not depend on each other may begin in another order on another device, and with few
        threads each waits for the other. XLA does not know that what is added is zero.
        """
        if platform(self.layout.mesh) != "cpu":
            return x
        return x + jnp.minimum(jnp.abs(before), 0).astype(jnp.int32).astype(x.dtype)

    def _placed(self, x: jax.Array) -> jax.Array:
        """What goes from stage to stage, sharded inside one: the same in all branches of a condition, as XLA wants."""
        return self._varying(
            self.layout.constrain(x, self.layout.activation_spec(("batch", "length", "embed"), x.shape))
        )

    def _either(self, condition: bool | jax.Array, work: Any, otherwise: Any) -> Any:
        """The results of one of two functions without arguments, (activations, gradients by kind, small arrays).

        Only one is computed. No function may send permutes: unlike other messages these may wait for all devices of the
        mesh. So attention gathers keys (`jaxdl.parallel.collectives.ring_attention.Ring.gathers`).
        """
        if isinstance(condition, bool):
            return work() if condition else otherwise()

        def alike_of(function: Any) -> Any:
            def results() -> Any:
                x, grads, small = function()
                x = None if x is None else self._placed(x)
                small = jax.tree.map(lambda leaf: self.layout.constrain(leaf, PartitionSpec()), small)
                return self._varying((x, self._sharded(grads), small))

            return results

        return lax.cond(condition, alike_of(work), alike_of(otherwise))

    def _varying(self, tree: Any) -> Any:
        """The same arrays, typed as different on all devices of the manual axes."""
        return jax.tree.map(lambda x: alike(sorted(self.layout.manual), x)[0], tree)

    @property
    def _trained(self) -> Divided:
        """The leaves of the trained parameters."""
        return self._divided(self.parts.trainable.of(self.params))

    def _divided(self, trained: Any, is_leaf: Any = None) -> Divided:
        """The leaves of a tree like the trained parameters."""
        leaves = list(zip(self._is_stacked, jax.tree.leaves(trained, is_leaf=is_leaf), strict=True))
        return Divided([leaf for stacked, leaf in leaves if stacked], [leaf for stacked, leaf in leaves if not stacked])

    def _joined(self, leaves: Divided) -> Params:
        """The tree of these leaves."""
        stacked, rest = map(iter, leaves)
        treedef = jax.tree.structure(self.parts.trainable.of(self.params))
        return treedef.unflatten(next(stacked if is_stacked else rest) for is_stacked in self._is_stacked)

    @property
    def _is_stacked(self) -> list[bool]:
        """Of each trained parameter."""
        axes = self.parts.trainable.of(self.parts.network.axes)
        return [STACKED in names for names in jax.tree.leaves(axes, is_leaf=is_names)]

    def _sharded(self, grads: Divided) -> Divided:
        """Gradients, sharded inside a stage as they are exchanged; of one kind, or of both."""
        specs = self._divided(self.parts.state_spec.grads, is_leaf=is_spec)

        def constrained(leaves: Leaves, specs: Sequence[PartitionSpec]) -> Leaves:
            pairs = zip(leaves, specs, strict=True) if leaves else ()
            return [self.layout.constrain(x, without_axes(spec, STAGE)) for x, spec in pairs]

        return Divided(constrained(grads.stacked, specs.stacked), constrained(grads.rest, specs.rest))


def _with_rest(empty: int, tree: Any, whole: Any, axes: LogicalAxes) -> Any:
    """A tree without the last `empty` layers of its stacks, with those of `whole`."""

    def one(names: tuple[str, ...], x: jax.Array, given: jax.Array) -> jax.Array:
        return jnp.concatenate([x, given[len(x) :]]) if STACKED in names else x

    return jax.tree.map(one, axes, tree, whole, is_leaf=is_names)


def at(stack: jax.Array, index: jax.Array) -> jax.Array:
    """One of the arrays that are stacked along the first dimension."""
    return lax.dynamic_index_in_dim(stack, index, keepdims=False)
