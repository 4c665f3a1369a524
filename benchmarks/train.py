"""`python -m jaxdl.bench train`, which has others here: `python -m benchmarks.train --config ... --against torch`.

`torch` is PyTorch, compiled, and `plain` a decoder's step in plain JAX.
"""

from __future__ import annotations

from benchmarks.plain import make_plain_step
from benchmarks.pytorch import share_gpu_memory
from benchmarks.pytorch.training import make_torch_step
from jaxdl.performance.bench import train
from jaxdl.performance.bench.shared import run_module

train.FRAMEWORKS["torch"] = make_torch_step
train.FRAMEWORKS["plain"] = make_plain_step


def main(args: list[str]) -> None:
    """Runs the measurement and prints it."""
    share_gpu_memory(args)
    train.main(args)


if __name__ == "__main__":
    run_module(main)
