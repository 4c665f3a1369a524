"""Architectures: flax.nnx modules whose parameters carry logical axis names. No mesh, no collectives.

`ResNet` and `Transformer` are configs; their `build()` returns a function that makes the module from random keys.
`Network` is such a module split once into a pure function and trees of plain arrays.
"""

from jaxdl.models.network import Network
from jaxdl.models.resnet import ResNet
from jaxdl.models.transformer import Transformer

__all__ = ["Network", "ResNet", "Transformer"]
