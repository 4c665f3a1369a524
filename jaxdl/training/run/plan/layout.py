"""The layout of a run that a planner chooses when the run begins, and how it is kept in the workdir."""

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
from jaxdl.parallel.mesh import Axis, Device
from jaxdl.report import Start
from jaxdl.training.experiment import Experiment
from jaxdl.training.plans import LAYOUT
from jaxdl.training.run.workdir.kept_layout import Kept

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


def with_plan(
    experiment: Experiment,
    devices: Sequence[Device] | None,
    chosen: Callable[[], ExchangeConfig | None],
    stored: Callable[[], Kept | None] | None,
    start: Start,
) -> tuple[Experiment, tuple[str, ...], Kept | None]:
    """The experiment with its layout planned, if it asks for that; notes for the user, and what to keep.

    The plan that `stored` returns is taken again where it was made for such devices and settings. `chosen` returns the
    exchange that was chosen earlier, which stays. Raises ConfigError for what cannot be planned, on all processes.
    """
    if not experiment.plan.planner:
        return experiment, (), None
    if stored is None:
        raise ConfigError(f"--plan {experiment.plan.kind}: only a training run plans. Leave it out.")
    with start.doing("starting the devices"):
        start_devices(
            experiment.mesh, experiment.cluster, experiment=without_source(experiment.model_dump(mode="json"))
        )
    found = list(jax.devices() if devices is None else devices)
    made_for, earlier = _made_for(experiment, found), stored()
    before = chosen() if isinstance(experiment.exchange, Auto) else None
    if earlier is not None and earlier.made_for == made_for:
        start.fact("plan", f"{described(earlier.settings)}, as planned when the run began on these devices")
        return experiment.replaced(earlier.settings), (), earlier
    planner: Planner = import_object(experiment.plan.planner, "the planner")
    planned = planner(experiment if before is None else experiment.replaced({"exchange": before}), found, start)
    check_equal([{**planned.settings, "exchange": planned.exchange and planned.exchange.model_dump(mode="json")}])
    exchange = f", exchange {planned.exchange.label}" if planned.exchange is not None else ""
    for number, line in enumerate((described(planned.settings) + exchange, *planned.reasons)):
        start.fact("plan" if number == 0 else "", line)
    notes = () if earlier is None else (f"the layout is planned again: {_changed(earlier.made_for, made_for)}",)
    changes = dict(planned.settings)
    if planned.exchange is not None:
        changes["exchange"] = planned.exchange
    return experiment.replaced(changes), notes, Kept(made_for, planned.settings, planned.reasons)


def described(settings: Mapping[str, Any]) -> str:
    """The settings of a plan in a line."""
    mesh = [f"{name} {settings[f'mesh.{name}']}" for name in (axis.value for axis in Axis)]
    others = [
        f"{name.rpartition('.')[2]} {value}"
        for name, value in settings.items()
        if not name.startswith("mesh.") and isinstance(value, int | str)
    ]
    return ", ".join([" x ".join(mesh), *others])


def _made_for(experiment: Experiment, devices: Sequence[Device]) -> dict[str, Any]:
    """What a plan depends on that may change when a run resumes."""
    dumped = experiment.model_dump(mode="json")
    kinds = sorted({str(one.device_kind) for one in devices})
    counts: dict[int, int] = {}
    for one in devices:
        counts[one.process_index] = counts.get(one.process_index, 0) + 1
    asked = {name: dumped[name] for name in ("plan", "mesh", "sharding", "embedding", "batch_size")}
    others = {name: value for name in LAYOUT if (value := _at(dumped, name)) is not None}
    sizes = [one["batch_size"] for one in (*dumped["phases"], dumped["evaluation"])]
    found = {**without_source(asked), "layout": others, "other_batch_sizes": sizes}
    return {_DEVICES: {"kinds": kinds, "of_each_process": list(counts.values())}, **found}


def _at(dumped: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted field; None where there is none, such as `model.remat` of a model without it."""
    part, _, field = name.partition(".")
    return dumped[part].get(field)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if before.get(_DEVICES) == now[_DEVICES]:
        return "other settings are given than when the plan was made"
    return f"the run has {_counted(now[_DEVICES])}; the plan was made for {_counted(before.get(_DEVICES, {}))}"


def _counted(devices: Mapping[str, Any]) -> str:
    counts = devices.get("of_each_process", [])
    return f"{sum(counts)} devices ({', '.join(devices.get('kinds', []))}) of {len(counts)} processes"


def check_equal(layouts: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError, on all processes, unless all have these layouts, each the settings of a plan."""
    wait_for_all()  # One may have compiled for longer than Gloo waits.
    every = from_each_process(json.dumps(layouts, sort_keys=True).encode())
    if len(set(every)) > 1:
        raise ConfigError(
            "--plan: the processes made different plans, so their devices or programs differ. Give --plan none, with "
            f"the layout: the first process would have {described(json.loads(every[0])[0])}."
        )
