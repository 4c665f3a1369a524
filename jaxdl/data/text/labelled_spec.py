"""What labelled texts are like: their tokens, how many of them there are, and the names of the classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.spec import DataSpec
from jaxdl.data.tables.row_weights import EXAMPLE_WEIGHT, blank_weight
from jaxdl.data.text.buckets import buckets_of, padded
from jaxdl.data.text.framing import Framer

TOKENS, NUM_TOKENS, TYPES = "tokens", "num_tokens", "types"


@dataclasses.dataclass(frozen=True)
class LabelledTextSpec(DataSpec):
    """Texts with a class each.

    A batch has "tokens", int32 [batch, length], padded with 0; "num_tokens", int32 [batch], how many there are; and
    "label". With `num_types` of 2 or more, for pairs of texts, it has "types", int32 like the tokens: which text each
    is of. `length` is how many tokens the network reads at most; batches may be shorter.
    """

    vocab_size: int
    length: int
    classes: tuple[str, ...]
    num_types: int = 1
    weight: str | None = None
    """The column of the weights of texts, which `mean_weight` divides."""
    mean_weight: float = 1.0
    modality: ClassVar[str] = "labelled_texts"

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, by number."""
        return self.classes

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    def sizes(self) -> dict[str, int]:
        """The size of the vocabulary, the number of classes, and that of types."""
        return {"vocab_size": self.vocab_size, "num_classes": self.num_classes, "num_types": self.num_types}

    def blank(self) -> dict[str, np.ndarray]:
        """One text of padding and its label; a text has one token at least."""
        rows = {TOKENS: np.zeros((1, self.length), np.int32), NUM_TOKENS: np.ones(1, np.int32)}
        types = {TYPES: np.zeros((1, self.length), np.int32)} if self.num_types > 1 else {}
        return rows | types | {"label": np.zeros(1, np.int32)} | blank_weight(self.weight)

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tokens, how many there are, and their types where there are several."""
        return tuple(batch[name] for name in (TOKENS, NUM_TOKENS, TYPES) if name in batch)

    def described(self) -> tuple[str, str]:
        """Length, vocabulary and classes."""
        what = "pairs of texts" if self.num_types > 1 else "texts"
        return what, f"up to {self.length:,} tokens, vocabulary of {self.vocab_size:,}, {len(self.classes):,} classes"

    def example(self) -> dict[str, np.ndarray]:
        """One text of padding, without its label and its weight."""
        return {name: x for name, x in self.blank().items() if name not in ("label", EXAMPLE_WEIGHT)}

    def user_example(self) -> list[Any]:
        """A text, or a pair of them."""
        return [("a text", "its pair")] if self.num_types > 1 else ["a text"]

    def example_text(self) -> str:
        """What the arrays are, and what the outputs are about."""
        return (
            "numbers of tokens with those around a text, padded with 0, and how many there are of each text; the "
            f"classes are {', '.join(self.classes)}"
        )

    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Arrays as `example` has them, of up to `length` tokens. Raises ConfigError for another form."""
        del names
        wanted = {TOKENS: 2, NUM_TOKENS: 1} | ({TYPES: 2} if self.num_types > 1 else {})
        arrays = {name: np.asarray(values[name]) for name in wanted if name in values} if isinstance(
            values, Mapping
        ) else {}  # fmt: skip
        fits = arrays.keys() == wanted.keys() and all(
            array.dtype.kind in "iu" and array.ndim == wanted[name] for name, array in arrays.items()
        )
        if not fits or not 0 < arrays[TOKENS].shape[1] <= self.length:
            raise ConfigError(
                f"{what}: this network reads texts. Give a text or a list of texts"
                f"{', pairs as tuples' if self.num_types > 1 else ''}; or their tokens, a dictionary of integers "
                f"{', '.join(wanted)}, of at most {self.length:,} tokens."
            )
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    def of_texts(self, given: Sequence[Any], what: str, codec: Codec) -> dict[str, np.ndarray]:
        """The batch of texts, or of pairs of them, that a user gave to the function called `what`.

        Raises ConfigError for pairs where single texts are read, and for both together.
        """
        pairs = [text for text in given if not isinstance(text, str)]
        if pairs and (self.num_types < 2 or len(pairs) < len(given)):
            why = "this network reads single texts" if self.num_types < 2 else "some are pairs, and others single texts"
            raise ConfigError(f"{what}: {pairs[0]!r}: {why}. Give texts of one kind.")
        firsts, seconds = ([pair[0] for pair in pairs], [pair[1] for pair in pairs]) if pairs else (given, None)
        framed = Framer(codec, self.length)(list(map(str, firsts)), seconds)
        longest = max(map(len, framed.tokens))
        length = next(size for size in buckets_of(self.length, self.length) if size >= longest)
        batch = {
            TOKENS: padded(framed.tokens, length),
            NUM_TOKENS: np.array([len(tokens) for tokens in framed.tokens], np.int32),
        }
        return batch | ({TYPES: padded(framed.types, length)} if self.num_types > 1 else {})


def is_text(value: Any) -> bool:
    """Whether a value is a text, or a tuple of two."""
    return isinstance(value, str) or (
        isinstance(value, tuple) and len(value) == 2 and all(isinstance(text, str) for text in value)
    )
