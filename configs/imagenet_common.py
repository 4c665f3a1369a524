"""The common part of the ImageNet configs; it is not an experiment.

They read `imagenet2012` of TensorFlow Datasets, prepared as ArrayRecord files in TFDS_DATA_DIR (docs/howto/images.md).
"""

from jaxdl.data import TFDS, Photos
from jaxdl.data.phases import Phase
from jaxdl.models import ResNet, ViT
from jaxdl.optim import LARS, Polynomial
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.precision import BFloat16, Float32
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Classification

EXAMPLES = 1_281_167
"""Images to train on."""

REPLICATED = ShardingConfig(param_sharding="replicated", update_sharding="sharded")
"""For networks that fit into a GPU many times over: parameters on each, the update split over the GPUs of a node."""

MESH = MeshConfig(without_gpus=MeshConfig(cpu_devices=2))
"""All GPUs; several nodes: --mesh.replica NODES. Without GPUs two virtual CPU devices."""


def imagenet(**photos: object) -> TFDS:
    """ImageNet, with `photos` as the fields of `Photos`.

    Its `test` split, where there is one, has no labels. For a data set on a slow disk add a cache:
    --data.photos.cache.memory-bytes, --data.photos.cache.disk.
    """
    return TFDS(name="imagenet2012", test_split="validation", photos=Photos(**photos))  # pyright: ignore[reportArgumentType]


def mlperf(
    *,
    batch_size: int,
    learning_rate: float,
    warmup_epochs: int,
    momentum: float,
    weight_decay: float,
    decay_steps: int,
    norm_span: int,
    epochs: int,
) -> Experiment:
    """ResNet-50 v1.5 with LARS, by a row of MLPerf's reference convergence points (closed division, target 0.759).

    The rules and the reference determine the rest: trust coefficient 0.001, no trust ratio and no weight decay on
    biases and batch norm, the rate falling by a power of 2 to 1e-4, label smoothing of 0.1 (or none), batch norm over
    `norm_span` images. `epochs` is the length of `decay_steps` and the warm-up. The reference's first step has a
    learning rate of 0; jaxdl's has that of its second.
    """
    return Experiment(
        data=imagenet(),
        model=ResNet(depth=50, norm_span=norm_span),
        task=Classification(label_smoothing=0.1),
        optimizer=LARS(learning_rate=learning_rate, momentum=momentum, weight_decay=weight_decay),
        schedule=Polynomial(
            warmup_epochs=warmup_epochs,
            power=2,
            # In epochs, so that the schedule stays the same at another batch size.
            decay_epochs=decay_steps * batch_size / EXAMPLES,
            end_fraction=1e-4 / learning_rate,
        ),
        precision=BFloat16(),
        batch_size=batch_size,
        epochs=epochs,
        evaluation=EvaluationConfig(every_epochs=4, batch_size=2048),
        mesh=MESH,
        sharding=REPLICATED,
    )


def small(experiment: Experiment) -> Experiment:
    """The experiment shortened to a minute on a CPU: small network, small images, 2 epochs or phases of 1 epoch.

    For the stand-in data set of 384 images, or any other `imagenet2012`. It tests that the parts fit together, not
    accuracy.
    """
    is_resnet, is_vit = isinstance(experiment.model, ResNet), isinstance(experiment.model, ViT)
    tiny: dict[str, object] = {"width": 8} if is_resnet else {"size": "tiny", "num_layers": 2} if is_vit else {}
    tiny = tiny or {"width": 0.125}
    if isinstance(getattr(experiment.model, "norm_span", None), int):
        tiny["norm_span"] = 16
    size = 32 if is_resnet or is_vit else 96
    photos = {"data.photos.size": size, "data.photos.eval_size": None, "data.photos.workers": 0}
    schedule: dict[str, object] = {
        f"schedule.{name}": None for name in ("warmup_steps", "decay_epochs") if _is_set(experiment, name)
    }
    if hasattr(experiment.schedule, "milestones_epochs"):
        schedule["schedule.milestones_epochs"] = (1.0, 1.5)
    changes: dict[str, object] = {
        **{f"model.{name}": value for name, value in tiny.items()},
        **photos,
        **schedule,
        "schedule.warmup_epochs": 0.5,
        "precision": Float32(),
        "mesh": MeshConfig(cpu_devices=2),
        "batch_size": 32,
        "evaluation.batch_size": 32,
        "step.microbatches": 1,
        "optimizer.learning_rate": min(experiment.optimizer.learning_rate, 1.0),
        "data.train_split": "train",
    }
    if experiment.phases:
        parts = [phase.size // 3 // 8 * 8 for phase in experiment.phases]
        halves = [16 if phase.batch_size else None for phase in experiment.phases]
        changes["phases"] = tuple(
            Phase(epochs=1, size=size, batch_size=half, min_scale=phase.min_scale)
            for size, half, phase in zip(parts, halves, experiment.phases, strict=True)
        )
    else:
        changes |= {"epochs": 2.0, "steps": None, "evaluation.every_epochs": 1.0}
    return experiment.replaced(changes)


def _is_set(experiment: Experiment, name: str) -> bool:
    return getattr(experiment.schedule, name, None) is not None
