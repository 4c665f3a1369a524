"""Fashion-MNIST (28 x 28 pixels, 60,000 + 10,000 images, through TensorFlow Datasets): a small ResNet.

TFDS_DATA_DIR=... python -m jaxdl.train --config configs/fashion_mnist.py --workdir runs/fashion_mnist

Expect: test accuracy 0.922 after 10 epochs. Time: about 2 minutes on 2 CPU cores. `tfds build fashion_mnist
--file_format=array_record` prepares the data (that needs TensorFlow; reading it does not).
"""

from jaxdl.data import TFDS
from jaxdl.models import ResNet
from jaxdl.optim import SGD, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Classification


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        data=TFDS(name="fashion_mnist"),
        model=ResNet(depth=8, width=16, stem="patch2"),
        task=Classification(augment="flip"),
        optimizer=SGD(learning_rate=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=Cosine(warmup_epochs=0.5),
        batch_size=256,
        epochs=10,
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=2)),
    )
