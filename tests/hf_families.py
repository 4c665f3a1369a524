"""Small checkpoints of more families of Hugging Face; `scripts/record_hf_families.py` recorded what they compute."""

import json
from pathlib import Path

from hf_cases import TOKENS

RECORDED = Path(__file__).parent / "hf_families.json"
POSITIONS = (0, 6, 11)
"""The tokens of TOKENS whose logits are recorded."""
NUM_WRITTEN = 8
"""Tokens that each network writes after TOKENS."""
FULL, SLIDING = "full_attention", "sliding_attention"
_COMMON = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = _COMMON | {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
_TIED = {"tie_word_embeddings": True}
_GEMMA = _LLAMA | _TIED | {"head_dim": 8, "num_hidden_layers": 3, "sliding_window": 4}
_LONG = {"short_factor": [1.0, 1.1], "long_factor": [1.5, 4.0]}
_PHI = _LLAMA | {"model_type": "phi3", "tie_word_embeddings": False}


def rope(kind, theta=100.0, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


FAMILIES = {
    "llama_biases": _LLAMA | {"model_type": "llama", "attention_bias": True},
    "llama_dynamic": _LLAMA | _TIED | {"model_type": "llama", "max_position_embeddings": 8}
    | rope("dynamic", factor=4.0),
    "llama_yarn": _LLAMA | _TIED | {"model_type": "llama", "head_dim": 16}
    | rope("yarn", 10000.0, factor=4.0, original_max_position_embeddings=16),
    "llama_yarn_deep": _LLAMA | _TIED | {"model_type": "llama", "head_dim": 16}
    | rope("yarn", 10000.0, factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.2,
           beta_fast=4.0, beta_slow=0.5, truncate=False),
    "qwen3_biases": _LLAMA | _TIED | {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
    "qwen2_windows": _LLAMA | _TIED | {"model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True,
                                       "sliding_window": 3, "max_window_layers": 1},
    "mistral_windows": _LLAMA | {"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": 3, "head_dim": 4,
                                 "layer_types": [SLIDING, FULL, SLIDING]},
    "gemma2": _GEMMA | {"model_type": "gemma2", "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0,
                        "final_logit_softcapping": 5.0},
    "gemma3": _GEMMA | {"model_type": "gemma3_text", "layer_types": [SLIDING, FULL, SLIDING], "rope_theta": 1000.0,
                        "query_pre_attn_scalar": 8, "rope_local_base_freq": 20.0,
                        "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi3": _PHI | {"sliding_window": 5, "num_key_value_heads": 4},
    "phi3_short": _PHI | {"original_max_position_embeddings": 16} | rope("longrope", **_LONG),
    "phi4": _PHI | _TIED | {"hidden_size": 32, "original_max_position_embeddings": 8, "partial_rotary_factor": 0.5}
    | rope("longrope", **_LONG),
    "olmo2": _LLAMA | {"model_type": "olmo2"},
    "smollm3": _LLAMA | _TIED | {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2},
    "smollm3_windows": _LLAMA | _TIED | {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0, 0],
                                         "use_sliding_window": True, "sliding_window": 3},
    "pythia": _COMMON | {"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 40, "max_position_embeddings": 64, "rotary_pct": 0.5},
    "neox": _COMMON | {"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "intermediate_size": 40, "max_position_embeddings": 64, "use_parallel_residual": False,
                       "hidden_act": "gelu_new"} | rope("linear", factor=2.0, partial_rotary_factor=0.25 * 2),
}  # fmt: skip


def recorded():
    """Case -> {"shapes": name of each tensor -> its shape, or the case that has the same, "logits", "written"}."""
    found = json.loads(RECORDED.read_text())
    for case in found.values():
        if isinstance(case["shapes"], str):
            case["shapes"] = found[case["shapes"]]["shapes"]
    return found


__all__ = ["FAMILIES", "NUM_WRITTEN", "POSITIONS", "RECORDED", "TOKENS", "recorded"]
