"""Transformers of published shapes, by name: `--model qwen3-0.6b`, or `preset("qwen3-0.6b")` in a config file.

Shapes, norms and positions are those of the published configuration files (`config.json` of openai-community/gpt2 and
gpt2-medium, meta-llama/Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B, Qwen/Qwen3-0.6B to Qwen3-8B); the vocabulary is
that of the data.
"""

from __future__ import annotations

import functools
import typing
from typing import Any, Literal

from jaxdl.models.config import Model
from jaxdl.models.rotary import RopeScaling
from jaxdl.models.transformer import Transformer

Name = Literal[
    "gpt2-124m",
    "gpt2-345m",
    "llama3-0.1b",
    "llama3.2-1b",
    "llama3.2-3b",
    "llama3.1-8b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
]

_GPT2: dict[str, Any] = {
    "positions": "learned",
    "max_length": 1024,
    "norm": "layer",
    "mlp": "gelu",
    "biases": "all",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "init_stddev": 0.02,
}
_LLAMA3: dict[str, Any] = {"num_kv_heads": 8, "rope_theta": 500_000.0}
_QWEN3: dict[str, Any] = {
    "num_kv_heads": 8,
    "head_size": 128,
    "qk_norm": True,
    "norm_epsilon": 1e-6,
    "rope_theta": 1_000_000.0,
}
_SHAPES: dict[Name, dict[str, Any]] = {
    "gpt2-124m": {**_GPT2, "num_layers": 12, "embed_dim": 768, "num_heads": 12},
    "gpt2-345m": {**_GPT2, "num_layers": 24, "embed_dim": 1024, "num_heads": 16},
    # Not published: a small one of the same kind, 104 million parameters without the embeddings.
    "llama3-0.1b": {
        **_LLAMA3,
        "num_layers": 12,
        "embed_dim": 768,
        "num_heads": 12,
        "num_kv_heads": 4,
        "mlp_dim": 3072,
    },
    "llama3.2-1b": {
        **_LLAMA3,
        "num_layers": 16,
        "embed_dim": 2048,
        "num_heads": 32,
        "mlp_dim": 8192,
        "rope_scaling": RopeScaling(factor=32.0),
    },
    "llama3.2-3b": {
        **_LLAMA3,
        "num_layers": 28,
        "embed_dim": 3072,
        "num_heads": 24,
        "mlp_dim": 8192,
        "rope_scaling": RopeScaling(factor=32.0),
    },
    "llama3.1-8b": {
        **_LLAMA3,
        "num_layers": 32,
        "embed_dim": 4096,
        "num_heads": 32,
        "mlp_dim": 14_336,
        "tied_embeddings": False,
        "rope_scaling": RopeScaling(factor=8.0),
    },
    "qwen3-0.6b": {**_QWEN3, "num_layers": 28, "embed_dim": 1024, "num_heads": 16, "mlp_dim": 3072},
    "qwen3-1.7b": {**_QWEN3, "num_layers": 28, "embed_dim": 2048, "num_heads": 16, "mlp_dim": 6144},
    "qwen3-4b": {**_QWEN3, "num_layers": 36, "embed_dim": 2560, "num_heads": 32, "mlp_dim": 9728},
    "qwen3-8b": {
        **_QWEN3,
        "num_layers": 36,
        "embed_dim": 4096,
        "num_heads": 32,
        "mlp_dim": 12_288,
        "tied_embeddings": False,
    },
}


def preset(name: Name, **changes: Any) -> Transformer:
    """The transformer of a published shape; `changes` are other fields of `Transformer`, by name.

    GPT-2 has the dropout of its configuration file, also on attention's weights, which no flash kernel has:
    `preset("gpt2-124m", dropout=0.0, attention_dropout=0.0)` is without. Raises ConfigError for invalid values.
    """
    return Transformer(**{**_SHAPES[name], **changes})


Model.presets = {**Model.presets} | {name: functools.partial(preset, name) for name in typing.get_args(Name)}
