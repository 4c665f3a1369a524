"""Reads one checkpoint, and tells damage from a disk that does not answer and from another version of the code.

Damage is what is wrong with bytes that could be read: a file that the manifest lists is missing, has another size or
other bytes; or all files can be read to their end, and twice in a row the arrays cannot be made of them, or do not have
their fingerprints. Nothing else moves a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxdl.checkpoint.agree import Finding, findings, raise_worst
from jaxdl.checkpoint.errors import Damaged, Unreadable, Unusable, read_refused, unreadable
from jaxdl.checkpoint.fingerprint import as_text, fingerprints, first_sums
from jaxdl.checkpoint.items import read_items, stored_arrays
from jaxdl.checkpoint.manifest import check_files, read_everything
from jaxdl.checkpoint.meta import Meta, Stored, read_meta
from jaxdl.exchange import resplit

Items = dict[str, dict[str, Any]]
_fingerprints = jax.jit(fingerprints)
_first_sums = jax.jit(first_sums)


def fingerprint_texts(items: Items) -> dict[str, dict[str, str]]:
    """The fingerprint of each array."""
    return as_text(_fingerprints(items))


def read_checkpoint(folder: Path, wanted: Items) -> tuple[Items, Meta]:
    """The arrays of the checkpoint in `folder`, and its description; on all processes, or on none.

    `wanted` are shape structs with shardings. Of the exchange's state all is read that is stored, laid out as
    `resplit.readable` says. Raises, on all processes alike, Damaged, Unreadable, and Unusable for a checkpoint of
    other arrays or another version.
    """
    for last in (False, True):
        error, found, meta = None, {}, None
        try:
            if jax.process_index() == 0:
                check_files(folder)
            meta = read_meta(folder)
            found = read_items(folder, _to_read(folder, meta, wanted))
        except Exception as raised:  # Kept until the other processes know: this one must not go another way than they.
            error = raised
        if not _problem(folder, error, last):
            assert meta is not None
            bad = _changed(found, meta)
            if not bad:
                return found, meta
            found.clear()  # The second attempt needs its memory.
            changed = ValueError(f"the stored values of {', '.join(bad[:3])} have changed since they were written")
            _problem(folder, changed, last)
    raise AssertionError("the last attempt returns or raises")


def _problem(folder: Path, error: Exception | None, last: bool) -> bool:
    """Whether any process met an error that a second attempt may not meet; raises, on all, what is certain."""
    every = findings(Finding.of(None if error is None else _diagnosed(folder, error, last)))
    raise_worst(every)
    return any(kind for kind, _ in every)


def _diagnosed(folder: Path, error: Exception, last: bool) -> Exception:
    """What an error in reading says: Damaged, Unreadable or Unusable; itself where a second attempt has to show it.

    Orbax and TensorStore raise many kinds of errors for a damaged file, and the same ones for a disk that refuses; so
    the files are read here without them.
    """
    if isinstance(error, Damaged | Unreadable | Unusable):
        return error
    try:
        vouched = check_files(folder)
        read_everything(folder)
    except (Damaged, Unreadable) as certain:
        return certain
    if not last:
        return error
    if (number := read_refused(error)) is not None:
        return unreadable(folder, number)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if vouched:
        return Unreadable(
            f"{folder}: its files are those that were written, and yet it cannot be restored: {reason}. Nothing was "
            "moved; the same command tries again. If it fails again, suspect the memory, or another version of Orbax."
        )
    return Damaged(reason)


def _to_read(folder: Path, meta: Meta, wanted: Items) -> Items:
    """What to read: shape structs of the arrays that are stored. Raises Unusable when other ones are wanted."""
    for item, leaves in wanted.items():
        stored = meta.arrays.get(item, {})
        other = sorted(leaves.keys() ^ stored.keys())
        if other and not (item == "exchange" and resplit.same_kind(leaves, meta.exchange_shapes)):
            what = "is not in it" if other[0] in leaves else "is unknown here"
            raise _of_another(folder, f"{other[0]} {what}")
        if item != "exchange":
            _check_shapes(folder, item, leaves, stored)
    if "exchange" in wanted:
        wanted = wanted | {"exchange": _exchange_to_read(folder, meta, wanted["exchange"])}
    return {name: item for name, item in wanted.items() if item}


def _check_shapes(folder: Path, item: str, leaves: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
    known = {name: (one.shape, one.dtype) for name, one in stored.items() if one.shape is not None}
    if not known:  # Format 1: TensorStore knows them. What it cannot read the restore will not read either.
        with contextlib.suppress(Exception):
            known = stored_arrays(folder, item)
    for name, x in leaves.items():
        now = (tuple(x.shape), str(x.dtype))
        if name in known and known[name] != now:
            then = f"{known[name][1]} {list(known[name][0] or ())}"
            raise _of_another(folder, f"{name} is {then} in it, and {now[1]} {list(now[0])} here")


def _exchange_to_read(folder: Path, meta: Meta, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The exchange's arrays in the dtypes in which they are stored, where those are known."""
    found = {}
    for name, x in resplit.readable(dict(wanted), meta.exchange_shapes).items():
        dtype = meta.arrays["exchange"][name].dtype or str(x.dtype)
        if name in wanted and dtype != str(wanted[name].dtype):
            raise _of_another(folder, f"{name} is {dtype} in it, and {wanted[name].dtype} here")
        found[name] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return found


def _of_another(folder: Path, what: str) -> Unusable:
    return Unusable(
        f"{folder}: this checkpoint is of another network or another version of jaxdl: {what}. Restore it with the "
        "settings and the version that wrote it."
    )


def _changed(found: Items, meta: Meta) -> list[str]:
    """The arrays that do not have their fingerprints."""
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
