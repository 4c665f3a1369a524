"""What a text begins with and where it ends: as in the training, in scores, texts, questions and exports."""

import json
import shutil

import gpt2_tokens
import jax
import numpy as np
import pytest
import sentencepiece
import tokenizers
from mistakes import refusal
from runs import tiny_experiment
from test_convert import write_checkpoint

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import Converted, Documents, Mixture, TextFiles
from jaxdl.data.__main__ import main as data_command
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.inference.generate.__main__ import main as generate
from jaxdl.inference.scoring import Question, Scorer, score_choices, score_documents
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.workdir.tokenizer import codec_of_run
from jaxdl.training.tasks import LanguageModelling

LENGTH, HEADS = 16, 2
TEXTS = [f"{number} fish, {word} fish" for number in range(12) for word in ("red", "blue", "old", "new")]
SPECIAL = [("<s>", 1), ("</s>", 2)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with documents and a tokenizer of each kind, trained on them."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, kind, size in (("own.json", "bpe", 280), ("pairs.model", "sentencepiece_bpe", 295)):
        data_command(["tokenizer", "--out", str(folder / name), "--kind", kind, str(folder / "texts.jsonl"),
                      f"--vocab-size={size}"])  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def packed(files):
    """The workdir of a run on packed documents with its own tokenizer."""
    experiment = tiny_experiment(
        data=Documents(paths=(str(files / "texts.jsonl"),), tokenizer=str(files / "own.json"), length=LENGTH,
                       shards=str(files / "shards")),
        model=Transformer(num_layers=1, embed_dim=16, num_heads=HEADS, mlp_dim=32, tied_embeddings=False),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=0.02),
        batch_size=4,
        steps=8,
        mesh=MeshConfig(),
        evaluation={"every_steps": 8},
        checkpoint={"every_steps": 8},
    )  # fmt: skip
    jaxdl.train(experiment, files / "run", quiet=True, devices=jax.devices()[:1])
    return files / "run"


@pytest.fixture(scope="module")
def writer(packed):
    return jaxdl.restore(packed)


def log_probabilities(params, tokens):
    """Of each token but the first, given those before it: a transformer of one layer, in NumPy, float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    block = jax.tree.map(lambda x: x[0], p["layers"])

    def norm(x, name, where):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * where[name]["scale"]

    def rotated(x):
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate(
            [x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1
        )

    x = p["embedding"][tokens]
    attention, h = block["attention"], norm(x, "attention_norm", block)
    query, key, value = (np.einsum("te,ehd->thd", h, attention[name]) for name in ("query", "key", "value"))
    scores = np.einsum("thd,shd->hts", rotated(query), rotated(key)) / np.sqrt(query.shape[-1])
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + np.einsum("hts,shd,hde->te", weights, value, attention["out"])
    h, mlp = norm(x, "mlp_norm", block), block["mlp"]
    gate = h @ mlp["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (h @ mlp["up"])) @ mlp["down"]
    logits = norm(x, "final_norm", p) @ p["head"]
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.slow
def test_scores_are_those_of_documents_that_begin_as_in_the_training(packed, writer):
    encode = tokenizers.Tokenizer.from_file(str(packed.parent / "own.json")).encode
    documents = TEXTS[:5]
    nats = [-log_probabilities(writer.params, [1, *encode(text).ids]) for text in documents]
    found = score_documents(Scorer(writer), writer.codec, documents, stride=8)
    np.testing.assert_allclose(found["loss"], np.concatenate(nats).mean(), rtol=1e-6)
    assert found["tokens"] == sum(map(len, nats))
    wrong = [-log_probabilities(writer.params, [2, *encode(text).ids]).mean() for text in documents]
    assert abs(np.mean(wrong) - found["loss"]) > 1e-3, "the beginning makes a difference"
    asked = [Question("1 fish,", ("red", "blue fish"), 0)]
    _, ((red, blue),) = score_choices(Scorer(writer), writer.codec, asked)
    for score, choice in ((red, " red"), (blue, " blue fish")):
        whole, before = encode("1 fish," + choice).ids, len(encode("1 fish,").ids)
        np.testing.assert_allclose(score, log_probabilities(writer.params, [1, *whole])[before:].sum(), rtol=1e-5)


@pytest.mark.slow
def test_texts_begin_with_the_mark_too(writer):
    codec = writer.codec
    assert (codec.prompt(""), codec.prompt("fish")) == ([1], [1, *codec.encode("fish")])
    (likeliest,) = writer.complete(["1 fish"], num_tokens=1, temperature=0, stop_at_end=False)
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(codec.prompt("1 fish"))] = codec.prompt("1 fish")
    logits = writer.logits(tokens)[0, len(codec.prompt("1 fish")) - 1]
    assert likeliest.text == codec.decode([*codec.prompt("1 fish"), int(np.argmax(logits))])[len("<s>1 fish") :]


@pytest.mark.slow
def test_the_mark_is_recorded_and_older_workdirs_have_it_from_their_config(packed, writer, tmp_path):
    kept = json.loads((packed / "codec.json").read_text())
    assert kept["opening"] == [1]
    data = writer.experiment.data
    for content, opening in (({"opening": [2]}, (2,)), ({}, (1,))):
        kept = {name: kept[name] for name in ("kind", "fingerprint")}
        (tmp_path / "codec.json").write_text(json.dumps(kept | content))
        assert codec_of_run(tmp_path, data).opening == opening
    (tmp_path / "codec.json").write_text(json.dumps(kept | {"opening": ["<s>"]}))
    with pytest.raises(ConfigError, match=r"codec.json: it cannot be read"):
        codec_of_run(tmp_path, data)


def test_other_packed_data_are_evaluated_with_the_mark_of_the_run(packed, writer, files):
    """As by a network that was trained with another mark than the tokenizer's start."""
    data = writer.experiment.data
    other = data.replaced({"split_seed": 3})
    mixed = Mixture(sources={"a": data, "b": other})
    for what, sources in ((other, 1), (mixed, 2)):
        with writer.held_out(what) as source:
            rows = [one.batch(np.arange(1))["tokens"] for one in (source.parts or {"": source}).values()]
            assert [row[0, 0] for row in rows] == [1] * sources
        changed = source.begun_by(7)
        for one in (changed.parts or {"": changed}).values():
            batch = one.batch(np.arange(1))
            first = np.flatnonzero(np.diff(batch["segments"][0], prepend=0) > 0)
            assert set(batch["tokens"][0, first]) == {7}


