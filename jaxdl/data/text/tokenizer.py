"""Trains tokenizers: `python -m jaxdl.data tokenizer FILES... --out tokenizer.json --vocab-size 8000`."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.core.files import partial_path, replace_file
from jaxdl.data.codec import Codec, import_text
from jaxdl.data.text.documents import EVERY_FILE, PlainDocument, Reading, find_documents, read_documents

SPECIAL = ("<pad>", "<s>", "</s>")
"""The first three tokens of a trained tokenizer: padding, start and end of a text."""
_CHUNK = 10_000
"""Characters that are given to the trainer at a time, which keeps a long document from being one sequence."""
_NUM_BYTES = 256


@dataclass(frozen=True)
class Train:
    """Trains a tokenizer on text files, and writes it as one file. The same text gives the same file."""

    out: Path
    """The file to write: .json, or .model for the kinds of sentencepiece."""
    vocab_size: int
    """The number of tokens, special ones and the 256 bytes included."""
    kind: Literal["bpe", "unigram", "sentencepiece_bpe"] = "bpe"
    """bpe: byte-level BPE, as GPT-2 has, of the `tokenizers` library. unigram, sentencepiece_bpe: of sentencepiece,
    with bytes for characters that it has not seen."""
    column: str = "text"
    """The column with the text, of JSON lines and Parquet. Of .tsv files all columns are read: pairs of sentences share
    the vocabulary."""
    document: PlainDocument = "file"
    """What a document of a plain text file is."""
    glob: str = EVERY_FILE
    """Which files of a folder are read."""
    max_bytes: int | None = None
    """Read only so much text, from the first file on; what is printed at the end says whether there was more."""


def train_tokenizer(files: Sequence[str], command: Train, console: Console) -> str:
    """Trains and writes a tokenizer; returns what to print. Raises ConfigError for what cannot be done."""
    suffix = ".json" if command.kind == "bpe" else ".model"
    least = _NUM_BYTES + len(SPECIAL) + 1
    if command.out.suffix != suffix:
        raise ConfigError(f"--out {command.out}: a tokenizer of kind {command.kind} is a {suffix} file. Rename it.")
    if command.out.exists():
        raise ConfigError(f"--out {command.out}: it is there already. Choose another file, or remove it.")
    if command.vocab_size < least:
        raise ConfigError(
            f"--vocab-size {command.vocab_size}: the bytes and special tokens are {least} alone. Raise it."
        )
    if command.max_bytes is not None and command.max_bytes < 1:
        raise ConfigError(f"--max-bytes {command.max_bytes}: it is below 1. Leave it out to read all of the text.")
    if not files:
        raise ConfigError("tokenizer: no files. Name text files to train on: tokenizer FILES... --out FILE.")
    num_bytes = sum(path.stat().st_size for _, path in find_documents(files, command.glob) if path.is_file())
    console.print(f"training {command.kind} of {command.vocab_size:,} tokens on {num_bytes / 1e6:,.1f} MB of files ...")
    texts = _Texts(files, command)
    with _writing(command.out):
        command.out.parent.mkdir(parents=True, exist_ok=True)
        probe = partial_path(command.out)
        probe.touch()  # Before the training, which may take long.
        probe.unlink()
    content = (_train_bpe if command.kind == "bpe" else _train_sentencepiece)(texts, command, console)
    with _writing(command.out):
        replace_file(command.out, content)
    codec = Codec(str(command.out))
    sample = "".join(itertools.islice(_Texts(files, command), 20))
    cut = f" (--max-bytes {command.max_bytes:,}: the files have more)" if texts.was_cut else ""
    per_token = len(sample.encode()) / max(1, len(codec.encode(sample)))
    return (
        f"{command.out}: {codec.vocab_size:,} tokens, trained on {texts.num_bytes / 1e6:,.1f} MB of text{cut}; "
        f"{per_token:.2f} bytes a token on its beginning; padding {codec.pad}, start {codec.start}, end {codec.end}"
    )


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Makes a file that cannot be written a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {path}: it cannot be written ({error.strerror}). Choose another.") from None


class _Texts:
    """The text of the files, in pieces; it can be read several times."""

    def __init__(self, files: Sequence[str], command: Train) -> None:
        self._files, self._command = files, command
        self.num_bytes, self.was_cut = 0, False

    def __iter__(self) -> Iterator[str]:
        command, self.num_bytes, self.was_cut = self._command, 0, False
        for text in read_documents(self._files, Reading(command.column, command.document), command.glob):
            for start in range(0, len(text), _CHUNK):
                if command.max_bytes is not None and self.num_bytes >= command.max_bytes:
                    self.was_cut = True
                    return
                piece = text[start : start + _CHUNK]
                self.num_bytes += len(piece.encode())
                yield piece


def _train_bpe(texts: _Texts, command: Train, console: Console) -> bytes:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=command.vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=console.is_terminal,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if texts.num_bytes == 0:
        raise ConfigError("tokenizer: the files have no text to train on.")
    return tokenizer.to_str(pretty=True).encode()


def _train_sentencepiece(texts: _Texts, command: Train, console: Console) -> bytes:
    sentencepiece = import_text("sentencepiece", f"--kind {command.kind}")
    model = io.BytesIO()
    lines = (line for text in texts for line in text.split("\n") if line and "\0" not in line)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="unigram" if command.kind == "unigram" else "bpe",
            vocab_size=command.vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * _CHUNK,
            pad_id=0, bos_id=1, eos_id=2, unk_id=3,
            num_threads=1,  # Sums of several threads depend on their order.
            minloglevel=0 if console.is_terminal else 1,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        reason = str(error).rpartition("] ")[2].strip()
        raise ConfigError(f"tokenizer: sentencepiece cannot train it: {reason}") from None
    return model.getvalue()
