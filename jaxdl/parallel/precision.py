"""Numerical precision: the dtype that a model computes in, and the loss scale that float16 needs.

Parameters and the optimizer's state are always float32, and so are the gradients that enter the exchange over
`replica`. Inside a replica XLA's partitioner sums the gradient of a weight over `fsdp` right at the product that makes
it, in the dtype of the product's result: float32 by default, or the computation's with `reduce_dtype = compute` (see
`jaxdl.models.products`). Gradients of embedding rows, biases and norm scales are always summed in float32.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic
from jax.typing import DTypeLike

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import Choice
from jaxdl.parallel.compiler.hlo import fp8_products, parse
from jaxdl.parallel.mesh import Device

_LAYER_DIMS = ("layers", "stack", "stack as before")
"""The logical names of dimensions that count layers, see `jaxdl.parallel.sharding` and `jaxdl.models.stacks`."""
_FIRST_WITH_FP8 = 8.9
"""The compute capability of Ada."""
LossScale = dict[str, jax.Array]
"""`scale` (float32), `good_steps` since its last change, `skipped_steps` of the run (int32); empty without scaling."""


class Precision(Choice):
    """The dtypes of the computation and the loss scale; by default float32 and none."""

    dtype: ClassVar[jnp.dtype] = jnp.dtype("float32")
    """The dtype of activations, and of weights while they are used."""
    matmul: ClassVar[str | None] = None
    """The setting of `jax.default_matmul_precision` under which the model is traced; None leaves JAX's default."""

    @property
    def weight_dtype(self) -> jnp.dtype:
        """The dtype of weights as the model receives them. Their gradients have it, and are summed in it over `fsdp`.

        A product rounds a wider weight to `dtype` before it multiplies.
        """
        return jnp.dtype("float32")

    @property
    def fp8_size(self) -> int | None:
        """The least size of a product of a block that training computes in FP8; None if it computes none in it."""
        return None

    @property
    def lowest_scale(self) -> float | None:
        """The loss scale never falls below this; None without loss scaling."""
        return None

    def check(self, device: Device) -> None:
        """Raises ConfigError when a device does not support this precision."""

    def program_notes(self, text: str) -> tuple[str, ...]:
        """Lines for the user about a compiled step, from its HLO. Raises ConfigError where it is another one."""
        del text
        return ()

    def init_loss_scale(self) -> LossScale:
        """The loss scale at the start of a run."""
        return {}

    def next_loss_scale(self, loss_scale: LossScale, finite: jax.Array) -> LossScale:
        """The loss scale after a step with (`finite`) or without an update."""
        del finite
        return loss_scale


class _Half(Precision, kind=None):
    """What the 16-bit precisions share."""

    reduce_dtype: Literal["float32", "compute"] = "float32"
    """The dtype in which gradients of weights are summed over `fsdp`: float32, or `compute`, the computation's 16 bits,
    which sends half the bytes and rounds every device's part and every partial sum. What is sent over `replica` is a
    setting of the exchange."""

    @property
    def weight_dtype(self) -> jnp.dtype:
        """float32, or `dtype` where gradients are summed in it."""
        return self.dtype if self.reduce_dtype == "compute" else jnp.dtype("float32")


class Float32(Precision, kind="float32"):
    """Everything in float32, also on GPUs, where JAX's own default would be TF32."""

    matmul: ClassVar[str | None] = "float32"


class TensorFloat32(Precision, kind="tensorfloat32"):
    """float32 with matrix products in TF32 (10 bits of mantissa), on NVIDIA GPUs since Ampere."""

    matmul: ClassVar[str | None] = "tensorfloat32"

    def check(self, device: Device) -> None:
        """Raises ConfigError anywhere but on a GPU."""
        if device.platform != "gpu":
            raise ConfigError(
                f"--precision tensorfloat32: {device.platform} devices have no TF32, it could not take effect. "
                "Use --precision float32 here."
            )


class BFloat16(_Half, kind="bfloat16"):
    """Activations and weights in use in bfloat16, which has float32's range and needs no loss scale."""

    dtype: ClassVar[jnp.dtype] = jnp.dtype("bfloat16")


class FP8(Precision, kind="fp8"):
    """bfloat16, and in training the large products of a decoder's blocks in FP8, on NVIDIA GPUs of sm89 and later.

    See `jaxdl.models.fp8`. Evaluation computes in bfloat16.
    """

    dtype: ClassVar[jnp.dtype] = jnp.dtype("bfloat16")
    min_size: int = pydantic.Field(default=2048, ge=1)
    """A product [n, k] x [k, m] is in FP8 if k and m, those of one device, are at least this."""
    emulated: bool = False
    """Train on devices without FP8 too: operands are rounded to it all the same. For experiments; nothing gets faster.
    """

    @property
    def fp8_size(self) -> int:
        """`min_size`."""
        return self.min_size

    def check(self, device: Device) -> None:
        """Raises ConfigError on a GPU before Ada, and on other devices, unless FP8 is `emulated`."""
        capability = str(getattr(device, "compute_capability", "")) if device.platform == "gpu" else ""
        if self.emulated or (re.fullmatch(r"\d+\.\d+", capability) and float(capability) >= _FIRST_WITH_FP8):
            return
        what = f"{device.device_kind} (sm{capability})" if capability else f"{device.platform} devices"
        raise ConfigError(
            f"--precision fp8: {what} cannot multiply FP8 numbers; GPUs of sm89 and later can (L4, RTX 4090, H100). "
            "Take --precision bfloat16, or --precision.emulated to try out what the rounding does."
        )

    def program_notes(self, text: str) -> tuple[str, ...]:
        """How many FP8 products a compiled step has; none are said of a program without any, such as a merge.

        Raises ConfigError where XLA compiled some of them in another dtype. Where FP8 is `emulated` it may.
        """
        in_fp8, meant = fp8_products(parse(text))
        if not meant or self.emulated:
            return ()
        if in_fp8 < meant:
            raise ConfigError(
                f"--precision {self.kind}: XLA has compiled {in_fp8} of {meant} products in FP8, the others round "
                "their operands and gain no time. Take --precision bfloat16, or leave out --compiler.options and "
                f"XLA_FLAGS that turn FP8 off (JAX {jax.__version__})."
            )
        return (f"fp8: all {in_fp8} FP8 products of the compiled step are in FP8",)


