"""Stale gradients, emulated: one program computes what replicas that do not wait for each other would.

Replica i takes its gradient of step t at the parameters of step t - s_i(t). The exchange averages the gradients, and
one optimizer updates one model: the centralized class with bounded staleness. Nothing runs at other times than
without, and nothing is faster: only the numbers are those of such training, and they can be repeated. For replicas that
do not wait, see `async`.

The parameters are delayed, not the gradients: each example is then used once and in its own step, what is kept does not
depend on the number of replicas, and delay compensation has the old parameters that it needs.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic

from jaxdl.core.config import Config, ConfigError
from jaxdl.exchange.agreement.config import Agreement, Merges, Metrics


class EmulatedStaleness(Agreement, kind="emulated_staleness"):
    """As `every_step`, but a replica takes its gradient at parameters that are up to `max_staleness` steps old.

    It shows what staleness does to training, and what helps. The train state keeps the last `max_staleness` versions of
    the parameters, sharded as they are.
    """

    keeps_replicas: ClassVar[bool] = False

    max_staleness: int = pydantic.Field(default=4, ge=0)
    """How many steps old the parameters are at most; 0 is `every_step`. In the first steps they are the initial ones at
    the oldest. One replica with a batch of 8 and a fixed staleness of 7 is 8 workers that take turns."""
    distribution: Literal["uniform", "fixed"] = "uniform"
    """`uniform`: each replica draws its staleness, 0 to `max_staleness`, in each step, from the seed, the step and its
    number. `fixed`: `max_staleness` always."""
    rate_over_staleness: bool = False
    """Divide the learning rate by 1 + staleness: gradients have weights 1 / (1 + staleness) in their mean, and the rate
    is multiplied by the mean of these weights. After Zhang et al., arXiv 1511.05950, who divide by the staleness."""
    delay_compensation: float = pydantic.Field(default=0.0, ge=0)
    """Lambda in g + lambda g*g*(w - w_old), a first-order estimate of the gradient at the present parameters w; 0 is
    off. DC-ASGD with a constant lambda (Zheng et al., arXiv 1609.08326)."""

    @pydantic.model_validator(mode="after")
    def _takes_effect(self) -> EmulatedStaleness:
        if self.max_staleness:
            return self
        for name in ("distribution", "rate_over_staleness", "delay_compensation"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {getattr(self, name)} has no effect with max_staleness = 0: no gradient is stale. Leave "
                    "it out, or set max_staleness."
                )
        return self

    @property
    def label(self) -> str:
        """`emulated staleness 0-7, rate / (1 + s)`."""
        stale = f"{self.max_staleness}" if self.distribution == "fixed" else f"0-{self.max_staleness}"
        rate = ", rate / (1 + s)" if self.rate_over_staleness else ""
        compensate = f", compensation {self.delay_compensation:g}" if self.delay_compensation else ""
        return f"emulated staleness {stale}{rate}{compensate}"

    @property
    def num_past(self) -> int:
        """The largest staleness, which is the number of earlier versions of the parameters that are stored."""
        return self.max_staleness

    def staleness(self, key: jax.Array, num_kept: jax.Array, num_replicas: int) -> jax.Array:
        """How many steps old the parameters of each replica are, int32 `[replica]`, however many there are."""
        most = jnp.full(num_replicas, self.max_staleness, jnp.int32)
        if self.distribution == "uniform":
            keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(num_replicas))
            most = jax.vmap(lambda key: jax.random.randint(key, (), 0, self.max_staleness + 1))(keys)
        return jnp.minimum(most, num_kept)

    def rate_factors(self, staleness: jax.Array) -> jax.Array | None:
        """The factor of the learning rate for the gradient of each replica, `[replica]`; None for 1."""
        return 1 / (1 + staleness.astype(jnp.float32)) if self.rate_over_staleness else None

    def compensate(self, grad: jax.Array, now: jax.Array, past: jax.Array) -> jax.Array:
        """The gradients `[replica, ...]`, taken at `past`, for the parameters as they are."""
        if not self.delay_compensation:
            return grad
        return grad + self.delay_compensation * grad * grad * (now - past)

    def due(self, step: int, total_steps: int, num_replicas: int) -> tuple[int, ...]:
        """Nothing: the replicas have one model."""
        del step, total_steps, num_replicas
        return ()

    def merge(self, merges: Merges, state: Any, number: int, num_replicas: int) -> tuple[Any, Metrics]:
        """Never asked for."""
        raise AssertionError("replicas with one model never merge")

    def check(self, exchange: Config, num_replicas: int, total_steps: int) -> None:
        """Raises ConfigError for an exchange, a number of replicas or a length of run that it does not work with."""
        del num_replicas
        if self.max_staleness and self.max_staleness >= total_steps:
            raise ConfigError(
                f"--agreement.max-staleness {self.max_staleness}: the run has {total_steps} steps, so no gradient gets "
                f"so stale. Choose {total_steps - 1} at most."
            )
        if delay := getattr(exchange, "delay_steps", 0):
            raise ConfigError(
                f"--exchange.delay-steps {delay}: with --agreement {self.kind} gradients would be {delay} more than "
                "--agreement.max-staleness steps old, and the remedies would not know. Set it to 0, and "
                "--agreement.max-staleness higher."
            )
