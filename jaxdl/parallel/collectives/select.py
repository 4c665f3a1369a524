"""`select_top_k`: exactly k entries of an array, the largest by magnitude, exactly or nearly so.

A sort of everything is what `lax.top_k` does, and what makes compressed gradients slower than the network they save.
These methods count instead: `exact` and `threshold` read the data once (at densities above about 1/32, once for each
counting pass), `block` twice, `mstopk` once for each pass on GPUs and for every three on CPUs. Nothing larger than n/8
is sorted. On NVIDIA GPUs `exact` and `threshold` of up to 2 million entries are a few kernels of their own
(`kernels.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxdl.parallel.collectives.blocks import largest_of_blocks, two_stages
from jaxdl.parallel.collectives.compact import COARSE_BITS, KEY_BITS, magnitudes
from jaxdl.parallel.collectives.mstopk import mstopk
from jaxdl.parallel.collectives.own_kernels import OwnKernels
from jaxdl.parallel.collectives.primitive import Result, alike, define, key_bits

Method = Literal["exact", "threshold", "mstopk", "block"]
METHODS: tuple[Method, ...] = get_args(Method)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
LEADING: dict[str, int] = {"exact": KEY_BITS, "threshold": COARSE_BITS}
"""How many bits of |x| the methods compare that differ in this alone."""
MOST_BY_KERNELS = 2_000_000
"""Of more entries plain XLA selects faster on a GPU: see `on_cuda`."""
SMALL = 2048
"""On a CPU, so few entries are sorted: the time is in compiling."""


def select_top_k(
    x: jax.Array,
    k: int,
    method: Method = "exact",
    *,
    key: jax.Array | None = None,
    num_passes: int = 30,
    num_per_block: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """The k largest entries of `x` [n] by magnitude: values `[k]` with their signs, indices int32 `[k]`, ascending.

    Always exactly k different indices. NaN counts as larger than infinity, and infinity as larger than any number, so
    both are chosen first and stay visible. x is float32, bfloat16 or float16. Methods:

    - `exact`: the set that `lax.top_k(|x|, k)` gives, ties lowest index first. One read of the data for the maxima of
      blocks, then O(sqrt(n k)) work: all of the k largest lie in the k blocks with the largest maxima.
    - `threshold`: the same by the 24 leading bits of |x| (exponent and 16 bits of the mantissa): those that differ by
      less than 2**-16 of their size count as ties. Fewer counting passes.
    - `mstopk`: Shi et al., MLSys 2021, Algorithm MSTopK: `num_passes` steps of bisection over the data, then a random
      window (`key`; seed 0 for None) of those between the last two thresholds. O(num_passes n).
    - `block`: the `num_per_block` largest of each of k / num_per_block blocks of (nearly) equal size, which is another
      set, but spread evenly. O(n).

    Differentiation holds the selection fixed: values are linear in x, indices have no derivative. Raises ValueError
    for arguments that do not fit.
    """
    _check(x, k, method, num_passes, num_per_block)
    operands = alike((), x, key_bits(key if method == "mstopk" else None))
    (indices,) = select_p.bind(*operands, k=k, method=method, num_passes=num_passes, num_per_block=num_per_block)
    values = x.at[indices].get(indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds")
    return values, indices


def _check(x: jax.Array, k: int, method: str, num_passes: int, num_per_block: int) -> None:
    if x.ndim != 1:
        raise ValueError(f"x has shape {x.shape}: a selection is from one dimension. Use x.reshape(-1) or jax.vmap.")
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: magnitudes are compared in float32. Give float32, bfloat16 or float16.")
    if method not in METHODS:
        raise ValueError(f"method={method!r}: no such method. Choose one of {', '.join(METHODS)}.")
    if not 1 <= k <= x.size:
        raise ValueError(f"k={k}: there are {x.size} entries to choose from. Give 1 to {x.size}.")
    if num_passes < 1:
        raise ValueError(f"num_passes={num_passes}: nothing would be searched. Give 1 or more; the paper has 30.")
    if num_passes != 30 and method != "mstopk":
        raise ValueError(f"num_passes={num_passes}: method {method!r} has no passes to number. Use it with 'mstopk'.")
    if num_per_block != 1 and method != "block":
        raise ValueError(f"num_per_block={num_per_block}: method {method!r} has no blocks. Use it with 'block'.")
    if num_per_block < 1 or k % num_per_block:
        raise ValueError(f"num_per_block={num_per_block}: k={k} is no multiple of it. Give a divisor of k.")


def select_indices(
    x: jax.Array, bits: jax.Array, *, k: int, method: Method, num_passes: int, num_per_block: int, compare: bool
) -> tuple[jax.Array]:
    """The implementation of all methods: indices int32 `[k]`; `compare` is the way of counting that suits GPUs."""
    if method == "block":
        return (largest_of_blocks(x, k, num_per_block, compare=compare),)
    if method == "mstopk":
        return (mstopk(x, k, num_passes, bits, compare=compare),)
    leading = LEADING[method]
    if x.size <= SMALL and not compare:
        # The same set, compiled in no time; `lax.top_k` too takes the lowest index first.
        return (jnp.sort(lax.top_k(magnitudes(x) >> (KEY_BITS - leading), k)[1]),)
    return (two_stages(x, k, leading, compare=compare),)


on_cpu: Callable[..., tuple[jax.Array]] = functools.partial(select_indices, compare=False)
on_gpu: Callable[..., tuple[jax.Array]] = functools.partial(select_indices, compare=True)


def rightly() -> bool:
    """Whether the kernels select right on this process's GPU; imports Pallas first."""
    from jaxdl.parallel.collectives import kernels

    return kernels.select_rightly()


KERNELS = OwnKernels(
    "JAXDL_SELECTION",
    "the kernels that select entries",
    "the slower selection of XLA is used, with the same results",
    rightly,
)


def by_kernels(num_entries: int, method: str) -> bool:
    """Whether a method selects from so many entries by kernels of our own, on an NVIDIA GPU."""
    return method in LEADING and num_entries <= MOST_BY_KERNELS and KERNELS.used()


def on_cuda(x: jax.Array, bits: jax.Array, *, k: int, method: Method, **settings: Any) -> tuple[jax.Array]:
    """`on_gpu`, but `exact` and `threshold` of few entries by kernels of our own where these work.

    For few entries most of the time goes into launches: of ten kernels in place of 78. For many it goes into additions
    to histograms: an H200 took 0.058 ms for 1 million entries (XLA 0.095), but 0.207 for 4 million (0.180).
    """
    if by_kernels(x.size, method):
        from jaxdl.parallel.collectives import kernels

        if kernels.fits(x.size, k):
            return (kernels.largest_by_kernels(x, k, LEADING[method]),)
    return on_gpu(x, bits, k=k, method=method, **settings)


def _results(x: Any, bits: Any, *, k: int, **_: Any) -> list[Result]:
    return [Result((k,), jnp.int32)]


select_p = define("select_top_k", on_cpu, _results, core_ndims=(1, 1), platforms={"cuda": on_cuda, "rocm": on_gpu})


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    outputs = select_p.bind(*primals, **params)
    return outputs, [ad.Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]


ad.primitive_jvps[select_p] = _jvp
