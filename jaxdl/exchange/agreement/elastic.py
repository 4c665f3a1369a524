"""Elastic averaging: replicas are drawn to a centre, and the centre to them."""

from __future__ import annotations

from typing import Any

import jax
import pydantic

from jaxdl.core.config import Config
from jaxdl.exchange.agreement.config import Agreement, Merges, Metrics, Tree, check_exchange


class Elastic(Agreement, kind="elastic"):
    """EASGD (Zhang, Choromanska and LeCun, arXiv 1412.6651), its synchronous form.

    Every `every_steps` steps replica i of n moves by -beta/n (x_i - c), and the centre c by beta times the mean of
    x_i - c. The centre is the anchor: what is evaluated and exported. For large `every_steps` it lags behind.
    """

    every_steps: int = pydantic.Field(default=4, ge=1)
    """Number of steps from one merge to the next."""
    beta: float = pydantic.Field(default=0.9, gt=0, le=1)
    """How far the centre moves to the mean of the replicas. 0.9 in the paper; above 1 it is not stable."""

    @property
    def label(self) -> str:
        """`elastic 4, 0.9`."""
        return f"elastic {self.every_steps}, {self.beta:g}"

    def due(self, step: int, total_steps: int, num_replicas: int) -> tuple[int, ...]:
        """The merges that follow the step just completed, by their numbers."""
        del num_replicas
        return (0,) if step == total_steps or step % self.every_steps == 0 else ()

    def merge(self, merges: Merges, state: Any, number: int, num_replicas: int) -> tuple[Any, Metrics]:
        """By the exchange."""
        del num_replicas
        return merges.by_exchange(state, (number,))

    def move_anchor(self, anchor: Tree, outer: dict[str, Tree], mean: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The centre after it has moved to the replicas."""
        return jax.tree.map(lambda c, d: c - self.beta * d, anchor, mean), outer

    def adopt(self, replica_params: jax.Array, before: jax.Array, after: jax.Array, num_replicas: int) -> jax.Array:
        """The replicas after they have moved to the centre as it was."""
        del after
        return replica_params - self.beta / num_replicas * (replica_params - before[None])

    def check(self, exchange: Config, num_replicas: int, total_steps: int) -> None:
        """Raises ConfigError for an exchange, a number of replicas or a length of run that it does not work with."""
        del num_replicas, total_steps
        check_exchange(self, exchange)
