"""Reads one checkpoint, and distinguishes damage from an unresponsive disk and from another version of the code.

Damage requires that all files can be read to their end, and that a file in the manifest is missing or has another size
or other bytes; or that restoring the arrays fails, or their fingerprints differ, twice in a row. Nothing else
quarantines a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdl.checkpoint.agree import Finding, findings, raise_worst
from jaxdl.checkpoint.differential import Rows, read_changed, with_changed
from jaxdl.checkpoint.errors import Damaged, Unreadable, Unusable, read_refused, unreadable
from jaxdl.checkpoint.fingerprint import as_text, fingerprints, first_sums, host_fingerprints, text
from jaxdl.checkpoint.items import read_items, stored_arrays
from jaxdl.checkpoint.manifest import check_files, read_everything
from jaxdl.checkpoint.meta import Meta, Stored, read_meta
from jaxdl.cluster import wait_for_all
from jaxdl.embedding import places
from jaxdl.exchange import resplit
from jaxdl.files import step_folder
from jaxdl.mesh import on_hosts
from jaxdl.state import TABLES

Items = dict[str, dict[str, Any]]
_GROUP_BYTES = 2**29
"""Of the arrays whose fingerprints are one program: on CPUs it has two copies of all its arrays."""
_fingerprints = jax.jit(fingerprints)
_first_sums = jax.jit(first_sums)


def fingerprint_texts(items: Items) -> dict[str, dict[str, str]]:
    """The fingerprint of each array; all processes call it."""
    groups: dict[Any, Items] = {}
    total = 0
    hosted = [(item, name) for item, leaves in items.items() for name, x in leaves.items() if on_hosts(x)]
    for item, leaves in items.items():
        for name, x in leaves.items():
            if (item, name) not in hosted:
                devices = x.sharding.device_set if isinstance(x, jax.Array) else ()  # One program is for the same ones.
                key = total // _GROUP_BYTES, frozenset(devices)
                groups.setdefault(key, {}).setdefault(item, {})[name] = x
                total += x.nbytes
    found: dict[str, dict[str, str]] = {item: {} for item in items}
    for group in groups.values():
        for item, texts in as_text(_fingerprints(group)).items():
            found[item] |= texts
    if hosted:
        wait_for_all()  # One host may have been slower than Gloo waits.
        for (item, name), words in zip(hosted, host_fingerprints([items[i][n] for i, n in hosted]), strict=True):
            found[item][name] = text(words)
    return found


def stored_model(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of each array of the network in the checkpoint in `folder`.

    Raises ConfigError if its description is damaged or of another version, Unreadable if it cannot be read.
    """
    try:
        stored = read_meta(folder).arrays["model"]
    except (Damaged, KeyError) as error:
        raise Unusable(f"{folder} is damaged ({error}). Choose another checkpoint.") from None
    if all(one.shape is not None and one.dtype is not None for one in stored.values()):
        return {name: (tuple(one.shape or ()), str(one.dtype)) for name, one in stored.items()}
    return stored_arrays(folder, "model")  # Format 1 does not have them.


