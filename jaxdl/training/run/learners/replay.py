"""The replay of a tape with the runs that made it: learners one after another, on the devices of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxdl.core.config import ConfigError
from jaxdl.exchange import by_name
from jaxdl.parallel.asynchrony.outer import Vector
from jaxdl.parallel.asynchrony.replay import Replayed, replay
from jaxdl.parallel.asynchrony.storage import read_tape
from jaxdl.parallel.mesh import Device
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import programs, shared_programs
from jaxdl.training.run.learners.learning import Flat, as_delta, make_adopt
from jaxdl.training.run.plan.build import Plan, make_initial_state, make_plan


def replay_runs(
    tape: Path, experiment_of: Callable[[int], Experiment], devices: Sequence[Device] | None = None
) -> Replayed:
    """Trains again what the learners of a tape trained, and merges as their syncer did.

    `experiment_of` gives the experiment of a learner from its number. The `devices` (all, by default) must be as many
    as a learner had: on others the sums have another order. Raises `replay.Difference` where a decision, a delta or an
    anchor is not the same, to the bit, and ConfigError for learners that went on from a checkpoint, which a tape lacks.
    """
    records = read_tape(tape)

    def worker(learner: int, resumes: str) -> PlanWorker:
        if resumes:
            raise ConfigError(
                f"{tape}: learner {learner} went on from its checkpoint of {resumes}. Only learners that began anew, "
                "because they had no --workdir or no checkpoint yet, can be replayed."
            )
        return PlanWorker(make_plan(experiment_of(learner), devices))

    with shared_programs():
        try:
            return replay(records, worker)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{tape}: {error}.") from None


class PlanWorker:
    """A learner of a plan, outside of a run: a `jaxdl.parallel.asynchrony.simulator.Worker`."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._programs = plan, programs()
        self._flat, self._adopt = Flat(plan.parts), make_adopt(plan.parts)
        self._state = make_initial_state(plan)
        self._step = 0

    def initial(self) -> Vector:
        """The parameters before the first step."""
        return self._flat.row(jax.device_get(by_name(self._plan.parts.trainable.of(self._state.params))))

    def run(self, anchor: Vector, num_steps: int) -> tuple[Vector, float]:
        """(the delta after `num_steps` steps from the anchor, the number of examples or tokens)."""
        state = self._adopt(self._state, self._flat.leaves(anchor), num_steps)
        timeline, end = self._plan.timeline, self._step + num_steps
        while self._step < end:
            segment = timeline.segment(self._step)
            left = min(segment.first + segment.num_steps, end) - self._step
            steps = self._programs.of(self._plan, segment)
            with self._plan.batches(segment, timeline.position(self._step), left) as batches:
                for batch in batches:
                    state, _ = steps.train(state, [batch], self._step)
                    self._step += 1
        self._state = state
        delta, since = as_delta(self._plan.parts, self._flat, anchor, state)
        return delta, since.weight
