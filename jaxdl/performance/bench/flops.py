"""Floating-point operations of a network, counted in its jaxpr; peak figures of devices."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxdl.parallel.collectives.grouped import USED_ROWS
from jaxdl.parallel.precision import Precision
from jaxdl.performance.bench.shared import time_in_turns
from jaxdl.training.run.plan.build import Plan

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "H200": {"fp8": 1979e12, "bfloat16": 989e12, "float16": 989e12, "tensorfloat32": 494e12, "float32": 67e12},
    "H100 80GB HBM3": {
        "fp8": 1979e12,
        "bfloat16": 989e12,
        "float16": 989e12,
        "tensorfloat32": 494e12,
        "float32": 67e12,
    },
    "A100-SXM": {"bfloat16": 312e12, "float16": 312e12, "tensorfloat32": 156e12, "float32": 19.5e12},
    "V100-SXM2": {"float16": 125e12, "float32": 15.7e12},
}
"""Part of a device's name -> precision -> operations a second, dense, of the SXM module (NVIDIA's data sheets)."""

_MATRIX = 4096
_PASSES = 3
"""A training step is a forward pass and a backward pass of twice its products."""


def step_flops(plan: Plan) -> float:
    """Operations of a training step's matrix products and convolutions, over all devices: 3 times the forward pass.

    A multiplication and an addition count as two. Recomputation to save memory does not count, so the share of the peak
    is the model's (MFU), not the hardware's.
    """
    parts = plan.parts
    spec = parts.data_spec
    example = parts.task.inputs(jax.tree.map(jnp.asarray, spec.blank()), spec)
    state, network = parts.state_spec.filled(), parts.network.filled

    def forward(params: Any, model_state: Any, *inputs: jax.Array) -> jax.Array:
        return network.apply(params, model_state, *inputs, train=False)[0]

    jaxpr = jax.make_jaxpr(forward)(state.params, state.model_state, *example)
    return _PASSES * count(jaxpr.jaxpr) * plan.experiment.batch_size


def count(jaxpr: core.Jaxpr) -> float:
    """Operations of the products and convolutions in a jaxpr; those in a scan's body count once per iteration.

    The number of iterations of a `while` loop is unknown: its body counts once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        shapes: list[Any] = [getattr(variable.aval, "shape", ()) for variable in equation.invars]
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            total += 2 * _size(equation.outvars[0]) * math.prod(shapes[0][dim] for dim in contracted)
        elif name.startswith("dot_product_attention_fwd"):  # Two products; as above, those that a mask removes count.
            total += 4 * _size(equation.invars[0]) * shapes[1][1]
        elif name == "conv_general_dilated":
            out_channels = shapes[1][params["dimension_numbers"].rhs_spec[0]]
            total += 2 * _size(equation.outvars[0]) * math.prod(shapes[1]) / out_channels
        else:
            inner = [sub for value in params.values() for sub in _jaxprs(value)]
            costs = [count(sub) for sub in inner]
            if costs:
                times = params["length"] if name == "scan" else 1
                used = re.search(USED_ROWS + r"(\d+)", str(equation.source_info.name_stack))
                if name == "scan" and used:  # The other rows of its blocks fill them up.
                    block: Any = inner[0].invars[-2].aval
                    times = int(used[1]) / block.shape[0]
                total += times * (max(costs) if name == "cond" else sum(costs))
    return total


def _jaxprs(value: Any) -> list[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, core.Jaxpr):
        return [value]
    return [sub for item in value for sub in _jaxprs(item)] if isinstance(value, tuple | list) else []


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def peak_flops(precision: Precision) -> tuple[float, str]:
    """Peak operations a second of all devices together, and the source of the figure.

    Without a known data sheet (CPUs) it is the measured speed of a large matrix product.
    """
    devices = jax.devices()
    for name, figures in PEAK_FLOPS.items():
        if name in devices[0].device_kind and precision.kind in figures:
            also = ", as if all products were in FP8" if precision.fp8_size is not None else ""
            return figures[precision.kind] * len(devices), f"the data sheet of {name}{also}"
    # Virtual CPU devices share the cores, and one product uses them all.
    number = 1 if devices[0].platform == "cpu" else len(devices)
    size = _MATRIX if devices[0].platform != "cpu" else _MATRIX // 2
    x = jnp.ones((size, size), precision.dtype)
    with jax.default_matmul_precision(precision.matmul or "default"):
        multiply = jax.jit(lambda x: (x @ x) / size).lower(x).compile()
    [times] = time_in_turns({"product": lambda: multiply(x)}, 5).values()
    return 2 * size**3 / statistics.median(times) * number, f"a product of {size} x {size} matrices here"
