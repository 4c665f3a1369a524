"""The layouts of the Llama family: weights [out, in], rotary positions, RMSNorm, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxdl.inference.convert.layouts import HFLayout, Tensor
from jaxdl.inference.convert.rope import read_rope, rope_fields, rope_length
from jaxdl.inference.convert.settings import (
    COUNT,
    FLAG,
    FULL,
    LAYERS,
    OBJECT,
    POSITIVE,
    SHARE,
    SLIDING,
    TEXTS,
    Form,
    Settings,
    layer_types,
    windows,
)
from jaxdl.models import Transformer


class Llama(HFLayout):
    """Llama 2 and 3; the others of its family derive from it."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    prefix = "model."
    ignored = (".rotary_emb.inv_freq",)
    forms: ClassVar[Mapping[str, Form]] = {
        **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
                         "max_position_embeddings"), COUNT),
        **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), COUNT.or_null),
        "rms_norm_eps": POSITIVE, "rope_theta": POSITIVE.or_null, "attention_dropout": SHARE.or_null,
        "tie_word_embeddings": FLAG, "use_sliding_window": FLAG, "max_window_layers": LAYERS,
        "layer_types": TEXTS.or_null, "rope_parameters": OBJECT.or_null, "rope_scaling": OBJECT.or_null,
        "partial_rotary_factor": POSITIVE.or_null,
    }  # fmt: skip
    others = ("hidden_act", "attention_bias", "mlp_bias", "pretraining_tp")
    biases: ClassVar[str] = "none"
    optional_biases: ClassVar[bool] = True
    """Whether `attention_bias` gives the four products of attention biases."""
    partial_rotary: ClassVar[bool] = False
    """Whether a share of the numbers of a head may be rotated."""
    qk_norm: ClassVar[bool | str] = False
    defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048}
    """The values of settings that a config.json lacks, as the config class of transformers has them."""

    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json."""
        config = {**self.defaults, **config}
        settings = Settings(config)
        self.check_fixed(settings)
        rope = read_rope(config, partial=self.partial_rotary)
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        return settings.transformer(
            num_layers=config["num_hidden_layers"],
            embed_dim=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=head_size,
            mlp_dim=config["intermediate_size"],
            tied_embeddings=config.get("tie_word_embeddings", False),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            rotary_dim=rope.dim(head_size),
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            biases="attention" if config.get("attention_bias") else self.biases,
            qk_norm=self.qk_norm,
            attention_dropout=config.get("attention_dropout") or 0.0,
            **self.windows(config),
            **self.further(config),
        )

    def check_fixed(self, settings: Settings) -> None:
        """Raises ConfigError for settings of which jaxdl computes one value alone."""
        settings.must("hidden_act", "silu", missing="silu")
        settings.must("attention_bias", False, *((True,) if self.optional_biases else ()), missing=False)
        settings.must("mlp_bias", False, missing=False)

    def windows(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the model on how many tokens a token sees, itself included, in each layer."""
        del config
        return {}

    def further(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Further fields of the model, which others of the family have."""
        del config
        return {}

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        return {
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.embed_dim,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "intermediate_size": model.hidden_dim,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_epsilon,
            "tie_word_embeddings": model.tied_embeddings,
            "max_position_embeddings": rope_length(model, length),
            "attention_bias": model.biases == "attention",
            "attention_dropout": model.attention_dropout,
            **rope_fields(model),
        }

    def tensors(self, model: Transformer) -> Iterator[Tensor]:
        """All tensors of a model."""
        block, attention = "model.layers.{}.", "model.layers.{}.self_attn."
        yield Tensor("model.embed_tokens.weight", ("embedding",), 1)
        yield Tensor(f"{block}input_layernorm.weight", ("attention_norm/scale",), 0)
        for there, here in (("q", "query"), ("k", "key"), ("v", "value")):
            yield Tensor(f"{attention}{there}_proj.weight", (f"attention/{here}",), 1, transposed=True)
            if model.biases != "none":
                yield Tensor(f"{attention}{there}_proj.bias", (f"attention/{here}_bias",), 0)
        if self.qk_norm:
            yield Tensor(f"{attention}q_norm.weight", ("attention/query_norm",), 0)
            yield Tensor(f"{attention}k_norm.weight", ("attention/key_norm",), 0)
        yield Tensor(f"{attention}o_proj.weight", ("attention/out",), 2, transposed=True)
        if model.biases == "attention":
            yield Tensor(f"{attention}o_proj.bias", ("attention/out_bias",), 0)
        yield Tensor(f"{block}post_attention_layernorm.weight", ("mlp_norm/scale",), 0)
        for name in ("gate", "up", "down"):
            yield Tensor(f"{block}mlp.{name}_proj.weight", (f"mlp/{name}",), 1, transposed=True)
        yield Tensor("model.norm.weight", ("final_norm/scale",), 0)
        if not model.tied_embeddings:
            yield Tensor("lm_head.weight", ("head",), 1, transposed=True)

    def length(self, config: Mapping[str, Any]) -> int:
        """How many tokens a model of this config reads."""
        return config.get("max_position_embeddings", self.defaults["max_position_embeddings"])

    def longest(self, config: Mapping[str, Any]) -> int:
        """With `dynamic` rotary positions as many times more as their factor is."""
        scaling = self.model(config).rope_scaling
        times = scaling.factor if scaling is not None and scaling.form == "dynamic" else 1
        return int(times * self.length(config))


class Mistral(Llama):
    """Mistral: a window of attention. With `layer_types` it is what transformers calls Ministral."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096,
    }  # fmt: skip

    optional_biases = False

    def windows(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """How many tokens a token sees: `sliding_window`, unless `layer_types` says otherwise."""
        window = config["sliding_window"]
        return windows(config, window, [FULL if window is None else SLIDING] * config["num_hidden_layers"])

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json; with `layer_types`, where layers differ, transformers calls it Ministral."""
        several = {"layer_types": layer_types(model)} if model.full_layers else {}
        return super().config(model, length) | {"sliding_window": model.window, **several}


class Qwen2(Llama):
    """Qwen 2 and 2.5: biases of queries, keys and values."""

    model_type = "qwen2"
    reads_sentencepiece = False
    architecture = "Qwen2ForCausalLM"
    biases = "qkv"
    optional_biases = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 32_768, "num_key_value_heads": 32, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28,
    }  # fmt: skip

    def windows(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """How many tokens a token sees: without `layer_types`, `max_window_layers` is the first layer with a window."""
        window = config["sliding_window"] if config["use_sliding_window"] else None
        kinds = [
            SLIDING if window is not None and layer >= config["max_window_layers"] else FULL
            for layer in range(config["num_hidden_layers"])
        ]
        return windows(config, window, kinds)

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json; `max_window_layers` is for versions of transformers without `layer_types`."""
        kinds = layer_types(model)
        return super().config(model, length) | {
            "sliding_window": model.window,
            "use_sliding_window": model.window is not None,
            "max_window_layers": next((layer for layer, kind in enumerate(kinds) if kind == SLIDING), len(kinds)),
            "layer_types": kinds,
        }


class Qwen3(Qwen2):
    """Qwen 3: RMSNorm of queries and keys, no biases."""

    model_type = "qwen3"
    reads_sentencepiece = True
    architecture = "Qwen3ForCausalLM"
    biases = "none"
    optional_biases = True
    qk_norm = True
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2.defaults, "head_dim": 128}
