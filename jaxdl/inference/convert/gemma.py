"""The layouts of Gemma 2 and 3 (text): norms around both branches, embeddings scaled, windows in most layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.layouts import Tensor
from jaxdl.inference.convert.llama import Llama
from jaxdl.inference.convert.rope import read_kind, rope_fields, write_rope
from jaxdl.inference.convert.settings import (
    COUNT,
    FULL,
    OBJECT,
    POSITIVE,
    SLIDING,
    Form,
    Settings,
    layer_types,
    windows,
)
from jaxdl.models import Transformer

_GELU = ("gelu_pytorch_tanh", "gelu_new")
"""Two names of the tanh approximation."""
_NORMS = {"input": "attention_norm", "post_attention": "attention_out_norm", "pre_feedforward": "mlp_norm",
          "post_feedforward": "mlp_out_norm"}  # fmt: skip
"""The norms of a block there, and here."""
_CAPS = {"attn_logit_softcapping": "attention_cap", "final_logit_softcapping": "logit_cap"}


class Gemma2(Llama):
    """Gemma 2: soft caps on attention's scores and on the logits; every second layer has a window."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    pattern: ClassVar[int] = 2
    """One layer of so many sees all tokens, the last."""
    forms: ClassVar[Mapping[str, Form]] = {
        **Llama.forms, "query_pre_attn_scalar": POSITIVE, **dict.fromkeys(_CAPS, POSITIVE.or_null),
    }  # fmt: skip
    others = (*Llama.others, "hidden_activation", "use_bidirectional_attention")
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        "tie_word_embeddings": True,
    }  # fmt: skip

    def check_fixed(self, settings: Settings) -> None:
        """Raises ConfigError for settings of which jaxdl computes one value alone."""
        settings.must("hidden_activation", *_GELU, None, missing=None)
        # What counts is the one above; files have this one beside it, and the first ones of Gemma had "gelu".
        settings.must("hidden_act", *_GELU, "gelu", None, missing=None)
        settings.must("attention_bias", False, True, missing=False)
        settings.must("mlp_bias", False, missing=False)
        settings.must("use_bidirectional_attention", False, None, missing=None)

    def windows(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Every layer has a window but the last of each `pattern`, unless `layer_types` says otherwise."""
        every = config.get("sliding_window_pattern", self.pattern)
        kinds = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(config["num_hidden_layers"])]
        return windows(config, config["sliding_window"], kinds)

    def further(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The norms, the factors and the caps."""
        scale = config["query_pre_attn_scalar"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {
            "mlp": "geglu",
            "norm": "rms_plus_one",
            "norm_place": "both",
            "scaled_embedding": True,
            "attention_scale": None if scale == size else scale**-0.5,
            **{here: config[there] for there, here in _CAPS.items()},
        }

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        scale = model.head_dim if model.attention_scale is None else model.attention_scale**-2
        return super().config(model, length) | {
            "hidden_act": _GELU[0],
            "hidden_activation": _GELU[0],
            # A whole number, as it is read there.
            "query_pre_attn_scalar": round(scale),
            "sliding_window": model.window,
            "layer_types": layer_types(model),
            **{there: getattr(model, here) for there, here in _CAPS.items()},
        }

    def tensors(self, model: Transformer) -> Iterator[Tensor]:
        """All tensors of a model."""
        for tensor in super().tensors(model):
            if tensor.params == ("mlp/gate",):
                for there, here in _NORMS.items():
                    yield Tensor(f"model.layers.{{}}.{there}_layernorm.weight", (f"{here}/scale",), 0)
            if tensor.params not in (("attention_norm/scale",), ("mlp_norm/scale",)):
                yield tensor


class Gemma3(Gemma2):
    """Gemma 3, text alone: queries and keys are normed; layers with a window have a rope_theta of their own."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    pattern = 6
    qk_norm = True
    forms: ClassVar[Mapping[str, Form]] = {
        **Gemma2.forms, "rope_local_base_freq": POSITIVE, "sliding_window_pattern": COUNT,
    }  # fmt: skip
    others = (*Gemma2.others, "attn_logit_softcapping")
    defaults: ClassVar[Mapping[str, Any]] = {
        **Gemma2.defaults, "max_position_embeddings": 131_072, "final_logit_softcapping": None,
        "attn_logit_softcapping": None, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
    }  # fmt: skip

    def check_fixed(self, settings: Settings) -> None:
        """Raises ConfigError for settings of which jaxdl computes one value alone."""
        super().check_fixed(settings)
        # transformers 5.24 reads this setting, and does nothing with it.
        settings.must("attn_logit_softcapping", None, missing=None)

    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json, whose `rope_parameters` are those of each kind of layer, or of all but those with
        a window."""
        config = {**self.defaults, **config}
        both = config.get("rope_parameters") or {}
        if not set(both) & {FULL, SLIDING}:
            both = {FULL: both}
        if other := set(both) - {FULL, SLIDING}:
            raise ConfigError(f"rope_parameters has {min(other)}: {FULL} and {SLIDING} are converted.")
        for kind in (FULL, SLIDING):
            OBJECT.or_null.check(f"rope_parameters.{kind}", both.get(kind))
        full, local = (dict(both.get(kind) or {}) for kind in (FULL, SLIDING))
        local = {"rope_theta": config["rope_local_base_freq"], **local}
        kind = local.get("rope_type", local.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"rope_type = {kind!r} of {SLIDING} is not converted, only default.")
        theta = read_kind(config, local, kind).theta
        found = super().model({**config, "rope_parameters": full})
        if found.full_layers:
            return found.replaced({"window_rope_theta": theta})
        return found if found.window is None else found.replaced({"rope_theta": theta, "rope_scaling": None})

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        local = model.rope_theta if model.window_rope_theta is None else model.window_rope_theta
        return super().config(model, length) | {
            **rope_fields(model),
            "rope_local_base_freq": local,
            "rope_parameters": {
                FULL: write_rope(model) | {"rope_theta": model.rope_theta},
                SLIDING: {"rope_type": "default", "rope_theta": local},
            },
        }
