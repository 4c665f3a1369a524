"""Pairs of texts: read from three kinds of files, tokenized once, packed into rows, and what a batch holds."""

import fcntl
import gzip
import hashlib
import json
import os
import pickle
import re

import jax
import numpy as np
import pytest
import tokenizers
from test_tfds import TEXT, write_dataset

from jaxdl.core.config import ConfigError
from jaxdl.data import Codec, Pairs, PairSpec, TFDSPairs
from jaxdl.data.__main__ import main
from jaxdl.data.copies import Hold
from jaxdl.data.text import shards as shards_of_texts
from jaxdl.data.text import tokenizing
from jaxdl.data.text.pair_files import pair_files
from jaxdl.data.text.pair_rows import first_fit
from jaxdl.data.text.shards import SOURCES

WORDS = [f"w{number}" for number in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same random pairs as a TSV file, JSON lines and two files; and a tokenizer, a word a token."""
    path = tmp_path_factory.mktemp("pairs")
    vocab = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(path / "words.json"))
    for name, count in (("train", 150), ("valid", 20)):
        pairs = random_pairs(count, seed=count)
        (path / f"{name}.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
        lines = [json.dumps({"translation": {"en": source, "de": target}}) for source, target in pairs]
        (path / f"{name}.jsonl").write_text("\n".join(lines))
        for side, suffix in enumerate(("en", "de")):
            (path / f"{name}.{suffix}").write_text("".join(pair[side] + "\n" for pair in pairs))
    return path


def random_pairs(count, seed):
    random = np.random.default_rng(seed)
    return [tuple(" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(2)) for _ in range(count)]


def config_of(folder, **changes):
    values = {
        "folder": str(folder),
        "train": ("train.tsv",),
        "valid": ("valid.tsv",),
        "tokenizer": str(folder / "words.json"),
        "source_length": 24,
        "target_length": 28,
        "shards": str(folder / "shards"),
    }
    return Pairs(**(values | changes))


def unpacked(batch, row, side):
    """The texts of a row, as lists of tokens."""
    tokens, segments = batch[side][row], batch[f"{side}_segments"][row]
    return [tokens[segments == number].tolist() for number in range(1, segments.max() + 1)]


def test_every_pair_is_in_one_row(folder):
    """The rows, taken apart, are the pairs of the file in some order, each text with its end."""
    splits = config_of(folder).build()
    number = {word: place + 3 for place, word in enumerate(WORDS)}
    for source, count in ((splits.train, 150), (splits.test, 20)):
        batch = source.batch(np.arange(len(source)))
        assert batch["source"].shape == (len(source), 24)
        assert batch["target"].shape == (len(source), 28)
        found = [
            pair
            for row in range(len(source))
            for pair in zip(unpacked(batch, row, "source"), unpacked(batch, row, "target"), strict=True)
        ]
        expected = [
            tuple([*(number[word] for word in text.split()), 2] for text in pair)
            for pair in random_pairs(count, seed=count)
        ]
        assert sorted(found) == sorted(expected)
        for side in ("source", "target"):
            assert not batch[side][batch[f"{side}_segments"] == 0].any()
    spec = splits.train.spec
    batch = splits.train.batch(np.arange(len(splits.train)))
    assert spec.target_tokens == pytest.approx((batch["target_segments"] > 0).sum() / len(splits.train), abs=0.01)
    assert "% padding" in spec.described()[1]


def test_rows_stay_what_they_were(folder):
    """The checksum of all arrays is that of the program that kept the tokens in memory (commit d0ba251)."""
    splits, found = config_of(folder).build(), hashlib.sha256()
    for source in (splits.train, splits.test):
        for name, values in sorted(source.batch(np.arange(len(source))[::-1]).items()):
            found.update(f"{name} {values.dtype} {values.shape}".encode())
            found.update(np.ascontiguousarray(values).data)
    assert found.hexdigest()[:16] == "6f1e59a12700999e"


def test_pairs_go_to_the_first_row_with_room():
    """As by a search among the open rows; and the rows are nearly full."""
    lengths = np.random.default_rng(0).integers(2, 30, (3000, 2))
    longest = (120, 128)
    row_of = first_fit(lengths, longest)
    room, rows = np.full((64, 2), -1), np.zeros(64, int)
    for pair, row in zip(lengths, row_of, strict=True):
        fits = np.flatnonzero((room >= pair).all(axis=1))
        place = fits[0] if len(fits) else room.min(axis=1).argmin()
        if not len(fits):
            room[place], rows[place] = longest, rows.max() + (row > 0)
        assert row == rows[place]
        room[place] -= pair
    # Neither side can be fuller than the fuller one in the mean.
    assert row_of.max() + 1 < 1.1 * (lengths.sum(axis=0) / longest).max()


def test_the_network_reads_the_token_before(folder):
    source = config_of(folder).build().train
    batch = source.batch(np.arange(4))
    _, _, read, segments = jax.jit(source.spec.inputs)(batch)
    for row in range(4):
        for number in range(1, segments[row].max() + 1):
            own = batch["target_segments"][row] == number
            assert np.asarray(read)[row][own].tolist() == [1, *batch["target"][row][own][:-1]]


@pytest.mark.parametrize(
    "changes",
    [
        {"train": ("train.jsonl",), "valid": ("valid.jsonl",), "source": "translation.en", "target": "translation.de"},
        {"train": ("train.en", "train.de"), "valid": ("valid.en", "valid.de")},
    ],
    ids=["json lines", "two files"],
)
def test_all_forms_give_the_same_rows(folder, changes):
    rows = [config_of(folder, **one).build().train for one in ({}, changes)]
    assert rows[0].content() == rows[1].content()
    assert rows[0].spec == rows[1].spec


@pytest.mark.parametrize("span_bytes", [1, 50, 400, 1 << 30])
@pytest.mark.parametrize("names", [("train.tsv",), ("train.jsonl",), ("train.en", "train.de"), ("a.en", "b.de.gz")])
def test_the_parts_of_a_file_have_each_pair_once(folder, names, span_bytes):
    (folder / "a.en").write_text("".join(f"{source}\n" for source, _ in random_pairs(150, seed=150)))
    lines = "\n".join(target for _, target in random_pairs(150, seed=150))  # Its last line has no end.
    (folder / "b.de.gz").write_bytes(gzip.compress(lines.encode()))
    texts = pair_files([str(folder / name) for name in names], ("translation.en", "translation.de"), "train")
    parts = texts.parts(span_bytes)
    assert (len(parts) > 1) == (span_bytes < 1 << 30 and not names[-1].endswith(".gz"))
    assert [pair for part in parts for pair in texts.pairs(part)] == random_pairs(150, seed=150)
    again = pickle.loads(pickle.dumps(texts))
    assert again.identity == texts.identity
    assert list(again.every()) == random_pairs(150, seed=150)


def test_a_second_start_tokenizes_nothing_and_changes_make_new_shards(folder, tmp_path, monkeypatch):
    shards, source = tmp_path / "shards", tmp_path / "train.tsv"
    source.write_text((folder / "train.tsv").read_text())
    config = config_of(folder, train=(str(source),), shards=str(shards))
    first = config.build()
    before = {path: path.read_bytes() for path in shards.glob("*/*")}
    assert len(list(shards.iterdir())) == 2

    def fails(*_):
        raise AssertionError("it tokenizes again")

    with monkeypatch.context() as patched:
        patched.setattr(Codec, "encode_many", fails)
        again = config.build()
        elsewhere = tmp_path / "node" / "train.tsv"
        elsewhere.parent.mkdir()
        for path in (source, elsewhere):  # Touched, and copied: the same bytes.
            elsewhere.write_bytes(source.read_bytes())
            os.utime(path, (1e9, 1e9))
            assert config.replaced({"train": (str(path),)}).build().content() == first.content()
    assert again.content() == first.content()
    every = np.arange(len(first.train))
    for name, values in first.train.batch(every).items():
        np.testing.assert_array_equal(again.train.batch(every)[name], values)
    after = {path: path.read_bytes() for path in shards.glob("*/*")}
    assert {path: one for path, one in after.items() if path.name not in (SOURCES, ".note.lock")} == {
        path: one for path, one in before.items() if path.name != SOURCES
    }
    source.write_text(source.read_text().replace("w1", "w2"))  # Of the same size.
    assert config.build().content()["train"] != first.content()["train"]
    config.replaced({"tokenizer": None, "source_length": 200, "target_length": 200}).build()
    assert len(list(shards.iterdir())) == 5  # The training pairs again, and both splits in bytes.


@pytest.mark.parametrize("case", ["unused", "used", "being removed", "elsewhere", "damaged note"])
def test_tokens_of_what_a_file_was_are_removed_unless_they_are_used(folder, tmp_path, monkeypatch, case):
    """In the cache of this user alone: others may read another folder."""
    monkeypatch.setenv("HOME", str(tmp_path / ("another" if case == "elsewhere" else "home")))
    shards, source = tmp_path / "home" / ".cache" / "jaxdl" / "tokens", tmp_path / "train.tsv"
    content = (folder / "train.tsv").read_text()
    source.write_text(content)
    config = config_of(folder, train=(str(source),), shards=str(shards))
    first = config.build()
    rows = first.train.batch(np.arange(3))
    if case != "used":
        del first
    if case == "damaged note":
        for note in shards.glob(f"*/{SOURCES}"):
            note.write_text(json.dumps(json.loads(note.read_bytes()) | {"places": 5, "seen": 5}))
    if case == "being removed":  # A process that removes a folder has the lock, renames it, and then takes its time.
        [former] = {one.parent for one in shards.glob(f"*/{SOURCES}") if str(source) in one.read_text()}
        with (former / "used.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert not Hold(former).is_there
        (former / "manifest.json").unlink()
        former.rename(shards / f".{former.name}.{'0' * 32}")
        np.testing.assert_array_equal(config.build().train.batch(np.arange(3))["source"], rows["source"])
    source.write_text(content.replace("w1", "w2"))
    config.build()
    kept = {"unused": 2, "being removed": 2}.get(case, 3)
    assert len([one for one in shards.iterdir() if not one.name.startswith(".")]) == kept
    if case == "used":
        np.testing.assert_array_equal(first.train.batch(np.arange(3))["source"], rows["source"])


CONFIG = """
from jaxdl import Experiment
from jaxdl.data import Pairs
from jaxdl.models import EncoderDecoder
from jaxdl.training.tasks import Translation

def config():
    data = Pairs(folder={folder!r}, train=("big.en", "big.de"), valid=("valid.tsv",), tokenizer={tokenizer!r})
    return Experiment(data=data, model=EncoderDecoder(), task=Translation(), steps=1)
"""


@pytest.mark.slow
def test_prepare_resumes_and_gives_the_same_shards(folder, tmp_path, capsys, monkeypatch):
    """Two files of 1.2 MB are two pieces here, which two processes write where there are two cores."""
    monkeypatch.setattr(shards_of_texts, "_PIECE_BYTES", 800_000)
    monkeypatch.setattr(tokenizing, "_ALONE_BYTES", 400_000)
    for side, suffix in enumerate(("en", "de")):
        text = "".join(pair[side] + "\n" for pair in random_pairs(150, seed=150))
        (folder / f"big.{suffix}").write_text(text * (600_000 // len(text)) + "w1\n" * side)
    with (folder / "big.en").open("a") as file:
        short = len((folder / "big.de").read_text().splitlines()) - len((folder / "big.en").read_text().splitlines())
        file.write("w2\n" * short)
    (tmp_path / "config.py").write_text(CONFIG.format(folder=str(folder), tokenizer=str(folder / "words.json")))
    args = ["prepare", "--config", str(tmp_path / "config.py"), "--data.shards", str(tmp_path / "shards")]
    main(args)
    assert re.search(r"train: [\d,]+ pairs, [\d,]+ tokens of .*\nvalid: 20 pairs", capsys.readouterr().out)
    (shards,) = (path.parent for path in (tmp_path / "shards").glob("*/00001.json"))
    before = {path.name: path.read_bytes() for path in shards.iterdir()}
    for name in ("manifest.json", "00001.json"):
        (shards / name).unlink()
    (shards / "00001.tokens").write_bytes(b"half")
    untouched = (shards / "00000.tokens").stat().st_mtime_ns
    main(args)
    assert {path.name: path.read_bytes() for path in shards.iterdir()} == before
    assert (shards / "00000.tokens").stat().st_mtime_ns == untouched
    main(args)
    assert capsys.readouterr().out.count("were prepared already") == 3


def test_a_null_leaves_its_pair_out_and_is_counted(folder, tmp_path, capsys):
    (folder / "nulls.jsonl").write_text('{"source": "w1", "target": null}\n{"source": "w1", "target": "w2"}\n')
    splits = config_of(folder, train=("nulls.jsonl",), valid=("nulls.jsonl",), shards=str(tmp_path)).build()
    assert len(splits.train) == 1
    assert unpacked(splits.train.batch(np.arange(1)), 0, "target") == [[5, 2]]
    assert "data pairs, split train: 1 pairs (1 that are null were left out)" in capsys.readouterr().err


def test_long_pairs_are_left_out_with_a_warning(folder):
    (folder / "long.tsv").write_text((folder / "train.tsv").read_text() + "w1 " * 30 + "\tw2\n\t\n")
    source, said = config_of(folder, train=("long.tsv",)).build().train, []
    source.on_warning(said.append)
    assert said == [
        "1 of 151 pairs are longer than 24 and 28 tokens, and left out (--data.source-length, --data.target-length)"
    ]
    assert len(source) == len(config_of(folder).build().train)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": ()}, "data.train is not set"),
        ({"train": ("a", "b", "c")}, "3 files"),
        ({"train": ("nowhere.tsv",)}, "nowhere.tsv: no such file"),
        ({"train": ("train.en",)}, "line 1: 1 columns, not a source and a target"),
        ({"train": ("train.en", "valid.de")}, "has more lines than"),
        (
            {"train": ("train.tsv", "more.tsv")},
            "train.tsv has pairs by its name. Two files are one of sources and one of",
        ),
        ({"train": ("train.en", "train.jsonl.gz")}, "train.jsonl.gz has pairs by its name"),
        ({"source": "en"}, "source = 'en' has no effect: no file is JSON lines by its name"),
        ({"train": ("bad.ndjson",)}, "line 1 is not JSON"),
        ({"train": ("train.jsonl",)}, "line 1: it has no 'source', but translation. Name the fields"),
        ({"train": ("bad.jsonl",)}, "line 2 is not JSON"),
        ({"train": ("bad.tsv",)}, "line 2 is not UTF-8"),
        ({"valid": ("sides.tsv",)}, "the split valid has no pair of two texts that are not empty"),
        ({"train": ("bad_long.tsv",), "source_length": 8}, "none of the 1 training pairs is that short"),
        ({"source_length": 8}, "the longest held-out texts have"),
        ({"tokenizer": "no_end.json"}, "it has no token for the end of a text"),
    ],
)
def test_mistakes(folder, changes, message):
    (folder / "bad_long.tsv").write_text("w1 " * 9 + "\tw2\n")
    (folder / "bad.tsv").write_bytes(b"a\tb\nc\t\xff\n")
    (folder / "bad.jsonl").write_text('\n{"source": \n')
    (folder / "bad.ndjson").write_text("a\tb\n")
    for name in ("more.tsv", "train.jsonl.gz"):
        (folder / name).touch()
    (folder / "sides.tsv").write_text("\tw1\nw2\t \n")
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "Ċ": 1}, []))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    letters.save(str(folder / "no_end.json"))
    if changes.get("tokenizer"):
        changes["tokenizer"] = str(folder / changes["tokenizer"])
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(folder, **changes).build()


def test_pairs_of_tensorflow_datasets_are_those_of_files(folder, tmp_path):
    examples = {
        split: [{"en": source.encode(), "de": target.encode()} for source, target in random_pairs(count, seed=count)]
        for split, count in (("train", 150), ("validation", 20))
    }
    values = {"tokenizer": str(folder / "words.json"), "source_length": 24, "target_length": 28}
    root = write_dataset(tmp_path, {"en": TEXT, "de": TEXT}, examples)
    data = TFDSPairs(name="tiny", data_dir=root, shards=str(tmp_path / "shards"), **values)
    found, expected = data.build(), config_of(folder).build()
    for split in ("train", "test"):
        source, other = getattr(found, split), getattr(expected, split)
        for name, array in other.batch(np.arange(len(other))).items():
            np.testing.assert_array_equal(source.batch(np.arange(len(source)))[name], array)
    texts = pickle.loads(pickle.dumps(data.texts("train")))
    parts = texts.parts(texts.num_bytes // 4)
    assert len(parts) > 3
    assert [pair for part in parts for pair in texts.pairs(part)] == list(data.pairs("train"))
    assert texts.identity != data.replaced({"splits": ("train[:9]", "validation", "test")}).texts("train").identity


def test_wmt_that_is_not_prepared_is_told(tmp_path, folder):
    data = TFDSPairs(data_dir=str(tmp_path), tokenizer=str(folder / "words.json"))
    with pytest.raises(ConfigError, match="wmt17_translate"):
        data.build()


def test_a_spec_survives_json():
    from jaxdl.data import spec_from_json, spec_to_json

    spec = PairSpec(40, 24, 28, 1, 2, 20.5, 22.25)
    assert spec_from_json(spec_to_json(spec)) == spec
