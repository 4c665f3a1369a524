"""ResNet-50 on ImageNet with LARS at batch 32,768: MLPerf's reference convergence point. Not run here.

TFDS_DATA_DIR=... python -m jaxdl.train --config configs/imagenet_resnet50_lars_32k.py --workdir runs/lars_32k

Source: the row of batch 32768 in mlcommons/logging, mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json; see
`imagenet_common.mlperf` for the values common to all rows.

Expected: top-1 0.759 after about 56 of the 74 epochs (the mean of the reference's runs).

Small, on a CPU: --config configs/imagenet_resnet50_lars_32k.py:smoke
"""

from imagenet_common import mlperf, small

from jaxdl.training.experiment import Experiment


def config() -> Experiment:
    """The experiment."""
    return mlperf(
        batch_size=32768,
        learning_rate=21.2,
        warmup_epochs=16,
        momentum=0.94,
        weight_decay=2.5e-5,
        decay_steps=2267,
        norm_span=128,
        epochs=74,
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
