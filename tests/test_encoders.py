"""Encoders that classify texts: the logits that transformers has, there and back bit by bit, heads, windows."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from encoder_cases import CONFIGS, DEFAULTS, NUM_TOKENS, TOKENS, TYPES, recorded, tensors_of
from safetensors import safe_open
from safetensors.numpy import save_file

import jaxdl
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.inference.convert.checkpoint import Checkpoint
from jaxdl.inference.convert.layouts import layout_for, layout_of
from jaxdl.models import Encoder, Model


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


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_there_and_back_are_the_same_bits(name, tmp_path):
    source = write_checkpoint(tmp_path / "hf", name, dtype=ml_dtypes.bfloat16)
    convert(["from-hf", str(source), str(tmp_path / "run")])
    convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "back"), "--dtype", "bfloat16"])
    assert bits(tmp_path / "back") == bits(source)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert {key: after[key] for key in before if key not in ("cls_token_id", "sep_token_id")}.items() <= before.items()
    assert json.loads((tmp_path / "run" / "data.json").read_text())["classes"] == ["no", "maybe", "yes"]


def test_an_encoder_without_a_head_gets_a_fresh_one(tmp_path):
    """With the names of older files, and a head for masked words, which is left out; both are said."""

    def change(tensors):
        found = {name.removeprefix("bert."): x for name, x in tensors.items() if not name.startswith("classifier")}
        found = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): x for name, x in found.items()}
        found |= {"embeddings.position_ids": np.zeros((1, 20), np.float32)}
        return found | {"cls.predictions.bias": np.zeros(32, np.float32)}

    config = {"id2label": None, "label2id": None}
    found = Checkpoint(write_checkpoint(tmp_path / "hf", "bert", change=change, **config))
    spec = found.layout.spec(found.config, found.vocab_size, found.length)
    assert spec.class_names == ("LABEL_0", "LABEL_1")
    network = found.model.network((), dtype=jnp.float32, **spec.sizes())
    params = found.params(network.param_shapes)
    wanted = tensors_of("bert")
    np.testing.assert_array_equal(params["embedding_norm"]["scale"], wanted["bert.embeddings.LayerNorm.weight"])
    np.testing.assert_array_equal(params["pooler"]["dense"], wanted["bert.pooler.dense.weight"].T)
    kernel = np.asarray(params["classifier"]["kernel"])
    assert kernel.shape == (16, 2)
    assert 0.01 < kernel.std() < 0.04
    other, head = found.notes
    assert "cls.predictions.bias" in other
    assert "lacks a head that classifies, so there is a fresh one (classifier.weight, classifier.bias)" in head


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("bert", {"problem_type": "regression"}, "problem_type = 'regression' is not converted"),
        ("bert", {"id2label": {"0": "a"}}, "id2label has one class alone"),
        ("bert", {"id2label": {"0": "a", "2": "b"}}, "must have the numbers from 0"),
        ("bert", {"hidden_act": "mish"}, "hidden_act = 'mish' is not converted, only gelu"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder = True is not converted"),
        ("bert", {"num_attention_heads": 3}, "embed_dim = 16 cannot be divided by num_heads = 3"),
        ("roberta", {"pad_token_id": None}, "pad_token_id = null is not converted"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings = 2 is too small"),
        ("modernbert", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}, "layer_types = "),
        ("modernbert", {"mlp_bias": True}, "mlp_bias = True is not converted"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "only default ones"),
        ("modernbert", {"rope_parameters": {"full_attention": {"type": "yarn"}}}, "only default ones"),
        ("modernbert", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "only default ones"),
        ("modernbert", {"rope_parameters": {"full_attention": [1]}}, "only default ones"),
        ("modernbert", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rot"),
        ("modernbert", {"rope_parameters": {"full_attention": {"factor": 2.0}}}, "factor = 2.0 of rotary positions"),
        ("modernbert", {"is_causal": True}, "is_causal = True is not converted"),
        ("modernbert", {"is_decoder": True}, "is_decoder = True is not converted"),
        ("distilbert", {"pruned_heads": {"0": [1]}}, "pruned_heads = {'0': [1]} is not converted"),
        ("roberta", {"is_encoder_decoder": True}, "is_encoder_decoder = True is not converted"),
        ("roberta", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not converted"),
        ("bert", {"attention_window": 4}, "attention_window = 4 is no setting of bert that jaxdl knows"),
        ("bert", {"num_labels": 1, "id2label": None}, "num_labels = 1 is one class alone"),
        ("bert", {"hidden_act": ["gelu"]}, "hidden_act = ['gelu'] is not converted, only gelu"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(name, settings, problem, tmp_path):
    folder = write_checkpoint(tmp_path / "hf", name, **settings)
    with pytest.raises(jaxdl.ConfigError, match=re.escape(problem)):
        Checkpoint(folder)


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_transformers_and_to_hf_write_is_known(name):
    config = DEFAULTS[name] | CONFIGS[name]
    layout = layout_of(config, "")
    for known in (config, layout.config(layout.model(config), 20) | {"vocab_size": 32}):
        layout.check(known)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"vocab_size": 5}, "the data has 32 tokens"),
        ({"num_types": 2}, "the tokenizer numbers the texts of a pair up to 2"),
    ],
)
def test_tables_have_a_row_for_all_that_is_read(settings, problem):
    model = Encoder(num_layers=1, embed_dim=8, num_heads=1, **settings)
    with pytest.raises(jaxdl.ConfigError, match=problem):
        model.network((), vocab_size=32, num_classes=2, num_types=3, dtype=jnp.float32)


def test_presets_are_encoders_that_have_a_layout():
    for name, model_type in (("bert-base", "bert"), ("roberta-large", "roberta"), ("distilbert-base", "distilbert"),
                             ("modernbert-base", "modernbert")):  # fmt: skip
        assert layout_for(Model.presets[name]()).model_type == model_type
    with pytest.raises(jaxdl.ConfigError, match="bert has no model=transformer"):
        layout_for(Model.presets["qwen3-0.6b"](), "bert")
