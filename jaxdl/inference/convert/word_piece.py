"""The older form of BERT's tokenizer, a vocab.txt, as a tokenizer.json of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.older import CONFIG, Older, add_tokens, content, settings_of

WORDS = "vocab.txt"
_NAMED = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
          "mask_token": "[MASK]"}  # fmt: skip
"""The special tokens, where the files beside name no others."""
_CLASSES = ("BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", "DistilBertTokenizerFast")
_LOWER = "do_lower_case"


def bert_tokenizer(folder: Path) -> str:
    """The content of the tokenizer.json that encodes as `BertTokenizer` does with the files in a folder.

    Raises ConfigError for files that are no such tokenizer.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    vocab, config = _words(folder), settings_of(folder)
    made_by, whole = config.get("tokenizer_class") or _CLASSES[0], config.get("do_basic_tokenize")
    if made_by not in _CLASSES or whole is False or config.get("never_split"):
        what = f"tokenizer_class = {made_by!r}" if made_by not in _CLASSES else "do_basic_tokenize or never_split"
        raise ConfigError(
            f"{folder / CONFIG}: {what} is not converted. Save it with transformers, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), and convert again."
        )
    named = {name: content(config.get(name, usual)) or usual for name, usual in _NAMED.items()}
    if lacking := [named[name] for name in ("unk_token", "sep_token", "cls_token") if named[name] not in vocab]:
        raise ConfigError(f"{folder / WORDS}: it has no token {lacking[0]!r}. Fetch the file again.")
    tokenizer: Any = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=named["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=_is_lower(config),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    present = {name: token for name, token in named.items() if token in vocab}
    add_tokens(tokenizer, folder, config, present, str(folder / WORDS))
    first, last = named["cls_token"], named["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(token, vocab[token]) for token in (first, last)],
    )
    return tokenizer.to_str(pretty=True)


def about_case(folder: Path) -> tuple[str, ...]:
    """A remark where texts become lower case although the words are not, and no file says so."""
    lost = [word for word in _words(folder) if word != word.lower() and word not in _NAMED.values()]
    if _LOWER in settings_of(folder) or not lost:
        return ()
    return (
        f"its {WORDS} has words such as {lost[-1]!r}, and no {CONFIG} says {_LOWER}: texts become lower case, as in "
        f'transformers. If the network was trained otherwise, write {{"{_LOWER}": false}} there and convert again',
    )


def _is_lower(config: Mapping[str, Any]) -> bool:
    return bool(config.get(_LOWER, True))


def _words(folder: Path) -> dict[str, int]:
    """The words of a folder with their numbers. Raises ConfigError."""
    try:
        text = (folder / WORDS).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{folder / WORDS}: not UTF-8 ({error.reason}). Fetch the file again.") from None
    return {word: number for number, word in enumerate(text.removesuffix("\n").split("\n"))}


BERT_FILES = Older((WORDS,), bert_tokenizer, about_case)
