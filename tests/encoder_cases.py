"""Small encoders of Hugging Face's form. `scripts/record_encoder_logits.py` recorded their logits."""

import json
from pathlib import Path

import numpy as np
from hf_cases import weights

RECORDED = Path(__file__).parent / "encoder_logits.json"
LENGTH = 14
NUM_TOKENS = np.array([14, 9, 3], np.int32)
TOKENS = np.where(
    np.arange(LENGTH) < NUM_TOKENS[:, None], np.random.default_rng(7).integers(4, 32, (3, LENGTH)), 1
).astype(np.int32)
"""Behind the texts there is the padding of RoBERTa, from which it counts its positions."""
TYPES = (np.arange(LENGTH) >= 5).astype(np.int32) * (np.arange(LENGTH) < NUM_TOKENS[:, None])
_CLASSES = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
_BERT = _CLASSES | {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 20, "pad_token_id": 1,
}  # fmt: skip
_MODERN = _BERT | {
    "model_type": "modernbert", "num_hidden_layers": 4, "local_attention": 6, "cls_token_id": 2, "sep_token_id": 3,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
CONFIGS = {
    "bert": _BERT | {"model_type": "bert"},
    "bert_tanh": _BERT | {"model_type": "bert", "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "roberta": _BERT | {"model_type": "roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "xlm_roberta": _BERT | {"model_type": "xlm-roberta", "type_vocab_size": 1, "hidden_act": "relu"},
    "distilbert": _CLASSES | {"model_type": "distilbert", "vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 4,
                              "hidden_dim": 24, "max_position_embeddings": 20, "pad_token_id": 1},
    "modernbert": _MODERN | {"classifier_pooling": "mean"},
    "modernbert_biases": _MODERN | {"classifier_pooling": "cls", "norm_bias": True, "attention_bias": True,
                                    "mlp_bias": True, "classifier_bias": True, "global_attn_every_n_layers": 2,
                                    "global_rope_theta": 500.0, "local_rope_theta": 50.0},
}  # fmt: skip
_ANY = {
    "architectures": None, "output_hidden_states": False, "return_dict": True, "dtype": None,
    "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "problem_type": None, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": True, "_name_or_path": "", "output_attentions": False,
    "initializer_range": 0.02, "transformers_version": "5.24.0",
}  # fmt: skip
_ANY_BERT = _ANY | {
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "use_cache": True, "classifier_dropout": None, "is_decoder": False,
    "add_cross_attention": False,
}  # fmt: skip
DEFAULTS = {
    "bert": _ANY_BERT | {"gradient_checkpointing": False, "directionality": "bidi", "pooler_num_fc_layers": 3},
    "roberta": _ANY_BERT,
    "xlm_roberta": _ANY_BERT | {"output_past": True},
    "distilbert": _ANY | {"sinusoidal_pos_embds": False, "dropout": 0.1, "attention_dropout": 0.1, "activation": "gelu",
                          "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "tie_weights_": True},
    "modernbert": _ANY | {
        "hidden_activation": "gelu", "initializer_cutoff_factor": 2.0, "norm_eps": 1e-5, "norm_bias": False,
        "attention_bias": False, "attention_dropout": 0.0, "local_attention": 128, "embedding_dropout": 0.0,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                            "full_attention": {"rope_type": "default", "rope_theta": 160000.0}},
        "mlp_bias": False, "mlp_dropout": 0.0, "decoder_bias": True, "classifier_pooling": "cls",
        "classifier_dropout": 0.0, "classifier_bias": False, "classifier_activation": "gelu",
        "deterministic_flash_attn": False, "sparse_prediction": False, "sparse_pred_ignore_index": -100,
        "layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "reference_compile": None,
    },
}  # fmt: skip
"""What transformers 5.24 writes besides, and older files have."""


def recorded():
    """Case -> {"shapes": name of each tensor -> its shape, "logits": [text][class]}, as transformers has them."""
    return json.loads(RECORDED.read_text())


def tensors_of(name):
    """The tensors of a case."""
    return weights(recorded()[name]["shapes"])
