"""Transformers of published shapes: their names, and their numbers of parameters."""

import math
import typing

import jax
import jax.numpy as jnp
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.models import Network, Transformer, preset, presets
from jaxdl.training.completion import option_values
from jaxdl.training.experiment import Experiment

PUBLISHED = {
    "gpt2-124m": (50_257, 124_439_808),
    "gpt2-345m": (50_257, 354_823_168),
    "llama3.2-1b": (128_256, 1_235_814_400),
    "llama3.2-3b": (128_256, 3_212_749_824),
    "llama3.1-8b": (128_256, 8_030_261_248),
    "qwen3-0.6b": (151_936, 596_049_920),
    "qwen3-1.7b": (151_936, 1_720_574_976),
    "qwen3-4b": (151_936, 4_022_468_096),
    "qwen3-8b": (151_936, 8_190_735_360),
}
"""Name -> vocabulary, parameters; a tied output layer is counted once."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    vocab_size, expected = PUBLISHED[name]
    network = Network(preset(name).build(vocab_size=vocab_size, dtype=jnp.float32))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(network.param_shapes)) == expected


def test_a_small_one_of_our_own():
    assert {*typing.get_args(presets.Name)} - {*PUBLISHED} == {"llama3-0.1b"}
    network = Network(preset("llama3-0.1b").build(vocab_size=1000, dtype=jnp.float32))
    outside = 1000 * 768
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(network.param_shapes)) - outside == 103_828_224


def test_a_name_stands_for_its_fields():
    """On the command line, in overrides and in a config file; config.json has the fields."""
    text = {"data": "synthetic_text", "task": "language_modelling"}
    named = Experiment().replaced({"model": "qwen3-0.6b", **text, "model.num_layers": 2})
    assert named.model == preset("qwen3-0.6b", num_layers=2)
    assert type(named.model) is Transformer
    assert Experiment.from_json(named.to_json()) == named
    assert "qwen3-0.6b" in option_values(Experiment)["--model"]
    with pytest.raises(ConfigError, match=r"Did you mean qwen3-0.6b\?"):
        Experiment().replaced({"model": "qwen3-0.6"})
