"""The layout of GPT-2 (Radford et al. 2019): its weights are [in, out], queries, keys and values in one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxdl.inference.convert.byte_bpe import GPT2_FILES
from jaxdl.inference.convert.layouts import HFLayout, Tensor
from jaxdl.inference.convert.settings import COUNT, FLAG, POSITIVE, SHARE, Form, Settings
from jaxdl.models import Transformer

_GELU = ("gelu_new", "gelu_pytorch_tanh")
"""Two names of the tanh approximation."""
_DROPOUT = 0.1
"""The dropouts of a config.json that has none."""


class GPT2(HFLayout):
    """GPT-2."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    prefix = "transformer."
    ignored = (".attn.bias", ".attn.masked_bias")
    older_tokenizer = GPT2_FILES
    others = (
        "activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
        "n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj", "gradient_checkpointing",
    )  # fmt: skip
    forms: ClassVar[Mapping[str, Form]] = {
        **dict.fromkeys(("n_layer", "n_embd", "n_head", "n_positions"), COUNT), "n_inner": COUNT.or_null,
        "layer_norm_epsilon": POSITIVE, "tie_word_embeddings": FLAG,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), SHARE),
    }  # fmt: skip

    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json."""
        settings = Settings(config)
        settings.must("activation_function", *_GELU, missing="gelu_new")
        settings.must("scale_attn_weights", True, missing=True)
        settings.must("scale_attn_by_inverse_layer_idx", False, missing=False)
        settings.must("add_cross_attention", False, missing=False)
        return settings.transformer(
            num_layers=config["n_layer"],
            embed_dim=config["n_embd"],
            num_heads=config["n_head"],
            mlp_dim=config.get("n_inner") or 4 * config["n_embd"],
            positions="learned",
            max_length=self.length(config),
            norm="layer",
            norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
            mlp="gelu",
            biases="all",
            tied_embeddings=config.get("tie_word_embeddings", True),
            dropout=config.get("resid_pdrop", _DROPOUT),
            attention_dropout=config.get("attn_pdrop", _DROPOUT),
        )

    def remarks(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """What has no exact equivalent: jaxdl has one dropout for the embeddings and the branches."""
        embeddings, branches = (config.get(name, _DROPOUT) for name in ("embd_pdrop", "resid_pdrop"))
        if embeddings == branches:
            return ()
        return (
            f"its config has embd_pdrop = {embeddings} and resid_pdrop = {branches}; here one dropout is for both: "
            f"dropout = {branches} (in training alone; --model.dropout changes it)",
        )

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        return {
            "n_layer": model.num_layers,
            "n_embd": model.embed_dim,
            "n_head": model.num_heads,
            "n_inner": model.hidden_dim,
            "n_positions": model.max_length or length,
            "layer_norm_epsilon": model.norm_epsilon,
            "activation_function": _GELU[0],
            "tie_word_embeddings": model.tied_embeddings,
            "embd_pdrop": model.dropout,
            "resid_pdrop": model.dropout,
            "attn_pdrop": model.attention_dropout,
        }

    def tensors(self, model: Transformer) -> Iterator[Tensor]:
        """All tensors of a model."""
        yield Tensor("transformer.wte.weight", ("embedding",), 1)
        yield Tensor("transformer.wpe.weight", ("position_embedding",), 1)
        yield from _norm("transformer.h.{}.ln_1", "attention_norm")
        three = tuple(f"attention/{name}" for name in ("query", "key", "value"))
        yield Tensor("transformer.h.{}.attn.c_attn.weight", three, 1)
        yield Tensor("transformer.h.{}.attn.c_attn.bias", tuple(f"{name}_bias" for name in three), 0)
        yield from _product("transformer.h.{}.attn.c_proj", "attention/out", 2)
        yield from _norm("transformer.h.{}.ln_2", "mlp_norm")
        yield from _product("transformer.h.{}.mlp.c_fc", "mlp/up", 1)
        yield from _product("transformer.h.{}.mlp.c_proj", "mlp/down", 1)
        yield from _norm("transformer.ln_f", "final_norm")
        if not model.tied_embeddings:
            yield Tensor("lm_head.weight", ("head",), 1, transposed=True)

    def length(self, config: Mapping[str, Any]) -> int:
        """How many tokens a model of this config reads."""
        return config.get("n_positions", 1024)


def _norm(name: str, here: str) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (f"{here}/scale",), 0)
    yield Tensor(f"{name}.bias", (f"{here}/bias",), 0)


def _product(name: str, here: str, num_inputs: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (here,), num_inputs)
    yield Tensor(f"{name}.bias", (f"{here}_bias",), 0)
