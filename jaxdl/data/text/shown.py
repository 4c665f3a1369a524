"""Rows of text as they are trained on, with the tokens that are learned in colour: `python -m jaxdl.data show`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.source import Source
from jaxdl.data.spec import TextSpec

LEARNED, READ, NOTE = "bold black on green", "dim", "cyan"
"""Styles of tokens that are learned, of those that are read alone, and of what is not in the text."""
_OPEN, _CLOSE = "[[", "]]"
"""What stands around learned tokens where there is no colour."""


def show(source: Source, codec: Codec, num_rows: int, console: Console) -> None:
    """Prints the first rows that training reads with seed 0: each document, its learned tokens in colour.

    Raises ConfigError for rows that are not text.
    """
    spec = source.spec
    if not isinstance(spec, TextSpec):
        raise ConfigError(f"show: these data are {spec.modality}. It shows the tokens of texts alone.")
    if told := source.remark():
        console.print(Text(told))
    count = min(num_rows, len(source))
    indices, _ = source.order(0).rows(0, count)
    for number, row in zip(indices.tolist(), _rows(source.batch(indices), count), strict=True):
        tokens, segments, learned = row
        for document in range(1, int(segments.max()) + 1):
            here = segments == document
            last = f", document {document} of {segments.max()}" if spec.packed else ""
            head = f"row {number:,}{last}: {int(learned[here].sum()):,} of {int(here.sum()):,} tokens are learned"
            console.print(Text(head, style=NOTE))
            text = coloured(tokens[here].tolist(), learned[here], codec, colour=console.color_system is not None)
            console.print(text, soft_wrap=True, highlight=False)
        if padding := int((segments == 0).sum()):
            console.print(Text(f"row {number:,}: {padding:,} places of padding", style=NOTE))
        console.print()
    legend = Text("learned", style=LEARNED) if console.color_system is not None else Text(f"{_OPEN}learned{_CLOSE}")
    console.print(Text.assemble(legend, " ", Text("read alone", style=READ)))


def coloured(tokens: list[int], learned: np.ndarray, codec: Codec, *, colour: bool) -> Text:
    """The text of a document; a character of several tokens is learned where its first token is."""
    text = Text(end="")
    at = 0
    for is_learned, group in itertools.groupby(learned.tolist()):
        size = len(list(group))
        piece = visible(codec.decode(tokens[at : at + size]))
        if is_learned and not colour:
            piece = f"{_OPEN}{piece}{_CLOSE}"
        text.append(piece, style=LEARNED if is_learned else READ)
        at += size
    return text


def visible(text: str) -> str:
    """A text whose control characters, but for new lines and tabs, are written as escapes."""
    return "".join(x if x.isprintable() or x in "\n\t" else repr(x)[1:-1] for x in text)


def _rows(batch: Mapping[str, Any], count: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(tokens, segments, which are learned) of each row, [length + 1] each; a window is one segment."""
    for row in range(count):
        tokens = batch["tokens"][row]
        segments = batch["segments"][row] if "segments" in batch else np.ones_like(tokens)
        learned = np.zeros(len(tokens), bool)
        learned[1:] = (segments[1:] != 0) & (segments[1:] == segments[:-1])
        if "mask" in batch:
            learned[1:] &= batch["mask"][row]
        yield tokens, segments, learned
