"""Scores of texts and of multiple-choice questions: as each scored alone, by the whole network; and the command."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import refusal
from test_generate import LENGTH, text, writer  # noqa: F401

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import Codec
from jaxdl.inference.score.__main__ import main
from jaxdl.inference.score.command import Score, scores
from jaxdl.inference.scoring import Question, Scorer, choice_tokens, score_choices, score_documents, windows
from jaxdl.parallel.mesh import MeshConfig

QUESTIONS = [
    Question("1 f", ("ish", "fish, red", "x"), 0),
    Question("2 fish, red fish\n", ("3", "2 fish, blue fish and much more than fits"), 1),
    Question("", ("0", "ésh"), 0),
]


def alone(writer, tokens, start):  # noqa: F811
    """The log-probabilities of tokens[start:], the text read once, in NumPy."""
    tokens = list(tokens)
    cut = max(0, len(tokens) - LENGTH - 1)
    tokens, start = tokens[cut:], max(1, start - cut)
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(tokens) - 1] = tokens[:-1]
    logged = np.asarray(jax.nn.log_softmax(jnp.asarray(writer.logits(padded))))[0]
    return np.array([logged[place - 1, tokens[place]] for place in range(start, len(tokens))])


def by_hand(writer, codec, delimiter=" "):  # noqa: F811
    """(the score of each choice of each question, alone; the accuracies)."""
    found = []
    for one in QUESTIONS:
        before = list(one.context.rstrip().encode()) or [0]
        rows = []
        for choice in one.choices:
            whole = list((one.context + delimiter + choice).encode())
            rows.append(float(alone(writer, whole if one.context else [0, *whole], len(before)).sum()))
        found.append(rows)
    sizes = {"acc": lambda _: 1, "acc_norm": len, "acc_bytes": lambda choice: len(choice.encode())}
    return found, {
        name: np.mean([np.argmax([row[i] / size(one.choices[i]) for i in range(len(row))]) == one.label
                       for one, row in zip(QUESTIONS, found, strict=True)])
        for name, size in sizes.items()
    }  # fmt: skip


def test_questions_score_as_each_choice_alone_on_any_mesh(text, writer):  # noqa: F811
    other = jaxdl.restore(text.workdir, mesh=MeshConfig(replica=2, fsdp=2, tensor=2))
    scores, accuracies = by_hand(writer, writer.codec)
    for predictor, most_logits in ((writer, 2**20), (other, 256 * 7)):  # All logits at once, and those of some tokens.
        done, scorer = [], Scorer(predictor, most_logits=most_logits)
        found, each = score_choices(scorer, predictor.codec, QUESTIONS, advance=done.append)
        assert sum(done) == 7
        assert {name: found[name] for name in accuracies} == accuracies
        for row, expected in zip(each, scores, strict=True):
            np.testing.assert_allclose(row, expected, rtol=2e-5)
    assert len({max(row) == row[0] for row in scores}) == 2, "not always the first"


def test_the_context_of_a_choice_is_counted_as_the_harness_does():
    codec = Codec(None)
    assert choice_tokens(codec, "ab", " c") == choice_tokens(codec, "ab ", "c")
    assert bytes(choice_tokens(codec, "ab ", "c").tokens[2:]) == b" c", "its space belongs to the choice"
    assert choice_tokens(codec, "", " c").tokens == [0, 32, 99]


@pytest.mark.parametrize(("context", "stride"), [(4, 1), (4, 3), (4, 4), (10, 5), (3, 2)])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9, 10, 11])
def test_windows_score_each_token_once_with_enough_before_it(num_tokens, context, stride):
    found = list(windows(num_tokens, context, stride))
    assert [place for _, first, end in found for place in range(first, end)] == list(range(1, num_tokens))
    for begin, first, end in found:
        assert end - begin <= context + 1
        assert first - begin >= min(first, context + 1 - stride), "tokens that are read before"


def test_a_document_is_scored_with_what_is_before_each_token(writer):  # noqa: F811
    documents, stride = ["2 fish, blue fish\n3 fish, red fish\n", "é"], 5
    nats = 0.0
    for one in documents:
        tokens = [0, *one.encode()]
        for begin, first, end in windows(len(tokens), LENGTH, stride):
            nats -= alone(writer, tokens[begin:end], first - begin).sum()
    found = score_documents(Scorer(writer), writer.codec, documents, stride)
    size = sum(len(one.encode()) for one in documents)
    assert (found["tokens"], found["bytes"], found["documents"]) == (size, size, 2)
    np.testing.assert_allclose(found["loss"], nats / size, rtol=1e-5)
    np.testing.assert_allclose(found["perplexity"], math.exp(nats / size), rtol=1e-5)
    np.testing.assert_allclose(found["bits_per_byte"], nats / size / math.log(2), rtol=1e-5)


@pytest.fixture
def files(tmp_path):
    """A folder with a text, documents and questions, also in the form of HellaSwag."""
    (tmp_path / "plain.txt").write_text("2 fish, blue fish\n3 fish\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "2 fish, blue fish\\n3 fish\\n"}\n')
    rows = [{"context": one.context, "choices": one.choices, "label": one.label} for one in QUESTIONS]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"ctx": one.context, "endings": one.choices, "label": str(one.label)} for one in QUESTIONS]
    (tmp_path / "hellaswag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bad.jsonl").write_text('{"context": "a", "choices": ["b"], "label": 1}\n')
    (tmp_path / "fields.jsonl").write_text('{"context": "a", "choice": ["b"], "label": 1}\n')
    (tmp_path / "half.jsonl").write_text('{"context": "a", "choices": ["\\ud83d"], "label": 0}\n')
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


def test_a_setting_for_one_of_the_files_does_not_disturb_the_others(text, writer, files):  # noqa: F811
    names = (str(files / "plain.txt"), str(files / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"column = 'body': it has no effect on files such as plain\.txt"):
        scores(Score(workdir=text.workdir, experiment=None, text=names[:1], column="body"), writer, {})
    rows = (files / "rows.jsonl").read_text().replace("text", "body")
    (files / "rows.jsonl").write_text(rows)
    command = Score(workdir=text.workdir, experiment=None, text=names, column="body")
    found = scores(command, writer, {})["text"]
    assert found[names[0]] == found[names[1]]


def test_the_command(text, writer, files, capsys):  # noqa: F811
    names = ("plain.txt", "rows.jsonl", "asked.jsonl", "hellaswag.jsonl")
    plain, documents, asked, hellaswag = (str(files / name) for name in names)
    main(["--workdir", str(text.workdir), "--text", plain, documents, "--choices", asked, hellaswag,
          "--to", str(files / "to.json")])  # fmt: skip
    printed, result = capsys.readouterr().out, json.loads((files / "to.json").read_text())
    expected = score_documents(Scorer(writer), writer.codec, [(files / "plain.txt").read_text()], LENGTH // 2)
    assert result["text"] == {plain: expected, documents: expected}
    scores, accuracies = by_hand(writer, writer.codec)
    for name in (asked, hellaswag):
        found = result["choices"][name]
        assert {key: found[key] for key in accuracies} == accuracies
        assert [row["label"] for row in found["each"]] == [0, 1, 0]
        np.testing.assert_allclose(found["each"][1]["scores"], scores[1], rtol=2e-5)
    assert f"perplexity {expected['perplexity']:.5g}, {expected['bits_per_byte']:.4f} bits per byte" in printed
    assert f"acc {accuracies['acc']:.4f}, acc_norm" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to score: give --text FILE, --choices FILE or --table FILE"),
        (["--text", "F/nowhere"], "F/nowhere: no such file"),
        (["--text", "F/empty.txt"], "--text F/empty.txt: it is empty"),
        (["--text", "F/plain.txt", "--stride", "17"], "--stride 17: the network reads 16 tokens at a time"),
        (["--choices", "F/nowhere"], "--choices F/nowhere: No such file"),
        (["--choices", "F/asked.jsonl", "--devices", "0"], "--devices 0: give a whole number, 1 or more"),
        (["--choices", "F/empty.txt"], "--choices F/empty.txt: it has no questions"),
        (["--choices", "F/plain.txt"], "--choices F/plain.txt: line 1 is not JSON"),
        (["--choices", "F/bad.jsonl"], "line 1: the label is 1; it must be a number from 0 to 0"),
        (["--choices", "F/asked.jsonl", "--stride", "4"], "--stride: it has no effect without --text"),
        (["--text", "F/plain.txt", "--delimiter", ""], "--delimiter: it has no effect without --choices"),
        (["--choices", "F/half.jsonl"], "half.jsonl: line 1 '\\ud83d': not UTF-8"),
        (["--choices", "F/fields.jsonl"], "line 1 has no field choices or endings"),
    ],
)
def test_mistakes(text, files, capsys, options, message):  # noqa: F811
    options, message = [one.replace("F/", f"{files}/") for one in options], message.replace("F/", f"{files}/")
    assert message in refusal(capsys, "--workdir", str(text.workdir), *options, run=main)


def test_a_network_of_images_scores_no_text(tiny_run, files, capsys):
    options = ["--workdir", str(tiny_run.workdir), "--text", str(files / "plain.txt")]
    assert "score: this network reads images" in refusal(capsys, *options, run=main)
