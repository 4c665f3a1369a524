"""Files of preferences: their forms and formats, what cannot be used, and texts that are too long."""

import gzip
import io
import json

import numpy as np
import pytest
from rich.console import Console
from trl_cases import write_rows

import jaxdl
from jaxdl.data import Codec, PreferencePairs
from jaxdl.data.text.shown import show

ROW = {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}
USER, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "a"), ("assistant", "b"))
)
START = "\0"
PLAIN = f"{START}User:\nhi\n\nAssistant:\n"
CHAT = (PLAIN, "a\0\n", "b\0\n")


def texts_of(source):
    """(prompt, chosen, rejected) of each pair, with the marks that bytes have: byte 0."""
    codec, found = Codec(None), []
    for tokens, answers in zip(
        *(source.batch(np.arange(len(source)))[name] for name in ("tokens", "answers")), strict=True
    ):
        (prompt, other), chosen = (
            [codec.decode(text[:start].tolist()) for text, (start, _) in zip(tokens, answers, strict=True)],
            [codec.decode(text[start:end].tolist()) for text, (start, end) in zip(tokens, answers, strict=True)],
        )
        assert prompt == other
        found.append((prompt, *chosen))
    return found


def read(tmp_path, rows, **settings):
    """The training source of rows in a file, the last of which is held out in another."""
    path = rows if not isinstance(rows, list) else write_rows(tmp_path / "rows.jsonl", rows)
    held_out = write_rows(tmp_path / "held_out.jsonl", [ROW])
    return PreferencePairs(paths=(str(path),), test_paths=(str(held_out),), **settings).build().train


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (ROW, (START + "2 + 2 = ", "4\0", "5\0")),
        ({"chosen": "so it is good", "rejected": "so it is bad"}, (START + "so it is", " good\0", " bad\0")),
        ({"chosen": "ab", "rejected": "abc"}, (START + "a", "b\0", "bc\0")),
        ({**ROW, "chosen": ""}, (START + "2 + 2 = ", "\0", "5\0")),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, CHAT),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, CHAT),
        ({"prompt": "hi", "chosen": [USER, YES], "rejected": [USER, NO]}, CHAT),
        ({"prompt": "hi", "chosen": [YES], "rejected": [NO]}, CHAT),
        ({"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]}, CHAT),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, CHAT),
        ({"prompt": "né ", "chosen": "é", "rejected": "è", "extra": 3}, (START + "né ", "é\0", "è\0")),
    ],
)
def test_forms_of_rows(tmp_path, row, wanted):
    """Explicit and implicit prompts, of texts and of messages. An answer that a byte begins for both is cut there."""
    prompt, *answers = texts_of(read(tmp_path, [row]))[0]
    assert ("".join((prompt, answers[0])), "".join((prompt, answers[1]))) == (
        wanted[0] + wanted[1],
        wanted[0] + wanted[2],
    )
    assert prompt == wanted[0]


def test_formats_of_files(tmp_path):
    """JSON, compressed JSON lines, Parquet, CSV and a folder of datasets give the same pairs."""
    import csv
    import gzip

    import pyarrow
    import pyarrow.parquet

    datasets = pytest.importorskip("datasets")
    rows = [ROW, {"prompt": "3 + 4 = ", "chosen": "7", "rejected": "8"}]
    chats = [{"prompt": [USER], "chosen": [YES], "rejected": [NO]}]
    for name, some in (("texts", rows), ("chats", chats)):
        wanted = texts_of(read(tmp_path, some))
        (tmp_path / f"{name}.json").write_text(json.dumps(some))
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in some)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), tmp_path / f"{name}.parquet", row_group_size=1)
        datasets.Dataset.from_list(some).save_to_disk(tmp_path / name)
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(some[0]))
            writer.writeheader()
            writer.writerows(some)  # Lists as Python writes them.
        for path in (f"{name}.json", f"{name}.jsonl.gz", f"{name}.parquet", f"{name}.csv", name):
            assert texts_of(read(tmp_path, tmp_path / path)) == wanted, path


def test_what_cannot_be_used_is_counted_and_named(tmp_path):
    rows = [
        ROW,
        {"prompt": "a", "chosen": "b"},
        {"prompt": "a", "chosen": "b", "rejected": None},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": 3, "rejected": "b"},
        [1, 2],
        {"prompt": "a", "chosen": [{"content": "x"}], "rejected": [NO]},
        {"prompt": [{"role": "robot", "content": "hi"}], "chosen": "a", "rejected": "b"},
        {"chosen": [YES], "rejected": [NO]},
        {"prompt": [USER], "chosen": [{"role": "assistant", "content": [{"type": "image"}]}], "rejected": [NO]},
        {"prompt": "\ud800", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [YES], "rejected": [{**YES, "content": " a "}]},
    ]
    source = read(tmp_path, rows)
    assert len(source) == 1
    remark = source.remark()
    assert remark.startswith("11 of 12 rows are left out: 2: no 'rejected' (rows.jsonl: row 2, rows.jsonl: row 3); ")
    for part in (
        "1: both answers are the same (rows.jsonl: row 4)",
        "1: 'chosen' is int, neither a text nor a list of messages (rows.jsonl: row 5)",
        "1: no object with columns (rows.jsonl: row 6)",
        "1: 'chosen' has a message without a 'role' (rows.jsonl: row 7)",
        "roles system, user and assistant, not robot) (rows.jsonl: row 8)",
        "1: no prompt: the conversations have no message in common (rows.jsonl: row 9)",
        "1: 'chosen' has a message that is more than text (image) (rows.jsonl: row 10)",
        "1: 'prompt' has half a surrogate pair, which is not a character (rows.jsonl: row 11)",
        "1: the chat template makes both answers the same (rows.jsonl: row 12)",
    ):
        assert part in remark


