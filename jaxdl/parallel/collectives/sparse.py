"""The sum of sparse vectors over a mesh axis, as one custom primitive with two algorithms.

* `all_gather`: every device sends its k entries to all others, which add them up: one message, exact but for the
  rounding of the wire format. What a device sends grows with the number of devices.
* `all_to_all`: positions are dealt out to owners. A device sends each owner its entries (one all-to-all), the owner
  adds them up, selects the largest sums once more, and sends these to all (one all-gather). What a device sends hardly
  grows with the number of devices, but what the second selection leaves out is lost, or goes into the error.

Sources are added one after the other, in the same order on every device and with one write to a position at a time, so
that the totals of all devices are equal bit by bit, and equal in every run.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxdl.parallel.collectives import packing
from jaxdl.parallel.collectives.packing import Wire
from jaxdl.parallel.collectives.primitive import (
    Axis,
    Result,
    alike,
    all_gather_same,
    axis_names,
    define,
    key_bits,
    num_devices,
)
from jaxdl.parallel.collectives.select import METHODS, Method, select_top_k
from jaxdl.parallel.collectives.sparse_plan import Algorithm, SparsePlan


class SparseOptions(TypedDict, total=False):
    """The options of `sparse_all_reduce`, for the types of its overloads."""

    algorithm: Algorithm
    wire: Wire
    num_kept: int | None
    method: Method
    key: jax.Array | None
    num_passes: int
    capacity_factor: float
    indices_sorted: bool


@overload
def sparse_all_reduce(
    values: jax.Array,
    indices: jax.Array,
    n: int,
    axis: Axis,
    *,
    return_error: Literal[True],
    **options: Unpack[SparseOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def sparse_all_reduce(
    values: jax.Array, indices: jax.Array, n: int, axis: Axis, **options: Unpack[SparseOptions]
) -> jax.Array: ...
def sparse_all_reduce(
    values: jax.Array,
    indices: jax.Array,
    n: int,
    axis: Axis,
    *,
    algorithm: Algorithm = "all_gather",
    wire: Wire = "packed",
    num_kept: int | None = None,
    method: Method = "exact",
    key: jax.Array | None = None,
    num_passes: int = 30,
    capacity_factor: float = 1.25,
    indices_sorted: bool = False,
    return_error: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """float32 `[n]`: the sum over the devices of `axis` of dense vectors, each zero but for `values [k]` at `indices`.

    With `return_error` it is `(total, error)`: `error`, float32 `[n]`, is what this device's entries and its share of
    the work lost, so that the sum over devices of the inputs equals `total` plus the sum over devices of `error`.
    `total` is the same on all devices of the axis, `error` is not.

    `values` are float32, bfloat16 or float16. `indices`, int32 `[k]`, are distinct; those outside of 0..n-1 are
    ignored. `indices_sorted` promises that they ascend (as those of `select_top_k` do; none is negative), which saves
    `all_gather` a sort. `wire` is the format of an entry, see `jaxdl.parallel.collectives.packing`. One device sends
    nothing and loses nothing, whatever the algorithm.

    For `all_to_all` alone: each owner keeps `num_kept` / devices sums, rounded up (`num_kept` defaults to k), chosen by
    `select_top_k` with `method`, `key` and `num_passes`; there is room for `capacity_factor` times the entries that an
    owner gets on average from a device, and a little more, and entries beyond it stay in the error.

    `all_gather` is linear in `values`, and so is its derivative (of a total whose values are not rounded; that of the
    error is zero); the sum in the derivative is sent in the plain format. `all_to_all` has none.
    NaN and infinity among the values reach the total, and make the error NaN at their positions.
    Raises ValueError for arguments that do not fit, and NameError when the axis is not bound.
    """
    axes = axis_names(axis)
    if values.ndim != 1 or indices.shape != values.shape:
        raise ValueError(
            f"sparse_all_reduce: values {values.shape} and indices {indices.shape} must both be [k]. "
            "Flatten them, or use jax.vmap for a batch."
        )
    if algorithm == "all_gather" and num_kept is not None:
        raise ValueError(f"num_kept={num_kept}: all_gather keeps all. Leave it out, or take algorithm='all_to_all'.")
    if method not in METHODS:
        raise ValueError(f"method={method!r}: no such method. Choose one of {', '.join(METHODS)}.")
    operands = alike(axes, values, indices, key_bits(key))
    plan = SparsePlan(len(values), n, num_devices(axes), algorithm, wire, num_kept, capacity_factor)
    results = sparse_all_reduce_p.bind(
        *operands,
        plan=plan,
        axes=axes,
        method=(method, num_passes),
        indices_sorted=indices_sorted,
        return_error=return_error,
    )
    return tuple(results) if return_error else results[0]


def sparse_sent_bytes(
    k: int,
    n: int,
    num_devices: int,
    *,
    algorithm: Algorithm = "all_gather",
    wire: Wire = "packed",
    num_kept: int | None = None,
    capacity_factor: float = 1.25,
) -> int:
    """Bytes that one device sends in `sparse_all_reduce` over `num_devices`, by ring algorithms."""
    return SparsePlan(k, n, num_devices, algorithm, wire, num_kept, capacity_factor).sent_bytes


def _results(
    values: jax.ShapeDtypeStruct,
    indices: jax.ShapeDtypeStruct,
    key: jax.ShapeDtypeStruct,
    *,
    plan: SparsePlan,
    **params: Any,
) -> list[Result]:
    del key
    if values.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"values of dtype {values.dtype}: entries are float32, bfloat16 or float16. Convert them.")
    if indices.dtype != jnp.int32:
        raise ValueError(f"indices of dtype {indices.dtype}: must be int32. Convert them by .astype(jnp.int32).")
    dense = functools.partial(Result, (plan.n,), jnp.float32)
    return [dense(same=True), dense()] if params["return_error"] else [dense(same=True)]


def _implementation(
    values: jax.Array,
    indices: jax.Array,
    key: jax.Array,
    *,
    plan: SparsePlan,
    axes: tuple[str, ...],
    method: tuple[Method, int],
    indices_sorted: bool,
    return_error: bool,
) -> list[jax.Array]:
    algorithm = {"all_gather": _by_all_gather, "all_to_all": _by_all_to_all}[plan.algorithm]
    if plan.num_devices == 1:
        algorithm = _single_device

    # The primitive has rules of its own. This one is for `vmap(axis_name=...)`, whose batching rule leaves a
    # derivative around it nothing but this function, and the bits of a message have none.
    @jax.custom_jvp
    def run(values: jax.Array, indices: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        indices = plan.or_nowhere(indices)
        return algorithm(values.astype(jnp.float32), indices, key, plan, axes, method, indices_sorted)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        _refuse_derivative(plan)
        moved = lax.psum(_scatter(tangents[0].astype(jnp.float32), plan.or_nowhere(primals[1]), plan.n), axes)
        return run(*primals), (moved, jnp.zeros(plan.n))

    return list(run(values, indices, key))[: 1 + return_error]


def _scatter(values: jax.Array, indices: jax.Array, n: int, sorted_too: bool = False) -> jax.Array:
    """The dense vector of some entries; the indices are distinct, but for those that are n and get dropped."""
    return (
        jnp.zeros(n, values.dtype)
        .at[indices]
        .set(values, mode="drop", unique_indices=True, indices_are_sorted=sorted_too)
    )


def _sum_in_order(words: jax.Array, k: int, n: int, wire: Wire) -> jax.Array:
    """float32 `[n]`: the sum of the messages `words [device, word]`, one device after the other."""

    def add(total: jax.Array, message: jax.Array) -> tuple[jax.Array, None]:
        values, indices = packing.unpack(message, k, n, wire=wire)
        return total.at[indices].add(values, mode="drop", unique_indices=True), None

    first = _scatter(*packing.unpack(words[0], k, n, wire=wire), n)
    return lax.scan(add, first, words[1:])[0]


def _single_device(
    values: jax.Array, indices: jax.Array, key: jax.Array, plan: SparsePlan, *_: Any
) -> tuple[jax.Array, jax.Array]:
    total = _scatter(values, indices, plan.n)
    return total, jnp.zeros_like(total)


def _by_all_gather(
    values: jax.Array,
    indices: jax.Array,
    key: jax.Array,
    plan: SparsePlan,
    axes: tuple[str, ...],
    method: tuple[Method, int],
    indices_sorted: bool,
) -> tuple[jax.Array, jax.Array]:
    del key, method
    if not indices_sorted:
        indices, values = lax.sort((indices, values), num_keys=1, is_stable=False)
    words = all_gather_same(packing.pack(values, indices, plan.n, wire=plan.wire), axes)
    total = _sum_in_order(words, plan.k, plan.n, plan.wire)
    return total, _scatter(values - packing.rounded(values, plan.wire), indices, plan.n, sorted_too=True)


def _by_all_to_all(
    values: jax.Array,
    indices: jax.Array,
    key: jax.Array,
    plan: SparsePlan,
    axes: tuple[str, ...],
    method: tuple[Method, int],
    indices_sorted: bool,
) -> tuple[jax.Array, jax.Array]:
    del indices_sorted  # The owners' ranges interleave, so the order is another one.
    m, size, wire = plan.num_devices, plan.range_size, plan.wire
    rows, unsent, unsent_at = _rows_by_owner(values, indices, plan)
    pack = functools.partial(packing.pack, n=size, wire=wire)
    received = lax.all_to_all(jax.vmap(pack)(*rows), axes, split_axis=0, concat_axis=0, tiled=True)
    mine = _sum_in_order(received, plan.capacity, size, wire)

    kept, places = select_top_k(mine, plan.kept, method[0], key=key, num_passes=method[1])
    words = all_gather_same(pack(kept, places), axes)
    kept_of, places_of = jax.vmap(lambda message: packing.unpack(message, plan.kept, size, wire=wire))(words)
    positions = plan.positions(jnp.arange(m, dtype=jnp.int32)[:, None], places_of)
    total = _scatter(kept_of.reshape(-1), positions.reshape(-1), plan.n)

    lost = mine.at[places].add(-packing.rounded(kept, wire), unique_indices=True, indices_are_sorted=True)
    error = plan.spread(lost, lax.axis_index(axes))
    return total, error.at[unsent_at].add(unsent, mode="drop", unique_indices=True)


def _rows_by_owner(
    values: jax.Array, indices: jax.Array, plan: SparsePlan
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """`(values, places)` `[owner, capacity]` to send; and what of each entry is not sent `[k]`, at which positions.

    The places of a row ascend; those of unused slots are the size of the range.
    """
    m, size, capacity = plan.num_devices, plan.range_size, plan.capacity
    owner, place = plan.owner_and_place(indices)
    nowhere = np.uint32(m * size)
    order = jnp.where(indices < plan.n, (owner * size + place).astype(jnp.uint32), nowhere)
    order, values = lax.sort((order, values), num_keys=1, is_stable=False)
    owner, place = jnp.divmod(order, np.uint32(size))
    indices = plan.positions(owner.astype(jnp.int32), jnp.where(order < nowhere, place, size).astype(jnp.int32))

    first_keys = np.arange(m + 1, dtype=np.uint32) * np.uint32(size)
    starts = jnp.searchsorted(order, jnp.asarray(first_keys), method="scan_unrolled").astype(jnp.int32)
    slots = starts[:-1, None] + jnp.arange(capacity, dtype=jnp.int32)
    used = slots < starts[1:, None]
    slots = jnp.minimum(slots, plan.k - 1)
    row_values = jnp.where(used, values[slots], 0)
    row_places = jnp.where(used, (order[slots] - first_keys[:-1, None]).astype(jnp.int32), size)

    rank = jnp.arange(plan.k, dtype=jnp.int32) - starts[owner]
    sent = jnp.where(rank < capacity, packing.rounded(values, plan.wire), 0)
    return (row_values, row_places), values - sent, indices


sparse_all_reduce_p = define("sparse_all_reduce", _implementation, _results, core_ndims=(1, 1, 1))


def _refuse_derivative(plan: SparsePlan) -> None:
    if plan.algorithm == "all_to_all":
        raise ValueError(
            "sparse_all_reduce: algorithm='all_to_all' has no derivative, since its second selection is not linear. "
            "Take algorithm='all_gather', or put jax.lax.stop_gradient around the values."
        )


def _jvp(primals: Any, tangents: Any, *, plan: SparsePlan, **params: Any) -> Any:
    results = sparse_all_reduce_p.bind(*primals, plan=plan, **params)
    _refuse_derivative(plan)
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    if isinstance(tangents[0], ad.Zero):
        return results, zeros
    exact = SparsePlan(plan.k, plan.n, plan.num_devices, "all_gather", "plain", None, plan.capacity_factor)
    [moved] = sparse_all_reduce_p.bind(
        *alike(params["axes"], tangents[0], *primals[1:]), plan=exact, **params | {"return_error": False}
    )
    return results, [moved, *zeros[1:]]


def _transpose(
    cotangents: Any, values: Any, indices: Any, key: Any, *, plan: SparsePlan, axes: Any, **params: Any
) -> Any:
    del key, params
    aval = values.aval
    [cotangent] = cotangents
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(aval.to_ct_aval()), None, None]
    # Where types tell that the total is the same everywhere, so is its cotangent. Elsewhere each device holds a part.
    untyped = tuple(name for name in axes if name not in aval.mat.varying)
    if untyped:
        cotangent = lax.psum(cotangent, untyped)
    cotangent, indices = alike(axes, cotangent, indices)
    picked = jnp.take_along_axis(cotangent, plan.or_nowhere(indices), axis=-1, mode="fill", fill_value=0)
    return [picked.astype(aval.dtype), None, None]


ad.primitive_jvps[sparse_all_reduce_p] = _jvp
ad.primitive_transposes[sparse_all_reduce_p] = _transpose
