"""Reads and writes the settings of a config.json of Hugging Face, in the forms of transformers 4 and 5."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.models import MixtureOfExperts, RopeScaling, Transformer

_FORMS = {"linear": "linear", "llama3": "llama3"}
"""The kinds of rope scaling that jaxdl computes, by their names there."""
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
_ROPE = {"rope_type": TEXT, "type": TEXT, "rope_theta": POSITIVE, "factor": POSITIVE, "low_freq_factor": POSITIVE,
         "high_freq_factor": POSITIVE, "original_max_position_embeddings": COUNT,
         "partial_rotary_factor": POSITIVE.or_null}  # fmt: skip
"""The settings of rotary positions."""


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


def common_window(config: Mapping[str, Any], window: int | None, usual: Sequence[str]) -> int | None:
    """How many tokens a token sees in all layers, itself included; None: all before it.

    `window` is how many in the layers of sliding attention. Which these are, `layer_types` of the config says; without
    it, `usual`, one kind for each layer. Raises ConfigError where not all layers are alike.
    """
    kinds = usual if config.get("layer_types") is None else config["layer_types"]
    other = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
    if other or len(kinds) != len(usual):
        what = f"has {other[0]}" if other else f"has {len(kinds)} entries for {len(usual)} layers"
        raise ConfigError(f"layer_types {what}: {FULL} or {SLIDING} of each layer is converted.")
    sliding = list(kinds).count(SLIDING)
    if not sliding:
        return None
    if window is None:
        raise ConfigError(f"layer_types has {SLIDING}, and no sliding_window is in use. Fetch the file again.")
    if sliding < len(kinds):
        raise ConfigError(
            f"{sliding} of its {len(kinds)} layers have a sliding window of {window:,} tokens, the others none; "
            "jaxdl's Transformer has one for all layers. Texts of up to so many tokens are read alike without it: for "
            f'these, write "sliding_window": null and "layer_types": null there, and give --length {window}.'
        )
    return window


def rope_scaling(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, how wavelengths are stretched) of a config.json. Raises ConfigError for what jaxdl does not compute."""
    old = config.get("rope_scaling")
    rope = config.get("rope_parameters") or old or {}
    if several := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise ConfigError(f"rope_parameters of each kind of layer, {', '.join(several)}, are not converted.")
    for name, form in _ROPE.items():
        if name in rope:
            form.check(name, rope[name])
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise ConfigError("partial_rotary_factor is not converted: jaxdl rotates whole heads.")
    if kind == "default":
        return theta, None
    if kind not in _FORMS:
        raise ConfigError(f"rope_type = {kind!r} is not converted, only default, {', '.join(_FORMS)}.")
    values: dict[str, Any] = {"form": _FORMS[kind], "factor": rope["factor"]}
    if kind == "llama3":
        values |= {name: rope[name] for name in ("low_freq_factor", "high_freq_factor")}
        values["original_length"] = rope["original_max_position_embeddings"]
    return theta, RopeScaling(**values)


def rope_fields(model: Transformer) -> dict[str, Any]:
    """The settings of rotary positions: `rope_parameters` of transformers 5, the others of transformers 4."""
    scaling = model.rope_scaling
    if scaling is None:
        rope: dict[str, Any] = {"rope_type": "default"}
    else:
        rope = {"rope_type": scaling.form, "factor": scaling.factor}
    if scaling is not None and scaling.form == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    old = None if scaling is None else rope
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": old,
        "rope_parameters": rope | {"rope_theta": model.rope_theta},
    }
