"""`python -m jaxdl.convert`: small checkpoints in the form of Hugging Face, and the logits that transformers had."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_cases import CONFIGS, TOKENS, recorded, weights
from mistakes import refusal
from safetensors import safe_open
from safetensors.numpy import save_file

import jaxdl
from jaxdl.inference.convert import from_hf
from jaxdl.inference.convert.__main__ import main
from jaxdl.inference.convert.checkpoint import Checkpoint
from jaxdl.inference.convert.layouts import layout_for, layout_of
from jaxdl.models import RopeScaling, Transformer
from jaxdl.parallel.lease import Lease

WORDS = {"type": "WordLevel", "vocab": {"<eos>": 0, **{f"w{n}": n for n in range(1, 30)}}, "unk_token": "<eos>"}
TOKENIZER = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": WORDS}


def write_checkpoint(folder, name, *, dtype=np.float32, num_files=1, change=lambda tensors: tensors, **settings):
    """Writes a case as save_pretrained does; returns the folder. `change` changes its tensors."""
    folder.mkdir()
    tensors = change({key: x.astype(dtype) for key, x in weights(recorded()[name]["shapes"]).items()})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | settings))
    names = ["model.safetensors"]
    if num_files > 1:
        names = [f"model-{n + 1:05}-of-{num_files:05}.safetensors" for n in range(num_files)]
        places = {key: names[n % num_files] for n, key in enumerate(tensors)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for n, file in enumerate(names):
        save_file(dict(list(tensors.items())[n::num_files]), folder / file, metadata={"format": "pt"})
    return folder


def bits(folder):
    """Name -> dtype, shape and bits of each tensor, as the safetensors library reads them."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in found.items()}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(the folder of a checkpoint, in bfloat16 and two files; the workdir that it became)."""
    folder = tmp_path_factory.mktemp("qwen")
    source = write_checkpoint(folder / "hf", "qwen3", dtype=ml_dtypes.bfloat16, num_files=2, eos_token_id=[0, 2])
    (source / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    main(["from-hf", str(source), str(folder / "run")])
    return source, folder / "run"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name, tmp_path):
    found = Checkpoint(write_checkpoint(tmp_path / "hf", name))
    network = found.model.network((), vocab_size=found.vocab_size, dtype=jnp.float32)
    params = found.params(network.param_shapes)
    logits = jax.jit(lambda params, tokens: network.apply(params, {}, tokens, train=False)[0])(params, TOKENS)
    np.testing.assert_allclose(logits, recorded()[name]["logits"], atol=1e-4)
    assert layout_for(found.model, found.layout.model_type) is found.layout


def test_the_workdir_is_one_of_a_run(qwen):
    _, workdir = qwen
    predictor = jaxdl.restore(workdir)
    np.testing.assert_allclose(predictor.logits(TOKENS), recorded()["qwen3"]["logits"], atol=1e-4)
    codec = predictor.experiment.data.codec()
    assert (codec.encode("w3 w7"), codec.end, predictor.parts.data_spec.vocab_size) == ([3, 7], 0, 30)
    assert predictor.params["embedding"].shape == (32, 16), "more rows than the tokenizer has tokens"
    with pytest.raises(jaxdl.ConfigError, match="its training data are not here"):
        predictor.evaluate()


def test_there_and_back_are_the_same_bits(qwen, tmp_path, capsys):
    source, workdir = qwen
    main(["to-hf", str(workdir), str(tmp_path / "back"), "--dtype", "bfloat16", "--file-bytes", "5000"])
    assert "qwen3" in capsys.readouterr().out
    assert bits(tmp_path / "back") == bits(source)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) == 3
    assert files == {path.name for path in (tmp_path / "back").glob("*.safetensors")}
    assert index["weight_map"].keys() == bits(source).keys()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert {name: after[name] for name in before} == before
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    again = Checkpoint(tmp_path / "back")
    assert again.model == Checkpoint(source).model


