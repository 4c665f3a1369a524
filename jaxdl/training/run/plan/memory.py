"""Whether a run's state, and its batches, fit into memory."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec
from jaxdl.models import Model
from jaxdl.parallel.cluster import host_memory_bytes
from jaxdl.parallel.embedding import Tables
from jaxdl.parallel.embedding.layout import copied_bytes
from jaxdl.parallel.mesh import FILLING_AXIS
from jaxdl.training.state import StateSpec, TrainState


def check_memory(
    model: Model, state_spec: StateSpec, spec: DataSpec, batch_size: int, tables: Tables | None = None
) -> None:
    """Raises ConfigError when the state, or a batch, takes more memory than there is: XLA would abort or hang.

    `batch_size` is that of the largest batch. With a cache an evaluation has slots of `tables` of its own. Activations
    and gradients are not counted: what passes may still be too large. Devices that are only described are not checked.
    """
    where_it_is = jax.tree.leaves(state_spec.abstract())[0].sharding.device_set
    if where_it_is.isdisjoint(jax.devices()):
        return
    local = jax.local_devices()
    on_cpu = local[0].platform == "cpu"
    copies = len(local) if on_cpu else 1  # Virtual devices share the memory of the host.
    there = host_memory_bytes() if on_cpu else ((local[0].memory_stats() or {}).get("bytes_limit") or math.inf)
    where = "this machine has" if on_cpu else "the device has"
    on = "" if len(local) == 1 else f" on all {len(local)} devices" if on_cpu else " on each device"
    state = copies * _bytes_on_one_device(state_spec.abstract())
    if state > there:
        raise ConfigError(
            f"model {model.kind}: its parameters, the optimizer's and the exchange's state take "
            f"{_size(state)}{on}, and {where} {_size(there)}. Make the model smaller, or shard it over more devices "
            f"(--mesh.{FILLING_AXIS})."
        )
    copied = copies * _evaluation_bytes(model, spec, tables)
    if tables is not None and state + copied > there:
        raise ConfigError(
            f"--embedding.cache.fraction {tables.config.cache.fraction:g}: the state of the run takes "
            f"{_size(state)}{on}, the slots of an evaluation {_size(copied)} more, and {where} {_size(there)}. Give a "
            "smaller fraction."
        )
    host = host_memory_bytes()
    example = sum(x.nbytes for x in spec.blank().values())
    batch = batch_size // jax.process_count() * example
    if batch > host:
        raise ConfigError(
            f"--batch-size {batch_size}: one batch takes {_size(batch)} of memory, and this machine has "
            f"{_size(host)}. Make it smaller."
        )


def _evaluation_bytes(model: Model, spec: DataSpec, tables: Tables | None) -> int:
    """Bytes of a device for what `Store.copied` copies."""
    if tables is None:
        return 0
    cache, whole = tables.config.cache, model.tables(spec.id_features())
    return copied_bytes(tables.buffers, {table.name for table in whole if cache.slots(table.name, table.rows)})


def _bytes_on_one_device(state: TrainState) -> int:
    arrays = [x for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
