"""The experiment of demo.py: a small MLP on scikit-learn's digits, on one device of each of some nodes.

Its mesh is no part of the model, as it would be with batch norm, whose statistics are of one replica's batch.
"""

import jax
import jax.numpy as jnp

from jaxdl.data import Digits
from jaxdl.models import FromFunctions
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import ReportConfig
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Classification

EVERY_STEPS = 10
"""Steps between two checkpoints."""


def init(key: jax.Array, image: jax.Array, num_classes: int) -> dict[str, jax.Array]:
    """The parameters of the MLP 64-64-64-10."""
    sizes = [image[0].size, 64, 64, num_classes]
    params = {}
    for number, (layer_key, rows, columns) in enumerate(
        zip(jax.random.split(key, 3), sizes[:-1], sizes[1:], strict=True)
    ):
        params[f"weight_{number}"] = jax.random.normal(layer_key, (rows, columns)) * (2 / rows) ** 0.5
        params[f"bias_{number}"] = jnp.zeros(columns)
    return params


def apply(params: dict[str, jax.Array], image: jax.Array) -> jax.Array:
    """The logits."""
    x = image.reshape(image.shape[0], -1)
    for number in range(2):
        x = jax.nn.relu(x @ params[f"weight_{number}"] + params[f"bias_{number}"])
    return x @ params["weight_2"] + params["bias_2"]


def config() -> Experiment:
    """The experiment; the length of the run and the number of replicas are given on the command line."""
    return Experiment(
        data=Digits(),
        model=FromFunctions(init=init, apply=apply),
        task=Classification(),
        optimizer=SGD(learning_rate=0.05, momentum=0.9),
        schedule=Constant(),
        batch_size=48,
        steps=60,
        mesh=MeshConfig(fsdp=1, cpu_devices=1),
        checkpoint=CheckpointConfig(every_steps=EVERY_STEPS),
        report=ReportConfig(every_steps=1, tensorboard=False, curves=False),
    )
