"""Encoders of published shapes, by name: `--model bert-base`, or `encoder_preset("bert-base")` in a config file.

Shapes are those of the published configuration files (`config.json` of google-bert/bert-base-uncased and
bert-large-uncased, FacebookAI/roberta-base and roberta-large, distilbert/distilbert-base-uncased,
answerdotai/ModernBERT-base and ModernBERT-large); the vocabulary is that of the data.
"""

from __future__ import annotations

import functools
import typing
from typing import Any, Literal

from jaxdl.models.config import Model
from jaxdl.models.encoder import Encoder

EncoderName = Literal[
    "bert-base",
    "bert-large",
    "roberta-base",
    "roberta-large",
    "distilbert-base",
    "modernbert-base",
    "modernbert-large",
]
_LARGE: dict[str, Any] = {"num_layers": 24, "embed_dim": 1024, "num_heads": 16}
ROBERTA: dict[str, Any] = {"norm_epsilon": 1e-5, "position_offset": 2, "num_types": 1, "head_drops_input": True}
"""What RoBERTa has otherwise than BERT."""
DISTILBERT: dict[str, Any] = {"num_types": 0, "head_activation": "relu", "head_dropout": 0.2}
"""What DistilBERT has otherwise than BERT."""
MODERNBERT: dict[str, Any] = {
    "gated": True,
    "norm_position": "pre",
    "norm_epsilon": 1e-5,
    "norm_biases": False,
    "biases": False,
    "positions": "rotary",
    "max_length": 8192,
    "window": 64,
    "num_types": 0,
    "head_activation": "gelu",
    "head_norm": True,
    "head_biases": False,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
"""What ModernBERT has otherwise than BERT."""
_SHAPES: dict[EncoderName, dict[str, Any]] = {
    "bert-base": {},
    "bert-large": _LARGE,
    "roberta-base": ROBERTA,
    "roberta-large": {**ROBERTA, **_LARGE},
    "distilbert-base": {**DISTILBERT, "num_layers": 6},
    "modernbert-base": {**MODERNBERT, "num_layers": 22, "mlp_dim": 1152, "pooling": "mean"},
    "modernbert-large": {**MODERNBERT, "num_layers": 28, "embed_dim": 1024, "num_heads": 16, "mlp_dim": 2624,
                         "pooling": "mean"},
}  # fmt: skip


def encoder_preset(name: EncoderName, **changes: Any) -> Encoder:
    """The encoder of a published shape; `changes` are other fields of `Encoder`, by name.

    Raises ConfigError for invalid values.
    """
    return Encoder(**{**_SHAPES[name], **changes})


Model.presets = {**Model.presets} | {
    name: functools.partial(encoder_preset, name) for name in typing.get_args(EncoderName)
}
