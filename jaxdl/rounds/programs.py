"""The compiled programs of replicas that have parameters of their own, and which of them runs at which step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jaxdl.mesh import Axis, batch_sharding
from jaxdl.rounds.local import OWN, local_step, make_joint_step, make_local_step
from jaxdl.rounds.merge import Merge, make_merge, make_settle
from jaxdl.state import TrainState, replicated
from jaxdl.step import Batch, Metrics, Parts

Compile = Callable[[jax.stages.Lowered], Callable[..., Any]]


def make_streamed(parts: Parts, number: int, num_steps: int) -> jax.stages.Wrapped:
    """The jitted function `(state, batches) -> (state, metrics of each step, of the merge)`; the state is donated.

    `num_steps` local steps, and beside them the messages of merge `number`, which begins before the first and arrives
    after the last. Nothing of the steps depends on the messages, so a compiler that runs them in the background hides
    them.
    """
    merge, shardings, mesh = Merge(parts), parts.state_spec.shardings, parts.layout.mesh

    def streamed(state: TrainState, batches: tuple[Batch, ...]) -> tuple[TrainState, list[Metrics], Metrics]:
        state, begun = merge.begun(state, number)
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
        state, metrics = lax.scan(lambda state, batch: local_step(parts, state, batch), state, stacked)
        each = [jax.tree.map(lambda x, i=i: x[i], metrics) for i in range(num_steps)]
        state, more = merge.arrived(state, begun, number)
        return state, each, more

    return jax.jit(
        streamed,
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, NamedSharding(mesh, OWN), replicated(parts.layout)),
    )


class RoundSteps:
    """The steps of a run whose replicas have parameters of their own, compiled by `compile`.

    Args:
      parts: those of the run.
      batch: the shapes of a batch.
      steps: the first step and the last one that are to be taken.
      total_steps: the length of the run.
      compile: from a lowered program to a compiled one.
    """

    def __init__(self, parts: Parts, batch: Any, steps: tuple[int, int], total_steps: int, compile: Compile) -> None:
        self._agreement, self._total = parts.agreement, total_steps
        self._num_replicas = parts.layout.mesh.shape[Axis.REPLICA]
        state = parts.state_spec.abstract()
        first, last = steps
        numbers = range(first, last)
        self._joint = self._local = None
        if any(self._agreement.joint(step) for step in numbers):
            self._joint = compile(make_joint_step(parts).lower(state, batch))
        if any(not self._agreement.joint(step) for step in numbers):
            self._local = compile(make_local_step(parts).lower(state, batch))
        due = {number for step in numbers for number in self._due(step + 1)}
        beside = {one for step in numbers if (one := self._agreement.steps_beside(step, total_steps))}
        self._merges = {number: compile(make_merge(parts, number).lower(state)) for number in sorted(due)}
        self._streamed = {
            one: compile(make_streamed(parts, *one).lower(state, (batch,) * one[1])) for one in sorted(beside)
        }
        self._settle = None if self._agreement.has_anchor else compile(make_settle(parts).lower(state))

    def _due(self, step: int) -> tuple[int, ...]:
        return self._agreement.due(step, self._total, self._num_replicas)

    def num_batches(self, step: int) -> int:
        """How many steps the next call takes, after `step` steps."""
        beside = self._agreement.steps_beside(step, self._total)
        return 1 if beside is None else beside[1]

    def __call__(self, state: TrainState, batches: Sequence[Batch], step: int) -> tuple[TrainState, list[Metrics]]:
        """The state after a step on each batch, and the merges that follow them; and the metrics of each step.

        `step` steps have been taken before.
        """
        beside = self._agreement.steps_beside(step, self._total)
        if beside is not None:
            state, metrics, more = self._streamed[beside](state, tuple(batches))
            metrics[-1] = metrics[-1] | more
        else:
            (batch,) = batches
            program = self._joint if self._agreement.joint(step) else self._local
            assert program is not None
            state, one = program(state, batch)
            metrics = [one]
        for number in self._due(step + len(batches)):
            state, more = self._merges[number](state)
            metrics[-1] = metrics[-1] | more
        return state, metrics

    def settle(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """The state with the mean of the replicas as its parameters, where merges move no anchor; see `make_settle`."""
        return (state, {}) if self._settle is None else self._settle(state)

    def apart(self, step: int) -> bool:
        """Whether the replicas differ from the anchor after `step` steps."""
        return self._agreement.apart(step, self._total, self._num_replicas)
