"""Records what transformers computes from the small encoders of tests/encoder_cases.py: tests/encoder_logits.json.

It needs PyTorch and transformers: python scripts/record_encoder_logits.py
"""

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from encoder_cases import CONFIGS, NUM_TOKENS, RECORDED, TOKENS, TYPES  # pyright: ignore[reportMissingImports]
from hf_cases import weights  # pyright: ignore[reportMissingImports]
from older_tokenizers import CASES, TEXTS, write_older  # pyright: ignore[reportMissingImports]


def older_tokenizers() -> dict[str, Any]:
    """Case -> the tokens of each text, and those of pairs of neighbours with the types of BERT."""
    found = {}
    for name in CASES:
        is_bert = name.startswith("bert")
        with tempfile.TemporaryDirectory() as folder:
            write_older(Path(folder), name)
            made = (transformers.BertTokenizer if is_bert else transformers.RobertaTokenizer).from_pretrained(folder)
            pairs = [made(*pair, return_token_type_ids=is_bert) for pair in pairwise(filter(str.strip, TEXTS))]
            found[name] = {
                "single": [made(text)["input_ids"] for text in TEXTS],
                "pairs": [pair["input_ids"] for pair in pairs],
                "types": [pair["token_type_ids"] for pair in pairs] if is_bert else None,
            }
    return found


def main() -> None:
    """Writes the file."""
    found = {}
    mask = (torch.arange(TOKENS.shape[1]) < torch.tensor(NUM_TOKENS)[:, None]).long()
    for name, config in CONFIGS.items():
        made = transformers.AutoConfig.for_model(**config)
        auto = transformers.AutoModelForSequenceClassification
        with tempfile.TemporaryDirectory() as folder:
            auto.from_config(made).save_pretrained(folder)
            path = Path(folder) / "model.safetensors"
            shapes = {key: list(x.shape) for key, x in load_file(path).items()}
            save_file(weights(shapes), path, metadata={"format": "pt"})
            model = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        inputs = {"input_ids": torch.tensor(TOKENS), "attention_mask": mask}
        if config.get("type_vocab_size", 2) > 1 and config["model_type"] == "bert":
            inputs["token_type_ids"] = torch.tensor(TYPES)
        with torch.no_grad():
            logits = model(**inputs).logits.double().numpy()
        found[name] = {"shapes": shapes, "logits": [[round(x, 7) for x in row] for row in logits.tolist()]}
    found["older_tokenizers"] = older_tokenizers()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
