"""A network that is trained on conversations: resumed bit for bit, its template kept, and its answers on the screen."""

import io
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from chat_cases import write_tokenizer
from mistakes import refusal
from runs import assert_bit_equal, measured, saved_state, tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import Conversations
from jaxdl.inference.chatting import Chat
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.inference.generate.__main__ import main
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.tasks import LanguageModelling

CAPITALS = {"France": "Paris", "Peru": "Lima", "Japan": "Tokyo", "Cuba": "Havana"}


def question(land):
    return {"role": "user", "content": f"The capital of {land}?"}


def rows():
    for land, city in CAPITALS.items():
        yield {"messages": [question(land), {"role": "assistant", "content": f"{city}."}]}
        yield {"messages": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."},
                            question(land), {"role": "assistant", "content": f"{city}."}]}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the experiment, its run) on conversations by a template in ChatML's style."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = write_tokenizer(folder / "tokenizer", "chatml")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    experiment = tiny_experiment(
        data=Conversations(
            paths=(str(folder / "rows.jsonl"),), test_paths=(str(folder / "rows.jsonl"),), tokenizer=tokenizer,
            length=256, shards=str(folder / "shards"),
        ),
        model=Transformer(num_layers=2, embed_dim=64, num_heads=2, mlp_dim=128),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=0.01, b2=0.95),
        batch_size=4,
        steps=60,
        mesh=MeshConfig(replica=1, fsdp=2),
        evaluation={"every_steps": 60},
        checkpoint={"every_steps": 20},
    )  # fmt: skip
    run = jaxdl.train(experiment, folder / "run", quiet=True, devices=jax.devices()[:2])
    return experiment, run


@pytest.fixture(scope="module")
def chat(made):
    return Chat(jaxdl.restore(made[1].workdir))


def test_only_learned_tokens_are_in_the_loss(made):
    """The loss of the evaluation is that of the answers' tokens, by NumPy from the network's own probabilities."""
    experiment, run = made
    predictor = jaxdl.restore(run.workdir)
    source = experiment.data.build().test
    batch = source.batch(np.arange(len(source)))
    total = count = 0
    for tokens, segments, mask in zip(batch["tokens"], batch["segments"], batch["mask"], strict=True):
        for number in range(1, segments.max() + 1):  # Alone, so that what is packed beside it cannot help.
            here = segments == number
            alone, learned = tokens[here], mask[here[1:] & (segments[:-1] == number)]
            logits = np.asarray(predictor.logits(np.pad(alone[None, :-1], ((0, 0), (0, 257 - len(alone))))), float)[0]
            logits = logits[: len(learned)] - np.log(np.exp(logits[: len(learned)]).sum(axis=1, keepdims=True))
            total -= logits[np.arange(len(learned)), alone[1:]][learned].sum()
            count += learned.sum()
    assert count == source.num_learned
    assert run.metrics["loss"] == pytest.approx(total / count, rel=1e-4)


def test_an_interrupted_run_goes_on_bit_for_bit(made, tmp_path):
    """The second part tokenizes anew, on another day."""
    experiment, run = made
    jaxdl.train(experiment, tmp_path, quiet=True, devices=jax.devices()[:2], max_steps=20)
    shutil.rmtree(experiment.data.shards)
    jaxdl.train(experiment, tmp_path, quiet=True, devices=jax.devices()[:2])
    assert_bit_equal(saved_state(tmp_path, experiment), saved_state(run.workdir, experiment))
    assert measured(tmp_path)[-1]["eval/loss"] == measured(run.workdir)[-1]["eval/loss"]


def test_it_answers_and_stops_at_the_end_of_its_turn(chat):
    assert chat.stop_tokens == (chat._predictor.codec.encode("<|im_end|>")[0],)
    prompts = [chat.prompt([question(land)]) for land in CAPITALS]
    answers = list(chat.answers(prompts, temperature=0, num_tokens=30, batch_size=4))
    assert [answer.text for answer in answers] == [f"{city}." for city in CAPITALS.values()]
    assert {answer.ended for answer in answers} == {"token"}
    assert "".join(chat.answer(prompts[1], temperature=0, num_tokens=30)) == answers[1].text


