"""Families of Hugging Face's decoders: logits, texts and tensors are those of transformers."""

import contextlib
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import weights
from hf_families import FAMILIES, NUM_WRITTEN, POSITIONS, TOKENS, recorded
from mistakes import refusal
from safetensors.numpy import save_file
from test_convert import BAD

import jaxdl
from jaxdl.core.config import one_message
from jaxdl.inference.convert.__main__ import main
from jaxdl.inference.convert.checkpoint import Checkpoint, at, places
from jaxdl.inference.convert.layouts import layout_for, layout_of
from jaxdl.inference.generation import Decoder, Sampling, Writing
from jaxdl.inference.scoring import ScoredText, Scorer
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
    assert (layout_for(found.model) is found.layout) == (name != "phi3"), "with a window it is a Mistral too"
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


def converted(folder, name, *options, **settings):
    """The run of a case."""
    main(["from-hf", str(write(folder / "hf", name, **settings)), str(folder / "run"), *options])
    return jaxdl.restore(folder / "run")


@pytest.mark.parametrize(
    ("name", "options", "cached"),
    [("phi3_short", (), True), ("llama_dynamic", ("--length", "32"), True), ("phi3_short", (), False)],
)
def test_what_depends_on_the_length_of_a_text_is_read_again(name, options, cached, tmp_path):
    """Beside a longer text, whose rotation is another one; without a cache texts are padded."""
    network = converted(tmp_path, name, *options)
    writing = Writing(
        Decoder(network, network.parts.data_spec.length, 32, cached=cached),
        [TOKENS[0].tolist(), [*range(18)]],
        Sampling(num_tokens=NUM_WRITTEN, temperature=0.0),
    )
    written = []
    while not writing.done.all():
        written += writing.more()[0]
    assert written == RECORDED[name]["written"]


def test_scores_of_padded_texts_are_those_of_the_texts(tmp_path):
    """With 11 tokens of 12 that are read alike, in a row of 16."""
    network = converted(tmp_path, "phi3_short", original_max_position_embeddings=12)
    (score,) = Scorer(network).log_likelihoods([ScoredText(TOKENS[0].tolist(), 1)])
    logits = network.logits(TOKENS[:, :-1])[0]
    wanted = jax.nn.log_softmax(logits)[np.arange(11), TOKENS[0, 1:]].sum()
    np.testing.assert_allclose(score, wanted, rtol=1e-5)
    longer = network.logits(np.pad(TOKENS, ((0, 0), (0, 4))))[0, :11]
    assert np.abs(longer - logits).max() > 0.01, "rotated otherwise, or this proves nothing"


def test_two_forms_of_the_rotation_of_gemma_3(tmp_path):
    """That of transformers 5, and of 4 (the case's)."""
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    }
    none = dict.fromkeys(("rope_scaling", "rope_theta"))
    new = write(tmp_path / "new", "gemma3", rope_parameters=parameters, rope_local_base_freq=10_000.0, **none)
    assert Checkpoint(new).model == Checkpoint(write(tmp_path / "old", "gemma3")).model


def other(name, become):
    def changed(tensors):
        return {become if key == name else key: x for key, x in tensors.items() if key != name or become}

    return changed


def misshapen(tensors):
    return tensors | {"model.layers.0.self_attn.qkv_proj.weight": np.zeros((30, 16), np.float32)}


LONG = FAMILIES["phi3_short"]["rope_parameters"]


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("gemma2", {"change": other("model.layers.1.pre_feedforward_layernorm.weight", "")},
         "missing: model.layers.1.pre_feedforward_layernorm.weight"),
        ("phi3", {"change": misshapen}, "qkv_proj.weight is [30, 16], and [48, 16] by its config"),
        ("pythia", {"change": other("embed_out.weight", "lm_out.weight")}, "unexpected: lm_out.weight"),
        ("smollm3", {"residual_multiplier": 0.2}, "residual_multiplier = 0.2 is no setting of smollm3 that jaxdl"),
        ("olmo2", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not converted"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation = 'silu' is not converted"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not converted"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping = -1.0 must be a number above 0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not converted"),
        ("gemma3", {"rope_parameters": {"full_attention": [1]}}, "rope_parameters.full_attention = [1] must be an"),
        ("gemma2", {"mlp_bias": True}, "mlp_bias = True is not converted"),
        ("gemma3", {"sliding_window": None}, "layer_types has sliding_attention, and no sliding_window is in use"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
         "rope_type = 'yarn' of sliding_attention is not converted"),
        ("phi3_short", {"rope_parameters": LONG | {"long_factor": [1.5]}}, "short_factors (2 numbers) and"),
        ("phi3_short", {"rope_parameters": LONG | {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}},
         "long_factors has 3 numbers: longrope needs 2"),
        ("phi3_short", {"rope_parameters": LONG | {"rope_type": "llama3"}}, "rope_type = 'llama3' is not converted"),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mrope_section": [1, 2]}},
         "mrope_section = [1, 2] of rotary positions is not converted"),
        ("llama_yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "differ in factor: 4.0 and 8.0"),
        ("llama_biases", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not converted: this layout"),
        ("llama_biases", {"mlp_bias": True}, "mlp_bias = True is not converted"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 3 layers"),
        ("pythia", {"rotary_pct": 0.4}, "rotary_dim = 3: give an even number"),
        ("pythia", {"attention_bias": False}, "attention_bias = False is not converted"),
        ("neox", {"hidden_act": "silu"}, "hidden_act = 'silu' is not converted"),
    ],
)  # fmt: skip
def test_what_is_not_converted_is_named(name, settings, problem, tmp_path, capsys):
    assert problem in refusal(capsys, "from-hf", write(tmp_path / "hf", name, **settings), tmp_path / "run", run=main)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", FAMILIES)
def test_any_value_of_any_setting_is_read_or_told(name):
    given = FAMILIES[name]
    layout = layout_of(given, "")
    for setting in {*given, *layout.forms, *layout.others}:
        for value in BAD:
            config = {**given, setting: value}
            with contextlib.suppress(jaxdl.ConfigError, KeyError):
                layout.check(config)
                with one_message():
                    layout.model(config)
                assert layout.length(config) >= 1
    for setting, value in itertools.product(given.get("rope_parameters", ()), BAD):
        config = {**given, "rope_parameters": {**given["rope_parameters"], setting: value}}
        with contextlib.suppress(jaxdl.ConfigError), one_message():
            layout.model(config)
