"""The layouts of the Llama family: weights [out, in], rotary positions, RMSNorm, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxdl.inference.convert.layouts import HFLayout, Tensor
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
    common_window,
    rope_fields,
    rope_scaling,
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
    biases: ClassVar[str] = "none"
    qk_norm: ClassVar[bool | str] = False
    defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048}
    """The values of settings that a config.json lacks, as the config class of transformers has them."""

    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json."""
        config = {**self.defaults, **config}
        settings = Settings(config)
        settings.must("hidden_act", "silu", missing="silu")
        settings.must("attention_bias", False, missing=False)
        settings.must("mlp_bias", False, missing=False)
        theta, scaling = rope_scaling(config)
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
            rope_theta=theta,
            rope_scaling=scaling,
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            biases=self.biases,
            qk_norm=self.qk_norm,
            window=self.window(config),
            attention_dropout=config.get("attention_dropout") or 0.0,
        )

    def window(self, config: Mapping[str, Any]) -> int | None:
        """How many tokens a token sees, itself included; None for all before it. Raises ConfigError for several."""
        del config
        return None

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
            "max_position_embeddings": length,
            "attention_bias": False,
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
            if self.biases == "qkv":
                yield Tensor(f"{attention}{there}_proj.bias", (f"attention/{here}_bias",), 0)
        if self.qk_norm:
            yield Tensor(f"{attention}q_norm.weight", ("attention/query_norm",), 0)
            yield Tensor(f"{attention}k_norm.weight", ("attention/key_norm",), 0)
        yield Tensor(f"{attention}o_proj.weight", ("attention/out",), 2, transposed=True)
        yield Tensor(f"{block}post_attention_layernorm.weight", ("mlp_norm/scale",), 0)
        for name in ("gate", "up", "down"):
            yield Tensor(f"{block}mlp.{name}_proj.weight", (f"mlp/{name}",), 1, transposed=True)
        yield Tensor("model.norm.weight", ("final_norm/scale",), 0)
        if not model.tied_embeddings:
            yield Tensor("lm_head.weight", ("head",), 1, transposed=True)

    def length(self, config: Mapping[str, Any]) -> int:
        """How many tokens a model of this config reads."""
        return config.get("max_position_embeddings", self.defaults["max_position_embeddings"])


class Mistral(Llama):
    """Mistral: a window of attention. With `layer_types` it is what transformers calls Ministral."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096,
    }  # fmt: skip

    def window(self, config: Mapping[str, Any]) -> int | None:
        """How many tokens a token sees: `sliding_window`, unless `layer_types` says otherwise; None for all."""
        window = config["sliding_window"]
        return common_window(config, window, [FULL if window is None else SLIDING] * config["num_hidden_layers"])

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        return super().config(model, length) | {"sliding_window": model.window}


class Qwen2(Llama):
    """Qwen 2 and 2.5: biases of queries, keys and values."""

    model_type = "qwen2"
    reads_sentencepiece = False
    architecture = "Qwen2ForCausalLM"
    biases = "qkv"
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 32_768, "num_key_value_heads": 32, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28,
    }  # fmt: skip

    def window(self, config: Mapping[str, Any]) -> int | None:
        """How many tokens a token sees: without `layer_types`, `max_window_layers` is the first layer with a window."""
        window = config["sliding_window"] if config["use_sliding_window"] else None
        kinds = [
            SLIDING if window is not None and layer >= config["max_window_layers"] else FULL
            for layer in range(config["num_hidden_layers"])
        ]
        return common_window(config, window, kinds)

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json; `max_window_layers` is for versions of transformers without `layer_types`."""
        slides = model.window is not None
        return super().config(model, length) | {
            "sliding_window": model.window,
            "use_sliding_window": slides,
            "max_window_layers": 0 if slides else model.num_layers,
            "layer_types": [SLIDING if slides else FULL] * model.num_layers,
        }


class Qwen3(Qwen2):
    """Qwen 3: RMSNorm of queries and keys, no biases."""

    model_type = "qwen3"
    reads_sentencepiece = True
    architecture = "Qwen3ForCausalLM"
    biases = "none"
    qk_norm = True
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2.defaults, "head_dim": 128}
