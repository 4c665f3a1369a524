"""Conversations as data: what rows mean, what is left out and said, how they are packed and cut, and odd files."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from conversing import answer, chats, data, learned, lines, show, user
from mistakes import refusal
from rich.console import Console
from runs import tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import Codec, Conversations
from jaxdl.data.__main__ import main
from jaxdl.data.text.answers import Renderer, Unusable
from jaxdl.data.text.chat_template import ChatTemplate, TemplateRefusal, template_of
from jaxdl.data.text.row_files import find_rows
from jaxdl.models import Transformer
from jaxdl.report.facts import data_fact
from jaxdl.training.tasks import LanguageModelling

CONFIGS = Path(__file__).parent.parent / "configs"


TURNS = [user("Hi"), answer("Yo")]
FORMS = [
    ({"messages": TURNS}, "Yo\0"),
    ({"messages": json.dumps(TURNS)}, "Yo\0"),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}, "Yo\0"),
    ({"conversation": TURNS, "system": "Be short."}, "Yo\0"),
    ({"prompt": "1 + 1 =", "completion": " 2"}, " 2\0"),
    ({"prompt": [user("Hi")], "completion": [answer("Yo")]}, "Yo\0"),
    ({"instruction": "Add", "input": "1, 1", "output": "2"}, "2\0"),
    ({"instruction": "Add", "input": None, "output": "2"}, "2\0"),
    ({"messages": [user("Hi"), answer("Yo"), user("?"), answer("Lo")]}, "Yo\0Lo\0"),
    ({"messages": [user("Hi"), answer("Yo", weight=0), user("?"), answer("Lo", weight=1)]}, "Lo\0"),
    ({"messages": [user([{"type": "text", "text": "Hi"}]), answer([{"type": "text", "text": "Yo"}])]}, "Yo\0"),
]


def cells(rows, form):
    """CSV with JSON in its cells; or compressed TSV with lists as Python writes them, and so pandas."""
    text, inside, mark = io.StringIO(newline=""), json.dumps if form == "csv" else repr, "," if form == "csv" else "\t"
    writer = csv.DictWriter(text, list(rows[0]), delimiter=mark)
    writer.writeheader()
    writer.writerows({name: inside(x) if isinstance(x, list) else x for name, x in row.items()} for row in rows)
    return text.getvalue().encode() if form == "csv" else gzip.compress(text.getvalue().encode())


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "datasets", "csv", "tsv.gz"])
def test_what_rows_mean_in_every_format(form, tmp_path):
    for number, (row, expected) in enumerate(FORMS):
        rows, path = [row] * 2, tmp_path / f"{number}.{form}"
        if form == "datasets":
            datasets = pytest.importorskip("datasets")
            datasets.Dataset.from_list(rows).save_to_disk(path)
        elif form == "parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
        elif form in ("csv", "tsv.gz"):
            path.write_bytes(cells(rows, form))
        else:
            path.write_bytes(lines(rows) if form == "jsonl" else json.dumps(rows, indent=1).encode())
        made = Conversations(paths=(str(path),), length=90, shards=str(tmp_path / "shards")).build()
        assert (learned(made.train), learned(made.test)) == ([expected], [expected]), row


def test_which_tokens_are_learned(tmp_path):
    for learn, expected in (("answers", "Yo\0Lo\0"), ("last", "Lo\0"),
                            ("all", "User:\nHi\n\nAssistant:\nYo\0\nUser:\n?\n\nAssistant:\nLo\0\n")):  # fmt: skip
        made = data(
            tmp_path, [{"messages": [user("Hi"), answer("Yo"), user("?"), answer("Lo")]}] * 2, length=90, learn=learn
        )
        splits = made.build()
        assert learned(splits.train) == [expected]
        assert splits.train.spec.bytes_per_token == 1, "of bytes"
        assert splits.train.spec.mean_targets == len(expected)


def test_a_completion_begins_with_the_mark_of_a_text(tmp_path):
    splits = data(tmp_path, [{"prompt": "ab", "completion": "cd"}] * 2, length=8).build()
    batch = splits.train.batch(np.arange(1))
    assert batch["tokens"].tolist() == [[0, *b"abcd", 0, 0, 0, 0]]
    assert batch["mask"].tolist() == [[False, False, True, True, True, False, False, False]]
    assert splits.train.eval_batch(np.arange(2))["mask"].sum(axis=1).tolist() == [3, 0], "the second is padding"


def test_conversations_are_packed_whole_and_apart(tmp_path):
    rows = chats(30)
    made = data(tmp_path, rows, length=256, test_fraction=0.1)
    template = made.chat_template()
    splits = made.build()
    texts = sorted(template.render(row["messages"]) for row in rows)
    found, places = [], 0
    for source in (splits.train, splits.test):
        batch = source.batch(np.arange(len(source)))
        for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
            assert (np.diff(segments[segments != 0]) >= 0).all(), "a conversation is in one piece"
            numbers = range(1, segments.max() + 1)
            found += [bytes(tokens[segments == number].tolist()).decode() for number in numbers]
            places += 1
    assert sorted(found) == texts
    assert places < 30, "several are in a row"
    alone = data(tmp_path, rows, length=256, test_fraction=0.1, packing=False).build()
    assert len(alone.train) + len(alone.test) == 30
    assert learned(alone.train) == learned(splits.train)


def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path):
    rows = [{"messages": [user("x"), answer("y" * size)]} for size in (1, 5, 60, 70)] + [
        {"messages": [user("x" * 80), answer("never read")]}
    ]
    (tmp_path / "test.jsonl").write_bytes(lines(rows[:1]))
    fields = {"length": 40, "test_paths": (str(tmp_path / "test.jsonl"),)}
    cut, dropped = (data(tmp_path, rows, too_long=how, **fields).build().train for how in ("cut", "drop"))
    head = len("\0User:\nx\n\nAssistant:\n")
    assert learned(cut) == sorted(["y\0", "y" * 5 + "\0", "y" * (41 - head), "y" * (41 - head)])
    assert learned(dropped) == sorted(["y\0", "y" * 5 + "\0"])
    assert (
        "2 conversations are longer than a row, and cut. 1 conversations are longer than a row, and left"
        in cut.remark()
    )
    assert "3 conversations are longer than a row, and left out" in dropped.remark()
    (tmp_path / "test.jsonl").write_bytes(lines([*rows[:1], *rows[3:], {"messages": []}]))
    config = data(tmp_path, rows, **fields)
    held_out = data_fact(config, config.build()).partition("; held out: ")[2]
    assert held_out == (
        "1 conversations are longer than a row, and cut. 1 conversations are longer than a row, and left out. "
        "1 row is left out: 1 empty: no messages"
    )
    split = data(tmp_path, [*chats(9), {"messages": []}])
    assert "1 row is left out" in (told := data_fact(split, split.build()))
    assert "held out:" not in told
    assert cut.spec.mean_targets * len(cut) == 2 + 6 + 2 * (41 - head)


def test_what_cannot_be_used_is_counted_and_named(tmp_path, capsys):
    bad = [
        ({"messages": []}, "empty: no messages"),
        ({"messages": [user("x")]}, "no answer: no text of the assistant"),
        ({"messages": [user("x"), answer(" ")]}, "no answer: no text of the assistant"),
        ({"messages": [{"role": "alien", "content": "x"}, answer("y")]}, "the unknown role 'alien'"),
        ({"messages": [user("x"), answer([{"type": "image_url"}])]}, "a content with image_url"),
        ({"messages": [user("\ud800"), answer("y")]}, "half a surrogate pair"),
        ({"prompt": "x"}, "prompt without completion (the columns are prompt)"),
        ({"messages": [user("x"), answer("y", tool_calls=[{"function": {}}])]}, "a tool call without the name"),
        ({"messages": [{"role": "tool", "content": "1"}, answer("y")]}, "the plain template knows the roles"),
    ]
    rows = [*chats(3), *(row for row, _ in bad), {**chats(1)[0], "score": 1}]
    source = data(tmp_path, rows).build().train
    said = capsys.readouterr().err
    assert said.count(f"{len(bad)} rows are left out") == 1
    for _, reason in bad:
        assert reason in said
        assert reason in source.remark()
    assert "Columns that are not used: score (in 1)." in said
    assert "are texts by the plain chat template" in source.remark()
    assert f"{len(bad)} rows are left out" in data(tmp_path, rows).prepare(Console()), "also when it was done before"


def test_rows_are_shown_with_what_is_learned(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(lines([{"messages": [user("Hi"), answer("Yo")]}] * 3))
    main(show(tmp_path, tmp_path / "rows.jsonl", "--data.length", "64", "--rows", "1"))
    shown = capsys.readouterr().out
    assert "document 1 of 2: 3 of" in shown or "document 1 of 1: 3 of" in shown
    assert "\\x00User:\nHi\n\nAssistant:\n[[Yo\\x00]]" in shown
    assert "--rows 0" in refusal(capsys, *show(tmp_path, tmp_path / "rows.jsonl", "--rows", "0"), run=main)


def test_files_without_rows_are_named(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(lines(chats(2)))
    (tmp_path / "README.md").write_text("about")
    made = Conversations(paths=(str(tmp_path),), length=99, shards=str(tmp_path.parent / "shards"))
    assert "Files that are not read: README.md" in made.build().train.remark()


def test_a_table_beside_rows_of_another_form_is_read_if_it_is_named(tmp_path):
    rows, cells, alone = tmp_path / "rows" / "a.jsonl", tmp_path / "rows" / "scores.csv", tmp_path / "alone" / "b.csv"
    for path, content in (
        (rows, lines(chats(2))),
        (cells, b"prompt,completion\nx,y\n"),
        (alone, b"prompt,completion\n"),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    both, aside = [str(tmp_path / "rows"), str(tmp_path / "alone")], "scores.csv (a table beside other rows"

    def names(*arguments):
        files, others = find_rows(*arguments)
        assert all(other.startswith(aside) for other in others)
        return [name for name, _ in files], len(others)

    assert names(both, "**/*") == (["a.jsonl", "b.csv"], 1)
    assert names([*both, str(cells)], "**/*") == (["a.jsonl", "b.csv", "scores.csv"], 0)
    assert names(both[:1], "**/*.csv") == (["scores.csv"], 0)
    assert names(both[:1], "*") == (["a.jsonl", "scores.csv"], 0)
    made = Conversations(paths=tuple(both[:1]), length=99, shards=str(tmp_path / "shards"))
    assert f"Files that are not read: {aside}" in made.build().train.remark()


def test_settings_of_conversations_are_checked(tmp_path):
    fails = [
        ({"columns": {"question": "q"}}, "there is no such column to be found"),
        ({"template": str(tmp_path / "no.jinja")}, "no such file"),
        ({"template": str(tmp_path)}, "there is no chat template in this folder"),
        ({"length": 4}, "none of the .* conversations has a token to learn"),
        ({"paths": ()}, "data.paths: it is empty"),
    ]
    for fields, reason in fails:
        with pytest.raises(ConfigError, match=reason):
            data(tmp_path, chats(3)).replaced(fields).build()
    with pytest.raises(ConfigError, match="write a day as 2026-01-31"):
        Conversations(date="today")
    renamed = data(tmp_path, [{"q": "Hi", "a": "Yo"}] * 2, columns={"instruction": "q", "output": "a"}, length=60)
    assert learned(renamed.build().train) == ["Yo\0"]


def test_where_the_template_of_a_tokenizer_is_found(tmp_path):
    import tokenizers

    file = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, "a"))
    file.save(str(tmp_path / "tokenizer.json"))
    codec, config = Codec(str(tmp_path)), tmp_path / "tokenizer_config.json"
    assert template_of(codec).render([user("x")]) == "<s>User:\nx\n\n"
    config.write_text(json.dumps({"chat_template": "one {{ bos_token }}", "bos_token": {"content": "<b>"}}))
    assert template_of(codec).render([]) == "one <b>"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "two"},
                                                    {"name": "tool_use", "template": "tools"}]}))  # fmt: skip
    assert (template_of(codec).render([]), template_of(codec).render([], tools=[{}])) == ("two", "tools")
    (tmp_path / "chat_template.jinja").write_text("three\n  {% if x %}\n{{ x }}{% endif %}")
    assert template_of(codec).render([], x=4) == "three\n4"
    again = ChatTemplate.from_json(template_of(codec).to_json(), "here")
    assert again.render([], tools=[{}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"chat_template.jinja: it is not a template of Jinja \(line 1"):
        template_of(codec)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}",
     "{{ messages[0].content.x.y }}", "{% set n = namespace() %}{% set n.__a__ = 1 %}"],
)  # fmt: skip
def test_a_template_runs_in_a_sandbox_and_its_errors_are_messages(source):
    with pytest.raises(TemplateRefusal, match="does not take this conversation"):
        ChatTemplate(source).render([user("x")])


def test_a_template_without_a_consistent_prefix_is_refused():
    source = "{% for m in messages %}{{ messages | length }}{{ m.content | upper }}.{% endfor %}"
    with pytest.raises(Unusable, match="the chat template gives no consistent prefix"):
        Renderer(ChatTemplate(source)).answers([user("x"), answer("y"), user("z"), answer("w")])


@pytest.mark.parametrize("config", ["chat.py:finetune", "preferences.py"])
def test_a_base_is_tuned_with_the_template_that_it_was_trained_with(config, tmp_path, monkeypatch):
    base = tiny_experiment(
        data=Conversations(paths=("rows.jsonl",), template="own.jinja"),
        model=Transformer(num_layers=1, embed_dim=16, num_heads=2),
        task=LanguageModelling(),
    )
    (tmp_path / "config.json").write_text(base.to_json())
    monkeypatch.setenv("BASE", str(tmp_path))
    tuned: Any = jaxdl.load(CONFIGS / config).data
    assert tuned.template == "own.jinja"
