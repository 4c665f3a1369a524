"""A run that is ready to be compiled."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxdl.data import PhotoSource, Source, Splits, TrainLoader
from jaxdl.data.phases import Segment, Timeline
from jaxdl.exchange import ExchangeConfig
from jaxdl.parallel.mesh import RARE_AXES, Axis, batch_sharding
from jaxdl.report import StepCounter, Subject
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.init_from import Initial
from jaxdl.training.run.tables.cached_tables import Caches, make_caches
from jaxdl.training.run.tables.jagged_batches import in_training, shapes_of
from jaxdl.training.run.workdir.kept_layout import Kept
from jaxdl.training.state import TrainState
from jaxdl.training.step import Parts


@dataclass(frozen=True)
class Plan:
    """A run, ready to be compiled: every config built and checked against the devices, nothing allocated on them.

    Who chooses its layout, the option `--plan`, is `jaxdl.training.plans.PlanChoice`.
    """

    experiment: Experiment
    parts: Parts
    splits: Splits
    timeline: Timeline
    eval_batch_size: int
    asked: Experiment
    """The experiment as it was given; in `experiment` the exchange has been chosen, where that was left open."""
    reasons: tuple[str, ...] = ()
    """Why this exchange was chosen, or that with one replica it sends nothing; other notes for the user."""
    initial: Initial | None = None
    """What the run takes from another run when it begins at step 0."""
    kept: Kept | None = None
    """The layout that was planned for it."""
    may_change: tuple[str, ...] = ()
    """The fields whose values may be others than those in the workdir."""

    @property
    def exchange(self) -> ExchangeConfig:
        """The exchange, which has been chosen."""
        assert isinstance(self.experiment.exchange, ExchangeConfig)
        return self.experiment.exchange

    def subject(self, counter: StepCounter) -> Subject:
        """What is reported of the run, whose steps the counter counts."""
        source, seed = self.splits.train, self.experiment.seed
        return Subject(self.timeline, counter, self.parts.task, source, seed, self.experiment, self.num_params)

    @property
    def total_steps(self) -> int:
        """Length of the run."""
        return self.timeline.total_steps

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """How many devices each axis of the mesh has; of `RARE_AXES` those of several."""
        sizes = self.parts.layout.mesh.shape
        return {axis.value: sizes[axis] for axis in Axis if axis not in RARE_AXES or sizes[axis] > 1}

    @property
    def num_params(self) -> int:
        """The numbers of the network, frozen ones included, and of its embedding tables."""
        shapes = jax.tree.leaves(self.parts.network.filled.param_shapes)
        tables = () if self.parts.tables is None else self.parts.tables.tables
        return sum(math.prod(x.shape) for x in shapes) + sum(table.rows * table.columns for table in tables)

    def sources(self, segment: Segment) -> tuple[Source, Source]:
        """The training and the held-out examples as a segment of the run sees them."""
        phase = segment.phase
        if phase is None:
            return self.splits.train, self.splits.test
        train, test = self.splits.train, self.splits.test
        assert isinstance(train, PhotoSource)
        assert isinstance(test, PhotoSource)
        return train.at(size=phase.size, min_scale=phase.min_scale), test.at(size=phase.eval_size or phase.size)

    @functools.cached_property
    def caches(self) -> Caches | None:
        """The embedding tables that the host holds. Raises ConfigError for settings that do not fit."""
        return make_caches(self.experiment.model, self.parts.tables, self.splits.train.spec)

    def open(self, warn: Callable[[str], None], stack: contextlib.ExitStack) -> None:
        """`warn` gets the warnings of the sources; what they open is closed by `stack`."""
        for source in (self.splits.train, self.splits.test):
            source.on_warning(warn)
            stack.callback(source.close)
        if self.caches is not None:
            stack.callback(self.caches.close)

    def swap_rows(self, state: TrainState, num_batches: int) -> TrainState:
        """The state, which is donated, with the rows of tables that the next batches need."""
        return state if self.caches is None else self.caches.swap(state, num_batches)

    def batches(self, segment: Segment, start: int, num_steps: int, state: TrainState | None = None) -> TrainLoader:
        """The training batches of some steps of a segment, from a position in the stream of examples on.

        They are for steps from `state` on, of which `swap_rows` gives them the rows that they need.
        """
        source = original = self.sources(segment)[0]
        where = {"batch_size": segment.batch_size, "seed": self.experiment.seed, "start": start}
        if self.caches is not None and state is not None:
            source = self.caches.training(state, source, **where)
        source = in_training(self.parts.tables, source, original, **where)
        return TrainLoader(source, sharding=batch_sharding(self.parts.layout.mesh), num_steps=num_steps, **where)

    def batch_shapes(self, segment: Segment, *, evaluating: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of a batch of a segment; those with jagged features may have more ids."""
        source = self.sources(segment)[evaluating]
        size = self.eval_batch_size if evaluating else segment.batch_size
        return shapes_of(self.parts.tables, source.batch_shapes(size, evaluating=evaluating), evaluating=evaluating)
