"""The files of a tokenizer, and the numbers of its special tokens, on their way from and to Hugging Face."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data import Codec
from jaxdl.data.codec import GENERATION_FILE, SENTENCEPIECE_FILE, TOKENIZER_FILE
from jaxdl.data.text.chat_template import TEMPLATE_FILE, TEMPLATES_FOLDER, ChatTemplate
from jaxdl.inference.convert import HF_CONFIG
from jaxdl.inference.convert.byte_bpe import MERGES, VOCAB
from jaxdl.inference.convert.older import ADDED, CONFIG, SPECIAL, Older
from jaxdl.inference.convert.word_piece import WORDS

FOLDER = "tokenizer"
"""The folder of a converted workdir that has them."""
JSON, SENTENCEPIECE, GENERATION = TOKENIZER_FILE, SENTENCEPIECE_FILE, GENERATION_FILE
TOOLS_TEMPLATE = f"{TEMPLATES_FOLDER}/tool_use.jinja"
FILES = (
    JSON, SENTENCEPIECE, CONFIG, SPECIAL, ADDED, VOCAB, MERGES, WORDS, TEMPLATE_FILE, "chat_template.json",
    TOOLS_TEMPLATE, GENERATION,
)  # fmt: skip
"""What a checkpoint may have."""
_ANY_CLASS = "PreTrainedTokenizerFast"
NUMBERS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The names of the special tokens' numbers."""


def check_tokenizer(source: Path, config: Mapping[str, Any], *, older: Older | None) -> int | None:
    """How many tokens the tokenizer of a checkpoint has, None without one.

    Raises ConfigError for files that cannot be read; see `keep_tokenizer`.
    """
    for path, content in ((source / HF_CONFIG, config), (source / GENERATION, _read(source / GENERATION))):
        for name in NUMBERS:
            given = content.get(name)
            several = given if name == "eos_token_id" and isinstance(given, list) else () if given is None else (given,)
            if not all(type(number) is int for number in several):
                raise ConfigError(
                    f"{path}: {name} = {json.dumps(given)} is not converted: it must be the number of a token"
                    f"{', or a list of such' if name == 'eos_token_id' else ''}. Correct it there, or leave it out."
                )
    if (source / JSON).is_file():
        return Codec(str(source)).vocab_size
    if older is not None and _is_older(source, older):
        import tokenizers

        vocab: dict[str, int] = tokenizers.Tokenizer.from_str(older.make(source)).get_vocab(with_added_tokens=True)
        return max(vocab.values()) + 1
    return Codec(str(source / SENTENCEPIECE)).vocab_size if (source / SENTENCEPIECE).is_file() else None


def keep_tokenizer(source: Path, config: Mapping[str, Any], workdir: Path, *, older: Older | None) -> str | None:
    """Copies the tokenizer of a checkpoint into a workdir; what to give a codec, None if there is none. Raises OSError.

    It is relative to the workdir. Of files of the form `older` alone a tokenizer.json is made. The numbers of the
    special tokens in the checkpoint's config are kept in generation_config.json. Raises ConfigError for files that
    cannot be read.
    """
    folder = workdir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _copy(source, folder)
    numbers = {name: config[name] for name in NUMBERS if config.get(name) is not None}
    told = _read(folder / GENERATION)
    # It overrides the config, as in transformers; what it leaves open the config says.
    _write(folder / GENERATION, told | numbers | {name: x for name, x in told.items() if x is not None})
    if older is not None and _is_older(folder, older):
        (folder / JSON).write_text(older.make(folder), encoding="utf-8")
    if (folder / JSON).is_file():
        return FOLDER
    return f"{FOLDER}/{SENTENCEPIECE}" if (folder / SENTENCEPIECE).is_file() else None


def about_tokenizer(source: Path, older: Older | None) -> tuple[str, ...]:
    """Remarks on the tokenizer of a checkpoint."""
    return older.about(source) if older is not None and _is_older(source, older) else ()


def _is_older(folder: Path, older: Older) -> bool:
    """Whether the tokenizer in a folder has the files of an older form alone."""
    return not (folder / JSON).is_file() and all((folder / name).is_file() for name in older.files)


def special_numbers(folder: Path) -> dict[str, Any]:
    """The numbers of special tokens in the generation_config.json of a folder."""
    return {name: value for name, value in _read(folder / GENERATION).items() if name in NUMBERS}


