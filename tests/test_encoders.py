"""Encoders that classify texts: the logits that transformers has, there and back bit by bit, heads, windows."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_cases import CONFIGS, NUM_TOKENS, TOKENS, TYPES, recorded, tensors_of
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxdl.inference.convert.checkpoint import Checkpoint
from jaxdl.inference.convert.layouts import layout_for


def write_checkpoint(folder, name, *, dtype=np.float32, change=lambda tensors: tensors, **settings):
    """Writes a case as save_pretrained does; returns the folder. `change` changes its tensors."""
    folder.mkdir()
    tensors = change({key: x.astype(dtype) for key, x in tensors_of(name).items()})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def bits(folder):
    """Name -> dtype, shape and bits of each tensor, as the safetensors library reads them."""
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in found.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name, tmp_path):
    """Of texts of three lengths, padded; those of BERT are pairs."""
    found = Checkpoint(write_checkpoint(tmp_path / "hf", name))
    spec = found.layout.spec(found.config, found.vocab_size, found.length)
    network = found.model.network((), dtype=jnp.float32, **spec.sizes())
    params = found.params(network.param_shapes)
    types = TYPES if CONFIGS[name]["model_type"] == "bert" else None
    call = jax.jit(lambda params, *inputs: network.apply(params, {}, *inputs, train=False)[0])
    logits = call(params, TOKENS, NUM_TOKENS, types)
    np.testing.assert_allclose(logits, recorded()[name]["logits"], atol=1e-5)
    assert spec.class_names == ("no", "maybe", "yes")
    assert layout_for(found.model, found.layout.model_type) is found.layout
    if name != "xlm_roberta":
        assert layout_for(found.model) is found.layout
    # What is behind a text plays no part.
    noise = np.where(np.arange(TOKENS.shape[1]) < NUM_TOKENS[:, None], TOKENS, 9)
    np.testing.assert_array_equal(call(params, noise, NUM_TOKENS, types), logits)
