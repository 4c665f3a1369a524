"""The base of the configs of all exchanges: everything that the rest of jaxdl asks about a kind of exchange.

A new kind is a subclass of `ExchangeConfig`, or of `jaxdl.exchange.compressed.Compressed`, in a module of its own that
`jaxdl.exchange` imports. Every kind has to define the abstract members: without one it cannot be instantiated.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import pydantic
from jax.typing import DTypeLike

from jaxdl.core import kinds as all_kinds
from jaxdl.core.config import Config
from jaxdl.core.kinds import Choice
from jaxdl.exchange.base import Exchange, GradientLayout
from jaxdl.exchange.buckets import Bucket, make_buckets
from jaxdl.exchange.cost import Cost, Figures, Gradients, Machine
from jaxdl.exchange.wrapped import Delayed, SingleReplica

LAST_SHARE = 1 / 16
"""Of a bucket: gradients that the backward pass yields last, up to so many elements, are a message of their own. It has
nothing to run beside, so it is short."""


class ExchangeChoice(Choice):
    """What an experiment may have as its exchange: a gradient exchange, or the choice of one."""

    delay_steps: Literal[0, 1] = 0
    """Apply gradients this many steps late. With 1 the exchange is of the last step's gradients, and runs beside this
    step's forward and backward pass."""

    @abc.abstractmethod
    def check_optimizer(self, optimizer: Config) -> None:
        """Raises ValueError when the exchange does not work with an optimizer."""


class ExchangeConfig(ExchangeChoice, kind=None):
    """A gradient exchange: its options, what it costs, and what it does to the gradients."""

    bucket_mib: float = pydantic.Field(default=8.0, gt=0)
    """Fuse gradients into flat buffers of at most this many MiB (float32, on one device); larger ones stay alone. Each
    is sent when the backward pass has finished its gradients, so several of them hide behind the rest of it."""
    bucket_order: Literal["backward", "forward"] = "backward"
    """Which gradients are fused first: those that the backward pass finishes first (the last layers), or last."""

    compresses: ClassVar[bool] = True
    """Whether it changes more of the mean than its rounding; only a large speed-up is worth that."""
    single_replica_options: ClassVar[tuple[str, ...]] = ("delay_steps",)
    """The fields that also take effect with a single replica."""
    unsent_name: ClassVar[str] = "residual"
    """The entry of each replica's state with what it has not sent yet, where it keeps that."""

    def build(self, layout: GradientLayout | None = None) -> Exchange:
        """The exchange, for gradients that are sharded as `layout` says; without one, not at all."""
        layout = layout or GradientLayout()
        return self._delayed(self.undelayed(layout), layout)

    def build_single_replica(self, layout: GradientLayout | None = None) -> Exchange:
        """The exchange of a single replica: it sends nothing, but has the same state as that of several replicas."""
        layout = layout or GradientLayout()
        return self._delayed(SingleReplica(self.undelayed(layout), self.momentum_factor, layout), layout)

    def _delayed(self, exchange: Exchange, layout: GradientLayout) -> Exchange:
        return Delayed(exchange, layout) if self.delay_steps else exchange

    @abc.abstractmethod
    def undelayed(self, layout: GradientLayout) -> Exchange:
        """The exchange of gradients in the step that computes them; `build` delays it."""

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """The exchange in a few words, the kind first, for tables and figures."""

    @property
    @abc.abstractmethod
    def distortion(self) -> tuple[float, float]:
        """How much it changes the gradients, to sort by. Dense sums are (0, _), quantized ones, unbiased, (1, _), top-k
        (2, _), PowerSGD (3, _), signs (4, _); the second number grows with the distortion inside a kind."""

    @abc.abstractmethod
    def cost(self, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one `update` after all warm-ups. Raises ValueError for a speed that is not known."""

    @property
    def momentum_factor(self) -> float | None:
        """That of the momentum which the exchange keeps in place of the optimizer; None where it keeps none."""
        return None

    @property
    def unsent_decay(self) -> float:
        """What remains of `unsent_name` in the next step: 1 if nothing is lost."""
        return 1.0

    @property
    def sum_dtype(self) -> DTypeLike | None:
        """The dtype of the plain sum over replicas, one gradient apart from another, that it is; None for no such."""
        return None

    @property
    def figures(self) -> Figures:
        """What `cost` needs to know of a machine, beyond what is always measured."""
        return Figures()

    def check(self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout, num_replicas: int) -> None:
        """Raises ConfigError when an option has no effect on gradients of these names and shapes (of all shards)."""

    def check_optimizer(self, optimizer: Config) -> None:
        """Raises ValueError when the exchange does not work with an optimizer."""

    def remarks(self, cost: Cost, gradients: Gradients, machine: Machine, dense: ExchangeConfig) -> list[str]:
        """Further notes on its cost for the user, beside that of `dense`, a line each."""
        return []

    @classmethod
    def variants(cls) -> list[ExchangeConfig]:
        """The settings that benchmarks compare."""
        return [cls()]

    @classmethod
    def candidates(cls, densities: Sequence[float], num_replicas: int) -> dict[str, list[ExchangeConfig]]:
        """What `auto` may choose of this kind, by the names for `--exchange.candidates`."""
        return {cls.kind: [cls()]}

    @property
    def bucket_elements(self) -> float:
        """The most elements of a bucket."""
        return self.bucket_mib * 2**20 / 4

    def ordered(self, names: Sequence[str], layout: GradientLayout) -> list[str]:
        """The names in the order of the buckets; where it is not known, the backward pass ends with the first ones."""
        ready = dict.fromkeys((*layout.order, *reversed(names)))
        order = [name for name in ready if name in names]
        return order if self.bucket_order == "backward" else order[::-1]

    def buckets(
        self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout
    ) -> tuple[list[Bucket], list[Bucket]]:
        """The messages for gradients of these local shapes: dense ones and compressed ones."""
        names, most = self.ordered(list(shapes), layout), self.bucket_elements
        last = most * LAST_SHARE if layout.order and self.bucket_order == "backward" else 0
        return make_buckets(names, shapes, layout, max_elements=most, max_last=last), []


def kinds() -> dict[str, type[ExchangeConfig]]:
    """Every kind of gradient exchange by its name; not the choice of one."""
    return all_kinds.kinds(ExchangeConfig)
