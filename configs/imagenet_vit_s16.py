"""ViT-S/16 on ImageNet, 90 epochs: a modern network without batch norm, for comparison. Not run here.

TFDS_DATA_DIR=... python -m jaxdl.train --config configs/imagenet_vit_s16.py --workdir runs/imagenet_vit_s16

Source: Beyer et al., "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580), as in big_vision's
configs/vit_s16_i1k.py: Adam at 0.001, 10,000 steps of warm-up and a cosine, gradients clipped at norm 1, RandAugment
of 2 operations at full strength (their 10 of 10, 30 of 30 here), crops of 5 % and more, Mixup 0.2, 99 % of the training
images. Their weight decay of 0.0001 is not multiplied by the learning rate; here it is, so it is 0.1. Their head has a
layer with tanh before the linear one; here it is linear.

Expected: top-1 0.765.

Small, on a CPU: --config configs/imagenet_vit_s16.py:smoke
"""

from imagenet_common import MESH, imagenet, small

from jaxdl.models import ViT
from jaxdl.optim import AdamW, Cosine
from jaxdl.parallel.precision import BFloat16
from jaxdl.training.experiment import Experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Classification


def config() -> Experiment:
    """The experiment."""
    grey = (127.5, 127.5, 127.5)
    data = imagenet(policy="rand", policy_operations=2, policy_magnitude=30, min_scale=0.05, mean=grey, std=grey)
    return Experiment(
        data=data.model_copy(update={"train_split": "train[:99%]"}),
        model=ViT(size="small", patch=16),
        task=Classification(mixup=0.2),
        optimizer=AdamW(learning_rate=1e-3, weight_decay=0.1),
        schedule=Cosine(warmup_steps=10_000),
        precision=BFloat16(),
        batch_size=1024,
        epochs=90,
        step=StepConfig(clip_norm=1.0),
        mesh=MESH,
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
