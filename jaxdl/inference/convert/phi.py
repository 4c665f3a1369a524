"""The layout of Phi-3, and of Phi-4, which has its: queries, keys and values in one tensor, gate and up in another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.layouts import Tensor
from jaxdl.inference.convert.llama import Llama
from jaxdl.inference.convert.rope import rope_settings, share_of
from jaxdl.inference.convert.settings import COUNT, FULL, SHARE, SLIDING, Form, Settings, windows
from jaxdl.models import Transformer

_LONG = ("longrope", "su", "yarn")
"""What the rotary positions of Phi-3 have been called."""


class Phi3(Llama):
    """Phi-3 and Phi-4."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    optional_biases = False
    partial_rotary = True
    forms: ClassVar[Mapping[str, Form]] = {
        **Llama.forms, "original_max_position_embeddings": COUNT, "embd_pdrop": SHARE, "resid_pdrop": SHARE,
    }  # fmt: skip
    others = (*Llama.others, "lm_head_bias", "full_attn_mod", "interpolate_factor")
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "sliding_window": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }  # fmt: skip

    def check_fixed(self, settings: Settings) -> None:
        """Raises ConfigError for settings of which jaxdl computes one value alone."""
        super().check_fixed(settings)
        settings.must("lm_head_bias", False, missing=False)
        settings.must("full_attn_mod", 1, missing=1)
        settings.must("interpolate_factor", 1, missing=1)

    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json."""
        if rope := rope_settings(config):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind not in ("default", *_LONG):
                raise ConfigError(f"rope_type = {kind!r} is not converted for phi3, only default, {', '.join(_LONG)}.")
            kept = {key: value for key, value in rope.items() if key not in ("type", "rope_type")}
            if kind in _LONG:
                # The setting beside it counts, in transformers too.
                original = config.get("original_max_position_embeddings", 4096)
                kept |= {"rope_type": "longrope", "original_max_position_embeddings": original}
            config = {**config, "rope_scaling": None, "rope_parameters": kept}
        return super().model(config)

    def windows(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """How many tokens a token sees: `sliding_window` in all layers."""
        window = config["sliding_window"]
        kinds = [FULL if window is None else SLIDING] * config["num_hidden_layers"]
        return windows({**config, "layer_types": None}, window, kinds)

    def further(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The dropout of the branches."""
        return {"dropout": config["resid_pdrop"]}

    def remarks(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """What has no exact equivalent: jaxdl has one dropout for the embeddings and the branches."""
        embeddings, branches = (config.get(name, 0.0) for name in ("embd_pdrop", "resid_pdrop"))
        if embeddings == branches:
            return ()
        return (
            f"its config has embd_pdrop = {embeddings} and resid_pdrop = {branches}; here one dropout is for both: "
            f"dropout = {branches} (in training alone; --model.dropout changes it)",
        )

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        fields = super().config(model, length)
        scaling, share = model.rope_scaling, share_of(model)
        fields["rope_parameters"] |= {"partial_rotary_factor": share}
        if scaling is not None:
            # All that transformers 4 takes. It takes the factor for that of these two lengths.
            fields["rope_scaling"] = {
                "type": "longrope",
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
            }
            fields["max_position_embeddings"] = round(scaling.factor * scaling.original_length)
        return fields | {
            "partial_rotary_factor": share,
            "original_max_position_embeddings": length if scaling is None else scaling.original_length,
            "sliding_window": model.window,
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
        }

    def is_at_home(self, model: Transformer) -> bool:
        """With `longrope`: in transformers this class alone reads a text again when its rotation changes."""
        return model.kind == self.kind and model.rope_scaling is not None and model.rope_scaling.form == "longrope"

    def tensors(self, model: Transformer) -> Iterator[Tensor]:
        """All tensors of a model."""
        for tensor in super().tensors(model):
            if tensor.params == ("attention/query",):
                three = tuple(f"attention/{name}" for name in ("query", "key", "value"))
                yield Tensor("model.layers.{}.self_attn.qkv_proj.weight", three, 1, transposed=True)
            elif tensor.params == ("mlp/gate",):
                yield Tensor("model.layers.{}.mlp.gate_up_proj.weight", ("mlp/gate", "mlp/up"), 1, transposed=True)
            elif tensor.params[0] not in ("attention/key", "attention/value", "mlp/up"):
                yield tensor
