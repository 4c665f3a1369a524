"""Data: sources of examples, the order in which they are seen, and the loader that puts batches on the devices.

A data config builds `Splits`: a training and a held-out `Source`. Of images there are `Digits`, `TFDS`, `ImageFolder`,
`ImageTars`, `ImageStream`, `ParquetImages`, `ParquetPhotos` and `SyntheticImages`; of texts `TextFiles`, `Documents`,
`Mixture`, `TextStream`, `Conversations`, `PreferencePairs`, `LabelledTexts`, `Pairs`, `TFDSPairs` and `SyntheticText`,
`SyntheticPairs`, `SyntheticPreferences`; of tables `Table`, `Tabular`, `MovieLens`, `Clicks`, `Criteo`; and `Arrays`.
A source only returns the rows of given examples; `EpochShuffle` chooses
the examples of a step; `TrainLoader` and `eval_batches` read them ahead of the trainer and place them on the
mesh.

Encoded photographs (`Photos`) come from `Records`, local or remote; `Maker` turns them into rows of batches, in the
worker processes of a `Pool`, and keeps what it has read or decoded in `Store`s, the tiers of the cache.
"""

from jaxdl.data.array_spec import ArraySpec
from jaxdl.data.arrays.in_memory import Arrays
from jaxdl.data.codec import Codec
from jaxdl.data.converted import Converted, ConvertedPhotos, Kept
from jaxdl.data.digits import Digits
from jaxdl.data.images.folder import ImageFolder
from jaxdl.data.images.parquet import ParquetImages, ParquetPhotos
from jaxdl.data.images.photos import Cache, Photos, PhotoSource
from jaxdl.data.images.tars import ImageTars
from jaxdl.data.loader import Batches, TrainLoader, eval_batches
from jaxdl.data.order import EpochShuffle
from jaxdl.data.pairs import PairData, Pairs, TFDSPairs
from jaxdl.data.preferences import PreferencePairs
from jaxdl.data.source import Data, ImageArrays, Source, Splits
from jaxdl.data.spec import DataSpec, ImageSpec, TextSpec, spec_from_json, spec_to_json
from jaxdl.data.staging import Stage
from jaxdl.data.streams.image_stream import ImageStream
from jaxdl.data.streams.text_stream import TextStream
from jaxdl.data.synthetic import SyntheticImages, SyntheticText
from jaxdl.data.synthetic_pairs import SyntheticPairs
from jaxdl.data.synthetic_preferences import SyntheticPreferences
from jaxdl.data.tables.clicks import CRITEO_NUM_IDS, CRITEO_ROWS, Clicks
from jaxdl.data.tables.columns import NumbersSpec, Tabular
from jaxdl.data.tables.columns_spec import ColumnsSpec
from jaxdl.data.tables.criteo import Criteo
from jaxdl.data.tables.movielens import MovieLens
from jaxdl.data.tables.row_weights import EXAMPLE_WEIGHT
from jaxdl.data.tables.table import Table
from jaxdl.data.tables.tabular import Feature, TabularArrays, TabularSource, TabularSpec, with_statistics
from jaxdl.data.text.conversations import Conversations
from jaxdl.data.text.corpus import Documents, Mixture
from jaxdl.data.text.labelled_spec import LabelledTextSpec
from jaxdl.data.text.labelled_texts import LabelledTexts
from jaxdl.data.text.pair_rows import PairRows, PairSpec
from jaxdl.data.text.preference_rows import PreferenceRows, PreferenceSpec, PreferenceTokens
from jaxdl.data.text.token_windows import TextFiles, TokenWindows, standard_library_files
from jaxdl.data.tfds import TFDS

__all__ = [
    "CRITEO_NUM_IDS",
    "CRITEO_ROWS",
    "EXAMPLE_WEIGHT",
    "TFDS",
    "ArraySpec",
    "Arrays",
    "Batches",
    "Cache",
    "Clicks",
    "Codec",
    "ColumnsSpec",
    "Conversations",
    "Converted",
    "ConvertedPhotos",
    "Criteo",
    "Data",
    "DataSpec",
    "Digits",
    "Documents",
    "EpochShuffle",
    "Feature",
    "ImageArrays",
    "ImageFolder",
    "ImageSpec",
    "ImageStream",
    "ImageTars",
    "Kept",
    "LabelledTextSpec",
    "LabelledTexts",
    "Mixture",
    "MovieLens",
    "NumbersSpec",
    "PairData",
    "PairRows",
    "PairSpec",
    "Pairs",
    "ParquetImages",
    "ParquetPhotos",
    "PhotoSource",
    "Photos",
    "PreferencePairs",
    "PreferenceRows",
    "PreferenceSpec",
    "PreferenceTokens",
    "Source",
    "Splits",
    "Stage",
    "SyntheticImages",
    "SyntheticPairs",
    "SyntheticPreferences",
    "SyntheticText",
    "TFDSPairs",
    "Table",
    "Tabular",
    "TabularArrays",
    "TabularSource",
    "TabularSpec",
    "TextFiles",
    "TextSpec",
    "TextStream",
    "TokenWindows",
    "TrainLoader",
    "eval_batches",
    "spec_from_json",
    "spec_to_json",
    "standard_library_files",
    "with_statistics",
]
