"""Tokenizers: the kinds that are read, their special tokens, and those that the command trains."""

import errno
import json
import sys

import pytest

from jaxdl.core.config import ConfigError
from jaxdl.data import Codec
from jaxdl.data.__main__ import main

TEXT = "the red fish, the blue fish\tund der grüne Fisch 𝄞\n"


def trained(path, *options):
    corpus = path / "pairs.tsv"
    corpus.write_text("".join(TEXT.replace("fish", f"fish{i % 7} sea{i % 5}") for i in range(200)))
    out = path / ("tokenizer.json" if "--kind" not in options else "tokenizer.model")
    main(["tokenizer", str(corpus), "--out", str(out), "--vocab-size", "290", *options])
    return out


@pytest.mark.parametrize("options", [(), ("--kind", "unigram"), ("--kind", "sentencepiece_bpe")])
def test_a_trained_tokenizer_is_read_again_and_the_same_twice(tmp_path, options, capfd):
    out = trained(tmp_path, *options)
    codec, first = Codec(str(out)), out.read_bytes()
    assert codec.kind == ("sentencepiece" if options else "tokenizers")
    assert (codec.pad, codec.start, codec.end, codec.separator, codec.vocab_size) == (0, 1, 2, [2], 290)
    for text in ("the red fish", "nie gesehen: ∮ 𝄞", "a  b"):
        assert codec.decode(codec.encode(text)) == text
        assert codec.encode_many([text, ""]) == [codec.encode(text), []]
    assert len(codec.encode("fish Fisch")) < len("fish Fisch")  # Of both columns.
    out.unlink()
    assert trained(tmp_path, *options).read_bytes() == first
    assert "padding 0, start 1, end 2" in capfd.readouterr().out


def test_a_disk_that_is_full_at_the_end_is_told(tmp_path, monkeypatch, capsys):
    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jaxdl.core.files.os.replace", full)
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path)
    assert ended.value.code == 2
    assert "tokenizer.json: it cannot be written (No space left on device)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.tsv"]


@pytest.mark.parametrize(("max_bytes", "cuts"), [(5_000, True), (5_000_000, False)])
def test_a_limit_that_cuts_is_told(tmp_path, capsys, max_bytes, cuts):
    trained(tmp_path, "--max-bytes", str(max_bytes))
    assert (f"(--max-bytes {max_bytes:,}: the files have more)" in capsys.readouterr().out) == cuts


def test_bytes_end_with_byte_0():
    codec = Codec(None)
    assert (codec.kind, codec.pad, codec.start, codec.end, codec.separator) == ("bytes", None, None, 0, [0])


def test_a_folder_names_its_special_tokens_and_documents_stay_whole(tmp_path):
    import tokenizers

    words = ["<s>", "</s>", "<|eot|>", "a", "b"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "b"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    alone = Codec(str(tmp_path))
    assert (alone.pad, alone.start, alone.end) == (None, 0, 1)
    assert alone.encode("a b a") == [3, 4, 3]
    before = alone.fingerprint()
    named = {"eos_token": {"content": "<|eot|>"}, "bos_token": None, "pad_token": "a"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    folder = Codec(str(tmp_path))
    assert (folder.pad, folder.start, folder.end, folder.separator) == (3, 0, 2, [2])
    assert folder.fingerprint() != before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "x.json", "--vocab-size", "300"], "no files"),
        (["nowhere.txt", "--out", "x.json", "--vocab-size", "300"], "nowhere.txt: no such file"),
        (["a.txt", "--out", "x.model", "--vocab-size", "300"], "--out x.model: a tokenizer of kind bpe is a .json"),
        (["a.txt", "--out", "x.json", "--vocab-size", "30"], "--vocab-size 30: the bytes and special tokens"),
        (["a.txt", "--out", "there.json", "--vocab-size", "300"], "there.json: it is there already"),
        (["a.txt", "--out", "x.json"], "--vocab-size"),
        (["a.txt", "--out", "a.txt/x.json", "--vocab-size", "300"], "--out a.txt/x.json: it cannot be written"),
        (["a.txt", "--out", "x.json", "--vocab-size", "300", "--max-bytes", "0"], "--max-bytes 0: it is below 1"),
        (["a.txt", "--out", "x.json", "--vocab-size", "300", "--glob", "*.md"], "glob = '*.md': no path is a folder"),
        (["empty.txt", "--out", "x.json", "--vocab-size", "300"], "no text to train on"),
    ],
)
def test_mistakes_of_the_command(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.txt", "a b"), ("there.json", ""), ("empty.txt", "")):
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["tokenizer", *args])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "there.json", "empty.txt"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.model", "not a model of sentencepiece"),
        ("empty.model", "not a model of sentencepiece"),
        ("json.model", "not a model of sentencepiece"),
        ("folder.model", "no such file"),
        ("none.model", "no such file"),
    ],
)
def test_a_broken_model_is_told(tmp_path, name, message):
    for made, content in (("x", b"\x00garbage"), ("empty", b""), ("json", b'{"model": {}}')):
        (tmp_path / f"{made}.model").write_bytes(content)
    (tmp_path / "folder.model").mkdir()
    with pytest.raises(ConfigError, match=message):
        Codec(str(tmp_path / name))


def test_sentencepiece_that_is_not_installed_is_told(tmp_path, monkeypatch):
    (tmp_path / "x.model").touch()
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=r"x.model: it needs the package sentencepiece.* pip install 'jaxdl\[text\]'"):
        Codec(str(tmp_path / "x.model"))
