"""What differs between the versions of JAX that jaxdl runs on, 0.10 to 0.12."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """`(constants, carried values)` of a `scan` in a jaxpr, the first of its operands, from its parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()  # Since JAX 0.12.
    return len(constants), len(carried)
