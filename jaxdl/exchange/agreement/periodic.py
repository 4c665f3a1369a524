"""Replicas that train alone for some steps and then merge: local SGD, DiLoCo, SlowMo and their streaming form.

After H local steps replica i has changed its parameters by anchor - x_i, its pseudo-gradient. The exchange averages
these as it averages gradients, and an outer optimizer moves the anchor by the mean; the replicas go on from there.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pydantic

from jaxdl.core.config import Config, ConfigError
from jaxdl.exchange.agreement.config import Agreement, Merges, Metrics, Tree, check_exchange

_MOMENTUM = "momentum"
_FEW_MERGES = 200
"""With fewer merges an outer momentum of 0.9 has not come to its full speed before the run ends."""


class Outer(Config):
    """The outer optimizer: SGD on the mean pseudo-gradient d."""

    learning_rate: float = pydantic.Field(default=1.0, gt=0)
    """1 without momentum is the plain average of the replicas."""
    momentum: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """m = momentum * m + d; the anchor moves by -learning_rate * m."""
    nesterov: bool = False
    """The anchor moves by -learning_rate * (d + momentum * m) instead."""

    @pydantic.model_validator(mode="after")
    def _takes_effect(self) -> Outer:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = True: it has no effect without momentum. Set momentum too, or leave it out.")
        return self


class Periodic(Agreement, kind="periodic"):
    """Local steps, then a merge by the exchange: every `every_steps` steps, and at the end of the run.

    - Local SGD (Stich, arXiv 1805.09767), or federated averaging: the defaults, the plain average.
    - Post-local SGD (Lin et al., arXiv 1808.07217): with `start_step`, at the first decay of the learning rate.
    - DiLoCo (Douillard et al., arXiv 2311.08105): an outer Nesterov momentum, 0.7 and 0.9 in the paper, which takes
      AdamW for the local steps. The local optimizers' states are not averaged.
    - SlowMo (Wang et al., arXiv 1910.00643) and BMUF: an outer momentum without Nesterov's; the same while the local
      learning rate is constant.
    - Streaming DiLoCo (Douillard et al., arXiv 2501.18512): `fragments` and `overlap_steps`.
    """

    every_steps: int = pydantic.Field(default=32, ge=1)
    """Number of steps after which all parameters have been merged once."""
    outer: Outer = Outer()
    """How the mean change of the replicas moves the anchor, which is evaluated and exported."""
    start_step: int = pydantic.Field(default=0, ge=0)
    """Before this step, average the gradients in every step, by the dense exchange."""
    fragments: int = pydantic.Field(default=1, ge=1)
    """Number of parts of about the same size into which the parameters are divided (a looped model by its layers, dealt
    out in turn), merged at different steps: the peak of the traffic falls by as much."""
    overlap_steps: int = pydantic.Field(default=0, ge=0)
    """Number of the following local steps during which the messages of a merge are sent; they arrive after them."""
    mixing: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """How much of a replica's own parameters stays when the new anchor arrives; 0 takes the anchor's."""

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Periodic:
        if self.fragments > self.every_steps:
            raise ValueError(
                f"fragments = {self.fragments}: there are only {self.every_steps} steps (every_steps) to merge them "
                "at. Choose fewer, or a larger every_steps."
            )
        between = self.every_steps // self.fragments
        if self.overlap_steps > between:
            raise ValueError(
                f"overlap_steps = {self.overlap_steps}: the next merge begins after {between} steps (every_steps / "
                "fragments), before this one has arrived. Choose fewer."
            )
        return self

    @property
    def label(self) -> str:
        """`periodic 32, 0.7/0.9`."""
        outer = f"{self.outer.learning_rate:g}/{self.outer.momentum:g}" if self.outer != Outer() else "average"
        parts = f", {self.fragments} fragments" if self.fragments > 1 else ""
        beside = f", beside {self.overlap_steps}" if self.overlap_steps else ""
        return f"periodic {self.every_steps}, {outer}{parts}{beside}"

    @property
    def num_fragments(self) -> int:
        """Into how many fragments the parameters are divided, each merged at other steps."""
        return self.fragments

    def due(self, step: int, total_steps: int, num_replicas: int) -> tuple[int, ...]:
        """The fragment that merges right after this step, if it is the turn of one; at the end the number of all."""
        del num_replicas
        if step <= self.start_step:
            return ()
        if step == total_steps:
            return (self._all,)
        turn = self._turn(step)
        return () if turn is None or self._travels(step, total_steps) else (turn,)

    def steps_beside(self, step: int, total_steps: int) -> tuple[int, int] | None:
        """(number of a merge, during how many next steps it is sent), if one begins after `step`."""
        turn = self._turn(step)
        return None if turn is None or not self._travels(step, total_steps) else (turn, self.overlap_steps)

    @property
    def longest_beside(self) -> int:
        """The most steps during which the messages of a merge are sent."""
        return self.overlap_steps

    def apart(self, step: int, total_steps: int, num_replicas: int) -> bool:
        """Whether the replicas differ from the anchor after this step and its merges."""
        if step <= self.start_step:
            return False
        return self.mixing > 0 or self._all not in self.due(step, total_steps, num_replicas)

    @property
    def _all(self) -> int:
        """The number of the merge of all fragments."""
        return self.fragments if self.fragments > 1 else 0

    def _travels(self, step: int, total_steps: int) -> bool:
        """Whether a merge that begins after this step is sent beside the following ones, and arrives in time."""
        return self.overlap_steps > 0 and step + self.overlap_steps <= total_steps

    def _turn(self, step: int) -> int | None:
        """The fragment that merges after this step: number f of n in each round after (f + 1) / n of it."""
        since = step - self.start_step
        if since <= 0:
            return None
        place = (since - 1) % self.every_steps + 1
        ends = [-(-(number + 1) * self.every_steps // self.fragments) for number in range(self.fragments)]
        return ends.index(place) if place in ends else None

    def joint(self, step: int) -> bool:
        """Whether the next step is one in which the replicas still average their gradients."""
        return step < self.start_step

    def merge(self, merges: Merges, state: Any, number: int, num_replicas: int) -> tuple[Any, Metrics]:
        """By the exchange."""
        del num_replicas
        return merges.by_exchange(state, range(self.fragments) if number == self._all else (number,))

    def init_outer(self, params: Tree) -> dict[str, Tree]:
        """The outer momentum, if there is one."""
        return {_MOMENTUM: jax.tree.map(jnp.zeros_like, params)} if self.outer.momentum else {}

    def move_anchor(self, anchor: Tree, outer: dict[str, Tree], mean: Tree) -> tuple[Tree, dict[str, Tree]]:
        """SGD, with momentum as PyTorch has it: no dampening."""
        rate, factor = self.outer.learning_rate, self.outer.momentum
        step = mean
        if factor:
            momentum = jax.tree.map(lambda m, d: factor * m + d, outer[_MOMENTUM], mean)
            outer = outer | {_MOMENTUM: momentum}
            step = jax.tree.map(lambda d, m: d + factor * m, mean, momentum) if self.outer.nesterov else momentum
        return jax.tree.map(lambda x, d: x - rate * d, anchor, step), outer

    def adopt(self, replica_params: jax.Array, before: jax.Array, after: jax.Array, num_replicas: int) -> jax.Array:
        """The anchor, mixed with the replica's own (Streaming DiLoCo, algorithm 2)."""
        del before, num_replicas
        if not self.mixing:
            return jnp.broadcast_to(after[None], replica_params.shape)
        return self.mixing * replica_params + (1 - self.mixing) * after[None]

    def check(self, exchange: Config, num_replicas: int, total_steps: int) -> None:
        """Raises ConfigError for an exchange, a number of replicas or a length of run that it does not work with."""
        del num_replicas
        check_exchange(self, exchange)
        if self.start_step >= total_steps:
            raise ConfigError(
                f"--agreement.start-step {self.start_step}: the run has {total_steps} steps, so the replicas would "
                "never train alone. Choose a smaller one, or --agreement every_step."
            )

    def remarks(self, total_steps: int, num_replicas: int) -> tuple[str, ...]:
        """About one replica, a round longer than the run, and an outer momentum with few merges."""
        notes = []
        if num_replicas == 1:
            left = "only the outer optimizer" if self.outer != Outer() else "nothing"
            notes.append(
                f"agreement {self.label}: this mesh has one replica, so {left} takes effect. Others join with "
                "--mesh.replica 2 or more."
            )
        merges = math.ceil((total_steps - self.start_step) / self.every_steps)
        if merges == 1 and num_replicas > 1:
            notes.append(f"agreement {self.label}: the run has {total_steps} steps, so replicas merge only at its end.")
        if self.outer.momentum >= 0.9 and merges < _FEW_MERGES:
            notes.append(
                f"agreement {self.label}: merges in this run: {merges}. An outer momentum of {self.outer.momentum:g} "
                f"pays from about {_FEW_MERGES} on. With fewer, --agreement.outer.momentum 0.5 or 0 often gives more."
            )
        return tuple(notes)


_PRESETS = {
    "local_sgd": {},
    "diloco": {"every_steps": 64, "outer": Outer(learning_rate=0.7, momentum=0.9, nesterov=True)},
    "slowmo": {"every_steps": 12, "outer": Outer(momentum=0.7)},
    "streaming_diloco": {
        "every_steps": 64,
        "outer": Outer(learning_rate=0.4, momentum=0.9, nesterov=True),
        "fragments": 8,
        "overlap_steps": 2,
        "mixing": 0.5,
    },
}
Agreement.presets = {name: functools.partial(Periodic, **values) for name, values in _PRESETS.items()}
