"""A pipeline: the layers of a replica are spread over stages, and micro-batches pass through them.

It is the schedule 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2) in lock step, as one program of all stages.
With S stages, in turn t stage s computes the forward pass of micro-batch t - s and then the backward pass of
micro-batch t - 2 (S - 1) + s. It keeps the inputs of the micro-batches between the two, 2 S - 1 at most, and computes
its layers again in the backward pass. The last stage does both at once, so M micro-batches take as long as M + S - 1
forward and backward passes of one.

What a turn sends to a neighbour is needed in the next turn. Gradients of activations travel beside the forward pass of
a turn, activations beside its backward pass.

The network has the methods `enter`, `inside` and `leave` of `jaxdl.models.decoder.TransformerModule`. A stage's
parameters are those stacked over layers; the others, such as tables, are on all stages, and their gradients are summed
over the stages once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdl.models.logits import add_remarks
from jaxdl.models.network import Call
from jaxdl.parallel.collectives.primitive import alike
from jaxdl.parallel.mesh import BATCH_AXES, LENGTH_AXES, STAGE_AXES, batch_ways, ways
from jaxdl.parallel.sharding import STACKED, Grads, Layout, LogicalAxes, Params, is_names, is_spec, without_axes
from jaxdl.training.state import ModelState
from jaxdl.training.step.network import gathered_params, run_network, with_gathered
from jaxdl.training.step.parts import Batch, Parts, Sums
from jaxdl.training.step.turns import kept_inputs, num_turns

(STAGE,) = STAGE_AXES
Leaves = list[Any]


def num_stages(layout: Layout) -> int:
    """The number of stages of a mesh."""
    return layout.mesh.shape.get(STAGE, 1)


def stage_specs(axes: LogicalAxes, *before: str) -> Any:
    """How what has these logical axes is spread over stages, after leading dimensions that are split over `before`."""
    return jax.tree.map(
        lambda names: PartitionSpec(*before, *((STAGE,) if STACKED in names else ())), axes, is_leaf=is_names
    )


def pipelined_sums(parts: Parts, params: Params, model_state: ModelState, batch: Batch) -> Sums:
    """The task's sums in evaluation over a global batch, `[batch, ...]`, which goes through the stages in parts."""
    mesh, examples = parts.layout.mesh, len(next(iter(batch.values())))
    rows, most = examples // batch_ways(mesh), max(num_stages(parts.layout), parts.config.microbatches)
    num_parts = max(num for num in range(1, min(rows, most) + 1) if rows % num == 0)
    layout = replace(parts.layout, manual=frozenset({STAGE}))

    def region(params: Params, model_state: ModelState, batch: Batch) -> Sums:
        in_parts = {
            name: layout.constrain(split(x, num_parts), PartitionSpec(None, BATCH_AXES)) for name, x in batch.items()
        }
        return Pipeline(parts, layout, params, in_parts, train=False).ready.sums(model_state)

    specs = (stage_specs(parts.network.axes), stage_specs(parts.network.state_axes), PartitionSpec())
    staged = jax.shard_map(region, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), axis_names={STAGE})
    return staged(params, model_state, dict(batch))


