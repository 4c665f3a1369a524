"""Training that goes wrong: batches whose numbers are bad, and a disk that refuses checkpoints.

As a program it is `jaxdl.train` behind a JSON of what goes wrong in this process:
python -m tests.faulty_train '{"bad": [7, 8], "refused": [12], "elsewhere": FOLDER}' --config ...
With "elsewhere" the run is begun with another workdir first, which may be another one in each process.
"""

import errno
import functools
import itertools
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp

import jaxdl
from jaxdl.data import TrainLoader
from jaxdl.parallel.cluster import end_together
from jaxdl.parallel.lease import shared
from jaxdl.training.command import parse_command
from jaxdl.training.run.result import exit_codes
from jaxdl.training.tasks import Classification

LOSS, GRADIENT = 1000, 2000
"""A label of at least this much makes its example's loss NaN, or only the gradient of that."""


def make_labels_poisonous(patch=setattr):
    """Labels of data stay harmless. `patch` is called like `setattr`."""
    original = Classification.sums

    def sums(self, outputs, batch, *, train):
        found = original(self, outputs, batch, train=train)
        if train:
            label, square = batch["label"], jnp.sum(outputs.astype(jnp.float32) ** 2)
            bad_loss = jnp.any((label >= LOSS) & (label < GRADIENT))
            # The root's slope at 0 is infinite.
            root = jnp.sqrt(jnp.where(jnp.any(label >= GRADIENT), 0 * square, 1.0))
            bad_gradient = jnp.where(jnp.any(label >= GRADIENT), root, 0)
            found["loss"] = found["loss"] + jnp.where(bad_loss, jnp.nan, 0) + bad_gradient
        return found

    patch(Classification, "sums", sums)


def poisoned(batch, value):
    """The batch with a label that makes the numbers of one example, on one replica, bad."""
    label = batch["label"]
    return batch | {"label": _with_first(label.sharding)(label, value)}


@functools.cache
def _with_first(sharding):
    return jax.jit(lambda label, value: label.at[0].set(value), out_shardings=sharding)


def poison_batches(bad, patch=setattr, step_at=lambda start, batch_size: start // batch_size):
    """Makes the losses of these steps of a run NaN; the set may be changed later.

    `step_at(position, batch_size)` is how many steps come before a position in the stream of examples.
    """
    begin, following = TrainLoader.__init__, TrainLoader.__next__

    def noted(self, *args, start, batch_size, **kwargs):
        begin(self, *args, start=start, batch_size=batch_size, **kwargs)
        self.steps = itertools.count(step_at(start, batch_size) + 1)

    def next_batch(self):
        batch = following(self)
        return poisoned(batch, LOSS) if next(self.steps) in bad else batch

    patch(TrainLoader, "__init__", noted)
    patch(TrainLoader, "__next__", next_batch)


def refuse_checkpoints(steps):
    """This process's disk has no room for the checkpoints of these steps; returns the hook that notes the step."""
    original, now = pathlib.Path.open, [0]

    def open_unless_full(self, *args, **kwargs):
        if self.name.startswith(".probe.") and now[0] in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, *args, **kwargs)

    pathlib.Path.open = open_unless_full
    return lambda info: now.__setitem__(0, info.step)


if __name__ == "__main__":
    faults = json.loads(sys.argv[1])
    make_labels_poisonous()
    poison_batches(faults.get("bad", ()))
    note_step = refuse_checkpoints(faults.get("refused", ()))
    with end_together(), exit_codes():
        command = parse_command(sys.argv[2:])
        if "elsewhere" in faults:
            shared.SHARED_SEC, usual = 1, shared.SHARED_SEC
            try:
                jaxdl.train(command.experiment, faults["elsewhere"])
            except jaxdl.ConfigError as error:
                print(f"mistake: {error}")
            shared.SHARED_SEC = usual
        jaxdl.train(command.experiment, command.workdir, on_step=[note_step])
