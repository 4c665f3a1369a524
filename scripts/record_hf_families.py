"""Records what transformers computes from the small checkpoints of tests/hf_families.py: tests/hf_families.json.

It needs PyTorch and transformers: python scripts/record_hf_families.py
"""

import json
import sys
import tempfile
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from hf_cases import weights  # pyright: ignore[reportMissingImports]
from hf_families import FAMILIES, NUM_WRITTEN, POSITIONS, RECORDED, TOKENS  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Writes the file."""
    found: dict[str, dict] = {}
    for name, config in FAMILIES.items():
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            made = transformers.AutoConfig.from_pretrained(folder)
            # On disk some tensors have other names than in memory.
            transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
            path = folder / "model.safetensors"
            shapes = {key: list(x.shape) for key, x in load_file(path).items()}
            save_file(weights(shapes), path, metadata={"format": "pt"})
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", dtype=torch.float32
            ).eval()
        with torch.no_grad():
            tokens = torch.tensor(TOKENS)
            logits = model(tokens).logits.double().numpy()[0, POSITIONS]
            # Rotary positions that grow with the text are not those of the keys in a cache.
            cached = "dynamic" not in name
            written = model.generate(
                tokens, max_new_tokens=NUM_WRITTEN, do_sample=False, use_cache=cached, eos_token_id=None
            )
        same = next((case for case, other in found.items() if other["shapes"] == shapes), None)
        found[name] = {
            "shapes": shapes if same is None else same,
            "logits": [[round(x, 6) for x in row] for row in logits],
            "written": written[0, TOKENS.shape[1] :].tolist(),
        }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
