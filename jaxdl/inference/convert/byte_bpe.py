"""The older form of GPT-2's tokenizer, vocab.json and merges.txt, as a tokenizer.json of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError

VOCAB, MERGES = "vocab.json", "merges.txt"
CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_END = "<|endoftext|>"
_NAMED = {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}
"""The special tokens, where the files beside name no others."""


def gpt2_tokenizer(folder: Path) -> str:
    """The content of the tokenizer.json that encodes as `GPT2TokenizerFast` does with the files in a folder.

    It is byte-level BPE, with GPT-2's rule for splitting text, and the special and added tokens of the files beside.
    Raises ConfigError for files that are no such tokenizer.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    where = f"{folder / VOCAB} and {MERGES}"
    try:
        model = models.BPE.from_file(
            str(folder / VOCAB), str(folder / MERGES), continuing_subword_prefix="", end_of_word_suffix=""
        )
    except Exception as error:  # The library raises no narrower class.
        raise ConfigError(f"{where}: not a byte-level BPE ({error}). Fetch the files again.") from None
    config = {**_read(folder / SPECIAL), **_read(folder / CONFIG)}
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for number, token in _added_tokens(folder, config):
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise ConfigError(
                f"{where}: they have {tokenizer.get_vocab_size()} tokens, and {token.content!r} is said to be number "
                f"{number}. Fetch the files again."
            )
    named = {name: _content(config.get(name, usual)) for name, usual in _NAMED.items()}
    others = [_content(token) for token in config.get("additional_special_tokens") or ()]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(name, special=True) for name in (*named.values(), *others) if name]
    )
    if config.get("add_bos_token") and (first := named["bos_token"]):
        ends = [(first, tokenizer.token_to_id(first))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=ends
        )
    return tokenizer.to_str(pretty=True)


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """The tokens that were added with their numbers, in their order."""
    import tokenizers

    numbered = {int(number): token for number, token in (config.get("added_tokens_decoder") or {}).items()}
    plain = {int(number): {"content": name} for name, number in _read(folder / ADDED).items()}
    for number, token in sorted({**plain, **numbered}.items()):
        options = {
            name: token[name] for name in ("special", "lstrip", "rstrip", "single_word", "normalized") if name in token
        }
        yield number, tokenizers.AddedToken(token["content"], **options)


def _content(token: Any) -> str | None:
    """The text of a token, which a file has as it is or with its options."""
    return token["content"] if isinstance(token, Mapping) else token


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes())) if path.is_file() else {}
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: not JSON of an object. Fetch the file again.") from None
