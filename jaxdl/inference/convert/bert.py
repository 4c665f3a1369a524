"""The layout of BERT (Devlin et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxdl.inference.convert.encoders import NAMES, EncoderLayout, activation, classifier, norm, product
from jaxdl.inference.convert.layouts import Tensor
from jaxdl.inference.convert.settings import COUNT, LAYERS, POSITIVE, SHARE, Form, Settings
from jaxdl.inference.convert.word_piece import BERT_FILES
from jaxdl.models import Encoder

_DROPOUT = 0.1
"""The dropouts of a config.json that has none."""


class BERT(EncoderLayout):
    """BERT; RoBERTa derives from it."""

    model_type = "bert"
    architecture = "BertForSequenceClassification"
    prefix = "bert."
    older_tokenizer = BERT_FILES
    head = ("bert.pooler.", "classifier.")
    other_heads = ("cls.",)
    ignored = (".position_ids",)
    forms: ClassVar[Mapping[str, Form]] = {
        **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
                         "max_position_embeddings"), COUNT),
        "type_vocab_size": LAYERS, "layer_norm_eps": POSITIVE, "pad_token_id": LAYERS.or_null,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), SHARE),
        "classifier_dropout": SHARE.or_null,
    }  # fmt: skip
    others = (
        *EncoderLayout.others, "hidden_act", "position_embedding_type",
        # Multilingual BERT has these, which only TensorFlow's first program read.
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    )  # fmt: skip
    default_epsilon: ClassVar[float] = 1e-12
    drops_input: ClassVar[bool] = False

    def model(self, config: Mapping[str, Any]) -> Encoder:
        """The model of a config.json."""
        settings = Settings(config)
        settings.must("position_embedding_type", "absolute", missing="absolute")
        offset = self.offset(config)
        settings.refuse_if(config["max_position_embeddings"] <= offset, "max_position_embeddings", "is too small")
        return Encoder(
            num_layers=config["num_hidden_layers"],
            embed_dim=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            mlp_dim=config["intermediate_size"],
            activation=activation(config, "hidden_act", "gelu"),
            norm_epsilon=config.get("layer_norm_eps", self.default_epsilon),
            max_length=config["max_position_embeddings"] - offset,
            position_offset=offset,
            num_types=config.get("type_vocab_size", 2),
            vocab_size=config.get("vocab_size"),
            dropout=config.get("hidden_dropout_prob", _DROPOUT),
            attention_dropout=config.get("attention_probs_dropout_prob", _DROPOUT),
            head_dropout=config.get("classifier_dropout"),
            head_drops_input=self.drops_input,
        )

    def offset(self, config: Mapping[str, Any]) -> int:
        """The row of the first position."""
        del config
        return 0

    def config(self, model: Encoder, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        del length
        return {
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.embed_dim,
            "num_attention_heads": model.num_heads,
            "intermediate_size": model.hidden_dim,
            "hidden_act": NAMES[model.activation],
            "layer_norm_eps": model.norm_epsilon,
            "max_position_embeddings": model.max_length + model.position_offset,
            "type_vocab_size": model.num_types,
            "position_embedding_type": "absolute",
            "hidden_dropout_prob": model.dropout,
            "attention_probs_dropout_prob": model.attention_dropout,
            "classifier_dropout": model.head_dropout,
            "initializer_range": model.init_stddev,
        }

    def tensors(self, model: Encoder) -> Iterator[Tensor]:
        """All tensors of a model."""
        table, layer = f"{self.prefix}embeddings", f"{self.prefix}encoder.layer.{{}}"
        yield Tensor(f"{table}.word_embeddings.weight", ("embedding",), 1)
        yield Tensor(f"{table}.position_embeddings.weight", ("position_embedding",), 1)
        if model.num_types:
            yield Tensor(f"{table}.token_type_embeddings.weight", ("type_embedding",), 1)
        yield from norm(f"{table}.LayerNorm", "embedding_norm")
        for name in ("query", "key", "value"):
            yield from product(f"{layer}.attention.self.{name}", f"attention/{name}")
        yield from product(f"{layer}.attention.output.dense", "attention/out", 2)
        yield from norm(f"{layer}.attention.output.LayerNorm", "attention_norm")
        yield from product(f"{layer}.intermediate.dense", "mlp/up")
        yield from product(f"{layer}.output.dense", "mlp/down")
        yield from norm(f"{layer}.output.LayerNorm", "mlp_norm")
        yield from self.head_tensors()

    def head_tensors(self) -> Iterator[Tensor]:
        """The tensors of the head."""
        yield from product("bert.pooler.dense", "pooler/dense")
        yield from classifier("classifier")
