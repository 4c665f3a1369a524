"""Texts with a class each: what is read of files, what is around them, batches of similar length, runs and answers."""

import csv
import gzip
import json
import re

import jax
import numpy as np
import pytest

import jaxdl
from jaxdl.data import Codec, LabelledTexts, TrainLoader, eval_batches
from jaxdl.data.source import TrainRows
from jaxdl.data.text.buckets import GroupedOrder, buckets_of
from jaxdl.data.text.framing import Framer
from jaxdl.parallel.mesh import MeshConfig, batch_sharding, make_mesh

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]
_PIECES = {name: {"id": name, "ids": [WORDS.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")}


def _template(*names):
    found = []
    for name in names:
        kind, _, number = name.partition(":")
        what = {"SpecialToken": {"id": kind}} if kind[0] == "[" else {"Sequence": {"id": kind}}
        found.append({next(iter(what)): {**next(iter(what.values())), "type_id": int(number or 0)}})
    return found


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": WORDS.index(name), "content": name, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False} for name in WORDS[:4]
    ],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordPiece", "vocab": {word: n for n, word in enumerate(WORDS)}, "unk_token": "[UNK]",
              "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    "post_processor": {"type": "TemplateProcessing", "single": _template("[CLS]", "A", "[SEP]"),
                       "pair": _template("[CLS]", "A", "[SEP]", "B:1", "[SEP]:1"), "special_tokens": _PIECES},
}  # fmt: skip
"""Words of one letter, framed as BERT does."""
ROWS = [("a b c", "no"), ('say "d"', "yes"), ("e, f", "no"), ("g\nh", "yes"), ("i", "no"), ("j k", "yes")]


@pytest.fixture
def tokenizer(tmp_path):
    """The path of a small tokenizer."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER))
    return str(path)


def write_csv(path, rows, header=("text", "label"), **settings):
    """Writes a file of cells; returns its path."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **settings).writerows([header, *rows])
    return str(path)


def texts_of(path, **settings):
    """The rows of a file as a data config with bytes reads it: [(bytes, class)], in order."""
    train = LabelledTexts(train=(path,), test=(path,), length=64, **settings).build().train
    batch = train.batch(np.arange(len(train)))
    tokens = [
        bytes(row[1 : size - 1].tolist()).decode()
        for row, size in zip(batch["tokens"], batch["num_tokens"], strict=True)
    ]
    return [(text, train.spec.classes[label]) for text, label in zip(tokens, batch["label"], strict=True)]


def _parquet(path, rows):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"text": [row[0] for row in rows], "label": [row[1] for row in rows]}), path)
    return str(path)


def _json(path, rows):
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return str(path)


def test_each_form_gives_the_same_rows(tmp_path):
    flat = [(text.replace("\n", " "), label) for text, label in ROWS]
    plain = tmp_path / "plain.tsv"  # Without any quotes, as GLUE has them.
    plain.write_text("label\ttext\n" + "".join(f"{label}\t{text}\n" for text, label in flat))
    marked = tmp_path / "marked.csv"
    marked.write_bytes(b"\xef\xbb\xbf" + (tmp_path / write_csv(tmp_path / "a.csv", ROWS)).read_bytes())
    array = tmp_path / "array.json"
    array.write_text(json.dumps([{"text": text, "label": label} for text, label in ROWS]))
    for path in (
        write_csv(tmp_path / "a.csv", ROWS), str(marked), write_csv(tmp_path / "b.csv", ROWS, delimiter=";"),
        write_csv(tmp_path / "c.tsv", ROWS, delimiter="\t"), _json(tmp_path / "d.jsonl", ROWS), str(array),
        _parquet(tmp_path / "e.parquet", ROWS),
    ):  # fmt: skip
        assert texts_of(path) == ROWS, path
    assert texts_of(str(plain)) == flat
    assert texts_of(write_csv(tmp_path / "f.tsv", flat, delimiter="\t")) == flat


