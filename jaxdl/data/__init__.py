"""Data: sources of examples, the order in which they are seen, and the loader that puts batches on the devices.

A data config (`Digits`, `TFDS`, `TextFiles`, `SyntheticImages`, `SyntheticText`) builds `Splits`: a training and a
held-out `Source`. A source answers "the rows of these examples" and nothing else; `EpochShuffle` says which examples
make up a step; `TrainLoader` and `eval_batches` read them ahead of the trainer and place them on the mesh.
"""

from jaxdl.data.codec import Codec
from jaxdl.data.digits import Digits
from jaxdl.data.loader import Batches, TrainLoader, eval_batches
from jaxdl.data.order import EpochShuffle
from jaxdl.data.source import ImageArrays, ImageSpec, Source, Splits, TextSpec, spec_from_json, spec_to_json
from jaxdl.data.synthetic import SyntheticImages, SyntheticText
from jaxdl.data.text import TextFiles, TokenWindows, standard_library_files
from jaxdl.data.tfds import TFDS

DataConfig = Digits | TFDS | TextFiles | SyntheticImages | SyntheticText
"""The choice of a data set; every member has `build() -> Splits`."""

__all__ = [
    "TFDS",
    "Batches",
    "Codec",
    "DataConfig",
    "Digits",
    "EpochShuffle",
    "ImageArrays",
    "ImageSpec",
    "Source",
    "Splits",
    "SyntheticImages",
    "SyntheticText",
    "TextFiles",
    "TextSpec",
    "TokenWindows",
    "TrainLoader",
    "eval_batches",
    "spec_from_json",
    "spec_to_json",
    "standard_library_files",
]
