"""Documents: the formats they are read from, and the shards that they are tokenized into."""

import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from runs import wait_for

from jaxdl.core.config import ConfigError
from jaxdl.data import Codec, Documents
from jaxdl.data.__main__ import main
from jaxdl.data.text import shards as shards_of_texts
from jaxdl.data.text import tokenizing
from jaxdl.data.text.documents import EVERY_FILE, Reading, document_texts, find_documents, format_of, read_documents
from jaxdl.data.text.shards import ShardPlan, TokenStore, write_shard
from jaxdl.data.text.tokenizing import load_tokens

TEXTS = ["one", "", "zwei — 𝄞", "three\twith tab", "a longer document, " * 9, "é"]


def jsonl(texts):
    return "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts)).encode()


def write_parquet(path, texts):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": list(range(len(texts))), "body": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=2)


def write_zst(path, content):
    import pyarrow

    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(content)


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(TEXTS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(TEXTS))),
    "a.json.zst": lambda path: write_zst(path, jsonl(TEXTS)),
    "a.parquet": lambda path: write_parquet(path, TEXTS),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_format_gives_the_documents_and_its_spans_each_once(tmp_path, name):
    WRITERS[name](path := tmp_path / name)
    reading = Reading("body")
    assert list(read_documents([str(path)], reading)) == TEXTS
    form = format_of(path)
    for span_bytes in (1, 7, 40, 1 << 30):
        spans = form.spans(path, reading, span_bytes)
        assert [text for span in spans for text in form.read(span, reading)] == TEXTS
    if name in ("a.jsonl", "a.parquet"):
        assert len(form.spans(path, reading, 7)) > 2


def test_plain_files_are_documents_or_their_lines_are(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.md").write_text("x\n\ny")
    (tmp_path / "sub" / "a.py").write_text("z\r\n")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "pairs.tsv").write_text("left\tright\n")
    assert [name for name, _ in find_documents([str(tmp_path), str(tmp_path / "b.md")], "**/*")] == [
        "b.md",
        "pairs.tsv",
        "sub/a.py",
    ]
    assert list(read_documents([str(tmp_path)], Reading())) == ["x\n\ny", "left", "right", "z\r\n"]
    assert list(read_documents([str(tmp_path)], Reading(document="line"))) == ["x", "y", "left", "right", "z"]


def test_a_folder_of_datasets_is_read_where_the_library_is_installed(tmp_path):
    if importlib.util.find_spec("datasets") is None:
        (tmp_path / "state.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"it needs the package datasets.* pip install 'jaxdl\[text\]'"):
            list(read_documents([str(tmp_path)], Reading("body")))
        return
    import datasets

    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "all")
    reading, path = Reading("body"), tmp_path / "all"
    for span_bytes in (1, 40, 1 << 30):
        spans = format_of(path).spans(path, reading, span_bytes)
        assert [text for span in spans for text in format_of(path).read(span, reading)] == TEXTS


CUT = gzip.compress(b"x" * 99, mtime=0)[:-9]
"""Without the time of its making, which would be in the name of a test."""


