"""Preferences on which a small Llama is tuned. `scripts/record_trl.py` recorded in trl.json what TRL makes of them."""

import json
from pathlib import Path

from hf_cases import CONFIGS, recorded, weights
from safetensors.numpy import save_file

RECORDED = Path(__file__).parent / "trl.json"
CASE = "llama3"
TEXTS = [
    {"prompt": "w3 w4 w5", "chosen": " w6 w7", "rejected": " w8"},
    {"prompt": "w9", "chosen": " w10 w11 w12 w13", "rejected": " w14 w6"},
    {"prompt": "w15 w16", "chosen": " w17", "rejected": " w18 w19 w20 w21 w22"},
    {"prompt": "w23 w24 w25 w26 w27", "chosen": " w28 w29", "rejected": " w29 w28"},
    {"prompt": "w4", "chosen": " w4", "rejected": " w5"},
    {"prompt": "w6 w6 w6", "chosen": " w7 w7 w7 w7 w7 w7 w7", "rejected": " w8 w8 w8"},
    {"prompt": "w10 w12 w14 w16 w18 w20 w22 w24 w26", "chosen": " w28 w3 w5 w7", "rejected": " w9 w11"},
    {"prompt": "w13 w15", "chosen": " w17 w19 w21", "rejected": " w17 w19 w23"},
]
"""With the answers; the seventh is longer than LENGTH, and is cut."""
HELD_OUT = [{"prompt": "w3 w8", "chosen": " w13 w18", "rejected": " w23"}, TEXTS[1], TEXTS[3]]
LENGTH = 12
"""Tokens that the network reads; a text has one more (`max_length` of TRL)."""


def _message(role, content):
    return {"role": role, "content": content}


CHATS = [
    {"prompt": [_message("user", "w3 w4")], "chosen": [_message("assistant", "w5")],
     "rejected": [_message("assistant", "w6 w7")]},
    {"prompt": [_message("system", "w8"), _message("user", "w9 w10")], "chosen": [_message("assistant", "w11 w12")],
     "rejected": [_message("assistant", "w11 w13")]},
]  # fmt: skip
IMPLICIT = [
    {"chosen": "w3 w4 w5 w6", "rejected": "w3 w4 w7"},
    {"chosen": "w8 w9", "rejected": "w10 w9 w11"},
    {"chosen": "w12 w13", "rejected": "w12 w13 w14"},
]
"""Without prompts."""
RUNS = {
    "dpo": {"loss": "dpo", "beta": 0.3},
    "dpo_adamw": {"loss": "dpo", "beta": 0.1, "optimizer": "adamw", "learning_rate": 0.003},
    "ipo": {"loss": "ipo", "beta": 1.0, "learning_rate": 0.01},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.6},
    "simpo_smoothed": {"loss": "simpo", "beta": 1.0, "gamma": 0.0, "label_smoothing": 0.1},
}
"""What is tuned; by SGD with a learning rate of 0.05 where nothing else is said."""
STEPS = 5

_VOCAB = {"<eos>": 0, "<bos>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, 30)}, "user": 30, "assistant": 31}
_ADDED = [
    {"id": n, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
     "special": True}
    for n, text in enumerate(("<eos>", "<bos>", "<unk>"))
]  # fmt: skip
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}{% else %}"
    "{{ m.role + ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
_START = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [_START, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [_START, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}},
}


def write_base(folder):
    """The network and its tokenizer in the form of Hugging Face; returns the folder."""
    folder.mkdir(parents=True)
    save_file(weights(recorded()[CASE]["shapes"]), folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"bos_token_id": 1, "eos_token_id": 0, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(CONFIGS[CASE] | settings))
    tokenizer = {
        "version": "1.0", "added_tokens": _ADDED, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": _VOCAB, "unk_token": "<unk>"}, "post_processor": _PROCESSOR,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<eos>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | about))
    return folder


def write_rows(path, rows):
    """Writes JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