def split(x: jax.Array, num_parts: int) -> jax.Array:
    """`[batch, ...]` -> `[num_parts, batch / num_parts, ...]`, every num_parts-th row to the same part.

    So the parts hold the same examples on every mesh, and no row has to move between devices.
    """
    return jnp.moveaxis(x.reshape(x.shape[0] // num_parts, num_parts, *x.shape[1:]), 1, 0)


class Divided(NamedTuple):
    """The leaves of trained parameters, or of their gradients."""

    stacked: Leaves
    """Those of the layers of a stage."""
    rest: Leaves
    """Those that all stages have."""


_NO_GRADS = Divided([], [])


class _Carry(NamedTuple):
    """What goes from turn to turn of a stage."""

    x: jax.Array
    """What the stage before has sent."""
    dx: jax.Array
    """The gradient of a stage's input, which is sent next."""
    kept: tuple[jax.Array, ModelState]
    """Inputs of micro-batches whose backward pass is to come, and the state of the network at their forward pass."""
    grads: Divided
    sums: Sums
    state: ModelState


@dataclass(frozen=True)
class Pipeline:
    """One replica's stages, inside a `shard_map` that is manual over them.

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
    def ready(self) -> Pipeline:
        """The same with parameters that are gathered: to be done first.

        Its arrays are typed as different on all devices of the manual axes. Else the gradient of a parameter that all
        stages have would be summed over them in each turn.
        """
        params = self._varying(self.params)
        gathered = gathered_params(self.parts, self.layout, params)
        return replace(self, params=params, batch=self._varying(dict(self.batch)), gathered=gathered)

    def gradients(self, model_state: ModelState, factor: jax.Array) -> tuple[Grads, Sums, ModelState]:
        """`(gradients, sums, state)` of all micro-batches, the loss multiplied by `factor`."""
        x, sums = self._blank(model_state)
        kept = jax.tree.map(
            lambda leaf: jnp.zeros((kept_inputs(self._last + 1), *leaf.shape), leaf.dtype), (x, model_state)
        )
        trained = self._trained
        grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trained)
        start = _Carry(x, x, kept, self._sharded(self._varying(grads)), sums, model_state)
        turns = jnp.arange(num_turns(self._last + 1, self._num_microbatches))
        end = lax.scan(functools.partial(self._turn, trained, factor), self._varying(start), turns)[0]
        rest = [lax.psum(leaf, STAGE) for leaf in end.grads.rest]
        return self._joined(self._sharded(Divided(end.grads.stacked, rest))), lax.psum(end.sums, STAGE), end.state

    def sums(self, model_state: ModelState) -> Sums:
        """The sums of all micro-batches, without gradients."""
        x, sums = self._blank(model_state)
        trained = self._trained

        def turn(carry: tuple[jax.Array, Sums], turn: jax.Array) -> tuple[tuple[jax.Array, Sums], None]:
            x, sums = carry
            number, active = self._number(turn - self._index)
            x = self._first(trained, model_state, number, active, x)

            def work() -> Any:
                y, (remarks, _) = self._inside(trained, x, model_state, number)
                new = self._remarked({}, remarks, number)
                others = {name: jnp.zeros_like(value) for name, value in sums.items() if name not in new}
                end = self._either(
                    self._index == self._last,
                    lambda: (None, _NO_GRADS, self._leave(trained, y, model_state, number)),
                    lambda: (None, _NO_GRADS, others),
                )
                return y, _NO_GRADS, jax.tree.map(jnp.add, sums, new | end[2])

            y, _, sums = self._either(active, work, lambda: (jnp.zeros_like(x), _NO_GRADS, sums))
            return (self._sent(y, 1), sums), None

        turns = jnp.arange(self._num_microbatches + self._last)
        return lax.psum(lax.scan(turn, self._varying((x, sums)), turns)[0][1], STAGE)

    # A turn

    def _turn(self, trained: Divided, factor: jax.Array, carry: _Carry, turn: jax.Array) -> tuple[_Carry, None]:
        # Sent first, so that it travels beside the forward pass; it is needed after it.
        dy = self._sent(carry.dx, -1)
        number, forward = self._number(turn - self._index)
        x = self._first(trained, carry.state, number, forward, carry.x)
        place = (turn - self._index) % len(carry.kept[0])
        kept = jax.tree.map(
            lambda stack, new: lax.dynamic_update_index_in_dim(stack, new, place, 0), carry.kept, (x, carry.state)
        )

        def ahead() -> Any:
            y, (_, state) = self._inside(trained, x, carry.state, number)
            return y, _NO_GRADS, state

        # The last stage computes the forward pass of a micro-batch with its backward pass.
        forward &= self._index < self._last
        y, _, state = self._either(forward, ahead, lambda: (jnp.zeros_like(x), _NO_GRADS, carry.state))
        following = self._sent(y, 1)
        number, backward = self._number(turn - 2 * self._last + self._index)
        now = carry._replace(kept=kept, state=state)
        dx, grads, (sums, state) = self._either(
            backward,
            lambda: self._back(trained, factor, dy, now, number),
            lambda: (carry.dx, carry.grads, (carry.sums, state)),
        )
        return _Carry(following, dx, kept, grads, sums, state), None

    def _back(
        self, trained: Divided, factor: jax.Array, dy: jax.Array, carry: _Carry, number: jax.Array
    ) -> tuple[jax.Array, Divided, tuple[Sums, ModelState]]:
        """The backward pass of a micro-batch, whose gradients and sums are added to those of `carry`."""
        x, then = jax.tree.map(lambda stack: _at(stack, number % len(stack)), carry.kept)
        stacked, rest = carry.grads

        def inside(layers: Leaves, x: jax.Array) -> Any:
            y, (remarks, after) = self._inside(Divided(layers, trained.rest), x, then, number)
            sums = self._remarked({"loss": jnp.float32(0)}, remarks, number)
            loss = sums.pop("loss")
            return self._varying((y, loss * factor)), (sums, loss, after)

        (y, penalty), pull, (of_stage, loss, after) = jax.vjp(inside, trained.stacked, x, has_aux=True)

        def end() -> Any:
            def objective(rest: Leaves, y: jax.Array) -> tuple[jax.Array, Sums]:
                sums = self._leave(Divided(trained.stacked, rest), y, then, number)
                return sums["loss"] * factor, sums

            (new, dy), sums = jax.grad(objective, argnums=(0, 1), has_aux=True)(trained.rest, y)
            return dy, Divided([], jax.tree.map(jnp.add, rest, new)), sums

        others = {name: jnp.zeros_like(x) for name, x in carry.sums.items() if name not in of_stage}
        dy, (_, rest), sums = self._either(self._index == self._last, end, lambda: (dy, Divided([], rest), others))
        sums = {**sums, **of_stage, "loss": sums["loss"] + loss}
        new, dx = pull((dy, self._varying(jnp.ones_like(penalty))))

        def begin() -> Any:
            pulled = jax.vjp(lambda rest: self._enter(Divided(trained.stacked, rest), then, number), trained.rest)[1]
            return None, Divided([], jax.tree.map(jnp.add, rest, pulled(dx)[0])), ()

        rest = self._either(self._index == 0, begin, lambda: (None, Divided([], rest), ()))[1].rest
        grads = Divided(jax.tree.map(jnp.add, stacked, new), rest)
        state = jax.tree.map(lambda new, old: jnp.where(self._index == self._last, new, old), after, carry.state)
        return dx, grads, (jax.tree.map(jnp.add, carry.sums, sums), state)

    # Parts of the network

    def _run(self, method: str, trained: Divided, state: ModelState, number: jax.Array, *inputs: Any) -> Any:
        """A method of the network, with these of its trained parameters, on a micro-batch."""
        rows = None if self.rows is None else _at(self.rows, number)
        call = Call(train=self.train, key=self.key, rows=rows, materialize_logits=False, method=method)
        used = with_gathered(self.parts.trainable.merged(self._joined(trained), self.params), self.gathered)
        return run_network(self.parts, self.layout, used, state, call, *inputs)

    def _first(
        self, trained: Divided, state: ModelState, number: jax.Array, active: jax.Array, x: jax.Array
    ) -> jax.Array:
        """What a stage reads: the first what the network does, the others `x`."""
        return self._either(
            active & (self._index == 0),
            lambda: (self._enter(trained, state, number), _NO_GRADS, ()),
            lambda: (x, _NO_GRADS, ()),
        )[0]

    def _enter(self, trained: Divided, state: ModelState, number: jax.Array) -> jax.Array:
        """What the first stage reads."""
        return self._run("enter", trained, state, number, *self._tokens(number))[0]

    def _inside(
        self, trained: Divided, x: jax.Array, state: ModelState, number: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], ModelState]]:
        """`(x, (remarks, state))` after this stage's layers."""
        (x, remarks), state = self._run("inside", trained, state, number, x, *self._tokens(number))
        return x, (remarks, state)

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
        return {name: _at(x, number) for name, x in self.batch.items()}

    def _blank(self, state: ModelState) -> tuple[jax.Array, Sums]:
        """Zeros like what a stage sends on, and like the sums of a micro-batch."""
        trained, number = self._trained, jnp.int32(0)

        def outputs() -> tuple[jax.Array, Sums]:
            x = self._varying(self._enter(trained, state, number))
            y, (remarks, _) = self._inside(trained, x, state, number)
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

    def _placed(self, x: jax.Array) -> jax.Array:
        """What goes from stage to stage, sharded inside one: the same in all branches of a condition, as XLA wants."""
        return self._varying(
            self.layout.constrain(x, self.layout.activation_spec(("batch", "length", "embed"), x.shape))
        )

    def _either(self, condition: jax.Array, work: Any, otherwise: Any) -> Any:
        """The results of one of two functions without arguments, (activations, gradients by kind, small arrays)."""

        def alike_of(function: Any) -> Any:
            def results() -> Any:
                x, grads, small = function()
                x = None if x is None else self._placed(x)
                small = jax.tree.map(lambda leaf: self.layout.constrain(leaf, PartitionSpec()), small)
                return self._varying((x, self._sharded(grads), small))

            return results

        if ways(self.layout.mesh.shape, LENGTH_AXES) == 1:
            return lax.cond(condition, alike_of(work), alike_of(otherwise))
        # Devices that split texts send permutes, which, unlike other messages, may wait for all devices of the mesh. So
        # here stages compute what they do not need, also in the first and last turns.
        pairs = alike_of(work)(), alike_of(otherwise)()
        return jax.tree.map(lambda mine, other: jnp.where(condition, mine, other), *pairs)

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


def _at(stack: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, index, keepdims=False)
