"""ResNet-50 on ImageNet with LARS at batch 8,192: MLPerf's reference convergence point. Not run here.

TFDS_DATA_DIR=... python -m jaxdl.train --config configs/imagenet_resnet50_lars_8k.py --workdir runs/lars_8k

Source: the row of batch 8192 in mlcommons/logging, mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json; see
`imagenet_common.mlperf` for the values common to all rows.

Expected: top-1 0.759 after about 42 of the 44 epochs (the mean of the reference's runs).

Small, on a CPU: --config configs/imagenet_resnet50_lars_8k.py:smoke
"""

from imagenet_common import mlperf, small

from jaxdl.training.experiment import Experiment


def config() -> Experiment:
    """The experiment."""
    return mlperf(
        batch_size=8192,
        learning_rate=17.0,
        warmup_epochs=5,
        momentum=0.9,
        weight_decay=2e-4,
        decay_steps=6095,
        norm_span=64,
        epochs=44,
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
