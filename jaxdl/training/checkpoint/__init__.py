"""Checkpoints: written asynchronously, restored onto the current mesh, checked by fingerprints.

A checkpoint is a folder `checkpoints/step_N` with one array for each leaf of the train state, named by its path, in
three items (`model`, `optimizer`, `exchange`, written by Orbax), a description with the fingerprint of each array
(`meta/metadata`), and a list of its files (`files.json`). A network with embedding tables has a fourth item, `tables`,
or the rows of them that changed since an earlier checkpoint (`jaxdl.training.checkpoint.differential`).

A checkpoint that cannot be written (a full disk) does not end the run: the failure is noted, the partial folder is
removed, and complete checkpoints are kept. A checkpoint that cannot be read ends the run and is not moved. Only a
checkpoint that is proven to be damaged is quarantined in `checkpoints/damaged`; the one before it is used instead.
"""

from jaxdl.training.checkpoint.averaging import restore_mean
from jaxdl.training.checkpoint.config import CheckpointConfig
from jaxdl.training.checkpoint.earlier_runs import Earlier
from jaxdl.training.checkpoint.errors import Damaged, NoneLeft, Removed, Unreadable, Unusable
from jaxdl.training.checkpoint.fingerprint import fingerprints
from jaxdl.training.checkpoint.manager import Checkpoints, Restored
from jaxdl.training.checkpoint.reading import read_model, stored_model
from jaxdl.training.checkpoint.reference import KeptReference, read_reference

__all__ = [
    "CheckpointConfig",
    "Checkpoints",
    "Damaged",
    "Earlier",
    "KeptReference",
    "NoneLeft",
    "Removed",
    "Restored",
    "Unreadable",
    "Unusable",
    "fingerprints",
    "read_model",
    "read_reference",
    "restore_mean",
    "stored_model",
]
