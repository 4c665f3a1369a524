"""Encodes text to tokens and back: bytes, or a tokenizer in one of the usual files."""

from __future__ import annotations

import abc
import copy
import hashlib
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.tokenizer_files import end_tokens, json_object, older_files

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Ends of documents: the first one that a tokenizer has is used, unless its folder names another."""
START_OF_TEXT = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]")
"""Starts of documents, likewise."""
PADDING = ("<pad>", "<|pad|>", "[PAD]")
"""Padding, likewise."""

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
"""The files of a tokenizer's folder in the form of Hugging Face."""
SENTENCEPIECE_FILE, GENERATION_FILE = "tokenizer.model", "generation_config.json"
"""The same: the older form of a tokenizer, and what says where texts end."""

_ADVICE = (
    "Give a tokenizer.json, a folder that has one, or a .model file of sentencepiece; python -m jaxdl.data tokenizer "
    "trains one."
)

_kinds: list[type[Encoder]] = []


class Encoder(abc.ABC):
    """A kind of tokenizer: how the file at a path encodes. A subclass registers itself when its class statement runs.

    Its constructor raises ConfigError for a file that cannot be read. `pad`, `start` and `end` are the numbers of these
    tokens, None where the tokenizer has none.
    """

    kind: ClassVar[str]
    pad: int | None = None
    start: int | None = None
    end: int | None = None
    opening: tuple[int, ...] | None = None
    """What it puts before every text itself when it is asked for special tokens; None where its files do not say."""
    ends: tuple[int, ...] = ()
    """The tokens at which a text ends, where the folder of the tokenizer says so."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.isabstract(cls):
            _kinds.append(cls)

    @abc.abstractmethod
    def __init__(self, path: str) -> None: ...

    @classmethod
    @abc.abstractmethod
    def reads(cls, path: str | None) -> bool:
        """Whether a tokenizer at this path, which need not be there, is of this kind."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """The largest token plus 1."""

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without special tokens around it."""

    def offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """(the tokens, the characters [first, end) of each) of each text. Raises ConfigError if they are not known."""
        raise ConfigError(
            f"a tokenizer of {self.kind} says not which characters a token is, so those of an answer are not known. "
            "Give a tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it."
        )

    @abc.abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""

    @abc.abstractmethod
    def name(self, token: int) -> str:
        """What the tokenizer calls a token, `</s>`."""

    @abc.abstractmethod
    def files(self) -> list[Path]:
        """The files that decide its tokens."""


class _Bytes(Encoder):
    """The bytes of UTF-8; byte 0 ends a text."""

    kind = "bytes"
    end = 0

    def __init__(self, path: str | None) -> None:
        del path

    @classmethod
    def reads(cls, path: str | None) -> bool:
        return path is None

    @property
    def vocab_size(self) -> int:
        return 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        spans = ([(at, at + 1) for at, x in enumerate(text) for _ in x.encode()] for text in texts)
        return [(list(text.encode()), at) for text, at in zip(texts, spans, strict=True)]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def name(self, token: int) -> str:
        return chr(token)

    def files(self) -> list[Path]:
        return []


class _SentencePiece(Encoder):
    """A `.model` file of sentencepiece."""

    kind = "sentencepiece"

    def __init__(self, path: str) -> None:
        self._path = expand_home(path)
        if not self._path.is_file():
            raise ConfigError(f"tokenizer {path}: no such file. {_ADVICE}")
        sentencepiece = import_text("sentencepiece", f"tokenizer {path}")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(self._path))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"tokenizer {path}: not a model of sentencepiece ({error}). {_ADVICE}") from None
        numbers = (self._processor.pad_id(), self._processor.bos_id(), self._processor.eos_id())
        self.pad, self.start, self.end = (None if number < 0 else number for number in numbers)
        if self._path.name == SENTENCEPIECE_FILE:  # The files beside it are those of the same checkpoint.
            adds = json_object(self._path.with_name(TOKENIZER_CONFIG_FILE), path).get("add_bos_token")
            if isinstance(adds, bool):
                self.opening = (self.start,) if adds and self.start is not None else ()
            self.ends = end_tokens(self._path.with_name(GENERATION_FILE))

    @classmethod
    def reads(cls, path: str | None) -> bool:
        return path is not None and path.endswith(".model")

    @property
    def vocab_size(self) -> int:
        return self._processor.get_piece_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def decode(self, tokens: list[int]) -> str:
        return self._processor.decode(tokens)

    def name(self, token: int) -> str:
        return self._processor.id_to_piece(token)

    @property
    def merges_pairs(self) -> bool:
        pieces = range(self._processor.get_piece_size())
        return all(self._processor.get_score(piece).is_integer() for piece in pieces)  # Ranks, not logarithms.

    def files(self) -> list[Path]:
        return [self._path]


