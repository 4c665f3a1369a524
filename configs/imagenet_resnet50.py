"""ResNet-50 on ImageNet, batch 1,024, 90 epochs: the baseline of large-batch work. Not run here.

TFDS_DATA_DIR=... python -m jaxdl.train --config configs/imagenet_resnet50.py --workdir runs/imagenet_resnet50

Source: Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677): learning rate 0.1 for every 256 images, 5
epochs of warm-up, divided by 10 at epochs 30, 60 and 80, momentum 0.9, weight decay 1e-4 off batch norm, the last batch
norm of each block initialized to zero, statistics over the images of one GPU. They used batches up to 8,192 without
loss of accuracy: --batch-size 8192 --optimizer.learning-rate 3.2.

Expected: top-1 about 0.76. Published for the same network: 0.7613 (torchvision's documentation of the
IMAGENET1K_V1 weights); 0.7637 to 0.7672, and 0.7627 in mixed precision (google/flax, examples/imagenet/README.md: 100
epochs with a cosine).

Small, on a CPU: --config configs/imagenet_resnet50.py:smoke
"""

from imagenet_common import MESH, REPLICATED, imagenet, small

from jaxdl.models import ResNet
from jaxdl.optim import SGD, Steps
from jaxdl.parallel.precision import BFloat16
from jaxdl.training.experiment import Experiment


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        data=imagenet(),
        model=ResNet(depth=50, norm_span=32),
        optimizer=SGD(learning_rate=0.4, momentum=0.9, weight_decay=1e-4),
        schedule=Steps(warmup_epochs=5, milestones_epochs=(30, 60, 80)),
        precision=BFloat16(),
        batch_size=1024,
        epochs=90,
        mesh=MESH,
        sharding=REPLICATED,
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
