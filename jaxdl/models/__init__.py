"""Architectures: flax.nnx modules whose parameters carry logical axis names.

`ResNet`, `AlexNet`, `VGG`, `ViT`, `Perceptron`, `TableMLP` and `Transformer` are configs; their `build()` returns a
function that makes the module from random keys. `FromModule` and `FromFunctions` take a user's flax module or two
functions as they
are. `preset` makes transformers of published shapes. `Network` is such a module, split once into pure functions and
trees of arrays.
"""

from jaxdl.models.config import Model
from jaxdl.models.encoder import Encoder
from jaxdl.models.encoder_decoder import EncoderDecoder
from jaxdl.models.encoder_presets import encoder_preset
from jaxdl.models.lora import LoRA
from jaxdl.models.moe import MixtureOfExperts
from jaxdl.models.network import Network
from jaxdl.models.own import FromFunctions, FromModule
from jaxdl.models.perceptron import Perceptron
from jaxdl.models.plain import VGG, AlexNet
from jaxdl.models.presets import preset
from jaxdl.models.recommendation import DLRM, DCNv2
from jaxdl.models.resnet import ResNet
from jaxdl.models.rotary import RopeScaling
from jaxdl.models.table_mlp import TableMLP
from jaxdl.models.transformer import Transformer
from jaxdl.models.vit import ViT

__all__ = [
    "DLRM",
    "VGG",
    "AlexNet",
    "DCNv2",
    "Encoder",
    "EncoderDecoder",
    "FromFunctions",
    "FromModule",
    "LoRA",
    "MixtureOfExperts",
    "Model",
    "Network",
    "Perceptron",
    "ResNet",
    "RopeScaling",
    "TableMLP",
    "Transformer",
    "ViT",
    "encoder_preset",
    "preset",
]
