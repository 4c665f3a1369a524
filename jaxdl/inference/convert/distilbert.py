"""The layout of DistilBERT (Sanh et al. 2019): BERT with half of the layers, without types of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxdl.inference.convert.encoders import NAMES, EncoderLayout, activation, classifier, norm, product
from jaxdl.inference.convert.layouts import Tensor
from jaxdl.inference.convert.settings import COUNT, SHARE, Form
from jaxdl.inference.convert.word_piece import BERT_FILES
from jaxdl.models import Encoder

_EPSILON = 1e-12
"""That of every norm; it has no setting."""


class DistilBERT(EncoderLayout):
    """DistilBERT."""

    model_type = "distilbert"
    architecture = "DistilBertForSequenceClassification"
    prefix = "distilbert."
    older_tokenizer = BERT_FILES
    head = ("pre_classifier.", "classifier.")
    other_heads = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.")
    ignored = (".position_ids",)
    forms: ClassVar[Mapping[str, Form]] = {
        **dict.fromkeys(("n_layers", "dim", "n_heads", "hidden_dim", "max_position_embeddings"), COUNT),
        **dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), SHARE),
    }  # fmt: skip

    others = (*EncoderLayout.others, "activation", "sinusoidal_pos_embds", "qa_dropout", "tie_weights_")

    def model(self, config: Mapping[str, Any]) -> Encoder:
        """The model of a config.json; sinusoidal positions are numbers of its table, which are read as they are."""
        return Encoder(
            num_layers=config["n_layers"],
            embed_dim=config["dim"],
            num_heads=config["n_heads"],
            mlp_dim=config["hidden_dim"],
            activation=activation(config, "activation", "gelu"),
            norm_epsilon=_EPSILON,
            max_length=config["max_position_embeddings"],
            num_types=0,
            vocab_size=config.get("vocab_size"),
            head_activation="relu",
            dropout=config.get("dropout", 0.1),
            attention_dropout=config.get("attention_dropout", 0.1),
            head_dropout=config.get("seq_classif_dropout", 0.2),
        )

    def config(self, model: Encoder, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        del length
        return {
            "n_layers": model.num_layers,
            "dim": model.embed_dim,
            "n_heads": model.num_heads,
            "hidden_dim": model.hidden_dim,
            "activation": NAMES[model.activation],
            "max_position_embeddings": model.max_length,
            "sinusoidal_pos_embds": False,
            "dropout": model.dropout,
            "attention_dropout": model.attention_dropout,
            "seq_classif_dropout": model.classifier_dropout,
            "initializer_range": model.init_stddev,
        }

    def tensors(self, model: Encoder) -> Iterator[Tensor]:
        """All tensors of a model."""
        del model
        table, layer = "distilbert.embeddings", "distilbert.transformer.layer.{}"
        yield Tensor(f"{table}.word_embeddings.weight", ("embedding",), 1)
        yield Tensor(f"{table}.position_embeddings.weight", ("position_embedding",), 1)
        yield from norm(f"{table}.LayerNorm", "embedding_norm")
        for there, here in (("q", "query"), ("k", "key"), ("v", "value")):
            yield from product(f"{layer}.attention.{there}_lin", f"attention/{here}")
        yield from product(f"{layer}.attention.out_lin", "attention/out", 2)
        yield from norm(f"{layer}.sa_layer_norm", "attention_norm")
        yield from product(f"{layer}.ffn.lin1", "mlp/up")
        yield from product(f"{layer}.ffn.lin2", "mlp/down")
        yield from norm(f"{layer}.output_layer_norm", "mlp_norm")
        yield from product("pre_classifier", "pooler/dense")
        yield from classifier("classifier")
