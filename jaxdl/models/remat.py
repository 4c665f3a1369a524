"""What a network keeps of a layer for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import pydantic

from jaxdl.models.products import PRODUCT
from jaxdl.parallel.collectives.attention import ATTENTION


def remat_named(value: Any) -> Any:
    """The name of what is kept; runs made before there were names had a switch."""
    return {True: "block", False: "none"}[value] if isinstance(value, bool) else value


Remat = Annotated[Literal["none", "block", "dots", "offload"], pydantic.BeforeValidator(remat_named)]
"""What is kept of a layer for the backward pass, which computes the rest again: everything; its input; also the results
of products with weights and of attention; or these in the memory of the host."""
_KEPT = [PRODUCT, ATTENTION]
_POLICIES = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(*_KEPT),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=_KEPT,
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def rematerialize(body: Callable[..., Any], remat: Remat, *, in_scan: bool = False) -> Callable[..., Any]:
    """`body`, of which the backward pass finds what `remat` keeps."""
    if remat == "none":
        return body
    # A scan already keeps XLA from merging the recomputation with the original; preventing CSE too costs time.
    return jax.checkpoint(body, policy=_POLICIES[remat], prevent_cse=not in_scan)
