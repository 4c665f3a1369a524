"""What transformers writes with a small checkpoint of `hf_cases`. `scripts/record_hf_texts.py` recorded it."""

import json
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).parent / "hf_texts.json"
CASE = "qwen3"
PROMPTS = [[3, 9, 4], [11, 2, 30, 7, 7, 19], [25]]
NUM_TOKENS = 20
EOS = {"none": [], "one": [6], "two": [6, 13]}
GREEDY = {"plain": 1.0, "penalized": 1.3, "favoured": 0.8}
"""Name -> repetition penalty."""
BEAMS = {
    "four": {"beams": 4, "length_penalty": 1.0, "eos": "one"},
    "unnormalized": {"beams": 3, "length_penalty": 0.0, "eos": "two"},
    "short": {"beams": 4, "length_penalty": -0.5, "eos": "two"},
    "long": {"beams": 2, "length_penalty": 2.0, "eos": "one"},
    "penalized": {"beams": 4, "length_penalty": 1.0, "eos": "one", "repetition_penalty": 1.4},
    "endless": {"beams": 4, "length_penalty": 1.0, "eos": "none"},
}
"""Name -> the settings of a beam search."""
FILTERS = [
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 6},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.2, "repetition_penalty": 1.7, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 0.6, "top_k": 4},
]
"""Settings of a row of `LOGITS`, each."""
LOGITS = np.random.default_rng(11).normal(size=(len(FILTERS), 24)).astype(np.float32) * 2
SEEN = np.random.default_rng(12).integers(0, 24, (len(FILTERS), 7))


def recorded():
    """ "greedy" and "beams": name -> of each prompt (sequences, scores); "filtered": the logits, None where removed."""
    return json.loads(RECORDED.read_text())
