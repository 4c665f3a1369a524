"""Tokenizers on their way through `python -m jaxdl.convert`: GPT-2's older form, a moved workdir, and none at all."""

import json
import shutil

import gpt2_tokens
import numpy as np
import pytest
import tokenizers
from mistakes import refusal
from test_convert import write_checkpoint

import jaxdl
from jaxdl.data import Converted, TextFiles
from jaxdl.inference.convert.__main__ import main
from jaxdl.inference.convert.byte_bpe import gpt2_tokenizer
from jaxdl.inference.generate.__main__ import main as generate
from jaxdl.inference.score.__main__ import main as score
from jaxdl.training.experiment import load_experiment


@pytest.mark.parametrize("added", [False, True])
def test_the_older_form_gives_the_tokens_of_transformers(tmp_path, added):
    gpt2_tokens.write_tokenizer(tmp_path, added=added)
    found = tokenizers.Tokenizer.from_str(gpt2_tokenizer(tmp_path))
    tokens = [one.ids for one in found.encode_batch(gpt2_tokens.TEXTS, add_special_tokens=False)]
    assert tokens == list(gpt2_tokens.RECORDED_ADDED if added else gpt2_tokens.RECORDED)
    assert found.encode("hello").ids == ([299, 280] if added else [260]), "with the token that begins a text"
    assert [found.decode(one, skip_special_tokens=False) for one in gpt2_tokens.RECORDED] == list(gpt2_tokens.TEXTS)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("merges.txt", "h e\nq x9\n", "not a byte-level BPE (Error while initializing BPE: Token `x9` out of vocab"),
        ("vocab.json", "{", "not a byte-level BPE"),
        ("added_tokens.json", '{"<a>": 400}', "they have 301 tokens, and '<a>' is said to be number 400"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json: not JSON of an object"),
    ],
)
def test_damaged_files_of_the_older_form(tmp_path, name, content, problem):
    gpt2_tokens.write_tokenizer(tmp_path, added=False)
    (tmp_path / name).write_text(content)
    with pytest.raises(jaxdl.ConfigError) as error:
        gpt2_tokenizer(tmp_path)
    assert problem in str(error.value)


@pytest.mark.slow
def test_a_workdir_with_the_older_form_can_be_moved(tmp_path, capsys):
    """Everything that reads a run finds its tokenizer where the workdir lies now."""

    def widened(tensors):
        return {name: np.resize(x, (300, 16)) if "wte" in name else x for name, x in tensors.items()}

    source = write_checkpoint(tmp_path / "hf", "gpt2", vocab_size=300, embd_pdrop=0.2, change=widened)
    gpt2_tokens.write_tokenizer(source, added=False)
    main(["from-hf", str(source), str(tmp_path / "old" / "run")])
    assert "its config has embd_pdrop = 0.2 and resid_pdrop = 0.1; here one dropout" in capsys.readouterr().out
    (tmp_path / "old").rename(tmp_path / "new")
    shutil.rmtree(source)
    moved = tmp_path / "new" / "run"
    assert json.loads((moved / "config.json").read_text())["data"]["tokenizer"] == "tokenizer"
    assert load_experiment(moved / "config.json").data.tokenizer == str(moved / "tokenizer")
    predictor = jaxdl.restore(moved)
    recorded = json.loads((moved / "codec.json").read_text())["fingerprint"]
    assert predictor.codec.fingerprint() == recorded, "the folder of the tokenizer plays no part"
    assert (predictor.codec.encode("hello world"), predictor.codec.end) == ([260, 286], 299)
    generate(["--workdir", str(moved), "--prompt", "hello the", "--num-tokens", "2", "--no-stop-at-end"])
    (tmp_path / "text.txt").write_text("hello world, the end")
    score(["--workdir", str(moved), "--text", str(tmp_path / "text.txt")])
    capsys.readouterr()
    main(["to-hf", str(moved), str(tmp_path / "back")])
    assert "tokenizer" not in capsys.readouterr().out.partition("is written")[2]
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json"))
    assert written.encode("hello world").ids == [260, 286]
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["resid_pdrop"], config["embd_pdrop"], config["attn_pdrop"]) == (0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", "{", "not a JSON file of the tokenizers library"),
        ("generation_config.json", "{", "generation_config.json: not JSON"),
        ("vocab.json", "{", "not a byte-level BPE"),
    ],
)
def test_from_hf_with_a_damaged_tokenizer_leaves_nothing(tmp_path, capsys, name, content, problem):
    source = write_checkpoint(tmp_path / "hf", "gpt2")
    gpt2_tokens.write_tokenizer(source, added=False)
    (source / name).write_text(content)
    message = refusal(capsys, "from-hf", source, tmp_path / "run", run=main)
    assert problem in message
    assert str(source) in message
    assert sorted(tmp_path.iterdir()) == [source]


def test_only_paths_in_a_converted_workdir_are_relative_to_it(tmp_path):
    assert Converted(tokenizer="tokenizer").within(tmp_path / "run").tokenizer == str(tmp_path / "run" / "tokenizer")
    for data in (Converted(), TextFiles(tokenizer="mine.json")):
        assert data.within(tmp_path) is data, "a user's own paths are relative to the current folder"


def test_to_hf_says_when_there_is_no_tokenizer(tmp_path, capsys):
    """A network that was converted without one has none; bytes get a tokenizer of bytes."""
    main(["from-hf", str(write_checkpoint(tmp_path / "hf", "qwen3")), str(tmp_path / "run")])
    assert "the run reads and writes numbers of tokens alone, no text; put one of them there" in capsys.readouterr().out

    def written(folder, **changes):
        run = load_experiment(tmp_path / "run" / "config.json").replaced(changes)
        (tmp_path / "run" / "config.json").write_text(run.to_json())
        main(["to-hf", str(tmp_path / "run"), str(tmp_path / folder)])
        return capsys.readouterr().out

    text = written("none")
    assert "no tokenizer is written (the network was converted without a tokenizer" in text
    assert "takes numbers of tokens alone, below 32. If it has a tokenizer, put its tokenizer.json there" in text
    assert not (tmp_path / "none" / "tokenizer.json").exists()
    text = written("bytes", data=TextFiles(), **{"model.dropout": 0.1})
    assert (
        "the run has no tokenizer, since it reads bytes: the tokenizer.json that is written has the 256 bytes" in text
    )
    assert "dropout = 0.1 is not written, since qwen3 has no such setting" in text
    assert (tmp_path / "bytes" / "tokenizer.json").is_file()


def test_the_older_form_of_another_layout_is_told(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "hf", "qwen3")
    gpt2_tokens.write_tokenizer(source, added=False)
    main(["from-hf", str(source), str(tmp_path / "run")])
    assert "its vocab.json and merges.txt alone do not say how text is split" in capsys.readouterr().out
