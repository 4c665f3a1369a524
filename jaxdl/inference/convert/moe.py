"""The layouts of mixtures of experts of the Llama family: Mixtral, Qwen 3 and OLMoE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.layouts import Tensor
from jaxdl.inference.convert.llama import Llama, Mistral, Qwen3
from jaxdl.inference.convert.settings import COUNT, FLAG, Form, Settings
from jaxdl.models import MixtureOfExperts, Transformer

_ROUTER_LOSS = "router_aux_loss_coef"


class _MoE(Llama):
    """What the layouts of mixtures share: how experts are named."""

    kind = "moe"
    experts: ClassVar[tuple[str, ...]] = ("num_experts",)
    """The settings that count experts: of versions of transformers, the first that is there."""
    num_experts: ClassVar[int]
    """How many there are if none of them is."""
    expert_size: ClassVar[str] = "intermediate_size"
    """The setting of the hidden size of an expert."""
    module: ClassVar[str] = "mlp"
    """What a block calls them."""
    names: ClassVar[Mapping[str, str]] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    """Our name of a matrix of an expert -> the one there."""
    forms: ClassVar[Mapping[str, Form]] = Llama.forms
    others = (
        *Llama.others, "num_experts", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
        "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "clip_qkv",
    )  # fmt: skip

    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json."""
        given = next((config[name] for name in self.experts if name in config), None)
        config = {**self.defaults, **config}
        dense = super().model({**config, "intermediate_size": config[self.expert_size]})
        return Settings(config).moe(
            dense,
            num_experts=given or self.num_experts,
            experts_per_token=config["num_experts_per_tok"],
            normalized=self.normalized(config),
            balance="loss" if config.get(_ROUTER_LOSS) else "none",
            balance_rate=config.get(_ROUTER_LOSS) or None,
        )

    def windows(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """One window in all layers, or none: transformers reads no kinds of layers of a mixture. Raises ConfigError."""
        found = super().windows(config)
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        if found and (found["window"] != window or found.get("full_layers")):
            raise ConfigError(
                f"layer_types and max_window_layers do not say that all layers have sliding_window = {window}, which "
                f"transformers gives every layer of {self.model_type}. Make them the same, or take them out."
            )
        return found

    def other(self, model: Any) -> list[str]:
        """What a model computes otherwise than any model of this layout: also windows in some layers alone."""
        if model.kind == self.kind and model.full_layers:
            return [f"full_layers={model.full_layers}"]
        return super().other(model)

    def normalized(self, config: Mapping[str, Any]) -> bool:
        """Whether the weights of a token's experts are 1 together."""
        return config["norm_topk_prob"]

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        assert isinstance(model, MixtureOfExperts)
        fields = super().config(model, length) | {
            **dict.fromkeys(self.experts, model.num_experts),
            "num_experts_per_tok": model.experts_per_token,
            "norm_topk_prob": model.normalized,
            _ROUTER_LOSS: model.rate if model.balance == "loss" else 0.0,
        }
        return fields | {self.expert_size: model.hidden_dim}

    def tensors(self, model: Transformer) -> Iterator[Tensor]:
        """All tensors of a model."""
        block = f"model.layers.{{}}.{self.module}."
        for tensor in super().tensors(model):
            if tensor.params != ("mlp/gate",):
                if not tensor.params[0].startswith("mlp/"):
                    yield tensor
                continue
            yield Tensor(f"{block}gate.weight", ("mlp/router",), 1, transposed=True)
            for here, there in self.names.items():
                yield Tensor(f"{block}experts.{{expert}}.{there}.weight", (f"mlp/{here}",), 1, transposed=True)


class Mixtral(_MoE, Mistral):
    """Mixtral: Mistral's attention; the weights of the chosen experts are always 1 together."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    experts = ("num_local_experts",)
    num_experts = 8
    module = "block_sparse_moe"
    names: ClassVar[Mapping[str, str]] = {"gate": "w1", "up": "w3", "down": "w2"}
    forms: ClassVar[Mapping[str, Form]] = {
        **Llama.forms, **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), COUNT),
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": None,
        "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "rope_theta": 1_000_000.0,
    }  # fmt: skip

    def normalized(self, config: Mapping[str, Any]) -> bool:
        """Always."""
        del config
        return True

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        fields = super().config(model, length)
        del fields["norm_topk_prob"]
        return fields


class Qwen3Moe(_MoE, Qwen3):
    """Qwen 3 with experts in every block."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    experts = ("num_local_experts", "num_experts")
    num_experts = 128
    expert_size = "moe_intermediate_size"
    forms: ClassVar[Mapping[str, Form]] = {
        **Llama.forms, "norm_topk_prob": FLAG,
        **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
                         "decoder_sparse_step"), COUNT),
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen3.defaults, "num_key_value_heads": 4, "head_dim": None, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False, "max_window_layers": 0, "router_aux_loss_coef": 0.001,
    }  # fmt: skip

    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json. Raises ConfigError where some blocks have no experts."""
        if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
            raise ConfigError(
                "some of its blocks have no experts (decoder_sparse_step, mlp_only_layers): not converted."
            )
        return super().model(config)

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        whole = {"decoder_sparse_step": 1, "mlp_only_layers": []}
        return super().config(model, length) | whole


class Olmoe(_MoE):
    """OLMoE: queries and keys are normed over all heads."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    qk_norm = "all"
    num_experts = 64
    forms: ClassVar[Mapping[str, Form]] = {
        **Llama.forms, "norm_topk_prob": FLAG, **dict.fromkeys(("num_experts", "num_experts_per_tok"), COUNT),
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 4096, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.01,
    }  # fmt: skip

    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json. Raises ConfigError where queries, keys and values are clipped."""
        Settings(config).must("clip_qkv", None, missing=None)
        return super().model(config)
