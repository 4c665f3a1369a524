"""Odd files of conversations: each is one message, or the right data."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from conversing import chats, learned, lines, show, user
from mistakes import refusal

from jaxdl.data import Conversations
from jaxdl.data.__main__ import main

TABLE = {"messages": [row["messages"] for row in chats(3)]}
ODD = {
    "empty.jsonl": (b"", "there is no row"),
    "words.jsonl": (b"hello\n", "line 1 is not JSON"),
    "utf16.jsonl": ("{}".encode("utf-16"), "byte order mark of UTF-16"),
    "cut.jsonl.gz": (gzip.compress(lines(chats(3)), mtime=0)[:-9], "it cannot be read"),
    "text.jsonl": (lines([{"text": "a"}]), r"1 row is left out: 1 no messages, .* \(the columns are text\)"),
    "numbers.jsonl": (b"1\n2\n", "a row that is not an object"),
    "deep.jsonl": (b"[" * 100_000, "it cannot be read"),
    "single.jsonl": (lines(chats(1)), "there is one conversation"),
    "silent.jsonl": (lines([{"messages": [user("x")]}]), "no answer"),
    "words.txt": (b"hello", "it has no rows by its name"),
    "cut.json": (json.dumps(chats(3))[:-4].encode(), "begins like a JSON array, but is not one"),
    "object.json": (json.dumps({"data": chats(3)}).encode(), r"\(the columns are data\)"),
    "pretty.json": (json.dumps({"data": chats(3)}, indent=1).encode(), "Each line must be one JSON object"),
    "empty.json": (b"[]", "there is no row"),
    "twice.json": (b'[{"messages": [], "messages": []}]', "the key 'messages' stands there twice"),
    "twice.jsonl": (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands there twice"),
    "latin.jsonl": ('{"prompt": "\xe9"}'.encode("latin1"), "line 1 is not UTF-8"),
    "null.jsonl": (lines([{"messages": [{"role": "assistant", "content": None}]}]), "no answer"),
    "empty.csv": (b"", "there is no row"),
    "names.csv": (b"prompt,completion\n", "there is no row"),
    "latin.csv": (b"prompt,completion\na,\xe9\n", "line 2 is not UTF-8"),
    "cells.csv": (b"prompt,completion\na,b,c\n", "row 1: it has 3 cells, and the first line 2 names"),
    "quote.csv": (b'prompt,completion\na,"b\n', "row 0: unexpected end of data"),
    "twice.csv": (b"prompt,prompt\na,b\n", "2 columns named 'prompt'"),
    "text.csv": (b"text\na\n", r"\(the columns are text\)"),
    "lacks.tsv": (b"prompt\tcompletion\na\t\n", "prompt without completion"),
    "listed.csv": (b"messages\nhello\n", "messages that are a text, not a list"),
    "list.csv": (b"messages\n\"[{'role': 'user'} {\"\n", "begins like a list of messages, but cannot be read"),
    "key.csv": (b'messages\n"[{""role"": ""user"", ""role"": ""assistant""}]"\n', "the key 'role' stands there twice"),
    "literal.csv": (b"messages\n\"[{'role': None, 'role': 'user'}]\"\n", "the key 'role' stands there twice"),
    "cut.csv.gz": (gzip.compress(b"prompt,completion\n" + b"a,b\n" * 99, mtime=0)[:-9], "it cannot be read"),
    "strings.json": (b'["a", "b"]', "a row that is not an object"),
    "null.json": (b"[null]", "a row that is not an object"),
    "latin.json": ('[{"prompt": "é"}]'.encode("latin1"), "utf-8"),
    "number.json": (b'[{"messages": 5}]', "messages that are not a list"),
    "half.json": (b'[{"instruction": "x"}]', "instruction without output"),
    "string.json": (b'[{"messages": "hello"}]', "messages that are a text, not a list"),
    "words.parquet": (b"hello", "it cannot be read as Parquet"),
    "text.parquet": (pa.table({"text": ["a"]}), r"\(the columns are text\)"),
    "empty.parquet": (pa.table(TABLE).slice(0, 0), "there is no row"),
    "null.parquet": (pa.table({"messages": pa.array([None, None], pa.list_(pa.string()))}), r"messages \(null\)"),
    "ints.parquet": (pa.table({"prompt": [1], "completion": [2]}), "neither a text nor messages"),
    "bytes.parquet": (pa.table({"prompt": [b"a"], "completion": [b"b"]}), "neither a text nor messages"),
    "strings.parquet": (pa.table({"messages": [["a", "b"]]}), "a message that is not an object"),
    "single.parquet": (pa.table(TABLE).slice(0, 1), "there is one conversation"),
    "roles.parquet": (pa.table({"messages": [[{"content": "x"}]]}), "no role"),
    "none.parquet": (pa.table({"a": [1]}).select([]), "there is no row"),
}


def test_odd_files_are_one_message(tmp_path, capsys):
    for name, (content, reason) in ODD.items():
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            parquet.write_table(content, path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mistakes.MAX_LINES", 6)  # Paths of temporary folders are long.
            message = refusal(capsys, *show(tmp_path, path), run=main)
        assert re.search(reason, message), (name, message)
        assert name in message


def test_odd_files_are_right(tmp_path):
    """A byte order mark, ends of lines of Windows and blank lines; semicolons, and quotes around lines."""
    right = [{"prompt": "a", "completion": "b;\r\nc"}] * 2
    for name, content in {
        "mark.jsonl": b"\xef\xbb\xbf" + lines(right).replace(b"\n", b"\r\n\r\n"),
        "mark.csv": b'\xef\xbb\xbfprompt,completion\r\na,"b;\r\nc"\r\n\r\na,"b;\r\nc"\r\n',
        "marks.csv": b'prompt;completion\na;"b;\r\nc"\na;"b;\r\nc"',
    }.items():
        (tmp_path / name).write_bytes(content)
        made = Conversations(paths=(str(tmp_path / name),), shards=str(tmp_path / "shards")).build()
        assert learned(made.train) == learned(made.test) == ["b;\r\nc\0"], name


def test_odd_folders_of_data_sets_are_one_message(tmp_path, capsys):
    datasets = pytest.importorskip("datasets")

    def saved(name, made):
        made.save_to_disk(tmp_path / name)
        return tmp_path / name

    good = datasets.Dataset.from_list(chats(3))
    saved("state", good).joinpath("state.json").write_text("{")
    for path in (*saved("gone", good).glob("*.arrow"), *saved("cut", good).glob("*.arrow")):
        path.unlink() if path.parent.name == "gone" else path.write_bytes(path.read_bytes()[:90])
    (tmp_path / "nothing").mkdir()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "dataset_dict.json").write_text("[1]")
    odd = {
        "state": "cannot load it", "gone": "cannot load it", "cut": "cannot load it",
        "nothing": "no file in it matches", "list": "cannot load it",
        saved("several", datasets.DatasetDict(train=good, test=good)).name: "it has the splits train, test",
        saved("empty", good.select([])).name: "it has no rows, or is damaged",
        saved("text", datasets.Dataset.from_dict({"text": ["a"]})).name: "the columns are text",
        saved("single", good.select([0])).name: "there is one conversation",
        saved("ints", datasets.Dataset.from_dict({"prompt": [1], "completion": [2]})).name: "neither a text",
        saved("nulls", datasets.Dataset.from_dict({"messages": [None, None]})).name: r"messages (null)",
    }  # fmt: skip
    for name, reason in odd.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mistakes.MAX_LINES", 8)
            message = refusal(capsys, *show(tmp_path, tmp_path / name), run=main)
        assert reason in message, (name, message)
    for made in (good.with_format("numpy"), good.select([2, 0]), good):
        path = saved(f"right{len(made)}{made.format['type']}", made)
        splits = Conversations(paths=(str(path),), length=99, shards=str(tmp_path / "shards")).build()
        assert len(learned(splits.train)) == len(made) - 1
