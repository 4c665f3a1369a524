"""The layout of ModernBERT (Warner et al. 2024): rotary positions, gated MLPs, windows in most layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.encoders import NAMES, EncoderLayout, activation, classifier, norm, product
from jaxdl.inference.convert.layouts import Tensor
from jaxdl.inference.convert.rope import read_kind
from jaxdl.inference.convert.settings import (
    COUNT,
    FLAG,
    FULL,
    OBJECT,
    POSITIVE,
    SHARE,
    SLIDING,
    TEXTS,
    Form,
    Settings,
)
from jaxdl.models import Encoder

_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""The kinds of layers -> the older name of their base of wavelengths, and its value where nothing says it."""
_DROPOUTS = ("embedding_dropout", "mlp_dropout", "attention_dropout")


class ModernBERT(EncoderLayout):
    """ModernBERT."""

    model_type = "modernbert"
    architecture = "ModernBertForSequenceClassification"
    prefix = "model."
    head = ("head.", "classifier.")
    other_heads = ("decoder.",)
    forms: ClassVar[Mapping[str, Form]] = {
        **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
                         "max_position_embeddings", "local_attention", "global_attn_every_n_layers"), COUNT),
        "norm_eps": POSITIVE, **dict.fromkeys(("global_rope_theta", "local_rope_theta"), POSITIVE.or_null),
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), FLAG),
        **dict.fromkeys((*_DROPOUTS, "classifier_dropout"), SHARE),
        "layer_types": TEXTS.or_null, "rope_parameters": OBJECT.or_null,
    }  # fmt: skip

    others = (
        *EncoderLayout.others, "hidden_activation", "classifier_activation", "classifier_pooling", "rope_scaling",
        "initializer_cutoff_factor", "decoder_bias", "deterministic_flash_attn", "sparse_prediction",
        "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad",
        # The first files have these, and transformers reads `norm_eps` and rotary positions.
        "layer_norm_eps", "position_embedding_type",
    )  # fmt: skip

    def model(self, config: Mapping[str, Any]) -> Encoder:
        """The model of a config.json."""
        settings = Settings(config)
        biases = config.get("attention_bias", False)
        settings.must("mlp_bias", biases, missing=False)
        settings.must("classifier_pooling", "cls", "mean", missing="cls")
        return Encoder(
            num_layers=config["num_hidden_layers"],
            embed_dim=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            mlp_dim=config["intermediate_size"],
            activation=activation(config, "hidden_activation", "gelu"),
            gated=True,
            norm_position="pre",
            norm_epsilon=config.get("norm_eps", 1e-5),
            norm_biases=config.get("norm_bias", False),
            biases=biases,
            positions="rotary",
            max_length=config["max_position_embeddings"],
            rope_theta=_theta(config, FULL),
            local_rope_theta=_theta(config, SLIDING),
            window=config.get("local_attention", 128) // 2,
            global_every=_global_every(config),
            num_types=0,
            vocab_size=config.get("vocab_size"),
            pooling="mean" if config.get("classifier_pooling") == "mean" else "first",
            head_activation=activation(config, "classifier_activation", "gelu"),
            head_norm=True,
            head_biases=config.get("classifier_bias", False),
            dropout=config.get("mlp_dropout", 0.0),
            attention_dropout=config.get("attention_dropout", 0.0),
            head_dropout=config.get("classifier_dropout", 0.0),
        )

    def remarks(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """What has no exact equivalent: where dropouts are."""
        given = {name: value for name in _DROPOUTS if (value := config.get(name))}
        if not given:
            return ()
        several = ", ".join(f"{name} = {value}" for name, value in given.items())
        return (
            f"its config has {several}; here dropout = {config.get('mlp_dropout', 0.0)} is for the embeddings and what "
            "each part of a block adds, and attention_dropout for attention's weights (in training alone; "
            "--model.dropout changes it)",
        )

    def config(self, model: Encoder, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        del length
        window = model.max_length if model.window is None else model.window
        types = [FULL if model.window_of(layer) is None else SLIDING for layer in range(model.num_layers)]
        thetas = {FULL: model.rope_theta, SLIDING: model.local_rope_theta}
        return {
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.embed_dim,
            "num_attention_heads": model.num_heads,
            "intermediate_size": model.hidden_dim,
            "hidden_activation": NAMES[model.activation],
            "norm_eps": model.norm_epsilon,
            "norm_bias": model.norm_biases,
            "attention_bias": model.biases,
            "mlp_bias": model.biases,
            "max_position_embeddings": model.max_length,
            "local_attention": 2 * window,
            "global_attn_every_n_layers": model.global_every,
            "layer_types": types,
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
            "global_rope_theta": model.rope_theta,
            "local_rope_theta": model.local_rope_theta,
            "classifier_pooling": {"first": "cls", "mean": "mean"}[model.pooling],
            "classifier_bias": model.head_biases,
            "classifier_activation": NAMES[model.head_activation],
            "embedding_dropout": model.dropout,
            "mlp_dropout": model.dropout,
            "attention_dropout": model.attention_dropout,
            "classifier_dropout": model.classifier_dropout,
            "initializer_range": model.init_stddev,
        }

    def tensors(self, model: Encoder) -> Iterator[Tensor]:
        """All tensors of a model; in the first layer there is no norm before attention."""
        layer, biases, norms = "model.layers.{}", model.biases, model.norm_biases
        three = tuple(f"attention/{name}" for name in ("query", "key", "value"))
        yield Tensor("model.embeddings.tok_embeddings.weight", ("embedding",), 1)
        yield from norm("model.embeddings.norm", "embedding_norm", bias=norms)
        for tensor in norm(f"{layer}.attn_norm", "attention_norm", bias=norms):
            yield replace(tensor, after_first=True)
        yield Tensor(f"{layer}.attn.Wqkv.weight", three, 1, transposed=True)
        if biases:
            yield Tensor(f"{layer}.attn.Wqkv.bias", tuple(f"{name}_bias" for name in three), 0)
        yield from product(f"{layer}.attn.Wo", "attention/out", 2, bias=biases)
        yield from norm(f"{layer}.mlp_norm", "mlp_norm", bias=norms)
        yield Tensor(f"{layer}.mlp.Wi.weight", ("mlp/gate", "mlp/up"), 1, transposed=True)
        if biases:
            yield Tensor(f"{layer}.mlp.Wi.bias", ("mlp/gate_bias", "mlp/up_bias"), 0)
        yield from product(f"{layer}.mlp.Wo", "mlp/down", bias=biases)
        yield from norm("model.final_norm", "final_norm", bias=norms)
        yield from product("head.dense", "pooler/dense", bias=model.head_biases)
        yield from norm("head.norm", "pooler/norm", bias=norms)
        yield from classifier("classifier")


def _theta(config: Mapping[str, Any], kind: str) -> float:
    """The base of the wavelengths in layers of a kind. Raises ConfigError for positions that are stretched."""
    older, usual = _THETAS[kind]
    both = config.get("rope_parameters") or {}
    rope = both.get(kind) or {}
    form = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else None
    if form != "default" or set(both) - _THETAS.keys() or config.get("rope_scaling"):
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        raise ConfigError(f"{name} = {config[name]!r} are not converted, only default ones of {FULL} and {SLIDING}.")
    given = {name: value for name, value in rope.items() if value is not None}
    return read_kind({}, {"rope_theta": config.get(older) or usual, **given}, form).theta


def _global_every(config: Mapping[str, Any]) -> int:
    """Every so many layers one attends to the whole text. Raises ConfigError where they do not stand so."""
    types, num = config.get("layer_types"), config["num_hidden_layers"]
    if types is None:
        return config.get("global_attn_every_n_layers", 3)
    for every in range(1, num + 1):
        if list(types) == [SLIDING if layer % every else FULL for layer in range(num)]:
            return every
    raise ConfigError(
        f"layer_types = {list(types)} is not converted: {FULL} must be the first of {num} layers, and every so many "
        f"another, the others {SLIDING}."
    )
