"""ResNet-50 on ImageNet with LARS at batch 4,096: MLPerf's reference convergence point. Not run here.

TFDS_DATA_DIR=... python -m jaxdl.train --config configs/imagenet_resnet50_lars_4k.py --workdir runs/lars_4k

Source: the row of batch 4096 in mlcommons/logging, mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json; see
`imagenet_common.mlperf` for the values common to all rows.

Expected: top-1 0.759 after about 40 of the 47 epochs (the mean of the reference's runs).

Small, on a CPU: --config configs/imagenet_resnet50_lars_4k.py:smoke
"""

from imagenet_common import mlperf, small

from jaxdl.training.experiment import Experiment


def config() -> Experiment:
    """The experiment."""
    return mlperf(
        batch_size=4096,
        learning_rate=10.0,
        warmup_epochs=5,
        momentum=0.9,
        weight_decay=2e-4,
        decay_steps=13137,
        norm_span=64,
        epochs=47,
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
