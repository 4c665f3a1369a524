"""Steps of replicas that have parameters of their own, and the merges between them."""

from jaxdl.training.rounds.evaluation import make_own_eval_step
from jaxdl.training.rounds.local import make_joint_step, make_local_step
from jaxdl.training.rounds.merge import make_merge, make_settle
from jaxdl.training.rounds.programs import RoundSteps, lowered_programs, make_streamed

__all__ = [
    "RoundSteps",
    "lowered_programs",
    "make_joint_step",
    "make_local_step",
    "make_merge",
    "make_own_eval_step",
    "make_settle",
    "make_streamed",
]
