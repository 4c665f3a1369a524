"""The layout of a run that a planner chooses when the run begins, and how it is kept in the workdir.

A layout is here the settings `LAYOUT` of an experiment. `jaxdl.parallel.sharding.Layout`, of arrays on a mesh, is made
from them later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import import_object, without_source
from jaxdl.exchange import Auto, ExchangeConfig
from jaxdl.parallel.cluster import start_devices, wait_for_all
from jaxdl.parallel.cluster.agree import from_each_process
from jaxdl.parallel.mesh import AXES, Device, mesh_text
from jaxdl.report import Start
from jaxdl.training.experiment import Experiment
from jaxdl.training.plans import LAYOUT
from jaxdl.training.run.workdir.kept_layout import Kept
from jaxdl.training.run.workdir.records import Workdir

_PLAN, _DEVICES = "plan", "devices"


@dataclass(frozen=True)
class Planned:
    """What a planner chose."""

    settings: Mapping[str, Any]
    """Dotted fields of the experiment, with their values as in JSON."""
    reasons: tuple[str, ...]
    """In words."""
    exchange: ExchangeConfig | None = None
    """The exchange, where that was left open."""


Planner = Callable[[Experiment, Sequence[Device], Start], Planned]
"""(the experiment, the devices of the run, what prints) -> the layout; all processes call it alike."""


@dataclass(frozen=True)
class ChosenLayout:
    """An experiment with the layout in which it runs, its own or a planned one, and why."""

    experiment: Experiment
    asked: Experiment
    """The experiment as it was given."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    kept: Kept | None = None
    """What the workdir keeps of a layout that was planned."""


def choose_layout(
    experiment: Experiment, devices: Sequence[Device] | None, start: Start, workdir: Workdir | None
) -> ChosenLayout:
    """The experiment in its layout: as it is given, or planned where it asks for that.

    A plan that the workdir has is taken again where it was made for such devices and settings, and so is the exchange
    that was chosen earlier. `workdir` is None for a program that trains no run: it does not plan. Raises ConfigError
    for what cannot be planned, on all processes.
    """
    if not experiment.plan.planner:
        return ChosenLayout(experiment, asked=experiment)
    if workdir is None:
        raise ConfigError(f"--plan {experiment.plan.kind}: only a training run plans. Leave it out.")
    with start.doing("starting the devices"):
        start_devices(
            experiment.mesh, experiment.cluster, experiment=without_source(experiment.model_dump(mode="json"))
        )
    devices = list(jax.devices() if devices is None else devices)
    made_for, earlier = _conditions(experiment, devices), workdir.read_layout()
    exchange = workdir.read_exchange() if isinstance(experiment.exchange, Auto) else None
    if earlier is not None and earlier.made_for == made_for:
        start.fact("plan", f"{describe(earlier.settings)}, as planned when the run began on these devices")
        return ChosenLayout(experiment.replaced(earlier.settings), asked=experiment, kept=earlier)
    planner: Planner = import_object(experiment.plan.planner, "the planner")
    planned = planner(experiment if exchange is None else experiment.replaced({"exchange": exchange}), devices, start)
    check_equal([{**planned.settings, "exchange": planned.exchange and planned.exchange.model_dump(mode="json")}])
    label = f", exchange {planned.exchange.label}" if planned.exchange is not None else ""
    for number, line in enumerate((describe(planned.settings) + label, *planned.reasons)):
        start.fact("plan" if number == 0 else "", line)
    notes = () if earlier is None else (f"the layout is planned again: {_describe_change(earlier.made_for, made_for)}",)
    changes = dict(planned.settings)
    if planned.exchange is not None:
        changes["exchange"] = planned.exchange
    kept = Kept(made_for, planned.settings, planned.reasons)
    return ChosenLayout(experiment.replaced(changes), asked=experiment, notes=notes, kept=kept)


def describe(settings: Mapping[str, Any]) -> str:
    """The settings of a plan in a line."""
    mesh = mesh_text({axis: settings.get(f"mesh.{axis}", 1) for axis in AXES})
    others = [
        f"{name.rpartition('.')[2]} {value}"
        for name, value in settings.items()
        if not name.startswith("mesh.") and isinstance(value, int | str)
    ]
    return ", ".join([mesh, *others])


def _conditions(experiment: Experiment, devices: Sequence[Device]) -> dict[str, Any]:
    """What a plan depends on that may change when a run resumes."""
    dumped = experiment.model_dump(mode="json")
    kinds = sorted({str(device.device_kind) for device in devices})
    counts: dict[int, int] = {}
    for device in devices:
        counts[device.process_index] = counts.get(device.process_index, 0) + 1
    asked = {name: dumped[name] for name in ("plan", "mesh", "sharding", "embedding", "batch_size")}
    others = {name: value for name in LAYOUT if (value := _at(dumped, name)) is not None}
    sizes = [part["batch_size"] for part in (*dumped["phases"], dumped["evaluation"])]
    settings = {**without_source(asked), "layout": others, "other_batch_sizes": sizes}
    return {_DEVICES: {"kinds": kinds, "of_each_process": list(counts.values())}, **settings}


def _at(dumped: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted field; None where there is none, such as `model.remat` of a model without it."""
    part, _, field = name.partition(".")
    return dumped[part].get(field)


def _describe_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if before.get(_DEVICES) == now[_DEVICES]:
        return "other settings are given than when the plan was made"
    return f"the run has {_count(now[_DEVICES])}; the plan was made for {_count(before.get(_DEVICES, {}))}"


def _count(devices: Mapping[str, Any]) -> str:
    counts = devices.get("of_each_process", [])
    return f"{sum(counts)} devices ({', '.join(devices.get('kinds', []))}) of {len(counts)} processes"


def check_equal(layouts: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError, on all processes, unless all have these layouts, each the settings of a plan."""
    wait_for_all()  # One may have compiled for longer than Gloo waits.
    every = from_each_process(json.dumps(layouts, sort_keys=True).encode())
    if len(set(every)) > 1:
        raise ConfigError(
            "--plan: the processes made different plans, so their devices or programs differ. Give --plan none, with "
            f"the layout: the first process would have {describe(json.loads(every[0])[0])}."
        )
