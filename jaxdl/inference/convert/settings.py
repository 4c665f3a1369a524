"""Reads and writes the settings of a config.json of Hugging Face, in the forms of transformers 4 and 5."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.models import MixtureOfExperts, Transformer

FULL, SLIDING = "full_attention", "sliding_attention"
"""What the attention of a layer is, in `layer_types`: to all tokens before, or to those of a window."""


@dataclass(frozen=True)
class Form:
    """What the value of a setting must be."""

    words: str
    holds: Callable[[Any], bool]
    nullable: bool = False
    """Whether null stands for the value of a config without it."""

    @property
    def or_null(self) -> Form:
        """The same, or null."""
        return Form(self.words, self.holds, nullable=True)

    def check(self, name: str, value: Any) -> None:
        """Raises ConfigError unless a setting has such a value."""
        if not (self.holds(value) or (self.nullable and value is None)):
            raise ConfigError(f"{name} = {json.dumps(value)} must be {self.words}. Fetch the file again.")


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


COUNT = Form("a whole number, 1 or more", lambda x: type(x) is int and x >= 1)
LAYERS = Form("a whole number, 0 or more", lambda x: type(x) is int and x >= 0)
POSITIVE = Form("a number above 0", lambda x: _number(x) and x > 0)
SHARE = Form("a number from 0 to below 1", lambda x: _number(x) and 0 <= x < 1)
FLAG = Form("true or false", lambda x: type(x) is bool)
TEXTS = Form("a list of texts", lambda x: isinstance(x, list) and all(isinstance(text, str) for text in x))
OBJECT = Form("an object", lambda x: isinstance(x, dict))
TEXT = Form("a text", lambda x: isinstance(x, str))
HARMLESS = frozenset(
    [
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "jaxdl_version",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "use_cache",
        "initializer_range",
        "tokenizer_class",
        "prefix",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "cls_token_id",
        "mask_token_id",
        "decoder_start_token_id",
        "task_specific_params",
        "finetuning_task",
        "use_bfloat16",
        "tf_legacy_loss",
        "torchscript",
        "auto_map",
        "attn_implementation",
        "cache_implementation",
        "is_decoder",
        "unsloth_fixed",
        "unsloth_version",
        "tie_word_embeddings",
        "vocab_size",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "min_p",
        "min_length",
        "max_length",
        "max_new_tokens",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "length_penalty",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    ]
)
"""Settings of every config.json that say nothing of what a decoder computes, or that are read elsewhere."""
NEVER = ("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "pruned_heads",
         "tie_encoder_decoder", "quantization_config")  # fmt: skip
"""Settings that must be false, empty or null where they are."""


@dataclass(frozen=True)
class Settings:
    """A config.json that is checked while it is read."""

    config: Mapping[str, Any]

    def must(self, name: str, *allowed: Any, missing: Any) -> None:
        """Raises ConfigError unless a setting has one of the allowed values; `missing` is that of one not there."""
        value = self.config.get(name, missing)
        self.refuse_if(value not in allowed, name, f"is not converted, only {' or '.join(map(repr, allowed))}")

    def refuse_if(self, bad: bool, name: str, why: str) -> None:
        """Raises ConfigError for a setting that is bad."""
        if bad:
            raise ConfigError(f"{name} = {self.config.get(name)!r} {why}: jaxdl's Transformer computes nothing else.")

    def transformer(self, **fields: Any) -> Transformer:
        """The model with these fields and the vocabulary of the config."""
        return Transformer(**fields, vocab_size=self.config.get("vocab_size"))

    def moe(self, dense: Transformer, **fields: Any) -> MixtureOfExperts:
        """The model `dense` with a mixture of experts with these fields in place of each MLP."""
        return MixtureOfExperts(**{name: getattr(dense, name) for name in dense.model_fields_set}, **fields)


def windows(config: Mapping[str, Any], window: int | None, usual: Sequence[str]) -> dict[str, Any]:
    """The fields `window` and `full_layers` of a `Transformer`: how many tokens a token sees, and where it sees all.

    `window` is how many in the layers of sliding attention. Which these are, `layer_types` of the config says; without
    it, `usual`, one kind for each layer. Raises ConfigError for other kinds.
    """
    kinds = usual if config.get("layer_types") is None else config["layer_types"]
    other = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
    if other or len(kinds) != len(usual):
        what = f"has {other[0]}" if other else f"has {len(kinds)} entries for {len(usual)} layers"
        raise ConfigError(f"layer_types {what}: {FULL} or {SLIDING} of each layer is converted.")
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
    if len(full) == len(kinds):
        return {"window": None}
    if window is None:
        raise ConfigError(f"layer_types has {SLIDING}, and no sliding_window is in use. Fetch the file again.")
    return {"window": window, "full_layers": full}


def layer_types(model: Transformer) -> list[str]:
    """Of each layer of a model, `layer_types` of a config.json."""
    full = range(model.num_layers) if model.window is None else model.full_layers
    return [FULL if layer in full else SLIDING for layer in range(model.num_layers)]
