"""The layouts of RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020): BERT, its positions from 2 on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.bert import BERT
from jaxdl.inference.convert.byte_bpe import ROBERTA_FILES
from jaxdl.inference.convert.encoders import classifier, product
from jaxdl.inference.convert.layouts import Tensor
from jaxdl.models import Encoder


class RoBERTa(BERT):
    """RoBERTa: the first position is in the row after the number of the padding token."""

    model_type = "roberta"
    architecture = "RobertaForSequenceClassification"
    prefix = "roberta."
    head = ("classifier.",)
    other_heads = ("lm_head.", "roberta.pooler.", "pooler.")
    older_tokenizer = ROBERTA_FILES
    drops_input = True

    def offset(self, config: Mapping[str, Any]) -> int:
        """The row of the first position."""
        pad = config.get("pad_token_id", 1)
        if pad is None:
            raise ConfigError("pad_token_id = null is not converted: the positions of RoBERTa begin after it.")
        return pad + 1

    def config(self, model: Encoder, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        return super().config(model, length) | {"pad_token_id": model.position_offset - 1}

    def other(self, model: Any) -> list[str]:
        """What a model computes otherwise than any model of this layout."""
        if model.kind == self.kind and not model.position_offset:
            return ["position_offset=0"]
        return super().other(model)

    def head_tensors(self) -> Iterator[Tensor]:
        """The tensors of the head."""
        yield from product("classifier.dense", "pooler/dense")
        yield from classifier("classifier.out_proj")


class XLMRoBERTa(RoBERTa):
    """XLM-RoBERTa, and what is called XLM-R."""

    model_type = "xlm-roberta"
    architecture = "XLMRobertaForSequenceClassification"
    older_tokenizer = None
