"""Optimizers and learning-rate schedules: small optax transformations and the configs that chain them.

An optimizer config (`SGD`, `AdamW`, `SignSGD`, `Muon`, `LARS`, `LAMB`, or `Optax` for all others) holds the peak
learning rate; a schedule config (`Constant`, `Linear`, `Cosine`, `InverseSqrt`, `Polynomial`, `Steps`, `WSD`) its
shape. Trust ratios are per layer, also in a stack of layers in one array, and exclude biases and normalization unless a
config says otherwise.
"""

from jaxdl.optim.averages import average_params, keeps_average
from jaxdl.optim.build import build_schedule, check_average, check_rates, make_optimizer
from jaxdl.optim.freezing import EVERYTHING, Trainable, make_trainable, param_names
from jaxdl.optim.layerwise import add_weight_decay, scale_by_lars_trust_ratio
from jaxdl.optim.masks import decay_mask, stacked_dims
from jaxdl.optim.muon import Muon
from jaxdl.optim.optimizers import LAMB, LARS, SGD, AdamW, Optimizer, SignSGD
from jaxdl.optim.own import Optax
from jaxdl.optim.rates import Rates, num_updates, scale_by_learning_rate
from jaxdl.optim.schedules import WSD, Constant, Cosine, InverseSqrt, Linear, Polynomial, Schedule, Steps, noam_peak

__all__ = [
    "EVERYTHING",
    "LAMB",
    "LARS",
    "SGD",
    "WSD",
    "AdamW",
    "Constant",
    "Cosine",
    "InverseSqrt",
    "Linear",
    "Muon",
    "Optax",
    "Optimizer",
    "Polynomial",
    "Rates",
    "Schedule",
    "SignSGD",
    "Steps",
    "Trainable",
    "add_weight_decay",
    "average_params",
    "build_schedule",
    "check_average",
    "check_rates",
    "decay_mask",
    "keeps_average",
    "make_optimizer",
    "make_trainable",
    "noam_peak",
    "num_updates",
    "param_names",
    "scale_by_lars_trust_ratio",
    "scale_by_learning_rate",
    "stacked_dims",
]
