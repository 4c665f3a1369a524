"""When, and with whom, replicas agree: the base of the kinds of agreement.

With `EveryStep`, the default, the replicas average their gradients in each step and are always equal. With the other
kinds each replica has parameters and an optimizer of its own, and trains for some steps without the others (local
steps); then the replicas merge. These are centralized and decentralized training in the taxonomy of Langer et al.,
"Distributed Training of Deep Learning Models: A Taxonomic Perspective" (arXiv 2007.03970).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.kinds import Choice
from jaxdl.exchange.agreement.fragments import divided
from jaxdl.exchange.config import ExchangeConfig
from jaxdl.exchange.cost import Cost, Gradients, Link, Machine, predict
from jaxdl.parallel.mesh import Axis

Tree = Any
"""A tree of arrays, like the trained parameters or a part of them."""
Metrics = dict[str, jax.Array]
"""Scalars, float32, the same on all devices."""


class Merges(Protocol):
    """How the replicas of a state are merged: what `Agreement.merge` chooses from. See
    `jaxdl.training.rounds.merge`."""

    def by_exchange(self, state: Any, fragments: Sequence[int]) -> tuple[Any, Metrics]:
        """Moves these fragments of the anchor by the mean of what the replicas have changed, by the run's exchange."""
        ...

    def by_messages(self, state: Any, hops: Sequence[int], fractions: Sequence[float]) -> tuple[Any, Metrics]:
        """Each replica becomes an average of its own parameters and those of the replicas that are `hops` before it.

        `fractions` of the average are those replicas', the rest is its own.
        """
        ...


