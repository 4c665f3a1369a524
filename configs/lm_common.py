"""The common part of the language model configs; it is not an experiment."""

from jaxdl.data import TextFiles
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.precision import Float32
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment

MESH = MeshConfig(without_gpus=MeshConfig(cpu_devices=2))
"""All GPUs; several nodes: --mesh.replica NODES. Without GPUs two virtual CPU devices."""


def small(experiment: Experiment) -> Experiment:
    """The experiment shortened to half a minute on a CPU: a small network, bytes of Python's own standard library.

    It tests that the parts fit together, not quality.
    """
    changes: dict[str, object] = {
        "model.num_layers": 2,
        "model.embed_dim": 64,
        "model.num_heads": 4,
        "model.mlp_dim": 128,
        "model.vocab_size": None,
        "data": TextFiles(length=64, max_bytes=200_000),
        "precision": Float32(),
        "schedule.warmup_steps": 5,
        "step.microbatches": 1,
        "batch_size": 8,
        "steps": 30,
        "evaluation": EvaluationConfig(every_steps=15, batch_size=8),
        "mesh": MeshConfig(cpu_devices=2),
    }
    return experiment.replaced(changes)