def test_labels_of_any_kind_become_names(tmp_path):
    """Whole numbers are sorted as numbers, booleans are words; a name for each number may be given."""
    texts = ["a", "b", "c", "d"]

    def classes(labels, **settings):
        path = _json(tmp_path / "x.jsonl", list(zip(texts, labels, strict=True)))
        data = LabelledTexts(train=(path,), test=(path,), length=16, **settings).build().train
        return data.spec.classes, data.batch(np.arange(4))["label"].tolist()

    assert classes([10, 9, 2, 10]) == (("2", "9", "10"), [2, 1, 0, 2])
    assert classes(["10", "9", "2", "10"]) == (("2", "9", "10"), [2, 1, 0, 2])
    assert classes([True, False, True, False]) == (("false", "true"), [1, 0, 1, 0])
    assert classes([1.0, 0.0, 1.0, 0.0]) == (("0", "1"), [1, 0, 1, 0])
    assert classes(["b", "a ", "b", "a"]) == (("a", "b"), [1, 0, 1, 0])
    assert classes([0, 1, 1, 0], classes=("neg", "pos")) == (("neg", "pos"), [0, 1, 1, 0])
    assert classes(["pos", "neg", "neg", "pos"], classes=("pos", "neg")) == (("pos", "neg"), [0, 1, 1, 0])


def test_names_of_parquet_from_datasets_are_those_of_the_classes(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    features = {"info": {"features": {"label": {"names": ["bad", "good"], "_type": "ClassLabel"}}}}
    table = pa.table({"text": ["a", "b", "c"], "label": [1, 0, -1]})
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), tmp_path / "x.parquet")
    path = str(tmp_path / "x.parquet")
    assert texts_of(path) == [("a", "good"), ("b", "bad")]
    remark = LabelledTexts(train=(path,), test=(path,)).build().train.remark()
    assert f"left out of --data.train: 1 with no label ({path}: row 2)" in remark


def test_a_folder_of_datasets_has_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    made = {
        name: datasets.Dataset.from_dict({"text": texts, "label": [0, 1]}, features=features)
        for name, texts in (("train", ["a", "b"]), ("validation", ["c", "d"]))
    }
    datasets.DatasetDict(made).save_to_disk(tmp_path / "x")
    splits = LabelledTexts(train=(str(tmp_path / "x"),), test=(str(tmp_path / "x"),)).build()
    assert splits.train.spec.classes == ("bad", "good")
    assert [part.batch(np.arange(2))["tokens"][:, 1].tolist() for part in (splits.train, splits.test)] == [
        [97, 98], [99, 100]
    ]  # fmt: skip


def test_rows_that_lack_something_are_counted(tmp_path):
    rows = [*ROWS, ("", "no"), ("  ", "no"), ("x", ""), ("y", "")]
    path = write_csv(tmp_path / "x.csv", rows)
    assert texts_of(path) == ROWS
    remark = LabelledTexts(train=(path,)).build().train.remark()
    assert (
        f"left out of --data.train: 2 with no text ({path}: row 7, {path}: row 8); 2 with no label ({path}: row 9, "
        in remark
    )


def test_columns_that_are_not_used_are_counted(tmp_path):
    """Each by the rows that have it, in files whose rows have columns of their own and others."""
    path = tmp_path / "x.jsonl"
    rows = [{"doc": {"text": text}, "label": label, "id": n} for n, (text, label) in enumerate(ROWS)]
    rows[0]["note"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    test = write_csv(tmp_path / "x.csv", [(*row, "x") for row in ROWS], ("doc.text", "label", "source"))
    told = LabelledTexts(train=(str(path),), test=(test,), text="doc.text").build().train.remark()
    assert "columns of --data.train that are not used: id (in 6), note (in 1); columns of --data.test that" in told
    assert told.endswith("are not used: source (in 6)")
    alone = LabelledTexts(train=(write_csv(tmp_path / "y.csv", ROWS),)).build().train.remark()
    assert "not used" not in alone


def test_the_frame_is_that_of_the_tokenizer(tokenizer):
    """Of texts and pairs; long ones are cut as `transformers` does, the longer of a pair first."""
    framer = Framer(Codec(tokenizer), 8)
    framed = framer(["a b", "a b c d e f g h"])
    words = [[WORDS[token] for token in tokens] for tokens in framed.tokens]
    assert words == [["[CLS]", "a", "b", "[SEP]"], ["[CLS]", "a", "b", "c", "d", "e", "f", "[SEP]"]]
    assert framed.cut == [False, True]
    pairs = framer(["a b c d e f", "a"], ["x y", "u v w x y z"])
    assert [" ".join(WORDS[token] for token in tokens) for tokens in pairs.tokens] == [
        "[CLS] a b c [SEP] x y [SEP]", "[CLS] a [SEP] u v w x [SEP]"
    ]  # fmt: skip
    assert [types.tolist() for types in pairs.types] == [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]]
    assert (framer.num_types, framer.frames_itself) == (2, True)


