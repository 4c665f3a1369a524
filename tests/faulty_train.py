"""Training that goes wrong: batches whose numbers are bad, and a disk that refuses checkpoints.

As a program it is `jaxdl.train` behind a JSON of what goes wrong in this process:
python -m tests.faulty_train '{"bad": [7, 8], "refused": [12], "shared_sec": 1}' --config ...
"""

import errno
import functools
import itertools
import json
import os
import sys

import jax
import jax.numpy as jnp

from jaxdl.checkpoint import Checkpoints
from jaxdl.data import TrainLoader
from jaxdl.run import trainer, workdir
from jaxdl.tasks import Classification

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


def poison_batches(bad, patch=setattr):
    """Makes the losses of these steps of a run NaN; the set may be changed later."""

    class Loader(TrainLoader):
        def __init__(self, *args, start, batch_size, **kwargs):
            super().__init__(*args, start=start, batch_size=batch_size, **kwargs)
            self.steps = itertools.count(start // batch_size + 1)

        def __next__(self):
            batch = super().__next__()
            return poisoned(batch, LOSS) if next(self.steps) in bad else batch

    patch(trainer, "TrainLoader", Loader)


def refuse_checkpoints(steps):
    """This process's disk is full at these steps."""
    save, probe, now = Checkpoints.save, Checkpoints._probe, []

    def noted_save(self, state, step, **others):
        now[:] = [step]
        save(self, state, step, **others)

    def refusing_probe(self):
        if now[0] in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        probe(self)

    Checkpoints.save, Checkpoints._probe = noted_save, refusing_probe


if __name__ == "__main__":
    from jaxdl.train import main

    faults = json.loads(sys.argv[1])
    make_labels_poisonous()
    poison_batches(faults.get("bad", ()))
    refuse_checkpoints(faults.get("refused", ()))
    workdir.SHARED_SEC = faults.get("shared_sec", workdir.SHARED_SEC)
    main(sys.argv[2:])
