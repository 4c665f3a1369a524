"""ResNet-50 on ImageNet in 28 epochs, the recipe of the fastest entry of DAWNBench. Not run here.

python scripts/reproduce_dawnbench.py --data-dir ... --nodes 16 --gpus-per-node 8

Source: Alibaba Cloud's entry of 2020-03-17 (16 x 8 V100, 32 Gb/s; stanford-futuredata/dawn-bench-entries,
ImageNet/train/alibabacloud_resnet50_gn6e_16_machine_tensorflow.json): images of 96, 128, 224 and 288 pixels, LARS with
bounded trust ratios, Nesterov momentum cycled against the learning rate, label smoothing, mixed precision. The last
epoch has half the batch, and here half the learning rate. The entry evaluates the last epoch on whole, rectangular
images; here it is their centre, 288 x 288. It does not state the batch of its batch norm; here it is 256 images,
those of one of its GPUs. On fewer GPUs add --step.microbatches, as the script does. Left out are a "rectified
adaptive lr" of LARS, crops that show 15 % of an object, and a blacklist, which the entry's file names without
explanation.

Expected: top-5 0.9304 and top-1 0.7575 after the last epoch; theirs took 157.6 s.

Small, on a CPU: --config configs/imagenet_resnet50_dawnbench.py:smoke, or scripts/reproduce_dawnbench.py --rehearse
"""

from imagenet_common import MESH, REPLICATED, imagenet, small

from jaxdl.data.phases import Phase
from jaxdl.models import ResNet
from jaxdl.optim import LARS, Linear
from jaxdl.parallel.precision import BFloat16
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Classification


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        data=imagenet(min_scale=0.11),
        model=ResNet(depth=50, norm_span=256),
        task=Classification(label_smoothing=0.1),
        optimizer=LARS(
            learning_rate=25.0,
            momentum=0.98,
            momentum_at_peak=0.9,
            nesterov=True,
            weight_decay=1e-4,
            trust_coefficient=0.0008,
            trust_ratio_clip=(1e-5, 1.0),
        ),
        schedule=Linear(warmup_epochs=14, end_fraction=0.2 / 25),
        precision=BFloat16(),
        batch_size=32_768,
        phases=(
            Phase(epochs=13, size=96),
            Phase(epochs=11, size=128),
            Phase(epochs=3, size=224),
            Phase(epochs=1, size=288, batch_size=16_384, min_scale=0.5),
        ),
        evaluation=EvaluationConfig(every_epochs=1, batch_size=4096),
        mesh=MESH,
        sharding=REPLICATED,
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
