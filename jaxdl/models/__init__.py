"""Architectures: flax.nnx modules whose parameters carry logical axis names. No mesh, no collectives.

`ResNet`, `AlexNet`, `VGG`, `ViT` and `Transformer` are configs; their `build()` returns a function that makes the
module from random keys. `Network` is such a module, split once into pure functions and trees of arrays.
"""

from jaxdl.models.config import Model
from jaxdl.models.network import Network
from jaxdl.models.plain import VGG, AlexNet
from jaxdl.models.resnet import ResNet
from jaxdl.models.transformer import Transformer
from jaxdl.models.vit import ViT

__all__ = ["VGG", "AlexNet", "Model", "Network", "ResNet", "Transformer", "ViT"]
