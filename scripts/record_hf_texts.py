"""Records what transformers writes with a small checkpoint of tests/hf_cases.py: tests/hf_texts.json.

It needs PyTorch and transformers: python scripts/record_hf_texts.py
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import hf_cases  # pyright: ignore[reportMissingImports]
from hf_texts import (  # pyright: ignore[reportMissingImports]
    BEAMS,
    CASE,
    EOS,
    FILTERS,
    GREEDY,
    LOGITS,
    NUM_TOKENS,
    PROMPTS,
    RECORDED,
    SEEN,
)


def main() -> None:
    """Writes the file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_cases.CONFIGS[CASE]), encoding="utf-8")
        tensors = hf_cases.weights(hf_cases.recorded()[CASE]["shapes"])
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
    found = {
        "greedy": {
            name: [_written(model, prompt, repetition_penalty=penalty) for prompt in PROMPTS]
            for name, penalty in GREEDY.items()
        },
        "beams": {name: [_searched(model, prompt, **how) for prompt in PROMPTS] for name, how in BEAMS.items()},
        "filtered": [_filtered(*row) for row in zip(LOGITS, SEEN, FILTERS, strict=True)],
    }
    RECORDED.write_text(json.dumps(found) + "\n", encoding="utf-8")


def _generate(model: transformers.PreTrainedModel, prompt: list[int], **options: object) -> Any:
    given = {"eos_token_id": None, "pad_token_id": 31, "do_sample": False, "return_dict_in_generate": True}
    tokens = torch.tensor([prompt])
    return model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NUM_TOKENS, **(given | options)
    )


def _written(model: transformers.PreTrainedModel, prompt: list[int], **options: object) -> list[int]:
    return _generate(model, prompt, **options).sequences[0, len(prompt) :].tolist()


def _searched(
    model: transformers.PreTrainedModel, prompt: list[int], *, beams: int, eos: str, **options: object
) -> list[tuple[list[int], float]]:
    """(tokens, score) of each hypothesis, the tokens up to the one that ended it."""
    ends = EOS[eos]
    found = _generate(
        model, prompt, num_beams=beams, num_return_sequences=beams, output_scores=True, eos_token_id=ends or None,
        **options,
    )  # fmt: skip
    hypotheses = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        hypotheses.append((row[:end], score))
    return hypotheses


def _filtered(logits: object, seen: object, how: dict[str, float]) -> list[float | None]:
    given = {"top_k": 0} | how
    config = transformers.GenerationConfig(do_sample=True, **given)
    processors = [
        transformers.RepetitionPenaltyLogitsProcessor(config.repetition_penalty)
        if "repetition_penalty" in how
        else None,
        transformers.TemperatureLogitsWarper(config.temperature),
        transformers.TopKLogitsWarper(config.top_k) if config.top_k else None,
        transformers.TopPLogitsWarper(config.top_p) if "top_p" in how else None,
        transformers.MinPLogitsWarper(config.min_p) if "min_p" in how else None,
    ]
    scores, tokens = torch.tensor(logits)[None], torch.tensor(seen)[None]
    for one in processors:
        scores = scores if one is None else one(tokens, scores)
    return [round(x, 6) if x > -1e30 else None for x in scores[0].tolist()]


if __name__ == "__main__":
    main()
