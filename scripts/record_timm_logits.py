"""Records what timm and torchvision compute from the networks of tests/timm_cases.py: tests/timm_logits.json.

It needs PyTorch, timm and torchvision: python scripts/record_timm_logits.py
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from timm_cases import CASES, MEAN, RECORDED, STD, images, weights  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Writes the file."""
    found = {}
    for name, (path, arguments, size) in CASES.items():
        module, _, cls = path.rpartition(".")
        make = getattr(importlib.import_module(module), cls)
        tensors = weights({key: list(x.shape) for key, x in make(**arguments).state_dict().items()})
        state = {key: torch.from_numpy(x) for key, x in tensors.items()}
        model = make(**arguments)
        if "timm" in path and size != arguments.get("img_size", size):  # The table of positions is interpolated.
            model = make(**{**arguments, "img_size": size})
            from timm.layers import resample_abs_pos_embed  # pyright: ignore[reportMissingImports]

            grid = [size // arguments["patch_size"]] * 2
            state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], grid, num_prefix_tokens=1)
        model.load_state_dict(state)
        x = (images(size) / 255 - np.array(MEAN)) / np.array(STD)
        with torch.no_grad():
            logits = model.eval()(torch.tensor(x.transpose(0, 3, 1, 2), dtype=torch.float32)).double().numpy()
        shapes = {key: list(x.shape) for key, x in tensors.items()}
        found[name] = {"shapes": shapes, "logits": [[round(x, 6) for x in row] for row in logits]}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