def read_model(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Some arrays of the network in the checkpoint in `folder`: name -> shape struct with a sharding, or array.

    Raises what `read_checkpoint` raises.
    """
    return read_checkpoint(folder, {"model": dict(wanted)}, partial=True)[0].get("model", {})


def read_checkpoint(
    folder: Path, wanted: Items, *, partial: bool = False, table_layout: places.Layout = ()
) -> tuple[Items, Meta]:
    """(the arrays, the description) of the checkpoint in `folder`; it succeeds on all processes or on none.

    A differential checkpoint is put together with the one that has the whole embedding tables.
    `wanted` are shape structs with shardings, with `partial` of some of the stored arrays. Of the exchange's state all
    stored arrays are read, sharded as `resplit.readable` says. Embedding tables that are stored in another layout than
    `table_layout` are moved. Raises the same error on all processes: Damaged,
    Unreadable, or Unusable for a checkpoint with other arrays or of another version.
    """
    for last in (False, True):
        error, found, meta, there, base = None, {}, None, {}, None
        try:
            if jax.process_index() == 0:
                check_files(folder)
            meta = read_meta(folder)
            there = _elsewhere(folder, meta, wanted, table_layout)
            to_read = _to_read(
                folder, meta, {name: x for name, x in wanted.items() if name not in there}, partial=partial
            )
            to_read |= there
            if meta.base is not None and TABLES in to_read:
                base = _read_base(folder, meta, to_read.pop(TABLES))
            found = read_items(folder, to_read, partial=partial)
        except Exception as raised:  # Kept until the others know: all processes must take the same path.
            error = raised
        if not _problem(folder, error, last):
            assert meta is not None
            bad = [] if base is None else [f"{one} of {base.name}" for one in _changed(base.found, base.meta)]
            if base is not None:
                found[TABLES] = with_changed(base.found.pop(TABLES), base.changed)
            bad = bad or _changed(found, meta)
            if not bad:
                if there:
                    found |= _moved_tables(meta, found, wanted, table_layout)
                return found, meta
            found.clear()  # Free its memory for the second attempt.
            changed = ValueError(f"the stored values of {', '.join(bad[:3])} have changed since they were written")
            _problem(folder, changed, last)
    raise AssertionError("the last attempt returns or raises")


class _Base(NamedTuple):
    """Whole tables of an earlier checkpoint, and the rows that a differential one has."""

    name: str
    meta: Meta
    found: Items
    changed: list[Rows]


def _read_base(folder: Path, meta: Meta, tables: Mapping[str, Any]) -> _Base:
    """What a differential checkpoint is made of. Raises Damaged, Unreadable, and what Orbax and NumPy raise."""
    assert meta.base is not None
    base = folder.parent / step_folder(meta.base)
    with _named_base(base):
        if not base.is_dir():
            raise Damaged(f"there is no {base}")
        if jax.process_index() == 0:
            check_files(base)
        there = read_meta(base)
        if there.base is not None or list(there.table_layout) != list(meta.table_layout):
            raise Damaged("it is another checkpoint than the one that was written")
    changed = read_changed(folder, {name: one.dtype for name, one in meta.arrays[TABLES].items()})
    return _Base(base.name, there, read_items(base, {TABLES: tables}), changed)


@contextlib.contextmanager
def _named_base(base: Path) -> Iterator[None]:
    """What is damaged inside is the checkpoint with the whole tables."""
    try:
        yield
    except Damaged as error:
        raise Damaged(f"it needs the embedding tables of {base.name}, which cannot be used: {error}") from None


def _problem(folder: Path, error: Exception | None, last: bool) -> bool:
    """Whether any process met an error that a second attempt may avoid; raises definite errors on all processes."""
    every = findings(Finding.of(None if error is None else _diagnosed(folder, error, last)))
    raise_worst(every)
    return any(kind for kind, _ in every)


def _diagnosed(folder: Path, error: Exception, last: bool) -> Exception:
    """The error as Damaged, Unreadable or Unusable; unchanged if a second attempt has to decide.

    Orbax and TensorStore raise many kinds of errors for a damaged file, and the same ones for a refused read, so the
    files are read here without them.
    """
    if isinstance(error, Damaged | Unreadable | Unusable):
        return error
    try:
        vouched = check_files(folder)
        read_everything(folder)
        if (base := read_meta(folder).base) is not None:
            whole = folder.parent / step_folder(base)
            with _named_base(whole):
                vouched = check_files(whole) and vouched
                read_everything(whole)
    except (Damaged, Unreadable) as certain:
        return certain
    if not last:
        return error
    if (number := read_refused(error)) is not None:
        return unreadable(folder, number)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if vouched:
        return Unreadable(
            f"{folder}: its files are intact, but it cannot be restored: {reason}. Nothing was moved; the same command "
            "tries again. If it fails again, check the memory of this host and the version of Orbax."
        )
    return Damaged(reason)


def _to_read(folder: Path, meta: Meta, wanted: Items, *, partial: bool = False) -> Items:
    """Shape structs of the stored arrays to read. Raises Unusable if others are wanted, or fewer but for `partial`."""
    for item, leaves in wanted.items():
        stored = meta.arrays.get(item, {})
        other = sorted(leaves.keys() - stored.keys() if partial else leaves.keys() ^ stored.keys())
        if other and not (item == "exchange" and resplit.same_kind(leaves, meta.exchange_shapes)):
            what = "is not in it" if other[0] in leaves else "is not in this network"
            raise _of_another(folder, f"{other[0]} {what}")
        if item != "exchange":
            _check_shapes(folder, item, leaves, stored)
    if "exchange" in wanted:
        wanted = wanted | {"exchange": _exchange_to_read(folder, meta, wanted["exchange"])}
    return {name: item for name, item in wanted.items() if item}


def _elsewhere(folder: Path, meta: Meta, wanted: Items, layout: places.Layout) -> Items:
    """What is to be read of embedding tables that are stored in another layout than is wanted: NumPy's arrays."""
    if TABLES not in wanted or list(meta.table_layout) == places.to_json(layout):
        return {}
    stored = {name: rows for one in meta.table_layout for name, rows in one["rows"].items()}
    for one in layout:
        for name, rows in one.rows.items():
            if stored.get(name) != rows:
                there = f"has {stored[name]:,} rows" if name in stored else "is not"
                raise _of_another(folder, f"table {name} {there} in it, and has {rows:,} here")
    arrays = meta.arrays.get(TABLES, {})
    # A view of one number: nothing as large as a table is allocated.
    return {TABLES: {name: np.broadcast_to(np.zeros((), one.dtype), one.shape or ()) for name, one in arrays.items()}}


def _moved_tables(meta: Meta, found: Items, wanted: Items, layout: places.Layout) -> Items:
    arrays, like = ({name.removeprefix(f"{TABLES}."): x for name, x in of[TABLES].items()} for of in (found, wanted))
    made = places.moved(places.from_json(meta.table_layout), layout, arrays, like)
    return {TABLES: {f"{TABLES}.{name}": x for name, x in made.items()}}


def _check_shapes(folder: Path, item: str, leaves: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
    known = {name: (one.shape, one.dtype) for name, one in stored.items() if one.shape is not None}
    if not known:  # Format 1: ask TensorStore. If it cannot read them, the restore will fail too.
        with contextlib.suppress(Exception):
            known = stored_arrays(folder, item)
    for name, x in leaves.items():
        now = (tuple(x.shape), str(x.dtype))
        if name in known and known[name] != now:
            then = f"{known[name][1]} {list(known[name][0] or ())}"
            raise _of_another(folder, f"{name} is {then} in it, but {now[1]} {list(now[0])} here")


def _exchange_to_read(folder: Path, meta: Meta, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Shape structs of the exchange's arrays, in their stored dtypes where known."""
    found = {}
    for name, x in resplit.readable(dict(wanted), meta.exchange_shapes).items():
        dtype = meta.arrays["exchange"][name].dtype or str(x.dtype)
        if name in wanted and dtype != str(wanted[name].dtype):
            raise _of_another(folder, f"{name} is {dtype} in it, but {wanted[name].dtype} here")
        found[name] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return found


def _of_another(folder: Path, what: str) -> Unusable:
    return Unusable(
        f"{folder}: this checkpoint is of another network or version of jaxdl: {what}. Restore it with the "
        "settings and the version that wrote it."
    )


def _changed(found: Items, meta: Meta) -> list[str]:
    """The names of the arrays whose fingerprints differ from the stored ones."""
    if meta.format == 1:
        now = jax.tree.map(lambda x: str(int(x)), jax.device_get(_first_sums(found)))
    else:
        now = fingerprint_texts(found)
    return [
        f"{item}.{name}"
        for item, leaves in now.items()
        for name, value in leaves.items()
        if meta.arrays[item][name].fingerprint != value
    ]