def test_older_names_and_buffers(tmp_path):
    """GPT-2's own files lack the prefix, and have the masks of attention."""

    def change(tensors):
        found = {name.removeprefix("transformer."): x for name, x in tensors.items()}
        return found | {"h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)}

    old = Checkpoint(write_checkpoint(tmp_path / "old", "gpt2", change=change))
    new = Checkpoint(write_checkpoint(tmp_path / "new", "gpt2"))
    shapes = new.model.network((), vocab_size=32, dtype=jnp.float32).param_shapes
    assert jax.tree.all(jax.tree.map(np.array_equal, old.params(shapes), new.params(shapes)))


def test_settings_of_a_config(tmp_path):
    """The forms of transformers 4 and 5 mean the same, and what is written says the same again."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    new = Checkpoint(write_checkpoint(tmp_path / "new", "llama3"))
    older = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": scaling | {"rope_type": "llama3"}}
    old = Checkpoint(write_checkpoint(tmp_path / "old", "llama3", **older))
    wanted = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_length=8)
    assert new.model == old.model
    assert (new.model.rope_scaling, new.model.rope_theta) == (wanted, 5e5)
    assert (new.length, new.model.norm_epsilon, new.model.tied_embeddings) == (64, 1e-5, False)
    written = new.layout.config(new.model, 64)
    assert written["rope_parameters"] == CONFIGS["llama3"]["rope_parameters"]
    assert (written["rope_theta"], written["rope_scaling"]) == (5e5, older["rope_scaling"])
    assert new.layout.model(written | {"vocab_size": 32}) == new.model
    assert layout_for(Transformer()).model_type == "llama"
    assert layout_for(Transformer(window=4)).model_type == "mistral"
    assert layout_for(Transformer(qk_norm=True, window=4)).model_type == "qwen3"
    with pytest.raises(jaxdl.ConfigError, match="llama has no norm=layer"):
        layout_for(Transformer(norm="layer"))


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("kind", "settings", "window"),
    [
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 7, "layer_types": None}, 7),
        ("mistral", {"sliding_window": 7, "layer_types": [FULL] * 3}, None),
        ("mistral", {"sliding_window": 7, "layer_types": [SLIDING] * 3}, 7),
        ("qwen2", {"sliding_window": 7, "max_window_layers": 0}, None),
        ("qwen2", {"use_sliding_window": True}, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0,
                   "layer_types": [FULL] * 3}, None),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDING] * 3}, 7),
        ("llama", {"sliding_window": 7, "layer_types": [SLIDING] * 3}, None),
        ("mixtral", {"sliding_window": 7}, 7),
        ("qwen3_moe", {"sliding_window": 7, "max_window_layers": 2}, None),
        ("qwen3_moe", {"sliding_window": 7, "use_sliding_window": True}, 7),
    ],
)  # fmt: skip
def test_windows_are_those_of_transformers(kind, settings, window):
    """The windows of all layers: `self_attn.sliding_window` in transformers 5.23 with the same config."""
    config = CONFIGS["mistral"] | {"model_type": kind, "num_hidden_layers": 3} | settings
    config = {name: value for name, value in config.items() if name != "sliding_window" or name in settings}
    layout = layout_of(config, "config.json")
    model = layout.model(config)
    assert model.window == window
    written = layout.config(model, 64)
    assert layout.model(written) == model.replaced({"vocab_size": None})
    if kind.startswith("qwen"):  # As versions of transformers without layer_types read it.
        assert layout.model({**written, "layer_types": None}).window == window


def other(change):
    return lambda tensors: {change.get(name, name): x for name, x in tensors.items() if change.get(name) != ""}


def with_head(change, rows=32):
    """Adds an output layer that is the embedding table but for one number."""

    def changed(tensors):
        (table,) = (x for name, x in tensors.items() if name.endswith(("wte.weight", "embed_tokens.weight")))
        head = table[:rows].copy()
        head[7, 3] += change
        return tensors | {"lm_head.weight": head}

    return changed


def test_an_output_layer_that_is_the_embedding_table_is_accepted(tmp_path):
    """Stored twice, in two dtypes, or under the other name alone."""
    table = "model.embed_tokens.weight"

    def alone(tensors):
        return {"lm_head.weight" if name == table else name: x for name, x in tensors.items()}

    def narrow(tensors):
        return with_head(0)(tensors) | {table: tensors[table].astype(ml_dtypes.bfloat16)}

    cases = enumerate((with_head(0), alone, narrow, lambda tensors: tensors))
    found = [Checkpoint(write_checkpoint(tmp_path / str(n), "qwen2", change=change)) for n, change in cases]
    shapes = found[0].model.network((), vocab_size=32, dtype=jnp.float32).param_shapes
    *twice, plain = (one.params(shapes) for one in found)
    assert [jax.tree.all(jax.tree.map(np.array_equal, one, plain)) for one in twice] == [True] * 3


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("llama3", {"model_type": "mamba"}, "model_type is mamba; jaxdl converts llama, mistral, qwen2, "),
        ("llama3", {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_type = 'ntk' is not converted"),
        ("llama3", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not converted, only 'silu'"),
        ("mistral", {"attention_bias": True}, "attention_bias = True is not converted"),
        ("llama3", {"num_key_value_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        ("llama3", {"tie_word_embeddings": True, "intermediate_size": 20}, "of another shape: model.layers.0."
         "mlp.gate_proj.weight is [24, 16], and [20, 16] by its config"),
        ("llama3", {"num_hidden_layers": 3}, "missing: model.layers.2.input_layernorm.weight, model.layers"
         ".2.self_attn.q_proj.weight, model.layers.2.self_attn.k_proj.weight and 6 more."),
        ("llama3", {"change": other({"lm_head.weight": "", "model.norm.weight": "model.norm.scale"})},
         "missing: model.norm.weight, lm_head.weight; unexpected: model.norm.scale."),
        ("llama3", {"dtype": np.int8}, "its tensors are I8; F32, F16, BF16 can be converted"),
        ("llama3", {"cut": 100}, "it ends before "),
        ("llama3", {"cut": 10**9}, "not a safetensors file, or a damaged one"),
        ("llama3", {"gone": "model.safetensors"}, "it has neither model.safetensors nor model.safetensors.index.json"),
        ("llama3", {"gone": "config.json"}, "there is no config.json in it"),
        ("qwen3", {"layer_types": [SLIDING] * 2}, "layer_types has sliding_attention, and no sliding_window is in use"),
        ("qwen3", {"layer_types": [FULL, "chunked_attention"]}, "layer_types has chunked_attention: full_attention or"),
        ("qwen3", {"layer_types": [FULL]}, "layer_types has 1 entries for 2 layers"),
        ("qwen2", {"change": with_head(1)}, "output layer is the embedding table (tie_word_embeddings is true), but "
         "lm_head.weight differs from model.embed_tokens.weight in 1 of 32 rows. Write"),
        ("gpt2", {"change": with_head(0, rows=31)},
         "lm_head.weight is [31, 16], and transformer.wte.weight is [32, 16]"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not converted"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted(tmp_path, capsys, name, settings, problem):
    gone, cut = settings.pop("gone", None), settings.pop("cut", 0)
    folder = write_checkpoint(tmp_path / "hf", name, **settings)
    if gone:
        (folder / gone).unlink()
    if cut:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: max(20, len(content) - cut)])
    assert problem in refusal(capsys, "from-hf", folder, tmp_path / "run", run=main)
    assert not (tmp_path / "run" / "config.json").exists()


BAD = (None, [1], [], {}, {"a": 1}, "x", "1", -1, -1.5, 0, 0.5, True, float("nan"), float("inf"))
"""Values that settings of a config.json have been seen with, or could have."""


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_of_any_setting_is_read_or_told(tmp_path, name):
    """Each setting of the file and of the layout, and of its rotary positions, with each value."""
    folder = write_checkpoint(tmp_path / "hf", name)
    path, given = folder / "config.json", CONFIGS[name]
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8, "partial_rotary_factor": 1}  # fmt: skip
    layout = layout_of(given, "")
    tried = [{**given, setting: value} for setting in {*given, *layout.forms} for value in BAD]
    if name == "llama3":
        tried += [{**given, "rope_parameters": {**scaling, setting: value}} for setting in scaling for value in BAD]
    refused = 0
    for config in tried:
        path.write_text(json.dumps(config))
        try:
            found = Checkpoint(folder)
        except jaxdl.ConfigError:
            refused += 1
        else:
            assert (type(found.length), type(found.vocab_size)) == (int, int)
            assert found.length >= 1
    assert refused > len(tried) / 2


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_position_embeddings": None}, "max_position_embeddings = null must be a whole number, 1 or more"),
        ({"rope_parameters": [1]}, "rope_parameters = [1] must be an object"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e6}}}, f"each kind of layer, {FULL}, are not converted"),
        ({"vocab_size": "32"}, 'vocab_size = "32" must be a whole number'),
    ],
)
def test_a_setting_of_another_type_is_told(tmp_path, capsys, settings, problem):
    folder = write_checkpoint(tmp_path / "hf", "llama3", **settings)
    assert problem in refusal(capsys, "from-hf", folder, tmp_path / "new" / "run", run=main)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_a_tokenizer_with_more_tokens_than_rows_gets_rows(tmp_path, capsys, name):
    """Of networks with and without an output layer of their own."""
    folder = write_checkpoint(tmp_path / "hf", name)
    more = {"<eos>": 0, **{f"w{n}": n for n in range(1, 34)}}
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"model": WORDS | {"vocab": more}}))
    main(["from-hf", str(folder), str(tmp_path / "run")])
    assert "its tokenizer has 34 tokens, and its table 32 rows: 2 rows are added" in " ".join(
        capsys.readouterr().out.split()
    )
    predictor = jaxdl.restore(tmp_path / "run")
    logits = predictor.logits(TOKENS)
    np.testing.assert_allclose(logits[..., :32], recorded()[name]["logits"], atol=1e-4)
    # The mean of the rows has the mean of the logits.
    np.testing.assert_allclose(logits[..., 32:], logits[..., :32].mean(-1, keepdims=True).repeat(2, -1), atol=1e-4)
    main(["to-hf", str(tmp_path / "run"), str(tmp_path / "back")])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 34
    assert {x[1] for key, x in bits(tmp_path / "back").items() if "embed_tokens" in key or "lm_head" in key} == {
        (34, 16)
    }


def test_a_refused_conversion_leaves_what_was_there(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "hf", "llama3", num_hidden_layers=3)
    (tmp_path / "run" / "notes").mkdir(parents=True)
    (tmp_path / "run" / "notes" / "a.txt").touch()
    assert "missing: model.layers.2." in refusal(capsys, "from-hf", folder, tmp_path / "run", run=main)
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["notes", "a.txt"]
    assert "missing: model.layers.2." in refusal(capsys, "from-hf", folder, tmp_path / "a" / "b", run=main)
    assert not (tmp_path / "a").exists()


def test_a_conversion_that_waits_for_another_removes_nothing_of_it(tmp_path, capsys, monkeypatch):
    """Whether the other one holds the lease still or has ended; its own files go while it holds the lease."""
    folder, run = write_checkpoint(tmp_path / "hf", "llama3"), tmp_path / "run"
    other, take_lease = Lease(run, print), from_hf.take_lease

    def take_after_another(lease):
        other.acquire()
        (run / "tokenizer.json").touch()
        take_lease(lease)

    monkeypatch.setattr(from_hf, "take_lease", take_after_another)
    assert "is in use" in refusal(capsys, "from-hf", folder, run, run=main)
    assert {path.name for path in run.iterdir()} == {"tokenizer.json", "lease.json"}
    other.release()

    def take_after_a_whole_one(lease):
        (run / "checkpoints" / "step_0").mkdir(parents=True)
        take_lease(lease)

    monkeypatch.setattr(from_hf, "take_lease", take_after_a_whole_one)
    assert "there is a run in this folder already" in refusal(capsys, "from-hf", folder, run, run=main)
    assert {path.name for path in run.iterdir()} == {"tokenizer.json", "checkpoints"}


def test_a_failed_conversion_removes_its_files_before_it_returns_the_lease(tmp_path, capsys, monkeypatch):
    folder, run, left = write_checkpoint(tmp_path / "hf", "llama3", num_hidden_layers=3), tmp_path / "run", []
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    release = Lease.release

    def look_and_release(lease):
        left.append([path.name for path in run.iterdir()])
        release(lease)

    monkeypatch.setattr(Lease, "release", look_and_release)
    assert "missing: model.layers.2." in refusal(capsys, "from-hf", folder, run, run=main)
    assert left == [["lease.json"]]
    assert not run.exists()


@pytest.mark.parametrize("line", ["--length 8 HF RUN", "HF --length=8 RUN", "HF RUN --length 8"])
def test_options_may_stand_anywhere(tmp_path, capsys, line):
    folder, run = write_checkpoint(tmp_path / "hf", "qwen3"), tmp_path / "run"
    main(["from-hf", *({"HF": str(folder), "RUN": str(run)}.get(word, word) for word in line.split())])
    assert json.loads((run / "data.json").read_text())["length"] == 8


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["from-hf", "--length", "HF", "NEW"], "not a whole number"),
        (["from-hf", "--size", "8", "HF", "NEW"], "--size"),
        (["from-hf", "HF", "NEW", "OTHER"], "other"),
        (["to-hf", "--dtype", "int4", "RUN", "NEW"], "--dtype"),
        (["from-hf", "HF"], "two folders are needed: python -m jaxdl.convert from-hf FOLDER WORKDIR"),
        (["from-hf", "HF", "RUN"], "there is a run in this folder already"),
        (["from-hf", "HF", "NEW", "--length", "65"], "--length 65: the network reads 1 to 64 tokens"),
        (["to-hf", "nowhere", "NEW"], "nowhere: there is no run in this folder"),
        (["to-hf", "RUN", "HF"], "it has a config.json already"),
        (["to-hf", "RUN", "OTHER"], "it has a model.safetensors already"),
        (["to-hf", "RUN", "NEW", "--layout", "gpt2"], "gpt2 has no "),
        (["to-hf", "RUN", "NEW", "--layout", "t5"], "choose one of llama, mistral, qwen2, qwen3, gemma2,"),
        (["to", "RUN", "NEW"], "to: there is no such command. Commands: from-hf, to-hf, from-timm, to-timm."),
    ],
)
def test_mistakes(qwen, tmp_path, capsys, args, problem):
    places = {"HF": qwen[0], "RUN": qwen[1], "NEW": tmp_path / "new", "OTHER": tmp_path / "other"}
    places["OTHER"].mkdir()
    (places["OTHER"] / "model.safetensors").touch()
    assert problem in refusal(capsys, *(places.get(one, one) for one in args), run=main)
