"""The files of a tokenizer, and the numbers of its special tokens, on their way from and to Hugging Face."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdl.convert.byte_bpe import ADDED, CONFIG, MERGES, SPECIAL, VOCAB, gpt2_tokenizer
from jaxdl.data import Codec
from jaxdl.errors import ConfigError
from jaxdl.paths import expanded

FOLDER = "tokenizer"
"""The folder of a converted workdir that has them."""
JSON, SENTENCEPIECE, GENERATION = "tokenizer.json", "tokenizer.model", "generation_config.json"
FILES = (
    JSON, SENTENCEPIECE, CONFIG, SPECIAL, ADDED, VOCAB, MERGES, "chat_template.jinja", GENERATION,
)  # fmt: skip
"""What a checkpoint may have."""
NUMBERS = {"bos_token_id": "start", "eos_token_id": "end", "pad_token_id": "pad"}
"""Special tokens: name there -> name in a codec."""


def check_tokenizer(source: Path, *, byte_bpe: bool) -> None:
    """Raises ConfigError for files of the tokenizer of a checkpoint that cannot be read; see `keep_tokenizer`."""
    _read(source / GENERATION)
    if (source / JSON).is_file():
        Codec(str(source))
    elif _older_form(source, byte_bpe):
        gpt2_tokenizer(source)
    elif (source / SENTENCEPIECE).is_file():
        Codec(str(source / SENTENCEPIECE))


def keep_tokenizer(source: Path, config: Mapping[str, Any], workdir: Path, *, byte_bpe: bool) -> str | None:
    """Copies the tokenizer of a checkpoint into a workdir; what to give a codec, None if there is none. Raises OSError.

    It is relative to the workdir. With `byte_bpe` a vocab.json and a merges.txt alone are a tokenizer of GPT-2's kind,
    whose tokenizer.json is made. The numbers of the special tokens in the checkpoint's config are kept in
    generation_config.json. Raises ConfigError for files that cannot be read.
    """
    folder = workdir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _copy(source, folder)
    numbers = {name: config[name] for name in NUMBERS if config.get(name) is not None}
    _write(folder / GENERATION, numbers | _read(folder / GENERATION))
    if _older_form(folder, byte_bpe):
        (folder / JSON).write_text(gpt2_tokenizer(folder), encoding="utf-8")
    if (folder / JSON).is_file():
        return FOLDER
    return f"{FOLDER}/{SENTENCEPIECE}" if (folder / SENTENCEPIECE).is_file() else None


def _older_form(folder: Path, byte_bpe: bool) -> bool:
    """Whether the tokenizer in a folder is a vocab.json and a merges.txt alone."""
    return byte_bpe and not (folder / JSON).is_file() and all((folder / name).is_file() for name in (VOCAB, MERGES))


def kept_numbers(folder: Path) -> dict[str, Any]:
    """The numbers of special tokens in the generation_config.json of a folder."""
    return {name: value for name, value in _read(folder / GENERATION).items() if name in NUMBERS}


def write_tokenizer(codec: Codec, folder: Path) -> dict[str, Any]:
    """Writes a tokenizer as Hugging Face has it; returns the numbers of its special tokens. Raises OSError.

    Bytes become a tokenizer whose tokens are the bytes.
    """
    if codec.tokenizer is None:
        _write(folder / JSON, bytes_tokenizer())
    else:
        path = expanded(codec.tokenizer)
        _copy(path if path.is_dir() else path.parent, folder)
        if path.is_file():
            shutil.copyfile(path, folder / (SENTENCEPIECE if path.suffix == ".model" else JSON))
    if (folder / JSON).is_file() and not (folder / CONFIG).is_file():
        _write(folder / CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    numbers = {name: getattr(codec, own) for name, own in NUMBERS.items() if getattr(codec, own) is not None}
    numbers |= kept_numbers(folder)
    _write(folder / GENERATION, numbers | _read(folder / GENERATION))
    return numbers


def bytes_tokenizer() -> dict[str, Any]:
    """The content of a tokenizer.json whose token n is the byte n, as jaxdl has them without a tokenizer."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # As GPT-2 writes bytes: these as they are,
    hidden = {byte: 256 + place for place, byte in enumerate(sorted({*range(256)} - {*shown}))}  # the others shifted.
    vocab = {chr(hidden.get(byte, byte)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "dropout": None, "unk_token": None}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}


def _copy(source: Path, folder: Path) -> None:
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        raise ConfigError(f"{path}: not JSON. Fetch the file again.") from None
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
