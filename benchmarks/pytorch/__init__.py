"""The same networks and tables in PyTorch, to compare with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jaxdl.core.config import ConfigError


def share_gpu_memory(args: Sequence[str]) -> None:
    """Lets JAX leave memory of the GPU to PyTorch, for a command line with --against; before JAX starts its devices."""
    if any(arg.startswith("--against") for arg in args):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def load_torch() -> Any:
    """PyTorch, for --against torch. Raises ConfigError where it cannot be loaded."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise ConfigError(f"--against torch: PyTorch cannot be loaded here ({error}). pip install torch.") from None
    return torch