class _Tokenizers(Encoder):
    """A JSON file of the `tokenizers` library, or a folder of Hugging Face's form that has one."""

    kind = "tokenizers"

    def __init__(self, path: str) -> None:
        given = expand_home(path)
        self._file = given / TOKENIZER_FILE if given.is_dir() else given
        self._config = given / TOKENIZER_CONFIG_FILE
        if not self._file.is_file():
            raise ConfigError(_lacking(path, given))
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self._file))
        except Exception as error:  # The library raises no narrower class.
            raise ConfigError(
                f"tokenizer {path}: not a JSON file of the tokenizers library ({error}). {_ADVICE}"
            ) from None
        self._tokenizer.no_truncation()  # A file may ask for them; here documents are whole.
        self._tokenizer.no_padding()
        named = self._special_tokens(path)
        self.pad = self._number(named.get("pad_token"), PADDING)
        self.start = self._number(named.get("bos_token"), START_OF_TEXT)
        self.end = self._number(named.get("eos_token"), END_OF_TEXT)
        bare, framed = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        starts = (at for at in range(len(framed)) if bare and framed[at : at + len(bare)] == bare)
        self.opening = tuple(framed[: next(starts, 0)])
        self.ends = end_tokens(given / GENERATION_FILE)

    def _special_tokens(self, path: str) -> dict[str, str | None]:
        """The special tokens that the folder names: "pad_token" and the like."""
        config = json_object(self._config, path)
        names = {name: config[name] for name in ("pad_token", "bos_token", "eos_token") if name in config}
        contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in names.items()}
        if wrong := [name for name, value in contents.items() if not isinstance(value, str | None)]:
            where = f"{wrong[0]} in {TOKENIZER_CONFIG_FILE}"
            raise ConfigError(f"tokenizer {path}: {where} is not a token. Correct it there.")
        return contents

    def _number(self, named: str | None, usual: Sequence[str]) -> int | None:
        numbers = (self._tokenizer.token_to_id(token) for token in ((named,) if named else usual))
        return next((number for number in numbers if number is not None), None)

    @classmethod
    def reads(cls, path: str | None) -> bool:
        return path is not None and not _SentencePiece.reads(path)

    @property
    def vocab_size(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encoded]

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def name(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def files(self) -> list[Path]:
        return [path for path in (self._file, self._config) if path.is_file()]


def _lacking(path: str, given: Path) -> str:
    """The message for a path without a tokenizer.json."""
    older = older_files(given) if given.is_dir() else []
    if SENTENCEPIECE_FILE in older:
        return f"tokenizer {path}: it has no {TOKENIZER_FILE}. Name its {given / SENTENCEPIECE_FILE}."
    if older:
        return (
            f"tokenizer {path}: it has no {TOKENIZER_FILE}, but {' and '.join(older)}, an older form. Convert the "
            f"checkpoint and take WORKDIR/tokenizer (python -m jaxdl.convert from-hf {path} WORKDIR), or save it with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    return f"tokenizer {path}: {f'it has no {TOKENIZER_FILE}' if given.is_dir() else 'no such file'}. {_ADVICE}"


class Codec:
    """Text to tokens and back.

    `tokenizer` is None for bytes; the JSON file of the `tokenizers` library; a folder with tokenizer.json (and perhaps
    tokenizer_config.json), as models on Hugging Face have it; or a `.model` file of sentencepiece. Raises ConfigError
    for a missing or invalid file, and a tokenizer without a token to separate documents.
    """

    def __init__(self, tokenizer: str | None) -> None:
        (kind,) = [kind for kind in _kinds if kind.reads(tokenizer)]
        self._encoder: Any = kind(tokenizer)  # pyright: ignore[reportArgumentType]
        self.kind: str = kind.kind
        """Which kind it is: "bytes", "tokenizers" or "sentencepiece"."""
        self.tokenizer = tokenizer
        """What it was made of."""
        self.is_bytes = tokenizer is None
        self.pad: int | None = self._encoder.pad
        """The number of the token for padding, None where the tokenizer has none."""
        self.start: int | None = self._encoder.start
        """The number of the token before a text, or None."""
        self.end: int | None = self._encoder.end
        """The number of the token after a text, or None."""
        self.opening: tuple[int, ...] = self._encoder.opening or ()
        """The tokens that every text begins with: by default what its own file puts there, such as Llama's start of
        text, mostly none; of the data of a run those that its training documents begin with, see `for_documents`."""
        self.says_opening: bool = self._encoder.opening is not None
        """Whether the files of the tokenizer say what it puts before every text."""
        self.ends: tuple[int, ...] = self._encoder.ends or (() if self.end is None else (self.end,))
        """The tokens at which a text that is written ends: as the checkpoint says that the tokenizer came with, else
        its end of text."""
        self.separator = [self.end] if self.end is not None else self.encode("\n")
        """The tokens between two documents: byte 0, the tokenizer's end of text, or without one a newline."""
        if not self.separator:
            raise ConfigError(
                f"tokenizer {tokenizer}: it has no token to separate documents: none of {', '.join(END_OF_TEXT)}, and "
                "no newline. Add one of these to it."
            )

    @property
    def vocab_size(self) -> int:
        """The largest token plus 1."""
        return self._encoder.vocab_size

    @property
    def merges_pairs(self) -> bool:
        """Of a model of sentencepiece: whether it is BPE, as Llama's is; the other kind is unigram."""
        return self._encoder.merges_pairs

    @property
    def packed_mark(self) -> int:
        """The token that begins each document in packed rows: the start, or where there is none the separator."""
        return self.separator[-1] if self.start is None else self.start

    @property
    def beginning(self) -> list[int]:
        """The tokens before the first one of a document: the opening, or where there is none the separator."""
        return list(self.opening) or list(self.separator)

    def for_documents(self, opening: Sequence[int]) -> Codec:
        """The codec of data whose documents begin with `opening` and end with the tokenizer's end of text.

        In windows of one stream, where `opening` is empty, a document follows the separator, and a window may begin
        anywhere.
        """
        ends = self.ends if self.end is None else tuple(dict.fromkeys((*self.ends, self.end)))
        return self._with(opening=tuple(opening), ends=ends)

    def with_opening(self, opening: Sequence[int]) -> Codec:
        """The same codec, with other tokens before every text."""
        return self._with(opening=tuple(opening))

    def _with(self, **changes: Any) -> Codec:
        changed = copy.copy(self)
        vars(changed).update(changes)
        return changed

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens around it."""
        return self._encoder.encode([text])[0]

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text that a model continues: after those that every text begins with.

        Those of an empty text are the tokens before a new document.
        """
        return [*self.opening, *self.encode(text)] or self.beginning

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text; faster than one by one."""
        return self._encoder.encode(texts)

    def with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(the tokens, the first character of each, the one behind its last), int64, of each text.

        Raises ConfigError for a tokenizer of sentencepiece.
        """
        made = [(np.array(x, np.int64), np.array(at, np.int64)) for x, at in self._encoder.offsets(texts)]
        return [(tokens, at.reshape(-1, 2)[:, 0], at.reshape(-1, 2)[:, 1]) for tokens, at in made]

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self._encoder.decode(tokens)

    def name(self, token: int) -> str:
        """What the tokenizer calls a token, `</s>`."""
        return self._encoder.name(token)

    def files(self) -> list[Path]:
        """The files that decide its tokens, the tokenizer's own first; none for bytes."""
        return self._encoder.files()

    def fingerprint(self) -> str:
        """Identifies the tokenizer by its content, wherever its files are."""
        digest = hashlib.sha256(self.kind.encode())
        for path in self._encoder.files():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:16]


def import_text(name: str, what: str) -> Any:
    """The module of an optional package. Raises ConfigError, which begins with `what`, when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{what}: it needs the package {name}, which is not installed. Install it with pip install 'jaxdl[text]'."
        ) from None