class Agreement(Choice):
    """When, and with whom, replicas agree."""

    keeps_replicas: ClassVar[bool] = True
    """Whether each replica has parameters of its own between merges."""
    needs_syncer: ClassVar[bool] = False
    """Whether a run is a learner, whose merges are made by a syncer outside of it."""
    uses_exchange: ClassVar[bool] = True
    """Whether the run's exchange has anything to send."""
    has_anchor: ClassVar[bool] = True
    """Whether merges move the anchor; without one, the mean of the replicas is evaluated and exported."""

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """The agreement in a few words, the kind first, for tables and figures."""

    @abc.abstractmethod
    def due(self, step: int, total_steps: int, num_replicas: int) -> tuple[int, ...]:
        """The merges that follow the step just completed, by their numbers; most often none."""

    @property
    def merge_steps(self) -> int:
        """How many steps lie between two merges of a parameter."""
        return getattr(self, "every_steps", 1)

    @property
    def num_fragments(self) -> int:
        """Into how many fragments the parameters are divided, each merged at other steps."""
        return 1

    @abc.abstractmethod
    def merge(self, merges: Merges, state: Any, number: int, num_replicas: int) -> tuple[Any, Metrics]:
        """The train state after a merge; traced once for each number."""

    def joint(self, step: int) -> bool:
        """Whether the next step, after `step` steps, is one in which the replicas still average their gradients."""
        del step
        return False

    def steps_beside(self, step: int, total_steps: int) -> tuple[int, int] | None:
        """(number of a merge, during how many of the next steps its messages are sent), if one begins after `step`."""
        del step, total_steps
        return None

    def apart(self, step: int, total_steps: int, num_replicas: int) -> bool:
        """Whether the replicas differ from the anchor after this step and its merges."""
        del step, total_steps, num_replicas
        return self.keeps_replicas

    def boundary(self, step: int, total_steps: int) -> int:
        """The first step from `step` on that is not inside a merge whose messages are sent beside local steps."""
        if total_steps <= step:
            return step
        for before in range(max(0, step - self.longest_beside + 1), step):
            beside = self.steps_beside(before, total_steps)
            if beside is not None and before + beside[1] > step:
                return before + beside[1]
        return step

    @property
    def longest_beside(self) -> int:
        """The most steps during which the messages of a merge are sent."""
        return 0

    def init_outer(self, params: Tree) -> dict[str, Tree]:
        """What the agreement keeps beside the anchor, such as an outer momentum: name -> a tree like the parameters."""
        del params
        return {}

    def move_anchor(self, anchor: Tree, outer: dict[str, Tree], mean: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The anchor and `outer` after a merge; `mean` is that of the anchor less each replica's parameters."""
        raise NotImplementedError

    def adopt(self, replica_params: jax.Array, before: jax.Array, after: jax.Array, num_replicas: int) -> jax.Array:
        """A parameter of each replica, `[replica, ...]`, after the anchor's has moved from `before` to `after`."""
        raise NotImplementedError

    @property
    def num_past(self) -> int:
        """How many earlier versions of the parameters the train state keeps, so that gradients can be taken at them."""
        return 0

    def staleness(self, key: jax.Array, num_kept: jax.Array, num_replicas: int) -> jax.Array:
        """How many steps old the parameters are at which each replica takes its gradient: `[replica]`, int32.

        `key` is of the step, and `num_kept` how many versions there have been before the present one.
        """
        raise NotImplementedError

    def rate_factors(self, staleness: jax.Array) -> jax.Array | None:
        """By how much the learning rate is multiplied for the gradient of each replica, `[replica]`; None for 1."""
        del staleness
        return None

    def compensate(self, grad: jax.Array, now: jax.Array, past: jax.Array) -> jax.Array:
        """The gradient of each replica, `[replica, ...]`, that was taken at `past`, for the parameters as they are."""
        del now, past
        return grad

    def round_steps(self, num_replicas: int) -> int:
        """After how many steps the merges repeat, once each of `merges` has been."""
        del num_replicas
        return self.merge_steps

    def merges(self, exchange: ExchangeConfig, gradients: Gradients, machine: Machine) -> list[Cost]:
        """What each merge of a round takes, after all warm-ups: one exchange of each fragment.

        Of replicas that are always equal, what the exchange takes in a step. Raises ValueError for a speed of the
        machine that is not known.
        """
        return [predict(exchange, part, machine) for part in divided(gradients, self.num_fragments)]

    def cost(self, exchange: ExchangeConfig, gradients: Gradients, machine: Machine, step_sec: float = 0.0) -> Cost:
        """What replicas that agree in this way add to an average step of a round: seconds waited, and bytes.

        That is after a `start_step`, before which each step has a dense exchange. Messages that are sent beside local
        steps of `step_sec` seconds (0: not known) are waited for only as long as they take longer, where the machine
        `overlaps`. What a merge computes besides the exchange is not counted. Raises as `merges` does.
        """
        if gradients.num_replicas == 1:
            return Cost()
        hidden = self.longest_beside * step_sec if machine.overlaps else 0.0
        merges = [merge.beside(hidden) for merge in self.merges(exchange, gradients, machine)]
        return sum(merges, Cost()) * (1 / self.round_steps(gradients.num_replicas))

    def traffic(self, exchange: ExchangeConfig, gradients: Gradients) -> tuple[float, float]:
        """Bytes that a device sends to other replicas in an average step, and the most that it sends at once."""
        if gradients.num_replicas == 1:
            return 0.0, 0.0
        free = Machine(dict.fromkeys((Axis.REPLICA.value, *gradients.layout.inner), Link(0.0, math.inf)))
        sent = [merge.sent_bytes for merge in self.merges(exchange, gradients, free)]
        return sum(sent) / self.round_steps(gradients.num_replicas), max(sent, default=0.0)

    def check(self, exchange: Config, num_replicas: int, total_steps: int) -> None:
        """Raises ConfigError for an exchange, a number of replicas or a length of run that it does not work with."""
        del exchange, num_replicas, total_steps

    def remarks(self, total_steps: int, num_replicas: int) -> tuple[str, ...]:
        """Notes for the user about a run of this length."""
        del total_steps, num_replicas
        return ()


def check_exchange(agreement: Agreement, exchange: Any) -> None:
    """Raises ConfigError for an exchange that does not suit merges of what replicas have changed."""
    what = f"with --agreement {agreement.kind}"
    if exchange.delay_steps:
        raise ConfigError(
            f"--exchange.delay-steps {exchange.delay_steps}: {what} a merge would be applied one merge late. Set it to "
            "0; --agreement.overlap-steps of periodic hides merges behind local steps."
        )
    if exchange.momentum_factor is not None:
        raise ConfigError(
            f"--exchange {exchange.kind}: it keeps a momentum of what it sends, {what} a second outer momentum. Turn "
            "it off (--exchange.momentum-correction None), and set --agreement.outer.momentum."
        )


class EveryStep(Agreement, kind="every_step"):
    """Replicas average their gradients, by the exchange, in every step, and are always equal."""

    keeps_replicas: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """`every step`."""
        return "every step"

    def due(self, step: int, total_steps: int, num_replicas: int) -> tuple[int, ...]:
        """Nothing: equal replicas need no merge."""
        del step, total_steps, num_replicas
        return ()

    def merge(self, merges: Merges, state: Any, number: int, num_replicas: int) -> tuple[Any, Metrics]:
        """Never asked for."""
        raise AssertionError("replicas that agree in every step never merge")
