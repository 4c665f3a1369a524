"""Conversion of a train state to the flat items of a checkpoint and back, and reading of items."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdl.core.config import ConfigError
from jaxdl.training.checkpoint.differential import CHANGED, ChangedHandler
from jaxdl.training.checkpoint.literal import literal
from jaxdl.training.checkpoint.written_rows import RowsHandler, chunk_bytes
from jaxdl.training.state import TABLES, TrainState

ITEMS = {
    "model": ("step", "params", "model_state", "ema_params"),
    "optimizer": ("opt_state", "loss_scale", "guard", "key"),
    "exchange": ("exchange_state", "agreement_state"),
    TABLES: (TABLES,),
}
"""Item of a checkpoint -> the fields of the train state in it. Prediction reads only `model`."""


class Form(Protocol):
    """What states are like in checkpoints, if not as in training."""

    def abstract(self, state: TrainState) -> TrainState:
        """The shapes in a checkpoint, of those of a state."""
        ...

    def stored(self, state: TrainState) -> TrainState:
        """A state as a checkpoint has it. Raises OSError for a disk without room, on the processes that lack it."""
        ...

    def allocate(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A float32 array of zeros, for a part of a table that the host holds while a checkpoint is read."""
        ...

    def live(self, state: TrainState) -> TrainState:
        """The reverse of `stored`."""
        ...


def to_items(state: TrainState) -> dict[str, dict[str, Any]]:
    """The state as flat items: name of the item -> path of the leaf -> array."""
    items: dict[str, dict[str, Any]] = {}
    for item, fields in ITEMS.items():
        flat = jax.tree_util.tree_flatten_with_path({field: getattr(state, field) for field in fields})[0]
        items[item] = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    return items


def to_state(items: dict[str, dict[str, Any]], abstract: TrainState) -> TrainState:
    """The inverse of `to_items`, in the structure of `abstract`, which also gives the leaves that `items` lack."""
    changes: dict[str, Any] = {}
    for item, fields in ITEMS.items():
        tree = {field: getattr(abstract, field) for field in fields}
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
        leaves = items.get(item, {})
        changes |= treedef.unflatten([leaves.get(name, leaf) for name, (_, leaf) in zip(names, flat, strict=True)])
    return abstract.replace(**changes)


def fresh_exchange(abstract: TrainState, make: Callable[[], Any] | None) -> dict[str, Any]:
    """The item of the exchange's initial state, which `make` makes. Raises ConfigError without that."""
    if make is None:
        raise ConfigError(
            "the checkpoint has no state of the exchange for this mesh. Give fresh_exchange_state to restore it."
        )
    return to_items(abstract.replace(exchange_state=make()))["exchange"]


def handlers() -> dict[str, Any]:
    """Orbax's handlers. One replica writes small arrays: dividing them among replicas costs a compilation each."""
    trees = {}
    for name in ITEMS:
        kind = RowsHandler if name == TABLES else ocp.type_handlers.ArrayHandler
        arrays = kind(min_slice_bytes_for_replica_parallel=2**20)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        trees[name] = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    return trees | {"meta": ocp.JsonCheckpointHandler(), CHANGED: ChangedHandler()}


def save_arguments(items: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What Orbax is given to write the items that are not empty.

    Tables are written in chunks of some MB where their shape allows it; these can be read one after the other.
    """
    arguments: dict[str, Any] = {name: ocp.args.PyTreeSave(item) for name, item in items.items() if item}
    if items[TABLES]:
        chunks = {name: ocp.SaveArgs(chunk_byte_size=chunk_bytes(x)) for name, x in items[TABLES].items()}
        arguments[TABLES] = ocp.args.PyTreeSave(items[TABLES], save_args=chunks)
    return arguments


def read_items(folder: Path, wanted: dict[str, Any], *, partial: bool = False, strict: bool = True) -> dict[str, Any]:
    """The wanted items (name -> shape structs with shardings) of a checkpoint. Processes do not wait for each other.

    `partial`: the structs are of some of the stored arrays. Unless it is `strict`, arrays that are longer there are
    cut, and those that are shorter end with zeros: which shapes may differ is for the caller to know.
    """
    folder = literal(folder)
    if partial:
        with _reader(ocp.PyTreeCheckpointHandler) as reader:
            return {name: reader.restore(folder / name, args=_some_of(x, strict)) for name, x in wanted.items()}
    with _reader() as reader:
        arguments = {name: ocp.args.StandardRestore(x, strict=strict) for name, x in wanted.items()}
        return {name: reader.restore(folder / name, args=args) for name, args in arguments.items()}


def stored_arrays(folder: Path, item: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of each array of an item, as TensorStore reports them."""
    with _reader() as reader:
        tree = reader.metadata(literal(folder) / item)
    flat = getattr(tree, "item_metadata", tree)
    return {name: (tuple(array.shape), str(array.dtype)) for name, array in dict(getattr(flat, "tree", flat)).items()}


def _some_of(wanted: dict[str, Any], strict: bool) -> ocp.args.PyTreeRestore:
    arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
    arguments = jax.tree.map(lambda each: dataclasses.replace(each, strict=strict), arguments)
    return ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=True)


def _reader(handler: Callable[..., Any] = ocp.StandardCheckpointHandler) -> ocp.Checkpointer:
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    return ocp.Checkpointer(handler(multiprocessing_options=alone), multiprocessing_options=alone)