def test_texts_that_are_too_long(tmp_path):
    """Cut at their end as by TRL, or left out; never without a token of an answer, or with equal answers."""
    rows = [
        ROW,
        {"prompt": "abcd", "chosen": "efghijkl", "rejected": "x"},
        {"prompt": "abcdefghijklm", "chosen": "n", "rejected": "o"},
        {"prompt": "ab", "chosen": "cdefghij1", "rejected": "cdefghij2"},
    ]
    source = read(tmp_path, rows, length=9)
    assert texts_of(source) == [(START + "2 + 2 = ", "4", "5"), (START + "abcd", "efghi", "x\0")]
    assert source.remark() == (
        "2 of 4 rows are left out: 1: with a prompt of more than 9 tokens (--data.length) (rows.jsonl: row 3); "
        "1: whose answers differ behind 9 tokens alone (--data.length) (rows.jsonl: row 4); "
        "2 of 2 pairs are cut after 9 tokens (--data.length)"
    )
    dropped = read(tmp_path, rows, length=10, too_long="drop")
    assert texts_of(dropped) == [(START + "2 + 2 = ", "4\0", "5\0")]
    assert "3: with a text of more than 10 tokens" in dropped.remark()
    assert read(tmp_path, rows).spec.length == 32, "as long as the longest, a multiple of 32"


def test_pairs_can_be_seen(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    show(read(tmp_path, [ROW]), Codec(None), 1, console)
    printed = console.file.getvalue()
    assert "row 0, chosen: 2 of 11 tokens are learned\n\\x002 + 2 = [[4\\x00]]\n" in printed
    assert "row 0, rejected: 2 of 11 tokens are learned\n\\x002 + 2 = [[5\\x00]]\n" in printed


def test_held_out_pairs(tmp_path):
    """The same ones for ever: by the seed and the number of the row."""
    rows = [{"prompt": f"{n} ", "chosen": "a", "rejected": "b"} for n in range(20)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    splits = [PreferencePairs(paths=(str(path),), test_fraction=0.25, split_seed=seed).build() for seed in (0, 0, 1)]
    train, test = ([texts_of(getattr(split, part)) for split in splits] for part in ("train", "test"))
    assert (train[0], test[0]) == (train[1], test[1])
    assert test[0] != test[2]
    assert len(test[0]) == 5
    assert len({*train[0], *test[0]}) == 20
    assert splits[0].content() == splits[1].content() != splits[2].content()


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("", {}, "there is no row in it"),
        ("{}\n", {}, "no pair can be used"),
        (json.dumps({"good": "a", "bad": "b"}), {}, "The columns there are bad, good; a row needs 'chosen'"),
        ("not json\n", {}, "is not JSON"),
        (json.dumps(ROW)[:-5], {}, "is not JSON"),
        (json.dumps(ROW), {}, "one pair can be used, so none can be held out"),
        (json.dumps(ROW) + "\n" + json.dumps(ROW), {"length": 2}, "no pair is left"),
        (json.dumps(ROW), {"template": "/nowhere.jinja"}, "no such file"),
        (json.dumps(ROW), {"tokenizer": "/nowhere.json"}, "no such file"),
        (json.dumps(ROW), {"glob": "*.txt"}, "glob"),
    ],
)
def test_odd_inputs(tmp_path, content, settings, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(jaxdl.ConfigError, match=message):
        PreferencePairs(paths=(str(path),), **settings).build()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a", "chosen": "b", "chosen": "c"}', "the key 'chosen' stands there twice"),
        ("a.jsonl", b'\xe9{"prompt": "a"}', "line 1 is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(json.dumps(ROW).encode(), mtime=0)[:-9], "it cannot be read"),
        ("a.jsonl", b"[" * 100_000, "it cannot be read"),
        ("a.json", json.dumps({"data": [ROW]}).encode(), "The columns there are data"),
        ("a.json", json.dumps([[ROW]]).encode(), "no object with columns"),
        ("a.json", json.dumps([ROW])[:-1].encode(), "begins like a JSON array, but is not one"),
        ("a.jsonl", json.dumps({**ROW, "prompt": 5}).encode(), "'prompt' is int"),
        (
            "a.jsonl",
            json.dumps({**ROW, "chosen": [{**YES, "content": None}]}).encode(),
            "takes contents that are texts alone",
        ),
        ("a.jsonl", json.dumps({**ROW, "chosen": [], "rejected": []}).encode(), "both answers are the same"),
        ("a.csv", b"", "there is no row in it"),
        ("a.csv", b"prompt,chosen\na,b\n", "no 'rejected'"),
        ("a.csv", b"prompt,chosen,rejected\na,b,\n", "no 'rejected'"),
        ("a.csv", b"prompt,chosen,rejected\na,b,c,d\n", "row 1: it has 4 cells"),
        ("a.csv", b"prompt,chosen,rejected\na,b,\xe9\n", "line 2 is not UTF-8"),
        ("a.csv", b"chosen,chosen,rejected\na,b,c\n", "2 columns named 'chosen'"),
        ("a.parquet", b"PAR1", "it cannot be read as Parquet"),
    ],
)
def test_odd_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(jaxdl.ConfigError, match=message):
        PreferencePairs(paths=(str(tmp_path / name),)).build()


@pytest.mark.parametrize(
    ("name", "message"), [("none.jsonl", "no such file"), ("rows.txt", "it has no rows by its name")]
)
def test_files_that_are_not_there(tmp_path, name, message):
    (tmp_path / "rows.txt").write_text("prompt,chosen,rejected\na,b,c\n")
    with pytest.raises(jaxdl.ConfigError, match=message):
        PreferencePairs(paths=(str(tmp_path / name),)).build()
