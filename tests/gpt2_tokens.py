"""A small tokenizer in GPT-2's older form, and the tokens that transformers' GPT2TokenizerFast makes with it."""

import json

import tokenizers

MERGES = (
    "h e|l l|l o|he ll|hell o|Ġ t|Ġt he|r e|' s|' t|' ll|d o|do n|1 2|12 3|Ġ Ġ|ĠĠ ĠĠ|Ċ Ċ|Ã ©|ð Ł|ðŁ İ|e n|en d|. .|< |"
    "Ġ hello|Ã ¼|o r|w or|wor l|worl d|Ġ world|t w|tw o|s t|end o"
)  # fmt: skip
ADDED = {"<x1>": 300, "two words": 301}
TEXTS = (
    "", " ", "hello world", " hello  world", "    the\n\n\tthe \n", "don't I'll 's'S DON'T re",
    "café \u00fcber 𝄞 日本 \U0001f389", "12345 3.14...", "hello<|endoftext|> the",
    "<pad> hello<pad>x <x1> two words<tool>",
    "\u00a0the\u3000the\u200b\r\n", "e\u0301\x00\x7fĠt",
)  # fmt: skip
"""Runs of spaces, contractions, characters of several bytes, and special tokens inside of text."""

RECORDED = (
    [], [220], [260, 286], [280, 220, 286], [271, 220, 262, 273, 197, 83, 256, 220, 198], [268, 265, 220, 40,
    266, 220, 6, 82, 6, 50, 220, 35, 46, 45, 6, 51, 220, 263], [66, 64, 69, 274, 220, 281, 65, 68, 81, 220, 172,
    251, 226, 252, 220, 162, 245, 98, 162, 250, 105, 220, 276, 231], [270, 19, 20, 220, 18, 13, 16, 19, 279,
    13], [260, 299, 262], [27, 79, 64, 67, 29, 280, 27, 79, 64, 67, 29, 87, 220, 27, 87, 16, 29, 261, 86, 78,
    220, 283, 67, 82, 27, 83, 78, 78, 75, 29], [126, 254, 83, 256, 159, 222, 222, 83, 256, 158, 222, 233, 201,
    198], [68, 136, 223, 188, 221, 128, 254, 83],
)  # fmt: skip
"""The tokens of each text without special tokens around it: transformers 5.23."""
RECORDED_ADDED = (
    [], [220], [280, 286], [280, 220, 286], [271, 220, 262, 273, 197, 83, 256, 220, 198], [220, 268, 265, 220,
    40, 266, 220, 6, 82, 6, 50, 220, 35, 46, 45, 6, 51, 220, 263], [220, 66, 64, 69, 274, 220, 281, 65, 68, 81,
    220, 172, 251, 226, 252, 220, 162, 245, 98, 162, 250, 105, 220, 276, 231], [220, 270, 19, 20, 220, 18, 13,
    16, 19, 279, 13], [280, 299, 262], [302, 280, 302, 220, 87, 220, 300, 220, 301, 303], [220, 126, 254, 83,
    256, 159, 222, 222, 83, 256, 158, 222, 233, 201, 198], [220, 68, 136, 223, 188, 221, 128, 254, 83],
)  # fmt: skip
"""With further tokens, and a space before each text."""


def write_tokenizer(folder, *, added):
    """Writes vocab.json and merges.txt; with `added` also the files of a tokenizer with further tokens."""
    merges = [one for one in MERGES.split("|") if len(one.split(" ")) == 2 and all(one.split(" "))]
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    tokens += dict.fromkeys(one.replace(" ", "") for one in merges)
    tokens += [f"#{number}" for number in range(len(tokens), 299)] + ["<|endoftext|>"]
    assert len(tokens) == 300
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{one}\n" for one in merges), encoding="utf-8")
    if added:
        config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"additional_special_tokens": ["<tool>"]}))
        (folder / "added_tokens.json").write_text(json.dumps(ADDED))
        (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<pad>", "lstrip": True}}))
