"""One training step: a single jitted function of `(state, batch)`."""

from jaxdl.training.step.gradients import local_gradients, one_replica_params, own_param_specs
from jaxdl.training.step.network import apply_network, run_network
from jaxdl.training.step.parts import Batch, Metrics, Parts, StepConfig, Sums, TrainStep
from jaxdl.training.step.pipeline import pipelined_sums, split
from jaxdl.training.step.program import gradient_names, make_ahead_step, make_train_step, make_update
from jaxdl.training.step.reference import with_reference
from jaxdl.training.step.stage import num_stages
from jaxdl.training.step.update import choose_state, ema_decay, nonzero, update_state

__all__ = [
    "Batch",
    "Metrics",
    "Parts",
    "StepConfig",
    "Sums",
    "TrainStep",
    "apply_network",
    "choose_state",
    "ema_decay",
    "gradient_names",
    "local_gradients",
    "make_ahead_step",
    "make_train_step",
    "make_update",
    "nonzero",
    "num_stages",
    "one_replica_params",
    "own_param_specs",
    "pipelined_sums",
    "run_network",
    "split",
    "update_state",
    "with_reference",
]
