"""What a planner has to know of an experiment: what is fixed, the parameters, and what a compiled step says."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxdl.core.config import ConfigError, field_at
from jaxdl.data import TabularSpec
from jaxdl.exchange import Auto, ExchangeConfig
from jaxdl.exchange.base import by_name, leaf_names
from jaxdl.parallel.mesh import BATCH_AXES
from jaxdl.parallel.sharding import has_names, is_names
from jaxdl.performance.planner.choices import PlanTables, RunWorkload
from jaxdl.performance.planner.decoder import decoder_of
from jaxdl.performance.planner.memory import Fit, Parameters
from jaxdl.performance.planner.steptime import Profile
from jaxdl.performance.planner.timed import LocalSteps, StepParts
from jaxdl.performance.planner.trial import (
    Measured,
    Setting,
    exchange_bytes,
    measure_step,
    profile,
    trial_exchange,
)
from jaxdl.performance.planner.trials import Trials, trial_plan
from jaxdl.training.experiment import Experiment
from jaxdl.training.plans import LAYOUT
from jaxdl.training.run.plan.build import Plan
from jaxdl.training.step import Parts


def fixed_fields(experiment: Experiment, keep: Collection[str]) -> dict[str, Any]:
    """The fields of `LAYOUT` that a plan does not change, with their values.

    They are those in `keep`, and those with another value than the default. An axis of the mesh that is -1 is free.
    """
    fixed = {}
    for name in LAYOUT:
        part, _, field = name.partition(".")
        fields = type(getattr(experiment, part)).model_fields
        if field not in fields:
            continue
        value = field_at(experiment, name)
        if (name in keep or value != fields[field].default) and value != -1:
            fixed[name] = value
    return fixed


def list_fields(fixed: Mapping[str, Any]) -> str:
    """What is fixed, in words."""
    return ", ".join(f"{name} {value}" for name, value in fixed.items()) or "nothing"


def no_layout(experiment: Experiment, fixed: Mapping[str, Any], devices: str) -> ConfigError:
    """The error of a search without any candidate."""
    ways = "all devices" if experiment.model.modality == TabularSpec.modality else " x ".join(BATCH_AXES)
    return ConfigError(
        f"no layout: batch_size {experiment.batch_size} (and that of the evaluation) has to be divided by {ways} "
        f"on {devices}, with what is given ({list_fields(fixed)}). Give fewer options (an axis of the mesh that is -1 "
        "is planned), or another --batch-size."
    )


def workload_of(
    experiment: Experiment,
    trials: Trials,
    devices: Sequence[Any],
    nodes: int,
    tables: PlanTables | None = None,
    steps: LocalSteps | None = None,
    *,
    replicas: bool | None = None,
) -> RunWorkload:
    """What is planned of an experiment; steps, those of `trials`, are compiled for `devices`, those of a node.

    With `replicas`, which several nodes have by default, the memory that their exchange needs is that of a compiled
    step of two replicas, if a node has devices for them. Kernels take the times of `steps` that were timed, by remat;
    without them those of the roofline.

    Raises ConfigError where the data is missing, and for settings that no plan is made for.
    """
    if experiment.agreement.keeps_replicas:
        raise ConfigError(
            f"--agreement {experiment.agreement.kind}: the planner knows replicas that agree in every step alone. Plan "
            "with --agreement every_step."
        )
    exchange = experiment.exchange
    if not isinstance(exchange, ExchangeConfig | Auto):
        raise ConfigError(f"exchange {exchange.kind}: the planner does not know what it costs. Choose another one.")
    remat = getattr(experiment.model, "remat", None)
    base = trial_plan(trials, Setting(1, 1, 1, remat, "replicated"), devices)
    profiles = Profiles(trials, devices, experiment.batch_size // (nodes * len(devices)), steps)
    return RunWorkload(
        batch_size=experiment.batch_size,
        parameters=parameters_of(base),
        profiles=profiles.of,
        exchange_bytes=profiles.exchange_bytes if (nodes > 1 if replicas is None else replicas) else lambda *_: None,
        remats=("",) if remat is None else ("none", "dots", "block"),
        sharding=experiment.sharding,
        exchange=exchange,
        measured_exchange=trial_exchange(experiment),
        norm_span=span if isinstance(span := getattr(experiment.model, "norm_span", None), int) else None,
        example_bytes=example_bytes(base),
        decoder=decoder_of(base),
        tables=tables,
        batch_sizes=[phase.batch_size for phase in experiment.phases if phase.batch_size is not None],
        eval_batch_size=experiment.evaluation.batch_size,
        tensor_fits=lambda size: (
            size <= len(devices) and tensor_fits(base.parts, experiment.sharding.tensor_dims, size)
        ),
    )


def parameters_of(plan: Plan) -> Parameters:
    """What the state of a plan has, from its shapes."""
    parts = plan.parts
    axes, trained = parts.trainable.of(parts.network.axes), parts.trainable.of(parts.network.filled.param_shapes)
    size = _bytes(trained)
    shapes = parts.state_spec.shapes
    names = set(leaf_names(trained))
    every = zip(jax.tree.leaves(parts.network.axes, is_leaf=is_names), jax.tree.leaves(shapes.params), strict=True)
    frozen = [leaf for name, leaf in zip(leaf_names(shapes.params), every, strict=True) if name not in names]
    return Parameters(
        axes,
        trained,
        optimizer_copies=_bytes(shapes.opt_state) / max(size, 1),
        average=bool(jax.tree.leaves(shapes.ema_params)),
        other_bytes=_bytes(shapes.model_state),
        frozen=tuple(frozen),
        order=tuple(reversed(list(by_name(trained)))),
    )


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def example_bytes(plan: Plan) -> float:
    """Bytes of an example of a batch."""
    segment = plan.timeline.segments[0]
    batch = plan.sources(segment)[0].batch_shapes(segment.batch_size, evaluating=False)
    return _bytes(batch) / segment.batch_size


def tensor_fits(parts: Parts, dims: Sequence[str], size: int) -> bool:
    """Whether `tensor` of this size divides every named dimension that it is to split."""
    if size == 1:
        return True
    network = parts.network
    if not has_names(network.axes):
        return False
    axes = jax.tree.leaves(network.axes, is_leaf=is_names)
    shapes = jax.tree.leaves(network.filled.param_shapes)
    dim_sizes = [
        number
        for names, x in zip(axes, shapes, strict=True)
        for name, number in zip(names, x.shape, strict=True)
        if name in dims
    ]
    return bool(dim_sizes) and all(number % size == 0 for number in dim_sizes)


class Profiles:
    """Profiles by tensor, remat and sharding; each step is compiled once."""

    def __init__(
        self, trials: Trials, devices: Sequence[Any], most_examples: int, steps: LocalSteps | None = None
    ) -> None:
        """Steps with up to `most_examples` of a device are compiled for the devices of a node."""
        self._devices, self._steps = devices, steps
        self._few = max(1, min(8, most_examples // 2))
        self._has_tables = trials.experiment.model.modality == TabularSpec.modality
        self._compiled = functools.cache(lambda setting: measure_step(trial_plan(trials, setting, devices)))
        self._counted = functools.cache(self._count)

    def of(self, tensor: int, remat: str, param_sharding: str) -> Profile:
        """A profile. Raises ConfigError if XLA cannot compile `tensor`."""
        counted = self._counted(tensor, remat, param_sharding)
        if self._steps is None:
            return counted
        alone = counted if tensor == 1 else self._counted(1, remat, param_sharding)
        parts, (few, _) = self._steps(remat), self._examples(1, remat)
        return with_measured(counted, parts, alone, few, divided=param_sharding == "sharded")

    def exchange_bytes(self, tensor: int, remat: str) -> float | None:
        """See `RunWorkload.exchange_bytes`; None where a node has no devices for two replicas."""
        if 2 * tensor > len(self._devices):
            return None
        few, _ = self._examples(tensor, remat)
        return exchange_bytes(self._compiled, tensor=tensor, remat=remat or None, examples=few)

    def _timed(self, tensor: int, remat: str) -> Mapping[int, Measured]:
        """Examples of a device -> the figures of the steps that are timed, where those tell what is asked."""
        if self._steps is None or tensor > 1 or self._has_tables:  # Those of tables have messages between replicas.
            return {}
        return self._steps.figures(remat)

    def _examples(self, tensor: int, remat: str) -> tuple[int, int]:
        """The two numbers of examples of a device in compiled steps."""
        if timed := self._timed(tensor, remat):
            return min(timed), max(2 * min(timed), *timed)
        # Batches with tables are divided by all devices.
        least = -(-self._few // tensor) * tensor if self._has_tables else self._few
        return least, 2 * least

    def _count(self, tensor: int, remat: str, param_sharding: str) -> Profile:
        timed = self._timed(tensor, remat)

        def measure(setting: Setting) -> Measured:
            alone = setting.fsdp == 1 and setting.examples in timed
            return timed[setting.examples] if alone else self._compiled(setting)

        try:
            return profile(
                measure,
                tensor=tensor,
                most_fsdp=len(self._devices) // tensor,
                remat=remat or None,
                param_sharding=param_sharding,
                examples=self._examples(tensor, remat),
            )
        except jax.errors.JaxRuntimeError as error:
            if tensor == 1:
                raise
            why = str(error).splitlines()[0][:200]
            raise ConfigError(
                f"mesh.tensor {tensor}: XLA does not compile this model's step with it ({why}). Plan with "
                "--mesh.tensor 1."
            ) from None


def with_measured(counted: Profile, parts: StepParts, alone: Profile, examples: int, *, divided: bool) -> Profile:
    """A profile whose kernels take as long as measured ones did, of one device of `fsdp` and `tensor`.

    `alone` is the profile of these. Kernels of another size of `tensor` are as much slower than their least times as
    those of `alone` are, with so many examples. `divided` says whether the update is split over `fsdp`.
    """
    if counted is alone:
        rest = Fit(0.0, parts.rest) if divided else Fit(parts.rest)
        return dataclasses.replace(counted, passes_sec=Fit(parts.microbatch, 0.0, parts.example), other_sec=rest)
    passes = (parts.microbatch + parts.example * examples) / alone.passes_sec.at(1, examples)
    rest = parts.rest / alone.other_sec.at(1, 0)
    return dataclasses.replace(
        counted, passes_sec=counted.passes_sec.scaled(passes), other_sec=counted.other_sec.scaled(rest)
    )
