"""`select_top_k`: exactly k entries of an array, the largest by magnitude, exactly or nearly so.

A sort of everything is what `lax.top_k` does, and what makes compressed gradients slower than the network they save.
These methods count instead: `exact` and `threshold` read the data once (at densities above about 1/32, once for each
counting pass), `block` twice, `mstopk` a few times. Nothing larger than n/8 is sorted. On NVIDIA GPUs `exact` and
`threshold` are a few kernels of their own (`kernels.py`).
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxdl.cluster.agree import from_each_process
from jaxdl.collectives.blocks import largest_of_blocks, two_stages
from jaxdl.collectives.compact import COARSE_BITS, KEY_BITS, magnitudes
from jaxdl.collectives.mstopk import mstopk
from jaxdl.collectives.primitive import Result, alike, define, key_bits
from jaxdl.errors import ConfigError

Method = Literal["exact", "threshold", "mstopk", "block"]
METHODS: tuple[Method, ...] = get_args(Method)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
LEADING: dict[str, int] = {"exact": KEY_BITS, "threshold": COARSE_BITS}
"""How many bits of |x| the methods compare that differ in this alone."""
SMALL = 2048
"""On a CPU, so few entries are sorted: the time is in compiling."""
_agreed: list[bool] = []
"""What `agree_on_kernels` found; empty before."""


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


def on_cuda(x: jax.Array, bits: jax.Array, *, k: int, method: Method, **settings: Any) -> tuple[jax.Array]:
    """`on_gpu`, but `exact` and `threshold` by a few kernels of our own where these work."""
    if method in LEADING and has_triton():
        from jaxdl.collectives import kernels

        if kernels.fits(x.size, k):
            return (kernels.largest_by_kernels(x, k, LEADING[method]),)
    return on_gpu(x, bits, k=k, method=method, **settings)


def has_triton() -> bool:
    """Whether the selection on GPUs is by XLA's Triton.

    By default it is on GPUs of compute capability 9 (Hopper) or later where `kernels_work`; and where no GPU is, to
    compile for some. `JAXDL_SELECTION` in the environment decides otherwise: `xla` is the selection in plain XLA,
    `triton` takes the kernels unchecked, from capability 8 (A100) on. In several processes, which must compile the
    same, it is as they agreed in `agree_on_kernels`, and plain XLA where they have not. Nothing is sent: a process may
    ask alone. Raises ConfigError for other words in `JAXDL_SELECTION`.
    """
    return _suits_here() if jax.process_count() == 1 else any(_agreed)


def agree_on_kernels() -> None:
    """Several processes agree, once, on `has_triton`: yes if each of them, asked alone, says so.

    All processes call it at the same place of the program. Raises ConfigError on all of them for what one of them
    raises it for.
    """
    if jax.process_count() == 1 or _agreed:
        return
    try:
        own = b"yes" if _suits_here() else b"no"
    except ConfigError as error:
        own = str(error).encode()
    answers = from_each_process(own)
    for answer in answers:
        if answer not in (b"yes", b"no"):
            raise ConfigError(answer.decode())
    _agreed.append(set(answers) == {b"yes"})
    if own == b"yes" and not _agreed[0]:
        _warn("are not used on another host")


def _suits_here() -> bool:
    wanted = os.environ.get("JAXDL_SELECTION", "auto")
    if wanted not in ("auto", "triton", "xla"):
        raise ConfigError(
            f"JAXDL_SELECTION={wanted}: the selection on GPUs is by 'xla', by 'triton', or 'auto' (the default): by "
            "Triton where that works."
        )
    if wanted == "xla":
        return False
    try:
        triton = importlib.import_module("jax.experimental.pallas.triton")
        # JAX 0.11 compiles only for GPUs that are there and that it knows by name.
        getattr(triton, "get_gpu_info", lambda: None)()
    except (ImportError, ValueError):  # It also announces a version without Triton.
        return False
    gpus = [device for device in jax.local_devices() if device.platform != "cpu"]
    least = 8 if wanted == "triton" else 9
    if any(capability(gpu) < least for gpu in gpus):
        return False
    return not gpus or wanted == "triton" or kernels_work()


def capability(gpu: Any) -> float:
    """The compute capability of an NVIDIA GPU, 9 for Hopper; 0 of other devices."""
    try:
        return float(getattr(gpu, "compute_capability", 0))
    except ValueError:  # AMD's are names.
        return 0.0


@functools.cache
def kernels_work() -> bool:
    """Whether the kernels give the right results on this process's GPU.

    They are tried once, in a thread of its own, because this is asked in the middle of tracing. Where they fail, a
    warning says so.
    """

    def tried() -> str:
        from jaxdl.collectives import kernels

        try:
            return "" if kernels.select_rightly() else "give wrong results"
        except Exception as error:  # Whatever Pallas, Triton or the driver says: there is another way.
            return f"do not run ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]})"

    with ThreadPoolExecutor(1) as threads:
        problem = threads.submit(tried).result()
    if problem:
        _warn(f"{problem} on this {jax.local_devices()[0].device_kind}")
    return not problem


def _warn(problem: str) -> None:
    warnings.warn(
        f"the kernels that select entries {problem}: the slower selection of XLA is used, with the same results. "
        "JAXDL_SELECTION=xla does so without this message.",
        stacklevel=3,
    )


def _results(x: Any, bits: Any, *, k: int, **_: Any) -> list[Result]:
    return [Result((k,), jnp.int32)]


select_p = define("select_top_k", on_cpu, _results, core_ndims=(1, 1), platforms={"cuda": on_cuda, "rocm": on_gpu})


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    outputs = select_p.bind(*primals, **params)
    return outputs, [ad.Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]


ad.primitive_jvps[select_p] = _jvp
