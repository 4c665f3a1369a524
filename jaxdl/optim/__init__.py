"""Optimizers and learning-rate schedules: small optax transformations and the configs that chain them.

An optimizer config (`SGD`, `AdamW`, `LARS`, `LAMB`) holds the peak learning rate; a schedule config (`Constant`,
`Linear`, `Cosine`, `Polynomial`, `Steps`) holds its course. Trust ratios are taken layer by layer, also when a model
keeps its layers stacked in one array, and stay off biases and normalization unless a config says otherwise.
"""

from jaxdl.optim.layerwise import add_weight_decay, scale_by_lamb_trust_ratio, scale_by_lars_trust_ratio
from jaxdl.optim.masks import decay_mask, num_stacked_dims
from jaxdl.optim.momentum import Momentum
from jaxdl.optim.optimizers import LAMB, LARS, SGD, AdamW, momentum_course
from jaxdl.optim.schedules import Constant, Cosine, Cycle, LearningRate, Linear, Polynomial, Steps

OptimizerConfig = SGD | AdamW | LARS | LAMB
"""The choice of an optimizer; every member has `build(learning_rate, axes, cycle) -> optax.GradientTransformation`."""

ScheduleConfig = Constant | Linear | Cosine | Polynomial | Steps
"""The choice of a schedule; every member has `build(peak=, total_steps=, steps_per_epoch=) -> LearningRate` and
`cycle(total_steps=, steps_per_epoch=) -> Cycle`."""

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "AdamW",
    "Constant",
    "Cosine",
    "Cycle",
    "LearningRate",
    "Linear",
    "Momentum",
    "OptimizerConfig",
    "Polynomial",
    "ScheduleConfig",
    "Steps",
    "add_weight_decay",
    "decay_mask",
    "momentum_course",
    "num_stacked_dims",
    "scale_by_lamb_trust_ratio",
    "scale_by_lars_trust_ratio",
]
