"""Records what transformers computes from the small checkpoints of tests/hf_cases.py: tests/hf_logits.json.

It needs PyTorch and transformers: python scripts/record_hf_logits.py
"""

import json
import sys
import tempfile
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from hf_cases import CONFIGS, RECORDED, TOKENS, weights  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Writes the file."""
    found = {}
    for name, config in CONFIGS.items():
        made = transformers.AutoConfig.for_model(**config)
        with tempfile.TemporaryDirectory() as folder:
            # On disk some tensors have other names than in memory, such as those of experts.
            transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
            path = Path(folder) / "model.safetensors"
            shapes = {key: list(x.shape) for key, x in load_file(path).items()}
            save_file(weights(shapes), path, metadata={"format": "pt"})
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", dtype=torch.float32
            ).eval()
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS)).logits.double().numpy()
        found[name] = {"shapes": shapes, "logits": [[[round(x, 6) for x in row] for row in text] for text in logits]}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