def write_tokenizer(codec: Codec, folder: Path) -> dict[str, Any]:
    """Writes a tokenizer as Hugging Face has it; returns the numbers of its special tokens. Raises OSError.

    There it begins a text as the codec does, and `generate` of transformers ends one at the same tokens. Bytes become a
    tokenizer whose tokens are the bytes.
    """
    if codec.tokenizer is None:
        _write(folder / JSON, bytes_tokenizer())
    else:
        path = expand_home(codec.tokenizer)
        _copy(path if path.is_dir() else path.parent, folder)
        if path.is_file():
            shutil.copyfile(path, folder / (SENTENCEPIECE if path.suffix == ".model" else JSON))
    begin = codec.opening[0] if codec.opening else codec.end if codec.end is not None else codec.start
    _write_config(codec, begin, folder)
    numbers = {"bos_token_id": begin, "pad_token_id": codec.pad} | special_numbers(folder)
    if codec.ends:
        numbers["eos_token_id"] = codec.ends[0] if len(codec.ends) == 1 else list(codec.ends)
    numbers = {name: number for name, number in numbers.items() if number is not None}
    _write(folder / GENERATION, _read(folder / GENERATION) | numbers)
    return numbers


def write_chat_template(template: ChatTemplate, folder: Path) -> None:
    """Writes the chat template of a run beside its tokenizer, as transformers reads it. Raises OSError."""
    (folder / TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
    if template.with_tools is not None:
        (folder / TEMPLATES_FOLDER).mkdir(exist_ok=True)
        (folder / TOOLS_TEMPLATE).write_text(template.with_tools, encoding="utf-8")


def _write_config(codec: Codec, begin: int | None, folder: Path) -> None:
    """Makes the tokenizer in a folder put before every text what the codec does, and names its special tokens.

    `begin` begins a document. The files of one that came so, and begins texts so, stay as they are.
    """
    is_json = (folder / JSON).is_file()
    there = Codec(str(folder if is_json else folder / SENTENCEPIECE))
    if (folder / CONFIG).is_file() and there.says_opening and there.opening == codec.opening:
        return
    first = begin if begin in (codec.start, codec.end) else None  # No other is special: it would be found in texts.
    names = {"bos_token": first, "eos_token": codec.end, "pad_token": codec.pad}
    told: dict[str, Any] = {name: codec.name(number) for name, number in names.items() if number is not None}
    # The class for Llama's reads a model of kind unigram as BPE, and gives other tokens.
    is_llamas = not is_json and codec.merges_pairs
    told |= {
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "LlamaTokenizer" if is_llamas else _ANY_CLASS,
    }
    adds = {} if is_json else {"add_bos_token": bool(codec.opening), "add_eos_token": False}
    _write(folder / CONFIG, told | _read(folder / CONFIG) | adds)
    if is_json and there.opening != codec.opening:
        content = json.loads((folder / JSON).read_bytes())
        content["post_processor"] = _template([(codec.name(token), token) for token in codec.opening])
        _write(folder / JSON, content)


def write_frame(folder: Path, codec: Codec, around: tuple[Sequence[int], Sequence[int]], num_types: int) -> None:
    """Makes the tokenizer in a folder put tokens before a text, and after it and the second one of a pair.

    The second text has the type 1 where there are several. Raises OSError.
    """
    before, after = ([(codec.name(token), token) for token in tokens] for tokens in around)
    second = min(1, num_types - 1)
    single = [*_special(before, 0), {"Sequence": {"id": "A", "type_id": 0}}, *_special(after, 0)]
    content = json.loads((folder / JSON).read_bytes())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": second}}, *_special(after, second)],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in before + after},
    }
    _write(folder / JSON, content)


def write_inputs(folder: Path, *, num_types: int, length: int) -> None:
    """Makes the tokenizer in a folder cut texts at `length` tokens where it is asked to cut them, and give types.

    One with a class of its own has what that gives. Raises OSError.
    """
    told = _read(folder / CONFIG)
    if told.get("tokenizer_class") == _ANY_CLASS:
        types = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if num_types > 1 else {}
        _write(folder / CONFIG, {"model_max_length": length} | types | told)


def _special(tokens: Sequence[tuple[str, int]], type_id: int) -> list[dict[str, Any]]:
    return [{"SpecialToken": {"id": name, "type_id": type_id}} for name, _ in tokens]


def _template(opening: Sequence[tuple[str, int]]) -> dict[str, Any] | None:
    """The post processor that puts tokens, (name, number) each, before every text."""
    if not opening:
        return None
    before = _special(opening, 0)
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in opening}
    single = [*before, first]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, second], "special_tokens": special}


def bytes_tokenizer() -> dict[str, Any]:
    """The content of a tokenizer.json whose token n is the byte n, as jaxdl has them without a tokenizer.

    Byte 0, which ends a text, is a special token of its own.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # As GPT-2 writes bytes: these as they are,
    hidden = {byte: 256 + place for place, byte in enumerate(sorted({*range(256)} - {*shown}))}  # the others shifted.
    vocab = {chr(hidden.get(byte, byte) if byte else 0): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "dropout": None, "unk_token": None}
    end = {"id": 0, "content": "\0", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    return {"version": "1.0", "added_tokens": [end], "pre_tokenizer": level, "decoder": level, "model": model}


def _copy(source: Path, folder: Path) -> None:
    for name in FILES:
        if (source / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        raise ConfigError(f"{path}: not JSON. Fetch the file again.") from None
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