@pytest.mark.parametrize(
    ("tokenizer", "packing", "opening", "beginning"),
    [
        ("own.json", True, (1,), [1]),
        ("own.json", False, (), [2]),
        ("pairs.model", True, (1,), [1]),
        ("pairs.model", False, (), [2]),
        (None, True, (0,), [0]),
        (None, False, (), [0]),
    ],
)
def test_documents_begin_as_their_rows_do(files, tokenizer, packing, opening, beginning):
    path = tokenizer and str(files / tokenizer)
    data = Documents(paths=(str(files / "texts.jsonl"),), tokenizer=path, packing=packing, length=LENGTH,
                     shards=str(files / "shards"))  # fmt: skip
    codec = data.codec()
    assert (codec.opening, codec.beginning, codec.prompt("")) == (opening, beginning, beginning)
    rows = data.build().train
    tokens = rows.batch(np.arange(len(rows)))["tokens"]
    heads = [codec.encode(text)[:4] for text in TEXTS if text.startswith(("10", "11"))]  # Nowhere but there.
    at = [(row, place) for row, place in np.ndindex(*tokens.shape) if tokens[row, place : place + 4].tolist() in heads]
    assert len(at) >= 4
    assert all(tokens[row, place - 1] == beginning[-1] for row, place in at if place), "every document after its mark"


def test_bytes_record_their_mark_and_streams_have_none(files):
    assert TextFiles().codec().opening == ()
    words = tokenizers.Tokenizer.from_file(str(files / "own.json"))
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=SPECIAL)
    words.save(str(files / "framed.json"))
    assert TextFiles(tokenizer=str(files / "framed.json")).codec().beginning == [2], "windows never saw the other"


@pytest.mark.parametrize(
    ("config", "opening"),
    [({"add_bos_token": True}, (1,)), ({"add_bos_token": False}, ()), ({}, (1,)), (None, (1,))],
)
def test_the_older_form_of_llama_begins_as_its_config_says(files, tmp_path, config, opening):
    shutil.copy(files / "pairs.model", tmp_path / "tokenizer.model")
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Converted(tokenizer=str(tmp_path / "tokenizer.model")).codec().opening == opening


