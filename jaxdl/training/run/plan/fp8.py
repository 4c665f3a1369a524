"""What of a network is in FP8, found out before anything is compiled or written."""

from __future__ import annotations

import jax

from jaxdl.core.config import ConfigError
from jaxdl.models.fp8 import noted
from jaxdl.models.network import Call
from jaxdl.parallel.mesh import batch_ways
from jaxdl.training.step.network import apply_network
from jaxdl.training.step.parts import Parts

_ROWS = 8
"""Examples of a device: any number will do."""


def fp8_remarks(parts: Parts) -> tuple[str, ...]:
    """Lines for the user: which products of a step are in FP8, if its precision has that.

    Raises ConfigError where none is.
    """
    if parts.precision.fp8_size is None:
        return ()
    shapes, rows = parts.state_spec.shapes, _ROWS * batch_ways(parts.layout.mesh)
    example = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in dict(parts.data_spec.blank()).items()
    }
    call = Call(train=True, key=jax.random.key(0), materialize_logits=False)
    with noted() as lines:
        jax.eval_shape(
            lambda params, state, batch: apply_network(parts, parts.layout, params, state, batch, call),
            shapes.params, shapes.model_state, example,
        )  # fmt: skip
    if not lines:
        raise ConfigError(
            f"--precision {parts.precision.kind}: the network of this model computes nothing in FP8: its layers do not "
            "pass jaxdl.models.fp8.bodies_of. Take --precision bfloat16."
        )
    return tuple(dict.fromkeys(lines))
