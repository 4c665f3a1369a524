"""`benchmarks.train` with one change of the step taken back, to see what it brings on the GPU at hand.

python -m benchmarks.gpu.without sums --config configs/lm_gpt2_124m.py ...

`sums`: sums over tokens are reductions, not products with ones. `heads`: queries, keys and values are three products.
`reduction`: the logits are read three times, not once. `loop`: layers are a loop over their stack. `finite`: gradients
are looked through for what is not finite, apart from their norm. `folding`: the result of a 1x1 convolution is stored
before its batch norm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from benchmarks import train
from benchmarks.gpu import CHANGES, CHANGES_OF_RESNET
from jaxdl.core.errors import OptionError
from jaxdl.exchange import base
from jaxdl.models import loop
from jaxdl.models.batch_norm import BatchNormOptions
from jaxdl.models.blocks import Attention
from jaxdl.parallel.collectives import cross_entropy, shards
from jaxdl.performance.bench.shared import run_module


def _no_sums() -> None:
    shards._rows_by_ones = shards._reduce_rows


def _no_heads() -> None:
    Attention._heads_are_sharded_alike = lambda self: False  # type: ignore[method-assign]


def _no_reduction() -> None:
    cross_entropy._in_one_pass = cross_entropy._in_passes


def _no_finite() -> None:
    def are_finite(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays])

    base.are_finite = are_finite


def _no_folding() -> None:
    BatchNormOptions.alone = property(lambda self: False)  # type: ignore[method-assign]


def _no_loop() -> None:
    loop._MOST_UNROLLED = 0


_TAKE_BACK: dict[str, Callable[[], None]] = {
    "sums": _no_sums,
    "heads": _no_heads,
    "reduction": _no_reduction,
    "loop": _no_loop,
    "finite": _no_finite,
    "folding": _no_folding,
}
assert tuple(_TAKE_BACK) == CHANGES + CHANGES_OF_RESNET


def main(args: list[str]) -> None:
    """Takes the change back and measures the step."""
    name, *rest = args or [""]
    if name not in _TAKE_BACK:
        raise OptionError(
            f"{name or 'no change'}: give one of {', '.join(_TAKE_BACK)}, then the options of bench train."
        )
    _TAKE_BACK[name]()
    train.main(rest)


if __name__ == "__main__":
    sys.argv[0] = "benchmarks.gpu.without"
    run_module(main)
