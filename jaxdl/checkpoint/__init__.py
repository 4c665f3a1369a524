"""Checkpoints: written asynchronously, restored onto the current mesh, checked by fingerprints.

A checkpoint is a folder `checkpoints/step_N`. It is flat: one array for each leaf of the train state, by its path, in
three items (`model`, `optimizer`, `exchange`, written by Orbax), a description with the fingerprint of each array
(`meta/metadata`), and a list of its files (`files.json`).

A checkpoint that cannot be written (a full disk) ends no run: it is a note, the half of it is removed, and nothing that
is whole is touched. One that cannot be read ends the run and stays where it is; only one that is proven to be damaged
is moved, to `checkpoints/damaged`, and the one before it is used.
"""

from jaxdl.checkpoint.earlier import Earlier
from jaxdl.checkpoint.errors import Damaged, NoneLeft, Unreadable, Unusable
from jaxdl.checkpoint.fingerprint import fingerprints
from jaxdl.checkpoint.manager import CheckpointConfig, Checkpoints, Restored

__all__ = [
    "CheckpointConfig",
    "Checkpoints",
    "Damaged",
    "Earlier",
    "NoneLeft",
    "Restored",
    "Unreadable",
    "Unusable",
    "fingerprints",
]
