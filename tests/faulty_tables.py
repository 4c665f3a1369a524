"""Two processes of a run whose embedding tables meet bad gradients, another layout, and a wrong id.

python -m tests.faulty_tables FOLDER --config ... --workdir ...: FOLDER gets what each process has of the tables. A
program and not `jaxdl.train`, because one pair of processes does all of it: starting and compiling takes most of the
time.
"""

import contextlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxdl
from jaxdl.data.tables.clicks import ClickSource
from jaxdl.models.recommendation import RecommendationModule
from jaxdl.parallel.cluster import end_together
from jaxdl.parallel.embedding import (
    ColumnWise,
    DataParallel,
    EmbeddingConfig,
    Replicated,
    RowWise,
    RowWiseAdaGrad,
    TableRowWise,
    TableWise,
)
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.parallel.embedding.places import to_json
from jaxdl.parallel.embedding.store import Store
from jaxdl.training.checkpoint import Checkpoints
from jaxdl.training.command import parse_command
from jaxdl.training.run.compile import shared_programs
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.run.result import exit_codes
from jaxdl.training.run.tables.global_ids import training_batches

SCHEMES = (
    TableWise(),
    RowWise(),
    ColumnWise(),
    TableRowWise(),
    DataParallel(),
    Replicated(),
    Replicated(room=0.02),  # Its messages have no room for the rows of these batches: another branch of the program.
)
"""Of each feature's table."""
BAD = {2 * (number + 1): number for number in range(len(SCHEMES))}
"""Step -> the feature of which one vector has a gradient that is not finite, of an example of process 1."""
SAVED = 15
"""The last step of the first run; its checkpoint has the rows that changed since step 5."""
WRONG_STEP, WRONG_ID, WRONG_FEATURE = 25, 123_456, 3
"""Process 1 reads this id in the batch of this step."""
OTHER = EmbeddingConfig(
    schemes=tuple((f"feature{number:02d}", one) for number, one in enumerate((*SCHEMES[2:], *SCHEMES[:2]))),
    optimizer=RowWiseAdaGrad(),
    cache=CacheConfig(fraction=0.2, min_rows=2000),
)
"""The second layout, on the other mesh: that of test_processes.ACROSS."""
_MARK = 64.0
"""The first number of an example with a bad gradient, plus its feature: no example has such a number."""


def make_gradients_poisonous():
    """The vector of the marked feature has a gradient that is not finite; the loss and all other gradients are."""
    original = RecommendationModule.__call__

    def poisoned(self, numbers, vectors):
        first, changed = numbers[:, 0], {}
        for number, (name, x) in enumerate(vectors.items()):
            marked = (first == _MARK + number)[:, None]
            # The root's slope at 0 is infinite.
            changed[name] = x + jnp.where(marked, jnp.sqrt(jnp.where(marked, 0 * x * x, 1.0)), 0)
        return original(self, numbers.at[:, 0].set(jnp.where(first >= _MARK, 0, first)), changed)

    RecommendationModule.__call__ = poisoned


def mark_examples(experiment):
    """Marks an example of each bad step, which process 1 reads; and returns that of the wrong id."""
    source, size = experiment.data.build().train, experiment.batch_size
    every = training_batches(source, batch_size=size, seed=experiment.seed, start=0)
    last = {step: int(rows[-1]) for step, rows in zip(range(1, WRONG_STEP + 1), every, strict=False)}
    marks, original = {last[step]: _MARK + feature for step, feature in BAD.items()}, ClickSource.batch

    def batch(self, indices):
        found = original(self, indices)
        for row, example in enumerate(indices):
            if self._first == 0 and example in marks:
                found["numbers"][row, 0] = marks[example]
        return found

    ClickSource.batch = batch
    return last[WRONG_STEP]


def read_wrong_id(example):
    """From now on this process reads a wrong id of the example."""
    for name in ("batch", "ids"):
        original = getattr(ClickSource, name)

        def read(self, indices, original=original):
            found = original(self, indices)
            ids = found["ids"] if isinstance(found, dict) else found
            first = sum(self._config.num_ids[:WRONG_FEATURE])
            ids[(np.asarray(indices) == example) & (self._first == 0), first] = WRONG_ID
            return found

        setattr(ClickSource, name, read)


def write_parts(folder, name, tables, layout):
    """Writes what this process has of the arrays, and where their rows are."""
    parts = {"layout": json.dumps(to_json(layout))}
    for buffer, arrays in tables.items():
        for what, x in arrays.items():
            for shard in x.addressable_shards:
                first = [one.indices(size)[0] for one, size in zip(shard.index, x.shape, strict=True)]
                parts["|".join([f"{buffer}.{what}", *map(str, [*first, 0][:2])])] = np.array(shard.data)
    np.savez(folder / f"{name}.{jax.process_index()}.npz", **parts)


class Watch:
    """Notes after each step which tables have changed, of what this process has of them."""

    def __init__(self):
        self.store, self.before, self.changed = None, None, {}
        init = Store.init

        def noted(store, *args):
            self.store = store
            init(store, *args)

        Store.init = noted

    def __call__(self, info):
        self.tables = self.store.stored(info.state.tables)
        now = {}
        for place in self.store.layout:
            for what, x in self.tables[place.buffer].items():
                for table, rows in place.rows.items():
                    numbers = place.of(table, np.arange(rows))
                    for shard in x.addressable_shards:
                        start, stop, _ = shard.index[0].indices(x.shape[0])
                        mine = numbers[(numbers >= start) & (numbers < stop)] - start
                        now.setdefault(table, []).append((what, np.array(shard.data)[mine].tobytes()))
        self.changed[info.step] = [name for name, x in now.items() if self.before and x != self.before[name]]
        self.before = now


def restored(experiment, workdir):
    """The whole tables of the newest checkpoint, in the layout of an experiment, and that layout."""
    plan = make_plan(experiment)
    layout = (plan.caches.store if plan.caches else plan.parts.tables).layout
    how = {"best_metric": "auc", "best_mode": "max", "read_only": True, "table_layout": layout, "form": plan.caches}
    with contextlib.closing(Checkpoints(workdir, experiment.checkpoint, **how)) as checkpoints:
        found = checkpoints.restore(plan.parts.state_spec.abstract(), items=("tables",))
    assert (found.step, found.damaged) == (SAVED, ())
    return (plan.caches.stored(found.state) if plan.caches else found.state).tables, layout


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with end_together(), exit_codes(), shared_programs():
        command = parse_command(sys.argv[2:])
        make_gradients_poisonous()
        wrong, watch = mark_examples(command.experiment), Watch()
        run = jaxdl.train(command.experiment, command.workdir, max_steps=SAVED, on_step=[watch])
        write_parts(folder, "run", watch.tables, watch.store.layout)
        noted = {"changed": watch.changed, "bad_steps": int(run.state.guard["bad_steps"])}
        (folder / f"noted.{jax.process_index()}.json").write_text(json.dumps(noted))
        other = command.experiment.replaced({"mesh.replica": 1, "mesh.fsdp": 4, "embedding": OTHER})
        write_parts(folder, "other", *restored(other, Path(command.workdir)))
        if jax.process_index() == 1:
            read_wrong_id(wrong)
        jaxdl.train(command.experiment, command.workdir)
