"""Small checkpoints of Hugging Face's form, made from a seed. `scripts/record_hf_logits.py` recorded their logits."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

RECORDED = Path(__file__).parent / "hf_logits.json"
TOKENS = np.random.default_rng(7).integers(0, 32, (1, 12))
_COMMON = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = _COMMON | {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
    "rope_type": "llama3",
}  # fmt: skip
CONFIGS = {
    "gpt2": _COMMON | {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 16,
                       "tie_word_embeddings": True},
    "llama3": _LLAMA | {"model_type": "llama", "tie_word_embeddings": False,
                        "rope_parameters": _LLAMA3 | {"rope_theta": 500000.0}},
    "llama_linear": _LLAMA | {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4,
                              "rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": _LLAMA | {"model_type": "mistral", "sliding_window": 5, "tie_word_embeddings": False, "head_dim": 4},
    "qwen2": _LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_window": _LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": True,
                              "sliding_window": 3, "max_window_layers": 0},
    "qwen3": _LLAMA | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "mixtral": _LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": False},
    "qwen3_moe": _LLAMA | {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 3,
                           "moe_intermediate_size": 12, "norm_topk_prob": True, "tie_word_embeddings": True},
    "olmoe": _LLAMA | {"model_type": "olmoe", "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
                       "tie_word_embeddings": False},
}  # fmt: skip


def recorded():
    """Case -> {"shapes": name of each tensor -> its shape, "logits": those of TOKENS}, as transformers has them."""
    return json.loads(RECORDED.read_text())


def weights(shapes):
    """Tensors of these shapes, float32 numbers that bfloat16 has too."""
    rng = np.random.default_rng(3)
    made = {name: rng.normal(size=shapes[name]) * (0.4 if len(shapes[name]) > 1 else 1) for name in sorted(shapes)}
    return {name: x.astype(ml_dtypes.bfloat16).astype(np.float32) for name, x in made.items()}