def test_the_oldest_questions_are_left_out_of_a_long_conversation(chat):
    turns = [
        message for land in list(CAPITALS) * 4 for message in (question(land), {"role": "assistant", "content": "x"})
    ]
    system = {"role": "system", "content": "Be brief."}
    prompt, left_out = chat.fitting([system, *turns, question("Peru")], 40)
    assert len(prompt) <= 256 - 40
    assert left_out % 2 == 0
    assert left_out > 0
    assert prompt == chat.prompt([system, *turns[left_out:], question("Peru")])
    assert len(chat.prompt([system, *turns[left_out - 2 :], question("Peru")])) > 256 - 40
    assert chat.fitting([system, question("Peru")], 40) == (chat.prompt([system, question("Peru")]), 0)


def run_main(made, *options):
    main(["--workdir", str(made[1].workdir), "--chat", "--temperature", "0", "--num-tokens", "30", *map(str, options)])


def test_a_conversation_is_held_by_lines_of_stdin(made, capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("Hello!\n\nThe capital of Cuba?\n/new\nThe capital of Peru?\n/exit\nno\n")
    )
    run_main(made)
    assert capsys.readouterr().out == "Hi.\nHavana.\nLima.\n"


def test_a_file_of_conversations_is_answered(made, tmp_path, capsys):
    file, to = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    asked = [{"messages": [question(land)], "id": land} for land in CAPITALS]
    file.write_text("".join(json.dumps(row) + "\n" for row in (*asked, {"prompt": "The capital of Peru?"})))
    run_main(made, "--prompts", file, "--to", to, "--batch-size", 3)
    answered = [json.loads(line) for line in to.read_text().splitlines()]
    assert [row["messages"][-1] for row in answered] == [
        {"role": "assistant", "content": f"{city}."} for city in (*CAPITALS.values(), "Lima")
    ]
    assert answered[0] == asked[0] | {"messages": answered[0]["messages"], "tokens": 6, "ended": "token"}
    run_main(made, "--prompt", "The capital of Japan?")
    assert capsys.readouterr().out == "Tokyo.\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it has no conversations"),
        ("[1]", "a message is not an object"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
            "nothing to answer",
        ),
        ('{"messages": []}', "give a list of messages"),
        ("{", "line 1 is not JSON"),
        ('{"prompt": [{"role": "user", "content": "x"}], "tools": 1}', "its tools are not a list"),
    ],
)
def test_a_file_that_cannot_be_answered(made, tmp_path, capsys, content, reason):
    (tmp_path / "asked.jsonl").write_text(content)
    options = ("--workdir", made[1].workdir, "--chat", "--prompts", tmp_path / "asked.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mistakes.MAX_LINES", 6)
        assert reason in refusal(capsys, *options, run=main)


def test_options_without_effect(made, capsys):
    assert "--system: it has no effect without --chat" in refusal(
        capsys, "--workdir", made[1].workdir, "--system", "x", run=main
    )


def test_the_template_goes_with_the_network_to_hugging_face_and_back(made, tmp_path, capsys):
    convert(["to-hf", str(made[1].workdir), str(tmp_path / "hf")])
    there = (tmp_path / "hf" / "chat_template.jinja").read_text()
    assert there == jaxdl.restore(made[1].workdir).chat_template.source
    convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / "back")])
    record = json.loads((tmp_path / "back" / "chat.json").read_text())
    assert (record["template"], record["tokens"]["eos_token"]) == (there, "<|im_end|>")
    capsys.readouterr()
    run_main((None, SimpleNamespace(workdir=tmp_path / "back")), "--prompt", "The capital of Cuba?")
    assert capsys.readouterr().out == "Havana.\n"
    (tmp_path / "back" / "chat.json").write_text("{}")
    with pytest.raises(ConfigError, match="it is not a chat template that jaxdl wrote"):
        jaxdl.restore(tmp_path / "back").chat_template  # noqa: B018
