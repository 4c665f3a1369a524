"""ResNet-50 on ImageNet with LARS at batch 65,536: MLPerf's reference convergence point. Not run here.

TFDS_DATA_DIR=... python -m jaxdl.train --config configs/imagenet_resnet50_lars_64k.py --workdir runs/lars_64k

Source: the row of batch 65536 in mlcommons/logging, mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json; see
`imagenet_common.mlperf` for the values common to all rows.

Expected: top-1 0.759 after about 85 of the 89 epochs (the mean of the reference's runs).

Small, on a CPU: --config configs/imagenet_resnet50_lars_64k.py:smoke
"""

from imagenet_common import mlperf, small

from jaxdl.training.experiment import Experiment


def config() -> Experiment:
    """The experiment."""
    return mlperf(
        batch_size=65536,
        learning_rate=24.699,
        warmup_epochs=31,
        momentum=0.951807,
        weight_decay=1e-4,
        decay_steps=1133,
        norm_span=128,
        epochs=89,
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
