"""The older form of GPT-2's and RoBERTa's tokenizer, vocab.json and merges.txt, as a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.older import Older, add_tokens, content, settings_of

VOCAB, MERGES = "vocab.json", "merges.txt"
_END = "<|endoftext|>"
_GPT2 = {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}
_ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>",
            "pad_token": "<pad>"}  # fmt: skip
"""The special tokens, where the files beside name no others."""
_MASK = "<mask>"


def gpt2_tokenizer(folder: Path) -> str:
    """The content of the tokenizer.json that encodes as `GPT2TokenizerFast` does with the files in a folder.

    It is byte-level BPE, with GPT-2's rule for splitting text, and the special and added tokens of the files beside.
    Raises ConfigError for files that are no such tokenizer.
    """
    from tokenizers import processors

    tokenizer, config = _byte_bpe(folder)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    named = {name: content(config.get(name, usual)) for name, usual in _GPT2.items()}
    add_tokens(tokenizer, folder, config, named, _where(folder))
    if config.get("add_bos_token") and (first := named["bos_token"]):
        ends = [(first, tokenizer.token_to_id(first))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=ends
        )
    return tokenizer.to_str(pretty=True)


def roberta_tokenizer(folder: Path) -> str:
    """That which encodes as `RobertaTokenizer` does: `<s> text </s>`, `<s> text </s></s> pair </s>`.

    Raises ConfigError for files that are no such tokenizer.
    """
    import tokenizers
    from tokenizers import processors

    tokenizer, config = _byte_bpe(folder)
    named = {name: content(config.get(name, usual)) or usual for name, usual in _ROBERTA.items()}
    if lacking := [token for token in named.values() if tokenizer.token_to_id(token) is None]:
        raise ConfigError(f"{_where(folder)}: they have no token {lacking[0]!r}. Fetch the files again.")
    add_tokens(tokenizer, folder, config, named, _where(folder))
    given = config.get("mask_token") or _MASK
    if (mask := content(given)) and tokenizer.token_to_id(mask) is not None:
        takes_space = isinstance(given, Mapping) and bool(given.get("lstrip"))
        tokenizer.add_special_tokens([tokenizers.AddedToken(mask, lstrip=takes_space, special=True)])
    first, last = ((named[name], tokenizer.token_to_id(named[name])) for name in ("cls_token", "sep_token"))
    tokenizer.post_processor = processors.RobertaProcessing(
        last, first, add_prefix_space=bool(config.get("add_prefix_space", False)), trim_offsets=True
    )
    return tokenizer.to_str(pretty=True)


def _byte_bpe(folder: Path) -> tuple[Any, Mapping[str, Any]]:
    """(the byte-level BPE of a folder, the settings beside it). Raises ConfigError."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    try:
        model = models.BPE.from_file(
            str(folder / VOCAB), str(folder / MERGES), continuing_subword_prefix="", end_of_word_suffix=""
        )
    except Exception as error:  # The library raises no narrower class.
        raise ConfigError(f"{_where(folder)}: not a byte-level BPE ({error}). Fetch the files again.") from None
    config = settings_of(folder)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, config


def _where(folder: Path) -> str:
    return f"{folder / VOCAB} and {MERGES}"


GPT2_FILES = Older((VOCAB, MERGES), gpt2_tokenizer)
ROBERTA_FILES = Older((VOCAB, MERGES), roberta_tokenizer)
