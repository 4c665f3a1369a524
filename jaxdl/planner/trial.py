"""Steps that are compiled, not run, to learn what a device needs for them."""

from __future__ import annotations

from typing import Any

import jax

from jaxdl.data import SyntheticImages
from jaxdl.experiment import Experiment
from jaxdl.optim import Constant

_IMAGENET_CLASSES = 1000


def resident(experiment: Experiment, image_size: int | None) -> Experiment:
    """The experiment without phases and schedule, and with synthetic images instead of photographs."""
    photos = getattr(experiment.data, "photos", None)
    changes: dict[str, Any] = {
        "epochs": None,
        "tokens": None,
        "steps": 10**6,
        "phases": (),
        "schedule": Constant(),
        "evaluation.norm_batches": None,
        "report.profile_start_step": None,
        "report.profile_steps": 3,
    }
    if photos is not None:
        size = image_size or photos.size
        count = experiment.batch_size
        changes["data"] = SyntheticImages(
            height=size, width=size, num_classes=_IMAGENET_CLASSES, num_train=count, num_test=count
        )
    return experiment.replaced(changes)


def planned_bytes(program: jax.stages.Compiled) -> int | None:
    """The bytes that a device needs for a program, by XLA's plan."""
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    kept = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return kept + analysis.temp_size_in_bytes
