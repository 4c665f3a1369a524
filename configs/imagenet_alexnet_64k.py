"""AlexNet with batch norm on ImageNet at batch 65,536, 95 epochs, with LARS. Not run here.

TFDS_DATA_DIR=... python -m jaxdl.train --config configs/imagenet_alexnet_64k.py --workdir runs/imagenet_alexnet_64k

Source: Jia et al. (arXiv 1807.11205): batch norm also after the last pooling, no weight decay on biases and batch norm
(worth 1.3 points there), forward and backward pass in float16 with a scaled loss, LARS and the parameters in float32.
The paper's learning rate, warm-up, momentum and weight decay are not known to us; those here are of MLPerf's reference
point for ResNet-50 at this batch, and need tuning. --precision.static keeps the loss scale constant, as the
paper does; its value is not known either.

Expected: top-1 0.587 with the paper's own settings.

Small, on a CPU: --config configs/imagenet_alexnet_64k.py:smoke
"""

from imagenet_common import mlperf, small

from jaxdl.models import AlexNet
from jaxdl.parallel.precision import Float16
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Classification


def config() -> Experiment:
    """The experiment."""
    resnet = mlperf(
        batch_size=65_536,
        learning_rate=24.699,
        warmup_epochs=31,
        momentum=0.951807,
        weight_decay=1e-4,
        decay_steps=1251,
        norm_span=128,
        epochs=95,
    )
    model = AlexNet(norm_span=128, pool5_norm=True)
    return resnet.replaced({"model": model, "precision": Float16(), "task": Classification()})


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
