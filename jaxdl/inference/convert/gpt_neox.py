"""The layout of GPT-NeoX, of Pythia: both branches read the same, a share of each head is rotated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdl.inference.convert.layouts import HFLayout, Tensor
from jaxdl.inference.convert.rope import read_rope, rope_length, share_of, write_rope
from jaxdl.inference.convert.settings import COUNT, FLAG, OBJECT, POSITIVE, SHARE, Form, Settings
from jaxdl.models import Transformer

_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu",
                "relu": "relu"}  # fmt: skip
"""An activation there, and the kind of MLP here."""
_DEFAULTS = {
    "max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10_000.0, "layer_norm_eps": 1e-5,
    "use_parallel_residual": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class _OfHeads(Tensor):
    """Queries, keys and values: of each head in turn, those of one beside each other."""

    num_heads: int = 1

    def to_params(self, x: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """The parameters in a tensor, of these shapes."""
        heads = x.T.reshape(*x.shape[1:], self.num_heads, len(shapes), -1)
        return [heads[..., place, :].reshape(shape) for place, shape in enumerate(shapes)]

    def to_tensor(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """The inverse of `to_params`."""
        lead = params[0].shape[: self.num_inputs]
        heads = np.stack([x.reshape(*lead, self.num_heads, -1) for x in params], axis=-2)
        return heads.reshape(*lead, -1).T


class GPTNeoX(HFLayout):
    """GPT-NeoX and Pythia."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    prefix = "gpt_neox."
    ignored = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    head = "embed_out.weight"
    reads_sentencepiece = False
    forms: ClassVar[Mapping[str, Form]] = {
        **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
                         "max_position_embeddings"), COUNT),
        "layer_norm_eps": POSITIVE, "rotary_pct": POSITIVE, "rotary_emb_base": POSITIVE, "rope_theta": POSITIVE.or_null,
        "partial_rotary_factor": POSITIVE.or_null, "tie_word_embeddings": FLAG, "use_parallel_residual": FLAG,
        "attention_dropout": SHARE, "hidden_dropout": SHARE, "rope_parameters": OBJECT.or_null,
        "rope_scaling": OBJECT.or_null,
    }  # fmt: skip
    others = ("hidden_act", "attention_bias", "classifier_dropout", "gradient_checkpointing")

    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json."""
        config = {**_DEFAULTS, **config}
        settings = Settings(config)
        settings.must("hidden_act", *_ACTIVATIONS, missing="gelu")
        settings.must("attention_bias", True, missing=True)
        older = {"rope_theta": config["rotary_emb_base"], "partial_rotary_factor": config["rotary_pct"]}
        rope = read_rope({**config, **{name: config.get(name) or value for name, value in older.items()}}, partial=True)
        head_size, left = divmod(config["hidden_size"], config["num_attention_heads"])
        settings.refuse_if(left > 0, "num_attention_heads", "does not divide hidden_size")
        return settings.transformer(
            num_layers=config["num_hidden_layers"],
            embed_dim=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            mlp_dim=config["intermediate_size"],
            mlp=_ACTIVATIONS[config.get("hidden_act", "gelu")],
            norm="layer",
            norm_epsilon=config["layer_norm_eps"],
            biases="all",
            parallel_residual=config["use_parallel_residual"],
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            rotary_dim=rope.dim(head_size),
            tied_embeddings=config.get("tie_word_embeddings", False),
            dropout=config["hidden_dropout"],
            attention_dropout=config["attention_dropout"],
        )

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        rope, share = write_rope(model), share_of(model)
        names = {kind: name for name, kind in reversed(_ACTIVATIONS.items())}
        return {
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.embed_dim,
            "num_attention_heads": model.num_heads,
            "intermediate_size": model.hidden_dim,
            "hidden_act": names.get(model.mlp, "gelu"),
            "layer_norm_eps": model.norm_epsilon,
            "max_position_embeddings": rope_length(model, length),
            "tie_word_embeddings": model.tied_embeddings,
            "use_parallel_residual": model.parallel_residual,
            "attention_bias": True,
            "hidden_dropout": model.dropout,
            "attention_dropout": model.attention_dropout,
            "rotary_pct": share,
            "rotary_emb_base": model.rope_theta,
            "rope_scaling": None if model.rope_scaling is None else rope,
            "rope_parameters": rope | {"rope_theta": model.rope_theta, "partial_rotary_factor": share},
        }

    def tensors(self, model: Transformer) -> Iterator[Tensor]:
        """All tensors of a model."""
        block, three = "gpt_neox.layers.{}.", tuple(f"attention/{name}" for name in ("query", "key", "value"))
        yield Tensor("gpt_neox.embed_in.weight", ("embedding",), 1)
        yield from _norm(f"{block}input_layernorm", "attention_norm")
        product = f"{block}attention.query_key_value"
        yield _OfHeads(f"{product}.weight", three, 1, transposed=True, num_heads=model.num_heads)
        yield _OfHeads(f"{product}.bias", tuple(f"{name}_bias" for name in three), 0, num_heads=model.num_heads)
        yield from _product(f"{block}attention.dense", "attention/out", 2)
        yield from _norm(f"{block}post_attention_layernorm", "mlp_norm")
        yield from _product(f"{block}mlp.dense_h_to_4h", "mlp/up", 1)
        yield from _product(f"{block}mlp.dense_4h_to_h", "mlp/down", 1)
        yield from _norm("gpt_neox.final_layer_norm", "final_norm")
        if not model.tied_embeddings:
            yield Tensor(self.head, ("head",), 1, transposed=True)

    def length(self, config: Mapping[str, Any]) -> int:
        """How many tokens a model of this config reads."""
        return config.get("max_position_embeddings", _DEFAULTS["max_position_embeddings"])


def _norm(name: str, here: str) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (f"{here}/scale",), 0)
    yield Tensor(f"{name}.bias", (f"{here}/bias",), 0)


def _product(name: str, here: str, num_inputs: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (here,), num_inputs, transposed=True)
    yield Tensor(f"{name}.bias", (f"{here}_bias",), 0)
