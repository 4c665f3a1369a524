"""Small tokenizers in the older forms of BERT and RoBERTa; `scripts/record_encoder_logits.py` recorded their tokens."""

import json

import gpt2_tokens

WORDS = (
    "[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
    *"abcdefghijklmnopqrstuvwxyzABC0123456789.,!?'-()é日本",
    *("##" + letter for letter in "abcdefghijklmnopqrstuvwxyz0123456789éü"), "hello", "world", "un", "##aff", "##able",
    "Hello", "café", "cafe", "don", "über", "the", "##s", "[tool]", "本日", "a",
)  # fmt: skip
"""One stands there twice: its last number counts."""
CASES = {
    "bert": None,
    "bert_cased": {"do_lower_case": False, "tokenizer_class": "BertTokenizer"},
    "bert_accents": {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False},
    "bert_added": {"do_lower_case": True, "additional_special_tokens": ["[tool]"], "model_max_length": 512,
                   "cls_token": "[CLS]"},
    "roberta": None,
    "roberta_space": {"add_prefix_space": True,
                      "mask_token": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}},
}  # fmt: skip
"""What tokenizer_config.json has, if there is one."""
TEXTS = (
    "Hello world", "unaffable, don't!", "CAFÉ café cafe\u0301 über Über", "本日 日本 hello日本", "a" * 101 + " b",
    "  tabs\tand\nlines\u00a0and\u3000spaces\u2028",
    "\x00nul\x7f\ufffd \u200b",
    "[MASK] [SEP] [CLS] x[MASK]y [mask]",
    "[tool]hello [TOOL]", "\U0001f389 \U0001d11e -- (3.14)",
    "I\u0307 ß \u0130stanbul", "<mask> <s>the</s><pad> x <mask>y",
    "", " ",
)  # fmt: skip
"""Cases, accents, signs without spaces, long words, white space, characters that are left out, special tokens."""


def write_older(folder, name):
    """Writes the files of a case into a folder."""
    if name.startswith("bert"):
        (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")
    else:
        gpt2_tokens.write_tokenizer(folder, added=False)
        vocab = json.loads((folder / "vocab.json").read_text())
        del vocab["<|endoftext|>"]
        vocab |= {token: 299 + at for at, token in enumerate(("<s>", "<pad>", "</s>", "<unk>", "<mask>"))}
        (folder / "vocab.json").write_text(json.dumps(vocab))
    if CASES[name] is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(CASES[name]))
