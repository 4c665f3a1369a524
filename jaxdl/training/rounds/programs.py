"""The compiled programs of replicas that have parameters of their own, and which of them runs at which step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jaxdl.exchange import by_name
from jaxdl.exchange.agreement import Agreement
from jaxdl.exchange.buckets import held_back
from jaxdl.parallel.mesh import Axis, batch_sharding, platform
from jaxdl.training.rounds.local import JOINED, OWN, local_step, make_joint_step, make_local_step
from jaxdl.training.rounds.merge import Merge, Pieces, make_merge, make_settle
from jaxdl.training.state import TrainState, replicated
from jaxdl.training.step import Batch, Metrics, Parts

Compile = Callable[[jax.stages.Lowered], Callable[..., Any]]


def make_streamed(parts: Parts, number: int) -> jax.stages.Wrapped:
    """The jitted function `(state, batches) -> (state, metrics of each step, of the merge)`; the state is donated.

    A local step on each batch, and beside them the messages of merge `number`, which begins before the first step and
    arrives after the last. Nothing of the steps depends on the messages, so a compiler that runs them in the background
    hides them. The steps are no loop, which XLA takes for one instruction. On CPUs the steps wait for the messages:
    XLA's virtual CPU devices share their threads, so messages that do not depend on each other can wait for each other.
    """
    merge, shardings, mesh = Merge(parts), parts.state_spec.shardings, parts.layout.mesh

    def streamed(state: TrainState, batches: tuple[Batch, ...]) -> tuple[TrainState, list[Metrics], Metrics]:
        state, begun = merge.begin(state, (number,))
        if platform(mesh) == "cpu":
            state = _after(parts, state, begun.mean)
        each = []
        for batch in batches:
            state, metrics = local_step(parts, state, batch)
            each.append(metrics)
        state, begun = lax.optimization_barrier((state, begun))
        state, more = merge.finish(state, begun, (number,))
        return state, each, more

    return jax.jit(
        streamed,
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, NamedSharding(mesh, OWN), replicated(parts.layout)),
    )


def _after(parts: Parts, state: TrainState, mean: Pieces) -> TrainState:
    """The state, whose replicas' parameters are there only when all messages of a merge have arrived; sends nothing."""
    places = parts.state_spec.specs.own.params
    assert parts.fragments is not None, "an agreement with merges has fragments"
    pieces = parts.fragments.each(by_name(parts.trainable.of(parts.state_spec.update)))

    def held(params: Any, mean: Pieces) -> Any:
        last = jnp.stack([x.reshape(-1)[0] for x in mean.values()]).sum()
        return jax.tree.map(lambda x: held_back(x, last), params)

    given = (places, {name: pieces[name] for name in mean})
    function = jax.shard_map(held, mesh=parts.layout.mesh, in_specs=given, out_specs=places, check_vma=False)
    return state.with_own(dataclasses.replace(state.own, params=function(state.own.params, mean)))


def lowered_programs(
    parts: Parts, batch: Any, steps: tuple[int, int], total_steps: int
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """The programs of a run, by names such as `local step`; each is lowered when it is called.

    Args:
      parts: those of the run.
      batch: the shapes of a batch.
      steps: the first step and the last one that are to be taken.
      total_steps: the length of the run.
    """
    agreement, state = parts.agreement, parts.state_spec.abstract()
    numbers, num_replicas = range(*steps), parts.layout.mesh.shape[Axis.REPLICA]
    programs: dict[str, Callable[[], jax.stages.Lowered]] = {}
    if any(agreement.joint(step) for step in numbers):
        programs[_JOINT] = lambda: make_joint_step(parts).lower(state, batch)
    if any(not agreement.joint(step) for step in numbers):
        programs[_LOCAL] = lambda: make_local_step(parts).lower(state, batch)
    due = {number for step in numbers for number in agreement.due(step + 1, total_steps, num_replicas)}
    for number in sorted(due):
        programs[_merge(agreement, number)] = lambda number=number: make_merge(parts, number).lower(state)
    beside = {pair for step in numbers if (pair := agreement.steps_beside(step, total_steps))}
    for pair in sorted(beside):
        programs[_beside(*pair)] = lambda pair=pair: make_streamed(parts, pair[0]).lower(state, (batch,) * pair[1])
    if not agreement.has_anchor:
        programs[_SETTLE] = lambda: make_settle(parts).lower(state)
    return programs


_JOINT, _LOCAL, _SETTLE = "step with the mean gradient", "local step", "mean of the replicas"


def _merge(agreement: Agreement, number: int) -> str:
    return "merge of all fragments" if 1 < agreement.num_fragments == number else f"merge {number}"


def _beside(number: int, num_steps: int) -> str:
    return f"merge {number} beside {num_steps} local step{'s' if num_steps > 1 else ''}"


class RoundSteps:
    """The steps of a run whose replicas have parameters of their own.

    `compile` makes the programs from those of `lowered_programs`, to which the other arguments go.
    """

    def __init__(self, parts: Parts, batch: Any, steps: tuple[int, int], total_steps: int, compile: Compile) -> None:
        self._agreement, self._total = parts.agreement, total_steps
        self._num_replicas = parts.layout.mesh.shape[Axis.REPLICA]
        lowered = lowered_programs(parts, batch, steps, total_steps)
        self._programs = {name: compile(lower()) for name, lower in lowered.items()}

    def _due(self, step: int) -> tuple[int, ...]:
        return self._agreement.due(step, self._total, self._num_replicas)

    def num_batches(self, step: int) -> int:
        """How many steps the next call takes, after `step` steps."""
        beside = self._agreement.steps_beside(step, self._total)
        return 1 if beside is None else beside[1]

    def restart(self) -> RoundSteps:
        """These: they have no memory of batches."""
        return self

    def __call__(self, state: TrainState, batches: Sequence[Batch], step: int) -> tuple[TrainState, list[Metrics]]:
        """The state after a step on each batch, and the merges that follow them; and the metrics of each step.

        `step` steps have been taken before.
        """
        beside = self._agreement.steps_beside(step, self._total)
        if beside is not None:
            state, metrics, more = self._programs[_beside(*beside)](state, tuple(batches))
            metrics[-1] = metrics[-1] | more
        else:
            (batch,) = batches
            if self._agreement.joint(step):
                state, of_step, joined = self._programs[_JOINT](state, batch)
                metrics = [of_step | joined]
            else:
                state, of_step = self._programs[_LOCAL](state, batch)
                metrics = [of_step]
        for number in self._due(step + len(batches)):
            state, more = self._programs[_merge(self._agreement, number)](state)
            last = metrics[-1]
            # What a merge beside these steps has joined this one does not join again.
            totals = {name: last[name] + more[name] for name in last if name.startswith(JOINED)}
            metrics[-1] = last | more | totals
        return state, metrics

    def settle(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """The state with the mean of the replicas as its parameters, where merges move no anchor; see `make_settle`."""
        return self._programs[_SETTLE](state) if _SETTLE in self._programs else (state, {})

    def apart(self, step: int) -> bool:
        """Whether the replicas differ from the anchor after `step` steps."""
        return self._agreement.apart(step, self._total, self._num_replicas)
