"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685), which alone are trained, beside a network that is not.

A matrix W, [inputs, outputs], is used as W + alpha / rank * A B, with A [inputs, rank] and B [rank, outputs]. B begins
with zeros, so that training begins with the network as it was. The product with x is x W + alpha / rank * (x A) B: no
gradient of the size of W is ever computed.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

from jaxdl.core.config import Config
from jaxdl.core.patterns import check_patterns, matches
from jaxdl.models.products import weight_product
from jaxdl.parallel.sharding import EXPERT, ROUTER, Params

_A, _B = "_lora_a", "_lora_b"
TRAINED = (f"*{_A}", f"*{_B}")
"""Patterns of the parameters of adapters."""


class LoRA(Config):
    """Low-rank adapters: the network is frozen, and small matrices beside its own are trained (Hu et al. 2021)."""

    rank: int = pydantic.Field(default=0, ge=0)
    """Columns of A and rows of B; 0 trains the network itself, without adapters."""
    alpha: float = pydantic.Field(default=16.0, gt=0)
    """The product of the two is multiplied by alpha / rank."""
    targets: tuple[str, ...] = pydantic.Field(default=("attention.query", "attention.value"), min_length=1)
    """Patterns of the names of a block's matrices that get adapters: `attention`, `mlp`, `*` for all. Experts, and
    their router, get none."""
    random_base: bool = pydantic.Field(default=False, exclude_if=lambda value: not value)
    """Allow a run without `--init-from`, beside a network that keeps its random values: to try a config, since little
    is learnt so."""

    @pydantic.model_validator(mode="after")
    def _has_an_effect(self) -> LoRA:
        """The other settings are about adapters, which rank 0 has none of."""
        for name, field in type(self).model_fields.items():
            if not self.rank and (value := getattr(self, name)) != field.default:
                raise ValueError(
                    f"{name} = {value} has no effect at rank = 0, which adds no adapters. Set a rank such as 8, or "
                    f"leave {name} {field.default}."
                )
        return self

    @property
    def trained(self) -> tuple[str, ...]:
        """Patterns of the parameters that are trained; none means all."""
        return TRAINED if self.rank else ()

    def add(self, block: nnx.Module, rngs: nnx.Rngs) -> None:
        """Gives the matrices of a block their adapters. Raises ConfigError for a pattern that selects none."""
        if not self.rank:
            return
        matrices: dict[str, tuple[nnx.Module, nnx.Param[jax.Array]]] = {}
        for path, module in nnx.iter_modules(block):
            for name, variable in vars(module).items():
                if isinstance(variable, nnx.Param) and len(variable.shape) > 1 and _is_adaptable(variable):
                    matrices["/".join((*map(str, path), name))] = module, variable
        check_patterns(self.targets, list(matrices), "--model.lora.targets")
        for full, (module, kernel) in matrices.items():
            if any(matches(full, pattern) for pattern in self.targets):
                self._add_to(module, full.rpartition("/")[2], kernel, rngs)

    def _add_to(self, module: nnx.Module, name: str, kernel: nnx.Param[jax.Array], rngs: nnx.Rngs) -> None:
        axes, shape = kernel.get_metadata()["axes"], kernel.shape
        # A matrix of a block reads the residual stream, whose axis is `embed`, or adds to it.
        num = len(axes) - 1 if axes[-1] == "embed" else 1
        inputs, outputs = (*shape[:num], self.rank), (self.rank, *shape[num:])
        stddev = 1 / math.sqrt(math.prod(shape[:num]))
        made = stddev * jax.random.normal(rngs.params(), inputs, jnp.float32)
        setattr(module, name + _A, nnx.Param(made, axes=(*axes[:num], "rank")))
        b = nnx.Param(jnp.zeros(outputs, jnp.float32), axes=("rank", *axes[num:]), factor=self.alpha / self.rank)
        setattr(module, name + _B, b)

    def merged(self, params: Params) -> Params:
        """The parameters of the network without adapters that computes the same, in float32; they may be stacked."""
        merged_params: Params = {}
        for name, x in params.items():
            if isinstance(x, dict):
                merged_params[name] = self.merged(x)
            elif name + _A in params:
                merged_params[name] = _sum(x, params[name + _A], params[name + _B], self.alpha / self.rank)
            elif not name.endswith((_A, _B)):
                merged_params[name] = x
        return merged_params


def _is_adaptable(kernel: nnx.Param[jax.Array]) -> bool:
    """Whether a matrix of a block may have an adapter: those of routers, and of experts that it chooses, have none."""
    return {EXPERT, ROUTER}.isdisjoint(kernel.get_metadata()["axes"])


@jax.jit
def _sum(kernel: jax.Array, a: jax.Array, b: jax.Array, factor: float) -> jax.Array:
    """kernel + factor * a b, each perhaps with a leading dimension for the layers."""
    stacked = a.ndim + b.ndim - 2 - kernel.ndim  # They share it, and the rank is in both.
    lead, rank = kernel.shape[:stacked], a.shape[-1]
    product = jnp.matmul(a.reshape(*lead, -1, rank), b.reshape(*lead, rank, -1), precision="highest")
    return kernel + factor * product.reshape(kernel.shape)


def adapt(module: nnx.Module, name: str, x: jax.Array, num_contracted: int) -> jax.Array | None:
    """What the adapter of the kernel `name` of a module adds to its product with `x`; None without one.

    `num_contracted` is that of the product.
    """
    a, b = getattr(module, name + _A, None), getattr(module, name + _B, None)
    if a is None or b is None:
        return None
    narrow = weight_product(x, a[...], num_contracted=num_contracted)
    return b.get_metadata()["factor"] * weight_product(narrow, b[...])
