"""A pipeline: the layers of a replica are spread over stages, and micro-batches pass through them.

It is the schedule 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2) in lock step, as one program of all stages.
With S stages, in turn t stage s computes the forward pass of micro-batch t - s and then the backward pass of
micro-batch t - 2 (S - 1) + s. It keeps the inputs of the micro-batches between the two, 2 S - 1 at most, and computes
its layers again in the backward pass. The last stage does both at once, so M micro-batches take as long as M + S - 1
forward and backward passes of one.

What a turn sends to a neighbour is needed in the next turn. Gradients of activations travel beside the forward pass of
a turn, activations beside its backward pass. Gradients of parameters that all stages have are summed over the stages
once, after all turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdl.parallel.mesh import BATCH_AXES, batch_ways
from jaxdl.parallel.sharding import STACKED, Grads, LogicalAxes, Params, is_names
from jaxdl.training.state import ModelState
from jaxdl.training.step.parts import Batch, Parts, Sums
from jaxdl.training.step.stage import NO_GRADS, STAGE, Divided, Leaves, Stage, at, num_stages
from jaxdl.training.step.turns import kept_inputs


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
class Pipeline(Stage):
    """The schedules: of a step, and of an evaluation."""

    def gradients(self, model_state: ModelState, factor: jax.Array) -> tuple[Grads, Sums, ModelState]:
        """`(gradients, sums, state)` of all micro-batches, the loss multiplied by `factor`."""
        trained, last = self._trained, self._last
        x, sums = self._blank(model_state)
        kept = jax.tree.map(lambda leaf: jnp.zeros((kept_inputs(last + 1), *leaf.shape), leaf.dtype), (x, model_state))
        grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trained)
        carry = self._varying(_Carry(x, x, kept, self._sharded(self._varying(grads)), sums, model_state))

        def ahead(carry: _Carry, turn: jax.Array) -> tuple[_Carry, None]:
            return self._forward(trained, carry, turn), None

        def both(carry: _Carry, turn: jax.Array) -> tuple[_Carry, None]:
            # Sent first, so that it travels beside the forward pass; it is needed after it.
            dy = self._sent(carry.dx, -1)
            return self._backward(trained, factor, dy, self._forward(trained, carry, turn), turn), None

        def behind(carry: _Carry, turn: jax.Array) -> tuple[_Carry, None]:
            return self._backward(trained, factor, self._sent(carry.dx, -1), carry, turn), None

        # In the first turns no stage has a backward pass to compute, and in the last no forward pass.
        begin, end = last, last + self._num_microbatches
        for turn, first, after in ((ahead, 0, begin), (both, begin, end), (behind, end, end + last)):
            carry = lax.scan(turn, carry, jnp.arange(first, after))[0]
        rest = [lax.psum(leaf, STAGE) for leaf in carry.grads.rest]
        grads = self._joined(self._sharded(Divided(carry.grads.stacked, rest)))
        return grads, lax.psum(carry.sums, STAGE), carry.state

    def sums(self, model_state: ModelState) -> Sums:
        """The sums of all micro-batches, without gradients."""
        x, sums = self._blank(model_state)
        trained = self._trained

        def turn(carry: tuple[jax.Array, Sums], turn: jax.Array) -> tuple[tuple[jax.Array, Sums], None]:
            x, sums = carry
            number, active = self._number(turn - self._index)
            x = self._first(trained, model_state, number, active, x)

            def work(is_last: bool | jax.Array) -> Any:
                y, (remarks, _) = self._inside(trained, x, model_state, number, is_last)
                new = self._remarked({}, remarks, number)
                others = {name: jnp.zeros_like(value) for name, value in sums.items() if name not in new}
                end = self._either(
                    is_last,
                    lambda: (None, NO_GRADS, self._leave(trained, y, model_state, number)),
                    lambda: (None, NO_GRADS, others),
                )
                return y, NO_GRADS, jax.tree.map(jnp.add, sums, new | end[2])

            y, _, sums = self._either(
                active, lambda: self._by_length(work), lambda: (jnp.zeros_like(x), NO_GRADS, sums)
            )
            return (self._sent(y, 1), sums), None

        turns = jnp.arange(self._num_microbatches + self._last)
        return lax.psum(lax.scan(turn, self._varying((x, sums)), turns)[0][1], STAGE)

    # A turn

    def _forward(self, trained: Divided, carry: _Carry, turn: jax.Array) -> _Carry:
        """The forward pass of a turn: what the next stage reads is sent, and what this one has read is kept."""
        number, active = self._number(turn - self._index)
        x = self._first(trained, carry.state, number, active, carry.x)
        place = (turn - self._index) % len(carry.kept[0])
        kept = jax.tree.map(
            lambda stack, new: lax.dynamic_update_index_in_dim(stack, new, place, 0), carry.kept, (x, carry.state)
        )

        def work() -> Any:
            y, (_, state) = self._inside(trained, x, carry.state, number, is_last=False)
            return y, NO_GRADS, state

        # The last stage computes the forward pass of a micro-batch with its backward pass.
        active &= self._index < self._last
        y, _, state = self._either(active, work, lambda: (jnp.zeros_like(x), NO_GRADS, carry.state))
        return carry._replace(x=self._sent(y, 1), kept=kept, state=state)

    def _backward(self, trained: Divided, factor: jax.Array, dy: jax.Array, carry: _Carry, turn: jax.Array) -> _Carry:
        """The backward pass of a turn; `dy` is the gradient of what this stage has sent."""
        number, active = self._number(turn - 2 * self._last + self._index)

        def work(is_last: bool | jax.Array) -> Any:
            return self._back(trained, factor, dy, carry, number, is_last)

        dx, grads, (sums, state) = self._either(
            active, lambda: self._by_length(work), lambda: (carry.dx, carry.grads, (carry.sums, carry.state))
        )
        return carry._replace(dx=dx, grads=grads, sums=sums, state=state)

    def _back(
        self,
        trained: Divided,
        factor: jax.Array,
        dy: jax.Array,
        carry: _Carry,
        number: jax.Array,
        is_last: bool | jax.Array,
    ) -> tuple[jax.Array, Divided, tuple[Sums, ModelState]]:
        """The backward pass of a micro-batch, whose gradients and sums are added to those of `carry`."""
        x, then = jax.tree.map(lambda stack: at(stack, number % len(stack)), carry.kept)
        stacked, rest = carry.grads

        def inside(layers: Leaves, x: jax.Array) -> Any:
            y, (remarks, after) = self._inside(Divided(layers, trained.rest), x, then, number, is_last)
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
        dy, (_, rest), sums = self._either(is_last, end, lambda: (dy, Divided([], rest), others))
        sums = {**sums, **of_stage, "loss": sums["loss"] + loss}
        new, dx = pull((dy, self._varying(jnp.ones_like(penalty))))

        def begin() -> Any:
            pulled = jax.vjp(lambda rest: self._enter(Divided(trained.stacked, rest), then, number), trained.rest)[1]
            return None, Divided([], jax.tree.map(jnp.add, rest, pulled(dx)[0])), ()

        rest = self._either(self._index == 0, begin, lambda: (None, Divided([], rest), ()))[1].rest
        grads = Divided(jax.tree.map(jnp.add, stacked, new), rest)
        state = jax.tree.map(lambda new, old: jnp.where(is_last, new, old), after, carry.state)
        return dx, grads, (jax.tree.map(jnp.add, carry.sums, sums), state)
