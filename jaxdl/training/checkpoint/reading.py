"""Reads one checkpoint, and distinguishes damage from an unresponsive disk and from another version of the code.

Damage requires that all files can be read to their end, and that a file in the manifest is missing or has another size
or other bytes; or that restoring the arrays fails, or their fingerprints differ, twice in a row. Nothing else
quarantines a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import json
import types
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.files import step_folder
from jaxdl.exchange import resplit
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.embedding import places
from jaxdl.parallel.mesh import on_hosts
from jaxdl.training.checkpoint.agree import Finding, findings, raise_worst
from jaxdl.training.checkpoint.differential import with_changed
from jaxdl.training.checkpoint.errors import Damaged, Unreadable, Unusable, read_refused, unreadable
from jaxdl.training.checkpoint.fingerprint import (
    NUMPY_BYTES,
    Stale,
    first_sums,
    host_fingerprints,
    on_cpus,
    tag_fingerprint,
    tagged_texts,
    text,
)
from jaxdl.training.checkpoint.items import read_items, stored_arrays
from jaxdl.training.checkpoint.literal import with_names
from jaxdl.training.checkpoint.manifest import check_files, read_everything
from jaxdl.training.checkpoint.meta import Meta, Stored, read_meta
from jaxdl.training.checkpoint.stored_tables import (
    Allocate,
    Base,
    Hosted,
    changed_values,
    in_memory,
    named_base,
    open_base,
    read_moved,
)
from jaxdl.training.state import TABLES

Items = dict[str, dict[str, Any]]
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of arrays by their paths in the train state."""
_GROUP_BYTES = 2**29
"""Of the arrays whose fingerprints are one program: on CPUs it has two copies of all its arrays."""
EMPTY: Shapes = types.MappingProxyType({})
_first_sums = jax.jit(first_sums)


def fingerprint_texts(items: Items, tag: int, shapes: Shapes = EMPTY) -> dict[str, dict[str, str]]:
    """The fingerprint of each array; all processes call it, with a `tag` that is another for each checkpoint.

    Of arrays of these names the parts of these `shapes`, at their beginnings. Raises Stale on the processes
    that get those of another call from their devices.
    """
    tag %= 2**32
    stale: Stale | None = None
    groups: dict[Any, Items] = {}
    total = 0
    every = {(item, name): x for item, leaves in items.items() for name, x in leaves.items()}
    without_program = all(map(on_cpus, every.values())) and sum(x.nbytes for x in every.values()) <= NUMPY_BYTES
    hosted = {key: x for key, x in every.items() if without_program or on_hosts(x)}
    for (item, name), x in every.items():
        if (item, name) not in hosted:
            devices = x.sharding.device_set if isinstance(x, jax.Array) else ()  # One program is for the same ones.
            key = total // _GROUP_BYTES, frozenset(devices)
            groups.setdefault(key, {}).setdefault(item, {})[name] = x
            total += x.nbytes
    arrays: dict[str, dict[str, str]] = {item: {} for item in items}
    for group in groups.values():
        try:
            counted = tuple((name, shapes[name]) for leaves in group.values() for name in leaves if name in shapes)
            texts_of = tagged_texts(_fingerprints(group, np.uint32(tag), counted), tag)
        except Stale as error:  # The others go on, and wait for this process below.
            stale = error
            continue
        for item, texts in texts_of.items():
            arrays[item] |= texts
    if hosted:
        wait_for_all()  # One host may have been slower than Gloo waits.
        sizes = [shapes.get(name, tuple(x.shape)) for (_, name), x in hosted.items()]
        for (item, name), words in zip(hosted, host_fingerprints(list(hosted.values()), sizes), strict=True):
            arrays[item][name] = text(words)
    if stale is not None:
        raise stale
    return arrays


