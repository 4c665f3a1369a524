"""Software, code, config and number of devices must be equal in all processes of a run; messages when they differ."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.parallel.cluster.messages import printable

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "jaxdl")
_MOST_NAMED = 5
_MOST_CHARACTERS = 200


def describe_process(config: Mapping[str, Any] | None, num_devices: int | None) -> dict[str, Any]:
    """The description that a process sends to process 0. `num_devices` is None if known only after JAX has started."""
    return {
        "versions": {"Python": ".".join(platform.python_version_tuple()[:2])} | {p: _version(p) for p in PACKAGES},
        "files": dict(_source_hashes()),
        "config": flat(config or {}),
        "devices": num_devices,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _source_hashes() -> dict[str, str]:
    """SHA-256 (16 digits) of each source file of jaxdl."""
    root = Path(__file__).parents[2]
    return {
        path.relative_to(root.parent).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(root.rglob("*.py"))
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dictionaries into one with dotted names."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        entries |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return entries


def process_names(processes: Iterable[int], hosts: Mapping[int, str] | Sequence[str]) -> str:
    """`host1 (process 1), host3 (process 3)`; the first 8 of many."""
    every = list(processes)
    shown = [f"{hosts[process]} (process {process})" for process in every[:8]]
    return ", ".join(shown) + (f" and {len(every) - 8} more" if len(every) > 8 else "")


def difference(descriptions: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> str | None:
    """A message on the first difference between the processes: values, hosts and remedy; None if there is none.

    `descriptions` holds the `describe_process` of each process, in the order of their numbers.
    """
    if parts := _unequal([description["versions"] for description in descriptions], hosts):
        return f"the processes do not run the same software: {parts}. Install the same versions on every host."
    if parts := _unequal([description["files"] for description in descriptions], hosts, with_values=False):
        return f"the processes do not run the same code of jaxdl: {parts}. Install the same commit on every host."
    if parts := _unequal([description["config"] for description in descriptions], hosts):
        return f"the processes were not given the same experiment: {parts}. Start all with one --config and options."
    if parts := _unequal([{"devices": description["devices"]} for description in descriptions], hosts):
        return unequal_devices(parts)
    return None


def unequal_devices(parts: str) -> str:
    """The message for unequal numbers of devices."""
    return (
        f"the processes have unequal numbers of devices: {parts}. The mesh needs equal numbers: start all with the "
        "same --devices (or JAX_NUM_CPU_DEVICES), or equally many visible GPUs."
    )


def unequal_counts(counts: Sequence[int], hosts: Sequence[str]) -> str | None:
    """The message for unequal device counts, one per process; None if they are equal."""
    parts = _unequal([{"devices": count} for count in counts], hosts)
    return unequal_devices(parts) if parts else None


def _unequal(descriptions: Sequence[Mapping[str, Any]], hosts: Sequence[str], *, with_values: bool = True) -> str:
    """`jax is 0.10.2 on a (process 0), but 0.11.2 on b (process 1)` for the first entries that differ; else empty."""
    names = dict.fromkeys(name for description in descriptions for name in description)
    different = [
        name
        for name in names
        if any(description.get(name) != descriptions[0].get(name) for description in descriptions)
    ]
    parts = []
    for name in different[:_MOST_NAMED]:
        groups: dict[str, list[int]] = {}
        for process, description in enumerate(descriptions):
            groups.setdefault(json.dumps(description.get(name, "missing")), []).append(process)
        first, *others = groups.items()
        if with_values:
            rest = ", but ".join(f"{_shown(value)} on {process_names(processes, hosts)}" for value, processes in others)
            parts.append(f"{_shown(name)} is {_shown(first[0])} on {process_names(first[1], hosts)}, but {rest}")
        else:
            rest = ", ".join(process_names(processes, hosts) for _, processes in others)
            parts.append(f"{_shown(name)} on {process_names(first[1], hosts)} differs from {rest}")
    more = len(different) - _MOST_NAMED
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _shown(text: str) -> str:
    """A name or a JSON value for a message: without quotes, cut if long."""
    text = printable(text.strip('"'))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
