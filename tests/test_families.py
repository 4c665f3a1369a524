"""Families of Hugging Face's decoders: logits, texts and tensors are those of transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import weights
from hf_families import FAMILIES, NUM_WRITTEN, POSITIONS, TOKENS, recorded
from safetensors.numpy import save_file

from jaxdl.inference.convert.checkpoint import Checkpoint, at, places
from jaxdl.inference.convert.layouts import layout_for
from jaxdl.models.network import Call

RECORDED = recorded()


def write(folder, name, change=lambda tensors: tensors, **settings):
    """Writes a case as save_pretrained does; returns the folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FAMILIES[name] | settings))
    save_file(change(weights(RECORDED[name]["shapes"])), folder / "model.safetensors")
    return folder


def call(network, params, method, *inputs):
    how = Call(train=False, method=method)
    return network.call(how, params, {}, *inputs)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_that_of_transformers(name, tmp_path):
    """Logits, the text that is written with the cache or without, and the tensors that are written again."""
    found, wanted = Checkpoint(write(tmp_path / "hf", name)), RECORDED[name]
    network = found.model.network((), vocab_size=found.vocab_size, dtype=jnp.float32)
    params = found.params(network.param_shapes)
    read = jax.jit(lambda params, tokens: network.apply(params, {}, tokens, train=False)[0])
    logits = read(params, TOKENS)
    np.testing.assert_allclose(logits[0, POSITIONS], wanted["logits"], atol=1e-5)
    text = TOKENS[0].tolist()
    prefill = jax.jit(lambda params, tokens, lengths: call(network, params, "prefill", tokens, lengths, 32))
    decode = jax.jit(lambda params, *inputs: call(network, params, "decode", *inputs))
    cache = None
    while len(text) < TOKENS.shape[1] + NUM_WRITTEN:
        change = network.next_change(len(text) - 1)
        if cache is None or change == len(text):
            padded = np.zeros((1, 24), np.int32)
            padded[0, : len(text)] = text
            logits, cache = prefill(params, padded, np.array([len(text)], np.int32))
        else:
            logits, cache = decode(params, np.array(text[-1:], np.int32), cache, np.int32(len(text) - 1))
        text.append(int(logits[0, -1].argmax()))
    assert text[TOKENS.shape[1] :] == wanted["written"]
    assert layout_for(found.model, found.layout.model_type) is found.layout
    back = {
        place.name: place.tensor.to_tensor([np.asarray(at(params, path)[place.index]) for path in place.paths])
        for place in places(found.layout, found.model, params)
    }
    before = weights(wanted["shapes"])
    assert back.keys() == before.keys()
    assert all(np.array_equal(back[key], x) for key, x in before.items())
    again = found.layout.config(found.model, found.length) | {"vocab_size": 32}
    found.layout.check(again)
    assert found.layout.model(again) == found.model
    assert found.layout.length(again) == found.length