class Float16(_Half, kind="float16"):
    """Activations and weights in use in float16, with a loss scale.

    A step with non-finite gradients only lowers the scale; after `growth_interval_steps` good ones it grows. It stays
    between `min_scale` and `max_scale` (Micikevicius et al., arXiv 1710.03740). A `static` one never changes, as in Jia
    et al., arXiv 1807.11205. Either way the optimizer gets unscaled float32 gradients: in float16 many of LARS's
    updates would be zero (Jia et al.).
    """

    dtype: ClassVar[jnp.dtype] = jnp.dtype("float16")
    initial_scale: float = pydantic.Field(default=2.0**15, gt=0)
    """The loss is multiplied by this before it is differentiated."""
    static: bool = False
    """Keep the scale constant. Steps with non-finite gradients are skipped all the same."""
    growth_interval_steps: int = pydantic.Field(default=2000, ge=1)
    """Consecutive good steps after which the scale grows."""
    factor: float = pydantic.Field(default=2.0, gt=1)
    """The scale grows and falls by this factor."""
    min_scale: float = pydantic.Field(default=1.0, gt=0)
    """The scale never falls below this."""
    max_scale: float = pydantic.Field(default=2.0**24, gt=0)
    """The scale never grows above this."""

    @pydantic.model_validator(mode="after")
    def _order(self) -> Float16:
        changed = self.model_fields_set & {"growth_interval_steps", "factor", "min_scale", "max_scale"}
        defaults = {name: type(self).model_fields[name].default for name in changed}
        idle = sorted(name for name, value in defaults.items() if getattr(self, name) != value)
        if self.static and idle:
            raise ValueError(f"{', '.join(idle)}: no effect on a static scale. Remove it, or static.")
        if not self.static and not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale {self.initial_scale:g} must be between min_scale {self.min_scale:g} "
                f"and max_scale {self.max_scale:g}."
            )
        return self

    @property
    def lowest_scale(self) -> float:
        """`min_scale`, or the static scale."""
        return self.initial_scale if self.static else self.min_scale

    def init_loss_scale(self) -> LossScale:
        """`initial_scale`, no step counted."""
        return {
            "scale": jnp.float32(self.initial_scale),
            "good_steps": jnp.int32(0),
            "skipped_steps": jnp.int32(0),
        }

    def next_loss_scale(self, loss_scale: LossScale, finite: jax.Array) -> LossScale:
        """Falls by `factor` after a non-finite step, grows after `growth_interval_steps` finite ones."""
        scale, good_steps = loss_scale["scale"], jnp.where(finite, loss_scale["good_steps"] + 1, 0)
        grow = good_steps >= self.growth_interval_steps
        changed = jnp.where(finite, jnp.where(grow, scale * self.factor, scale), scale / self.factor)
        return {
            "scale": scale if self.static else jnp.clip(changed, self.min_scale, self.max_scale),
            "good_steps": jnp.where(grow, 0, good_steps),
            "skipped_steps": loss_scale["skipped_steps"] + jnp.where(finite, 0, 1),
        }


@jax.custom_vjp
def float32_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel`, [..., m] by [m, n] of one dtype, summed and returned in float32: [..., n].

    For logits, whose softmax wants float32. Unlike with `preferred_element_type` alone, the two products of the
    backward pass are not in float32 too: they take the gradient rounded to the dtype of `x` and `kernel`.
    """
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _float32_matmul_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    # The transpose is made here: the backward pass is traced outside of `jax.default_matmul_precision`, and a product
    # written there would have JAX's default, TF32 on GPUs.
    _, transpose = jax.vjp(lambda x, kernel: jnp.matmul(x, kernel).astype(jnp.float32), x, kernel)
    return float32_matmul(x, kernel), transpose


def _float32_matmul_backward(transpose: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return transpose(cotangent)


float32_matmul.defvjp(_float32_matmul_forward, _float32_matmul_backward)


def cast_weights(params: Any, axes: Any, dtype: DTypeLike) -> Any:
    """Weights (two dimensions or more, not counting stacked layers) in `dtype`; routers, biases and norm scales
    unchanged."""

    def one(names: tuple[str, ...], x: jax.Array) -> jax.Array:
        weight = sum(name not in _LAYER_DIMS for name in names) > 1 and "router" not in names
        return x.astype(dtype) if weight else x

    return jax.tree.map(one, axes, params, is_leaf=lambda node: isinstance(node, tuple))
