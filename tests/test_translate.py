"""Translation by a trained network: batches of few shapes, the command, and the measures."""

import io
import json
import os
import re
import shutil

import jax
import pytest
from mistakes import refusal
from runs import tiny_translation
from test_pairs import config_of, folder  # noqa: F401

from jaxdl import restore, train
from jaxdl.core.config import ConfigError
from jaxdl.inference.evaluate.__main__ import main as evaluate
from jaxdl.inference.export.__main__ import main as export
from jaxdl.inference.trained import parse_command
from jaxdl.inference.translate.__main__ import PROG, main
from jaxdl.inference.translate.command import Translate, read_texts
from jaxdl.inference.translation import quality
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.experiment import load_experiment


@pytest.fixture(scope="module")
def workdir(folder, tmp_path_factory):  # noqa: F811
    """A run of two steps."""
    path = tmp_path_factory.mktemp("run")
    experiment = tiny_translation(config_of(folder, test=("valid.tsv",)))
    train(experiment, path, quiet=True, devices=jax.devices()[:1])
    return path


@pytest.mark.slow
def test_a_translation_does_not_depend_on_its_batch_or_the_mesh(workdir):
    texts = ["w1 w2 w3", "", "w4", "w5 w6 w7 w8 w9", "w1"]
    predictor, counts = restore(workdir), []
    found = predictor.translate(texts, beams=2, batch_size=2, done=counts.append)
    assert sum(counts) == len(texts)
    assert found[1] == ""
    assert found[0] == predictor.translate(["w1 w2 w3", "w4 w2"], beams=2, batch_size=2)[0]
    split = restore(workdir, mesh=MeshConfig(replica=2, fsdp=2, tensor=2))
    assert split.translate(texts, beams=2, batch_size=2) == found


@pytest.mark.slow
def test_long_texts_are_translated_a_few_at_a_time(workdir):
    counts = []
    long = " ".join(["w1"] * 200)  # More tokens than a whole batch may have.
    found = restore(workdir).translate([long, long, long, "w2 w3"], beams=1, batch_size=2, done=counts.append)
    assert counts == [0, 1, 1, 1, 1]
    assert found[0] == found[1] == found[2]


def test_lines_end_only_at_newlines(workdir, tmp_path):
    (tmp_path / "in.txt").write_bytes("w1\u2028w2\r\n\nw3\x85w4".encode())
    command = parse_command(Translate, ["--workdir", str(workdir), "--input", str(tmp_path / "in.txt")], PROG)
    assert read_texts(command) == (["w1\u2028w2", "", "w3\x85w4"], [])


def test_the_command_writes_translations_and_prints_scores(workdir, tmp_path, capsys):
    out = tmp_path / "out.txt"
    options = ["--beams", "1", "--batch-size", "32", "--mesh.fsdp", "8"]
    main(["--workdir", str(workdir), "--split", "test", *options, "--output", str(out)])
    assert len(out.read_text().splitlines()) == 20
    printed = capsys.readouterr().err
    assert "BLEU" in printed
    assert "chrF2" in printed
    assert "version:" in printed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no --workdir"),
        (["--workdir", "RUN", "--split", "test", "--input", "a.txt"], "it has its own texts"),
        (["--workdir", "RUN", "--input", "nowhere.txt"], "--input nowhere.txt: No such file"),
        (["--workdir", "RUN", "--split", "test", "--devices", "0"], "--devices 0: give a whole number, 1 or more"),
        (["--workdir", "RUN", "--split", "test", "--beams", "0"], "--beams 0: give a whole number, 1 or more"),
        (["--workdir", "RUN", "--split", "test", "--length-penalty", "nan"], "--length-penalty nan: give a number"),
        (["--workdir", "RUN", "--input", __file__, "--references", os.devnull], "--references /dev/null: 0 lines for"),
        (["--workdir", "RUN", "--split", "train", "--output", "no/where.txt"], "there is no folder"),
        (["--workdir", "RUN", "--split", "test", "--output", "."], "--output .: it is a folder"),
    ],
)
def test_mistakes_on_the_command_line(workdir, capsys, args, message):
    assert message in refusal(capsys, *[str(workdir) if one == "RUN" else one for one in args], run=main)


@pytest.mark.slow
def test_a_tokenizer_that_was_replaced_is_told(workdir, folder, tmp_path, capsys):  # noqa: F811
    """Another one of the same size, under the same name; a run of an older jaxdl, which recorded none, goes on."""
    path = folder / "words.json"
    before = path.read_text()
    content = json.loads(before)
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    message = f"tokenizer {path}: it is not the one that the network in {workdir} was trained with"
    (tmp_path / "in.txt").write_text("w1 w2\n")
    older = tmp_path / "older"
    shutil.copytree(workdir, older)
    (older / "codec.json").unlink()
    codecs = [restore(workdir).codec, restore(older).codec]
    assert codecs[0].fingerprint() == codecs[1].fingerprint()
    path.write_text(json.dumps(content))
    try:
        args = ["--workdir", str(workdir)]
        assert message in refusal(capsys, *args, "--input", str(tmp_path / "in.txt"), run=main)
        assert message in refusal(capsys, *args, "--mesh.fsdp", "8", run=evaluate)
        with pytest.raises(ConfigError, match=re.escape(message)):
            train(load_experiment(workdir / "config.json"), workdir, quiet=True, devices=jax.devices()[:1])
        assert restore(older).codec.vocab_size == codecs[0].vocab_size
        assert restore(older).codec.encode("w1") != codecs[0].encode("w1")
    finally:
        path.write_text(before)


def test_standard_input_is_utf_8(workdir, monkeypatch, capsys):
    args = ("--workdir", str(workdir))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w1\xff\n"), errors="surrogateescape"))
    assert "standard input: not UTF-8 (invalid start byte)" in refusal(capsys, *args, run=main)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n \n")))
    main(list(args))
    assert capsys.readouterr().out == "\n\n", "an empty text has an empty translation"


def test_quality_of_equal_and_of_other_texts():
    texts = ["the file was not found on this disk", "delete all of the old pictures"]
    assert quality(texts, texts)["BLEU"][0] == pytest.approx(100)
    found = quality(["nothing in common", "at all"], texts)
    assert found["BLEU"][0] < 10
    assert found["chrF2"][0] < 30
    assert "version:" in found["BLEU"][1]
    with pytest.raises(ConfigError, match="2 translations and 1 references"):
        quality(texts, texts[:1])


def test_an_export_has_the_parameters_alone(workdir, tmp_path, capsys):
    to = tmp_path / "to"
    places = ("--workdir", str(workdir), "--to", str(to))
    told = refusal(capsys, *places, run=export)
    assert "predict.stablehlo: the function from inputs to predictions cannot be made" in told
    assert "Give --format safetensors" in told
    assert not to.exists()
    export([*places, "--format", "safetensors"])
    assert sorted(path.name for path in to.iterdir()) == ["README.md", "params.safetensors"]
    assert "predict.stablehlo" not in (to / "README.md").read_text()
