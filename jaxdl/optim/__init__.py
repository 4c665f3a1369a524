"""Optimizers and learning-rate schedules: small optax transformations and the configs that chain them.

An optimizer config (`SGD`, `AdamW`, `LARS`, `LAMB`) holds the peak learning rate; a schedule config (`Constant`,
`Linear`, `Cosine`, `Polynomial`, `Steps`) its shape. Trust ratios are per layer, also in a stack of layers in one
array, and exclude biases and normalization unless a config says otherwise.
"""

from jaxdl.optim.layerwise import add_weight_decay, scale_by_lars_trust_ratio
from jaxdl.optim.masks import decay_mask, num_stacked_dims
from jaxdl.optim.optimizers import LAMB, LARS, SGD, AdamW, Optimizer
from jaxdl.optim.rates import Rates, num_updates, scale_by_learning_rate
from jaxdl.optim.schedules import Constant, Cosine, Linear, Polynomial, Schedule, Steps

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "AdamW",
    "Constant",
    "Cosine",
    "Linear",
    "Optimizer",
    "Polynomial",
    "Rates",
    "Schedule",
    "Steps",
    "add_weight_decay",
    "decay_mask",
    "num_stacked_dims",
    "num_updates",
    "scale_by_lars_trust_ratio",
    "scale_by_learning_rate",
]
