"""What a mixture of texts is made of."""

from __future__ import annotations

import abc
from typing import NamedTuple

from jaxdl.data.source import Data, Splits
from jaxdl.data.text.shards import ShardPlan


class Measured(NamedTuple):
    """Rows of text; of the held-out ones the bytes of the text that counts, and its tokens."""

    splits: Splits
    num_bytes: int
    num_tokens: int


class TokenizedText(Data, kind=None):
    """Text that is tokenized into shards before a run, with fields `tokenizer`, `length` and `packing`."""

    @abc.abstractmethod
    def measured(self) -> Measured:
        """Training and held-out rows. Raises ConfigError for what cannot be read, or takes long to tokenize."""

    @abc.abstractmethod
    def plans(self) -> list[ShardPlan]:
        """What is tokenized, and where the tokens are kept. Raises ConfigError for what cannot be found."""

    def build(self) -> Splits:
        """The rows; see `measured`."""
        return self.measured().splits
