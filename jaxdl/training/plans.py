"""Who chooses the layout of a run: the config, or a planner when the run begins."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Self

import pydantic

from jaxdl.core.kinds import Choice
from jaxdl.parallel.mesh import AXES

LAYOUT = (
    *(f"mesh.{axis}" for axis in AXES), "step.microbatches", "model.remat", "sharding.param_sharding", "model.dispatch",
)  # fmt: skip
"""The fields that a plan decides, besides the exchange where that is `auto`."""
TABLES = "embedding.scheme"
"""It decides the scheme of each embedding table as well, unless this is fixed."""


def typed_fields(args: Sequence[str]) -> set[str]:
    """The dotted fields that a command line names: `mesh.tensor` for `--mesh.tensor 2`."""
    return {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")}


class PlanChoice(Choice):
    """Who chooses the mesh, micro-batches, what activations are kept, sharding, exchange and schemes of tables."""

    planner: ClassVar[str] = ""
    """`MODULE:FUNCTION` of what plans, see `jaxdl.training.run.plan.layout.Planner`; it stands above the life of a run,
    so it is named here and not imported. Empty: the run has the layout of its config."""

    def keeping(self, options: Collection[str]) -> Self:
        """The same, around these dotted fields, which the command line gives."""
        del options
        return self


class AsGiven(PlanChoice, kind="none"):
    """The layout of the config."""


class PlanAuto(PlanChoice, kind="auto"):
    """Plans the layout when the run begins, for the devices that it has, and keeps it with the checkpoints.

    A run that resumes on such devices has the same plan. What the config sets to another value than the default stays
    as it is, and the rest is planned around it; so do the fields in `keep`, and options of the command line. An axis of
    the mesh that is -1 is planned. The exchange is planned where it is `auto`.
    """

    planner = "jaxdl.performance.planner.auto:plan"

    keep: tuple[str, ...] = ()
    """Fields that stay as they are, though they have their defaults, such as `mesh.tensor` or `step.microbatches`. The
    command line adds those of its options."""
    timed: int = pydantic.Field(default=4, ge=1)
    """Number of layouts, best predicted first, that are timed for some steps; the fastest is taken. Then about as many
    choices of schemes for its embedding tables are timed. 1: the best predicted layout is taken, untimed. Layouts that
    need more than 90 % of a device's memory by XLA's plan are left out, and the next ones timed."""
    devices_per_node: int | None = pydantic.Field(default=None, ge=1)
    """Devices that are joined by fast links; None: those of a process."""
    network: str | None = None
    """The rate of a node's network, each way, which its devices share: 500mbit, 25gbit. None measures all links when
    the run begins, for some seconds."""
    latency_us: float | None = pydantic.Field(default=None, ge=0)
    """Microseconds of the shortest message between nodes, with `network`; None: 20."""
    device_gb: float | None = pydantic.Field(default=None, gt=0)
    """Memory of a device in GB that the run may use; None: what the device has, of a CPU its share of the host's."""

    @pydantic.model_validator(mode="after")
    def _takes_effect(self) -> PlanAuto:
        for name in self.keep:
            if name not in (*LAYOUT, TABLES):
                raise ValueError(f"keep: {name!r} is nothing that a plan decides: {', '.join((*LAYOUT, TABLES))}.")
        if self.latency_us is not None and self.network is None:
            raise ValueError(f"latency_us = {self.latency_us:g} without network: the links are measured. Set both.")
        return self

    def keeping(self, options: Collection[str]) -> Self:
        """With the options among those that a plan decides added to `keep`."""
        return self.replaced({"keep": tuple(name for name in (*LAYOUT, TABLES) if name in {*self.keep, *options})})