@pytest.mark.parametrize(
    ("name", "content", "changes", "message"),
    [
        ("a.jsonl", b'{"body": "x"}\n', {}, r"a.jsonl: line 1: it has no 'text', but body. Set column"),
        ("a.jsonl", b'{"text": 3}\n', {}, "its 'text' is int, not a string"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', {}, r"line 2 is not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, "line 1: its 'text' has half a surrogate pair"),
        ("a.jsonl.gz", CUT, {}, r"a.jsonl.gz: it cannot be read \(Compressed file ended"),
        ("a.jsonl.gz", b"no", {}, r"a.jsonl.gz: it cannot be read \(Not a gzipped file"),
        ("a.txt", b"ab\xff", {}, r"a.txt: not UTF-8 .* at byte 2"),
        ("a.txt", b"ab\n\xff\n", {"document": "line"}, r"line 2 is not UTF-8"),
        ("a.parquet", b"no", {}, "cannot be read as Parquet"),
        ("a.txt", b"", {}, "there is no text in it"),
        ("a.txt", b"alone", {}, "one document, so none can be held out"),
        ("a.txt", b"a\nb", {"document": "line", "packing": False}, "less than one window"),
        ("a.txt", b"a", {"glob": "*.md"}, r"no file in it matches '\*.md'"),
        ("a.txt", b"a", {"paths": ()}, r"data.paths: it is empty"),
        ("a.txt", b"a", {"paths": ("none.txt",)}, "none.txt: no such file or folder"),
        ("a.txt", b"a", {"shards": "/proc/none"}, r"/proc/none.*cannot be written .*data.shards"),
        ("a.jsonl", b"", {"document": "line"}, r"document = 'line': it has no effect on files such as a.jsonl"),
        ("a.txt", b"a", {"column": "body"}, r"column = 'body': it has no effect on files such as a.txt"),
        ("a.txt", b"a", {"paths": (__file__,), "glob": "*.py"}, r"glob = '\*.py': no path is a folder"),
        ("a.jsonl", b'{"text": null}\n', {}, "there is no text in it"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, name, content, changes, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    data = Documents(paths=(str(tmp_path / "in"),), shards=str(tmp_path / "shards"))
    with pytest.raises(ConfigError, match=message):
        data.replaced(changes).build()


def test_a_setting_without_effect_beside_test_paths_is_told(tmp_path):
    Documents(test_paths=("b",), split_seed=1)  # Which documents share a row.
    for changes in ({"test_fraction": 0.1}, {"packing": False, "split_seed": 1}):
        with pytest.raises(ValueError, match=r"has no effect: test_paths are held out"):
            Documents(paths=("a",), test_paths=("b",), **changes)


def test_nulls_are_left_out_and_counted(tmp_path, capsys):
    texts = ["one", None, "", "two", None]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    write_parquet(tmp_path / "a.parquet", texts)
    for name in ("a.jsonl", "a.parquet"):
        assert list(read_documents([str(tmp_path / name)], Reading("body"))) == ["one", "", "two"]
        (texts,) = document_texts([[str(tmp_path / name)]], EVERY_FILE, Reading("body"))
        plan = ShardPlan(texts, None, str(tmp_path / "s"))
        store = load_tokens(plan, "data")
        assert (store.num_bytes.tolist(), store.nulls) == ([3, 3], 2)
        assert "data: 2 documents (2 that are null were left out)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_large_plain_file_is_not_one_document(tmp_path, name, monkeypatch):
    monkeypatch.setattr("jaxdl.data.text.documents.LARGEST_DOCUMENT", 1000)
    content = b"x\n" * 501
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(ConfigError, match=rf"{name}: .*of plain text would be one document.* set document to line"):
        list(read_documents([str(tmp_path / name)], Reading()))
    assert len(list(read_documents([str(tmp_path / name)], Reading(document="line")))) == 501


def test_a_store_of_many_shards_reads_as_one(tmp_path, monkeypatch):
    """Against the tokens of each document in a list; the shards are more than may be open."""
    monkeypatch.setattr("jaxdl.data.text.shards._PIECE_BYTES", 1)
    for number in range(300):
        (tmp_path / f"{number:03}.txt").write_text(f"{number} " * (number % 7 + 1))
    plan = ShardPlan(document_texts([[str(tmp_path)]], EVERY_FILE, Reading())[0], None, str(tmp_path / "shards"))
    store = load_tokens(plan, "data")
    assert len(plan.pieces) == 300
    random = np.random.default_rng(0)
    documents = random.integers(0, 300, (40, 50))
    places = random.integers(0, 1 << 30, documents.shape) % store.num_tokens[documents]
    expected = [*((f"{number} " * (number % 7 + 1)).encode() + b"\0" for number in range(300))]
    found = store.read(documents, places)
    assert found.dtype == np.int32
    assert found.tolist() == [
        [expected[one][place] for one, place in zip(*row, strict=True)] for row in zip(documents, places, strict=True)
    ]
    assert store.read(documents[:0, 0], places[:0, 0]).shape == (0,)


def test_much_text_is_not_tokenized_unasked(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").touch()
    os.truncate(tmp_path / "in" / "a.txt", 300 << 20)  # Takes no room on the disk.
    data = Documents(paths=(str(tmp_path / "in"),), document="line", shards=str(tmp_path / "shards"))
    with pytest.raises(ConfigError, match=r"0.3 GB of files are not tokenized yet.* python -m jaxdl.data prepare"):
        data.build()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Sixty lines of words that a small tokenizer knows, 36 kB."""
    import tokenizers

    folder = tmp_path_factory.mktemp("corpus")
    words = ["</s>", "?", *(f"w{i}" for i in range(30))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "words.json"))
    (folder / "in").mkdir()
    random = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in random.integers(0, 30, size)) for size in random.integers(1, 400, 60)]
    (folder / "in" / "a.txt").write_text("\n".join(texts))
    return folder, texts


def test_shards_have_the_tokens_of_each_document(corpus, tmp_path):
    folder, texts = corpus
    (lines,) = document_texts([[str(folder / "in")]], EVERY_FILE, Reading(document="line"))
    plan = ShardPlan(lines, str(folder / "words.json"), str(tmp_path))
    store, codec = load_tokens(plan, "data"), Codec(str(folder / "words.json"))
    expected = [[*codec.encode(text), 0] for text in texts]
    assert store.num_tokens.tolist() == [len(one) for one in expected]
    assert store.num_bytes.tolist() == [len(text.encode()) for text in texts]
    found = [store.read(np.full(len(one), i), np.arange(len(one))).tolist() for i, one in enumerate(expected)]
    assert found == expected
    other = ShardPlan(lines, None, str(tmp_path))
    assert other.folder != plan.folder
    assert load_tokens(other, "data").num_tokens.tolist() == [len(text) + 1 for text in texts]
    os.truncate(plan.folder / "00000.tokens", 10)
    with pytest.raises(ConfigError, match=r"damaged \(shard 00000 has another size\). Remove this folder"):
        TokenStore(plan.folder)
    (plan.folder / "00000.npy").unlink()
    with pytest.raises(ConfigError, match=r"damaged \(.*00000.npy"):
        TokenStore(plan.folder)
    (plan.folder / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"damaged \('dtype'\)"):
        TokenStore(plan.folder)


def test_windows_of_documents_are_one_stream(corpus, tmp_path):
    folder, texts = corpus
    data = Documents(paths=(str(folder / "in"),), document="line", packing=False, length=50, shards=str(tmp_path))
    splits = data.build()
    streams = []
    for source, count in ((splits.train, 57), (splits.test, 3)):
        rows = source.eval_batch(np.arange(len(source)))
        stream = [int(rows["tokens"][0, 0]), *rows["tokens"][:, 1:][rows["mask"]].tolist()]
        streams += bytes(stream).decode().split("\0")
        assert len(source.content()) == 16
        assert source.spec.bytes_per_token == 1.0
        assert bytes(stream).count(0) >= count - 1
    whole = set(streams) & set(texts)
    assert len(whole) >= 59, "the last training document may be cut"
    assert splits.content() == data.replaced({"shards": str(tmp_path / "elsewhere")}).build().content()
    assert splits.content() != data.replaced({"split_seed": 1}).build().content()


CONFIG = """
from jaxdl import Experiment
from jaxdl.data import Documents

def config():
    from jaxdl.models import Transformer
    from jaxdl.training.tasks import LanguageModelling
    data = Documents(paths=({path!r},), document="line", tokenizer={tokenizer!r}, shards={shards!r})
    return Experiment(data=data, model=Transformer(), task=LanguageModelling(), epochs=1)
"""


IN_SMALL_PIECES = """
import os, signal, sys
from jaxdl.data.__main__ import main
from jaxdl.data.text import shards
from jaxdl.data.text.documents import DocumentTexts

shards._PIECE_BYTES = 10_000
encode, shards_left = DocumentTexts.encode, [int(sys.argv.pop(1))]

def encode_or_die(*given):
    if not shards_left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    shards_left[0] -= 1
    return encode(*given)

DocumentTexts.encode = encode_or_die
main()
"""


@pytest.mark.slow
def test_killed_and_started_again_twice_at_once_it_writes_the_same_shards(corpus, tmp_path, monkeypatch):
    """Of four shards it is killed in the second one, whose file is left half-written."""
    folder, _ = corpus
    monkeypatch.setattr(shards_of_texts, "_PIECE_BYTES", 10_000)

    def prepare(name):
        text = CONFIG.format(path=str(folder / "in"), tokenizer=str(folder / "words.json"), shards=str(tmp_path / name))
        (tmp_path / f"{name}.py").write_text(text)
        return ["prepare", "--config", str(tmp_path / f"{name}.py")]

    def start(num_shards):
        command = [sys.executable, "-c", IN_SMALL_PIECES, num_shards, *prepare("killed")]
        with (tmp_path / "said").open("w") as said:
            return subprocess.Popen(command, stdout=said, stderr=said)

    assert start("1").wait() == -signal.SIGKILL, (tmp_path / "said").read_text()
    (right,) = (tmp_path / "killed").iterdir()
    done = {path: path.stat().st_mtime_ns for path in right.glob("00000.*")}
    assert len(done) == 3
    assert len(list(right.glob(".00001.tokens.*"))) == 1
    assert not (right / "manifest.json").exists()

    def write_when_the_other_waits(*args):
        if not others:
            others.append(start("-1"))
            wait_for(others[0], lambda: "waiting for another process" in (tmp_path / "said").read_text())
        return write_shard(*args)

    others = []
    monkeypatch.setattr(tokenizing, "write_shard", write_when_the_other_waits)
    main(prepare("killed"))
    assert others[0].wait() == 0, (tmp_path / "said").read_text()
    main(prepare("whole"))
    (left,) = (tmp_path / "whole").iterdir()
    assert left.name == right.name
    assert {path.name: path.read_bytes() for path in left.iterdir()} == {
        path.name: path.read_bytes() for path in right.iterdir()
    }
    assert {path: path.stat().st_mtime_ns for path in done} == done