@pytest.mark.parametrize("name", ["own.json", "pairs.model", "bytes"])
@pytest.mark.parametrize("begins", [True, False])
def test_an_exported_tokenizer_begins_alike(files, tmp_path, name, begins):
    from jaxdl.data import Codec
    from jaxdl.inference.convert.special import write_tokenizer

    codec = Codec(None if name == "bytes" else str(files / name))
    codec = codec.for_documents((codec.packed_mark,) if begins else ())
    numbers = write_tokenizer(codec, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    first, end = codec.name(codec.beginning[-1]), codec.name(codec.end)
    assert (config["bos_token"], config["eos_token"]) == (first, end)
    assert (numbers["bos_token_id"], numbers["eos_token_id"]) == (codec.beginning[-1], codec.end)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == codec.end
    if name == "pairs.model":
        assert config["add_bos_token"] is begins
        assert config["tokenizer_class"] == "LlamaTokenizer"
        return
    text = "1 fish Ā\0 é" if name == "bytes" else "1 fish"
    encoder = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert encoder.encode(text).ids == codec.prompt(text)
    assert encoder.decode(codec.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [3, 4, 3]}, (3, 4)),
        (2, {"eos_token_id": None}, (2,)),
        (7, {"max_length": 9}, (7,)),
        (-1, None, (299,)),
    ],
)
def test_a_converted_network_ends_texts_where_its_checkpoint_says(tmp_path, capsys, config, generation, ends):
    def widened(tensors):
        return {name: np.resize(x, (300, 16)) if "wte" in name else x for name, x in tensors.items()}

    source = write_checkpoint(tmp_path / "hf", "gpt2", vocab_size=300, change=widened, eos_token_id=config)
    gpt2_tokens.write_tokenizer(source, added=False)
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    convert(["from-hf", str(source), str(tmp_path / "run")])
    codec = codec_of_run(tmp_path / "run", jaxdl.load(tmp_path / "run" / "config.json").data)
    assert codec.ends == ends
    assert Documents(tokenizer=str(tmp_path / "run" / "tokenizer")).codec().ends == tuple(dict.fromkeys((*ends, 299)))


@pytest.mark.slow
def test_a_text_ends_at_any_of_several_ends_and_the_export_has_them(tmp_path, capsys):
    def widened(tensors):
        return {name: np.resize(x, (300, 16)) if "wte" in name else x for name, x in tensors.items()}

    source = write_checkpoint(tmp_path / "hf", "gpt2", vocab_size=300, change=widened, eos_token_id=[*range(280)])
    gpt2_tokens.write_tokenizer(source, added=False)
    convert(["from-hf", str(source), str(tmp_path / "run")])
    asked = ["--workdir", str(tmp_path / "run"), "--prompt", "a", "b", "--temperature", "0", "--num-tokens", "4"]

    def written(*options):
        capsys.readouterr()
        generate([*asked, *options])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    free = written("--no-stop-at-end")
    for one, other in zip(written(), free, strict=True):
        assert (one["ended"], other["ended"]) == ("token", "length")
        assert one["tokens"] < other["tokens"]
    convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "back")])
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text())["eos_token_id"] == [*range(280)]


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", [2, "3"], 2.5, {"a": 1}, True, [None]])
def test_ends_that_are_no_numbers_of_tokens(tmp_path, capsys, where, value):
    source = write_checkpoint(tmp_path / "hf", "llama3")
    there = json.loads((source / where).read_text()) if (source / where).exists() else {}
    (source / where).write_text(json.dumps(there | {"eos_token_id": value}))
    message = refusal(capsys, "from-hf", source, tmp_path / "run", run=convert)
    if value == [None]:
        assert "eos_token_id = [null]" in message
    assert f"{where}: eos_token_id = " in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("layout", ["qwen2", "qwen3"])
def test_a_tokenizer_that_transformers_would_misread_is_not_written(files, tmp_path, capsys, layout):
    """Of qwen2 it takes any tokenizer for the byte-level BPE of Qwen 2 (seen with transformers 5.24)."""
    checkpoint = write_checkpoint(tmp_path / "hf", layout)
    (checkpoint / "tokenizer.model").write_bytes((files / "pairs.model").read_bytes())
    convert(["from-hf", str(checkpoint), str(tmp_path / "run")])
    line = ["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]
    if layout == "qwen2":
        assert "in the layout qwen2 transformers reads that as another tokenizer" in refusal(capsys, *line, run=convert)
        assert not (tmp_path / "out").exists()
    else:
        convert(line)
        assert (tmp_path / "out" / "tokenizer.model").is_file()


def test_pairs_model_is_one_of_sentencepiece(files):
    """The oracle of the two forms above: the library's own numbers."""
    found = sentencepiece.SentencePieceProcessor(model_file=str(files / "pairs.model"))
    assert (found.bos_id(), found.eos_id()) == (1, 2)
