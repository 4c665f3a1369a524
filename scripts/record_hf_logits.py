"""Records what transformers computes from the small checkpoints of tests/hf_cases.py: tests/hf_logits.json.

It needs PyTorch and transformers: python scripts/record_hf_logits.py
"""

import json
import sys
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from hf_cases import CONFIGS, RECORDED, TOKENS, weights  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Writes the file."""
    found = {}
    for name, config in CONFIGS.items():
        made = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
        tied = ("lm_head.weight",) if made.tie_word_embeddings else ()
        shapes = {key: list(x.shape) for key, x in model.state_dict().items() if key not in tied}
        state = {key: torch.tensor(x) for key, x in weights(shapes).items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert set(missing) == set(tied), (name, missing)
        assert not unexpected, (name, unexpected)
        model.tie_weights()
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS)).logits.double().numpy()
        found[name] = {"shapes": shapes, "logits": [[[round(x, 6) for x in row] for row in text] for text in logits]}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