def test_bytes_have_a_frame_of_their_own():
    framer = Framer(Codec(None), 8)
    assert framer(["abc"]).tokens[0].tolist() == [0, 97, 98, 99, 0]
    pair = framer(["abcdef"], ["xyz"])
    assert pair.tokens[0].tolist() == [0, 97, 98, 99, 0, 120, 121, 0]
    assert pair.types[0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert pair.cut == [True]
    with pytest.raises(jaxdl.ConfigError, match="the tokenizer puts up to 3 tokens around a text"):
        Framer(Codec(None), 3)


@pytest.mark.parametrize(("num", "size"), [(1000, 32), (37, 8), (5, 8), (64, 64)])
def test_batches_of_similar_length_see_each_example_once_an_epoch(num, size):
    groups = np.random.default_rng(0).integers(0, 4, num)
    order = GroupedOrder(groups, size, seed=3)
    indices, epochs = order.rows(0, 3 * num)
    for epoch in range(3):
        assert sorted(indices[epochs == epoch]) == [*range(num)]
    assert not np.array_equal(indices[:num], indices[num : 2 * num]) or num < 10
    again = GroupedOrder(groups, size, seed=3)
    for start in (2 * num - 3, 0, num + 1):  # From any place, in any order.
        np.testing.assert_array_equal(again.rows(start, 5)[0], indices[start : start + 5])
    if num == 1000:
        batches = groups[indices[: 3 * num // size * size]].reshape(-1, size)
        assert np.mean([len(set(batch)) == 1 for batch in batches]) > 0.75
        assert len({tuple(batch) for batch in batches[:8]}) > 2, "batches of one length do not follow each other"


def test_lengths_are_few():
    assert buckets_of(100, 128) == (16, 32, 56, 104)
    assert buckets_of(500, 512) == (64, 128, 256, 504)
    assert (buckets_of(20, 128), buckets_of(127, 127), buckets_of(5, 128)) == ((24,), (16, 32, 64, 127), (8,))


def test_batches_are_as_long_as_they_need_to_be(tmp_path, tokenizer):
    """Those of processes that have a part of a batch too; and they hold the texts that the order says."""
    rng = np.random.default_rng(0)
    rows = [(" ".join("a" * int(n)), "xy"[int(n) % 2]) for n in rng.choice([3, 20, 60], 96)]
    path = write_csv(tmp_path / "x.csv", rows)
    train = LabelledTexts(train=(path,), test=(path,), tokenizer=tokenizer).build().train
    sharding = batch_sharding(make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]))
    with TrainLoader(train, batch_size=16, seed=0, sharding=sharding, start=0, num_steps=6) as batches:
        seen = [{name: np.asarray(x) for name, x in batch.items()} for batch in batches]
    lengths = [batch["tokens"].shape[1] for batch in seen]
    assert set(lengths) == {16, 32, 64}
    for batch in seen:
        assert batch["num_tokens"].max() <= batch["tokens"].shape[1]
        there = np.arange(batch["tokens"].shape[1]) < batch["num_tokens"][:, None]
        assert ((batch["tokens"] > 0) == there).all()
    assert sorted(np.concatenate([batch["num_tokens"] for batch in seen])) == sorted(
        len(text.split()) + 2 for text, _ in rows
    )
    view = train.in_batches(16)
    indices, epochs = view.order(0).rows(0, 16)
    (half,) = view.train_batches(iter([TrainRows(indices[:8], epochs[:8], 0, indices)]))
    assert half["tokens"].shape == (8, lengths[0])
    with eval_batches(train, batch_size=40, sharding=sharding) as batches:
        assert sum(int(batch["mask"].sum()) for batch in batches) == len(rows)
    fixed = LabelledTexts(train=(path,), test=(path,), tokenizer=tokenizer, padding="fixed").build().train
    assert fixed.batch(np.arange(3))["tokens"].shape == (3, 128)


@pytest.mark.parametrize(
    ("rows", "settings", "problem"),
    [
        ([], {}, "there is no labelled text in it"),
        ([("a", "x"), ("b", "x")], {}, "all texts have the label 'x'"),
        ([("a", "x"), ("b", "y"), ("c", "z")], {}, "each of its 3 texts has a label of its own, such as 'x'"),
        ([("a", "x"), ("b", "")], {"label": "class"}, "must have the names of the columns, 'text' and 'class' among"),
        ([("a", "0.5"), ("b", "0.7")], {"classes": ("x", "y")}, "the label '0.5' is none of the 2 classes, x, y"),
        ([("a", "2"), ("b", "1")], {"classes": ("x", "y")}, "the label '2' is none of the 2 classes"),
        ([("a", "x"), ("b", "y")], {"classes": ("x", "y", "x")}, "'x' stands there twice"),
        ([("a", "x"), ("b", "y")], {"text_pair": "other"}, "it has no column 'other'; it has text, label"),
        ([("a", "x", "z")], {}, "row 1: it has 3 cells, and the first line 2 names"),
        ([("a", "x"), ("b", "y")], {"tokenizer": "gone.json"}, "tokenizer gone.json: no such file"),
    ],
)
def test_odd_inputs_are_told(tmp_path, rows, settings, problem):
    path = write_csv(tmp_path / "x.csv", rows)
    with pytest.raises(jaxdl.ConfigError, match=re.escape(problem)):
        LabelledTexts(train=(path,), **settings).build()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "x.csv",
            b"text,label\n\xe9t\xe9,fr\n",
            "line 2 is not UTF-8 (invalid continuation byte). Convert it, from Latin-1",
        ),
        ("x.csv", b"", "it has nothing"),
        ("x.csv", b'text,label\n"a,b\n', "row"),
        ("x.csv", b"text,text,label\na,b,c\n", "it has 2 columns named 'text'"),
        ("x.csv", b"\xff\xfet\0e\0", "it begins with the byte order mark of UTF-16"),
        ("x.txt", b"a\n", "no form that is known. Give files of CSV"),
        ("x.jsonl", b'{"text": "a"}\n', "line 1: it has no 'label', but text"),
        ("x.jsonl", b'{"text": 5, "label": 1}\n', "its 'text' is int, not a string"),
        ("x.jsonl", b'{"text": "a", "label": [1, 2]}\n', "its label is list ([1, 2]): each text has one class"),
        ("x.jsonl", b'{"text": "a", "label": 0.5}\n', "its label is 0.5: a measure, not a class"),
        ("x.jsonl", b'{"text": "a", "label": 1}\nnothing\n', "line 2 is not JSON"),
        ("x.jsonl", b'{"text": "a", "label": 1}\n[1]\n', "line 2: it has no 'label', but list"),
        ("x.jsonl", b'{"text": "a", "text": "b", "label": 1}\n', "the key 'text' stands there twice"),
        ("x.json", b'[{"text": "a", "label": 1}', "begins like a JSON array, but is not one"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a", "label": 1}\n' * 9, mtime=0)[:-9], "it cannot be read"),
        ("x.jsonl", b'{"text": null, "label": 1}\n', "no labelled text in it (left out of it: 1 with no text"),
        (
            "x.jsonl",
            b'{"text": "a", "label": 1}\n{"text": "b", "text_pair": "c", "label": 0}\n',
            "x.jsonl: line 1: it has no 'text_pair', and ",
        ),
        (
            "x.json",
            b'[{"text": "b", "text_pair": "c", "label": 0}, {"text": "a", "label": 1}]',
            "x.json: element 2 of the array: it has no 'text_pair', and ",
        ),
        ("x.parquet", b"PAR1", "it cannot be read as Parquet"),
        ("dataset_dict.json", b"[1]", "dataset_dict.json: it does not say which splits there are"),
        ("folder", None, "a folder that the datasets library did not write"),
        ("gone", None, "there is no such file"),
    ],
)
def test_odd_files_are_told(tmp_path, name, content, problem):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif name == "folder":
        path.mkdir()
    with pytest.raises(jaxdl.ConfigError, match=re.escape(problem)):
        LabelledTexts(train=(str(tmp_path if name == "dataset_dict.json" else path),)).build()


def test_what_may_be_a_mistake_is_warned_of(tmp_path):
    warned = []
    rows = [("a", "x"), ("b", "X"), ("c", "x"), ("d", "X")]
    train, test = write_csv(tmp_path / "x.csv", rows), write_csv(tmp_path / "y.csv", [("a", "x"), ("e", "z")])
    LabelledTexts(train=(train,), test=(test,)).build().train.on_warning(warned.append)
    told = " | ".join(warned)
    assert "'z': no training text has this label" in told
    assert "'X', 'x': these classes differ in case or spaces alone" in told
    assert "1 of 2 held-out texts are training texts too" in told
