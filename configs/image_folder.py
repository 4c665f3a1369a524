"""Photographs in a folder, a class in each of its folders: a ResNet-18 learns them from nothing. Two commands:

python -m jaxdl.train --config configs/image_folder.py --data.folder my/photos --workdir runs/mine
python -m jaxdl.predict --workdir runs/mine new/photo.jpg

The folder has train/cat/1.jpg and val/cat/2.jpg (or valid, validation, test), or cat/1.jpg alone; then a fifth is held
out (--data.test-fraction). Before the first, `python -m jaxdl.data prepare` with the same config and folder reads each
photograph once, says which cannot be read, and fills the cache, so that the first epoch is as fast as the others.

It is for a few hundred to 100,000 photographs on a laptop or on GPUs: 60 epochs of images of 128 pixels. With fewer
than a thousand take --epochs 200, with more than 20,000 --epochs 30; on GPUs --model.width 64, --data.photos.size 176
and --precision bfloat16 cost little. With a network that was trained before, far fewer photographs are enough:
configs/image_folder_pretrained.py.

Expected: top-1 0.95 after 30 epochs of 240 crops of 12 photographs (of the stand-in of configs/photographs.py), a fifth
of which is held out. Logistic regression on 16 x 16 pixels gets 0.70 of the same.
"""

from jaxdl.data import Cache, ImageFolder, Photos
from jaxdl.models import ResNet
from jaxdl.optim import SGD, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Classification


def config() -> Experiment:
    """The experiment."""
    cache = Cache(short_side=192, disk="runs/cache", disk_bytes=2**35)
    return Experiment(
        data=ImageFolder(photos=Photos(size=128, min_scale=0.25, policy="trivial", cache=cache)),
        model=ResNet(depth=18, width=32),
        task=Classification(label_smoothing=0.1),
        optimizer=SGD(learning_rate=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=Cosine(warmup_epochs=2),
        batch_size=32,
        epochs=60,
        evaluation=EvaluationConfig(every_epochs=5, batch_size=64),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=2)),
    )


def smoke() -> Experiment:
    """Small, on a CPU: it shows that all fits together."""
    return config().replaced(
        {
            "model.width": 8,
            "data.photos": Photos(size=32, workers=0),
            "epochs": 2.0,
            "schedule.warmup_epochs": 0.5,
            "evaluation.every_epochs": 1.0,
        }
    )