@functools.partial(jax.jit, static_argnums=2)
def _fingerprints(group: Items, tag: jax.Array, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Any:
    counted = dict(shapes)
    return {
        item: {name: tag_fingerprint(x, tag, counted.get(name)) for name, x in leaves.items()}
        for item, leaves in group.items()
    }


def with_shapes(leaves: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Shape structs, those of these names with other shapes."""
    return {
        name: jax.ShapeDtypeStruct(shapes[name], x.dtype, sharding=x.sharding) if name in shapes else x
        for name, x in leaves.items()
    }


def stored_model(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of each array of the network in the checkpoint in `folder`.

    Raises ConfigError if its description is damaged or of another version, Unreadable if it cannot be read.
    """
    try:
        stored = read_meta(folder).arrays["model"]
    except (Damaged, KeyError) as error:
        raise Unusable(f"{folder} is damaged ({error}). Choose another checkpoint.") from None
    if all(array.shape is not None and array.dtype is not None for array in stored.values()):
        return {name: (tuple(array.shape or ()), str(array.dtype)) for name, array in stored.items()}
    return stored_arrays(folder, "model")  # Format 1 does not have them.


def read_model(folder: Path, wanted: Mapping[str, Any], filled_shapes: Shapes = EMPTY) -> dict[str, Any]:
    """Some arrays of the network in the checkpoint in `folder`: name -> shape struct with a sharding, or array.

    `filled_shapes` as of `read_checkpoint`. Raises what `read_checkpoint` raises.
    """
    return read_checkpoint(folder, {"model": dict(wanted)}, partial=True, filled_shapes=filled_shapes)[0].get(
        "model", {}
    )


def read_checkpoint(
    folder: Path,
    wanted: Items,
    *,
    partial: bool = False,
    table_layout: places.Layout = (),
    allocate: Allocate = in_memory,
    filled_shapes: Shapes = EMPTY,
) -> tuple[Items, Meta]:
    """(the arrays, the description) of the checkpoint in `folder`; it succeeds on all processes or on none.

    A differential checkpoint is put together with the one that has the whole embedding tables.
    `wanted` are shape structs with shardings, with `partial` of some of the stored arrays. Of the exchange's state all
    stored arrays are read, sharded as `resplit.readable` says. Embedding tables that are stored in another layout than
    `table_layout` are moved; `allocate` makes the memory of those that hosts hold. `filled_shapes` are the shapes of
    wanted arrays without empty layers, if they have some; those in the checkpoint may have others. Raises the same
    error on all processes: Damaged, Unreadable, or Unusable for a checkpoint with other arrays or of another version.
    """
    for last in (False, True):
        error, read = None, None
        try:
            if jax.process_index() == 0:
                check_files(folder)
            read = _read(folder, wanted, table_layout, allocate, partial=partial, filled=filled_shapes)
        except Exception as raised:  # Kept until the others know: all processes must take the same path.
            error = raised
        if not _problem(folder, error, last):
            assert read is not None
            bad = _complete(read)
            if not bad:
                return read.items | ({TABLES: read.moved} if read.moved else {}), read.meta
            read.items.clear()  # Free its memory for the second attempt.
            _problem(folder, changed_values(bad), last)
    raise AssertionError("the last attempt returns or raises")


class _Read(NamedTuple):
    """What was read; of a differential checkpoint the tables are still those of its base."""

    items: Items
    meta: Meta
    base: Base | None
    hosted: Hosted | None
    moved: dict[str, Any]
    """Tables from another layout, already checked and complete."""


def _read(
    folder: Path, wanted: Items, layout: places.Layout, allocate: Allocate, *, partial: bool, filled: Shapes
) -> _Read:
    """Reads a checkpoint; nothing in here waits for other processes."""
    meta = read_meta(folder)
    # Stacks may be longer in it, or here, than their layers; `_to_read` compares the layers that there are.
    how = {"partial": partial, "strict": not (filled or meta.empty_layers)}
    base = open_base(folder, meta) if TABLES in wanted else None
    if TABLES in wanted and list(meta.table_layout) != places.to_json(layout):
        _check_tables(folder, meta, wanted[TABLES], layout)
        others = {name: x for name, x in wanted.items() if name != TABLES}
        arrays = read_items(folder, _to_read(folder, meta, others, filled, partial=partial), **how)
        return _Read(arrays, meta, None, None, read_moved(folder, meta, base, wanted[TABLES], layout, allocate))
    to_read = _to_read(folder, meta, wanted, filled, partial=partial)
    tables = to_read.pop(TABLES, {})
    on_host = {name: x for name, x in tables.items() if on_hosts(x)}
    on_devices = {name: x for name, x in tables.items() if name not in on_host}
    whole, hosted = folder if base is None else base.folder, Hosted(on_host, allocate) if on_host else None
    arrays = read_items(folder, to_read, **how)
    if on_devices:
        arrays |= read_items(whole, {TABLES: on_devices}, partial=partial or bool(on_host))
    if hosted is not None:
        hosted.read(whole)
        arrays[TABLES] = arrays.get(TABLES, {}) | hosted.arrays()
    return _Read(arrays, meta, base, hosted, {})


def _complete(read: _Read) -> list[str]:
    """Puts changed rows in place; the names of arrays that have changed since they were written. All call it."""
    arrays, base, hosted = read.items, read.base, read.hosted
    if base is not None:
        bad = [f"{table} of {base.folder.name}" for table in _find_changes({TABLES: arrays[TABLES]}, base.meta)]
        if bad:
            return bad
        tables = arrays.pop(TABLES)
        if hosted is not None:
            tables = {name: x for name, x in tables.items() if not on_hosts(x)}
            hosted.put(base.changed)
            tables |= hosted.arrays()
        on_devices = {name: x for name, x in tables.items() if not on_hosts(x)}
        arrays[TABLES] = tables | with_changed(on_devices, base.changed)
    return _find_changes(arrays, read.meta)


def _problem(folder: Path, error: Exception | None, last: bool) -> bool:
    """Whether any process met an error that a second attempt may avoid; raises definite errors on all processes."""
    every = findings(Finding.of(None if error is None else _diagnose(folder, error, last)))
    raise_worst(every)
    return any(kind for kind, _ in every)


def _diagnose(folder: Path, error: Exception, last: bool) -> Exception:
    """The error as Damaged, Unreadable or Unusable; unchanged if a second attempt has to decide.

    Orbax and TensorStore raise many kinds of errors for a damaged file, and the same ones for a refused read, so the
    files are read here without them.
    """
    if isinstance(error, Damaged | Unreadable | ConfigError):
        return error
    try:
        vouched = check_files(folder)
        read_everything(folder)
        if (base := read_meta(folder).base) is not None:
            whole = folder.parent / step_folder(base)
            with named_base(whole):
                vouched = check_files(whole) and vouched
                read_everything(whole)
    except (Damaged, Unreadable) as certain:
        return certain
    if not last:
        return error
    if (number := read_refused(error)) is not None:
        return unreadable(folder, number)
    reason = (with_names(str(error)).strip() or type(error).__name__).splitlines()[0][:200]
    if vouched:
        return Unreadable(
            f"{folder}: its files are intact, but it cannot be restored: {reason}. Nothing was moved; the same command "
            "tries again. If it fails again, check the memory of this host and the version of Orbax."
        )
    return Damaged(reason)


def _to_read(folder: Path, meta: Meta, wanted: Items, filled: Shapes, *, partial: bool = False) -> Items:
    """Shape structs of the stored arrays to read. Raises Unusable if others are wanted, or fewer but for `partial`."""
    for item, leaves in wanted.items():
        stored = meta.arrays.get(item, {})
        other = sorted(leaves.keys() - stored.keys() if partial else leaves.keys() ^ stored.keys())
        if other and not (item == "exchange" and resplit.same_kind(leaves, meta.exchange_shapes)):
            what = "is not in it" if other[0] in leaves else "is not in this network"
            raise _of_another(folder, f"{other[0]} {what}")
        if item != "exchange":
            _check_shapes(folder, item, with_shapes(leaves, filled), stored)
    if "exchange" in wanted:
        wanted = wanted | {"exchange": _exchange_to_read(folder, meta, wanted["exchange"], filled)}
    return {name: item for name, item in wanted.items() if item}


def _check_tables(folder: Path, meta: Meta, wanted: Mapping[str, Any], layout: places.Layout) -> None:
    """Raises Unusable for other embedding tables than those in a checkpoint, or other optimizers of theirs."""
    stored = {name: (entry["buffer"], rows) for entry in meta.table_layout for name, rows in entry["rows"].items()}
    there, here = (_rows_of(names) for names in (meta.arrays.get(TABLES, {}), wanted))
    for place in layout:
        for name, rows in place.rows.items():
            buffer, known = stored.get(name, ("", None))
            if known != rows:
                what = "is not" if known is None else f"has {known:,} rows"
                raise _of_another(folder, f"table {name} {what} in it, and has {rows:,} here")
            if there[buffer] != here[place.buffer]:
                texts = (
                    ", ".join(sorted(kept - {"rows"})) or "nothing" for kept in (there[buffer], here[place.buffer])
                )
                what = "the optimizer of table {} keeps {} of a row in it, and {} here".format(name, *texts)
                raise _of_another(folder, what)
    more = sorted(stored.keys() - {name for place in layout for name in place.rows})
    if more:
        raise _of_another(folder, f"table {more[0]} is in it, and not here")


def _rows_of(names: Iterable[str]) -> dict[str, set[str]]:
    """Buffer -> what there is of its rows: `rows` and what its optimizer keeps."""
    by_item: dict[str, set[str]] = {}
    for name in names:
        buffer, _, what = name.removeprefix(f"{TABLES}.").rpartition(".")
        by_item.setdefault(buffer, set()).add(what)
    return by_item


def _check_shapes(folder: Path, item: str, leaves: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
    known = {name: (array.shape, array.dtype) for name, array in stored.items() if array.shape is not None}
    if not known:  # Format 1: ask TensorStore. If it cannot read them, the restore will fail too.
        with contextlib.suppress(Exception):
            known = stored_arrays(folder, item)
    for name, x in leaves.items():
        now = (tuple(x.shape), str(x.dtype))
        if name in known and known[name] != now:
            then = f"{known[name][1]} {list(known[name][0] or ())}"
            raise _of_another(folder, f"{name} is {then} in it, but {now[1]} {list(now[0])} here")


def _exchange_to_read(folder: Path, meta: Meta, wanted: Mapping[str, Any], filled: Shapes) -> dict[str, Any]:
    """Shape structs of the exchange's arrays, in their stored dtypes where known."""
    arrays = {}
    for name, x in resplit.readable(with_shapes(wanted, filled), meta.exchange_shapes).items():
        dtype = meta.arrays["exchange"][name].dtype or str(x.dtype)
        if name in wanted and dtype != str(wanted[name].dtype):
            raise _of_another(folder, f"{name} is {dtype} in it, but {wanted[name].dtype} here")
        # Of replicas as many as are stored, each with the empty layers that are wanted.
        shape = (x.shape[0], *wanted[name].shape[1:]) if name in filled and x.shape[1:] == filled[name][1:] else x.shape
        arrays[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=x.sharding)
    return arrays


def _of_another(folder: Path, what: str) -> Unusable:
    return Unusable(
        f"{folder}: this checkpoint is of another network or version of jaxdl: {what}. Restore it with the "
        "settings and the version that wrote it."
    )


def _find_changes(items: Items, meta: Meta) -> list[str]:
    """The names of the arrays whose fingerprints differ from the stored ones."""
    if meta.format == 1:
        now = jax.tree.map(lambda x: str(int(x)), jax.device_get(_first_sums(items)))
    else:
        stored = json.dumps([{name: array.fingerprint for name, array in meta.arrays[item].items()} for item in items])
        others = {  # Those that have empty layers here.
            name: shape
            for item, leaves in items.items()
            for name, x in leaves.items()
            if (shape := meta.arrays[item][name].shape) is not None and shape != tuple(x.shape)
        }
        now = fingerprint_texts(items, zlib.crc32(stored.encode()), others)
    return [
        f"{item}.{name}"
        for item, leaves in now.items()
        for name, value in leaves.items()
        if meta.arrays[item][name].fingerprint != value
    ]
