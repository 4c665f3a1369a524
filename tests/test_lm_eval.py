"""Tasks of lm-evaluation-harness: a converted checkpoint has the scores that the harness's own model has of it.

It needs the package lm-eval, of the extra `lm-eval`, and is skipped without.
"""

import json

import jax
import numpy as np
import pytest
from harness_cases import (
    CHAT_LENGTH,
    CHAT_TASKS,
    LENGTH,
    TASKS,
    TEMPLATE,
    answers,
    conversations,
    recorded,
    write_checkpoint,
    write_tasks,
)
from mistakes import refusal
from runs import tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import TextFiles
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.inference.evaluate.__main__ import main as evaluate
from jaxdl.inference.lm_eval import register
from jaxdl.inference.lm_eval.model import HarnessParts, model_class
from jaxdl.inference.lm_eval.tasks import TaskOptions, evaluate_tasks, scores_of
from jaxdl.models import Transformer
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.measures import LmEval
from jaxdl.training.tasks import LanguageModelling

lm_eval = pytest.importorskip("lm_eval", reason="needs the package lm-eval: pip install 'jaxdl[lm-eval]'")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the workdir of the checkpoint, the folder of the tasks)."""
    folder = tmp_path_factory.mktemp("harness")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        convert(["from-hf", str(write_checkpoint(folder / "hf")), str(folder / "run")])
        yield folder / "run", write_tasks(folder / "tasks")


def test_the_harness_finds_what_it_finds_of_the_checkpoint(made):
    register()
    workdir, tasks = made
    results = lm_eval.simple_evaluate(
        model="jaxdl",
        model_args={"workdir": str(workdir), "batch_size": 4},
        tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
        bootstrap_iters=0,
    )
    found = assert_recorded(results, recorded(), TASKS)
    assert any(len(text) < 20 for ((text,),) in found["small_written"]), "a stop text cuts one"


def assert_recorded(results, expected, tasks):
    """The scores and the answers to each request are the recorded ones; returns the answers."""
    found = answers(results)
    for task in tasks:
        scores = {name: x for name, x in expected["scores"][task].items() if isinstance(x, float)}
        assert {name: results["results"][task][name] for name in scores} == pytest.approx(scores, rel=1e-5)
        if task == "small_written":
            assert found[task] == expected["answers"][task]
            continue
        pairs = zip(numbers(found[task]), numbers(expected["answers"][task]), strict=True)
        assert all(mine == pytest.approx(other, rel=1e-5) for mine, other in pairs)
    return found


@pytest.mark.parametrize(("name", "multiturn"), [("turns", True), ("one_turn", False)])
def test_conversations_are_those_of_the_harness(made, name, multiturn):
    """Of a template that takes no message of the system, and no space at the end of one."""
    register()
    folder, tasks = made[1].parent / "longer", made[1]
    if not folder.exists():
        convert(["from-hf", str(write_checkpoint(folder / "hf", CHAT_LENGTH)), str(folder / "run")])
    workdir = folder / "run"
    model = {"model": "jaxdl", "model_args": {"workdir": str(workdir), "batch_size": 4}}
    with pytest.warns(UserWarning, match=r"no system.* messages of the system are left out"):
        results = conversations(lm_eval, tasks, multiturn, **model)
    expected = recorded()
    found = assert_recorded(results, expected[name], CHAT_TASKS)
    assert found["small_choice"] != expected["answers"]["small_choice"]
    assert expected["turns"]["answers"]["small_choice"] != expected["one_turn"]["answers"]["small_choice"]


def test_a_template_is_needed_for_conversations(made):
    model = model_class()(str(made[0]))
    with pytest.raises(ConfigError, match="a run has one chat template, without a name"):
        model.chat_template("other")
    name, source = model.tokenizer_name, model.chat_template(True)
    assert source == TEMPLATE
    model._parts.template = lambda: None
    with pytest.raises(ConfigError, match="the run has no chat template"):
        model.apply_chat_template([{"role": "user", "content": "a"}])
    assert model.tokenizer_name != name, "requests that a template made are not taken from a cache"


def numbers(nested):
    """The numbers in nested lists, one after another."""
    return [x for part in nested for x in numbers(part)] if isinstance(nested, list | tuple) else [nested]


def test_the_command_prints_the_scores_and_writes_the_results(made, tmp_path, capsys):
    workdir, tasks = made
    options = ["--workdir", str(workdir), "--include-path", str(tasks), "--limit", "3"]
    evaluate([*options, "--tasks", "small_cho*", "small_rolling", "--json", "--to", str(tmp_path / "to.json")])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["tasks"] == ["small_cho*", "small_rolling"]
    names = {"small_choice/acc", "small_choice/acc_norm"}
    names |= {f"small_rolling/{name}" for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")}
    assert printed["metrics"].keys() == names
    written = json.loads((tmp_path / "to.json").read_text())
    assert written["results"]["small_choice"]["acc,none"] == printed["metrics"]["small_choice/acc"]
    assert written["n-samples"]["small_choice"]["effective"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "small_choise", "--include-path", "TASKS"], "there is no such task. Did you mean small_choice?"),
        (["--tasks", ""], "give the names of tasks"),
        (["--tasks", "small_choice", "--include-path", "nowhere"], "--include-path nowhere: there is no such folder"),
        (["--include-path", "TASKS"], "it has no effect without --tasks"),
        (["--apply-chat-template"], "--apply-chat-template: it has no effect without --tasks"),
        (["--no-fewshot-as-multiturn"], "it has no effect without --apply-chat-template"),
        (["--limit", "3"], "--limit 3.0: it has no effect without --tasks"),
        (["--tasks", "small_choice", "--limit", "0"], "--limit 0: give a number of documents"),
        (["--tasks", "small_choice", "--num-fewshot", "-1"], "--num-fewshot -1: it must not be negative"),
        (["--tasks", "small_choice", "--include-path", "TASKS", "--to", "no/where"], "there is no folder no"),
        (["--tasks", "small_gone", "--include-path", "TASKS"], "--tasks small_gone: they cannot be read"),
        (["--tasks", "small_choice", "--batch-size", "0"], "--batch-size 0: give a whole number"),
    ],
)
def test_mistakes_of_the_command(made, capsys, options, message):
    workdir, tasks = made
    task = json.loads((tasks / "small_written.yaml").read_text())
    data = {"dataset_kwargs": {"data_files": {"test": str(tasks / "gone.jsonl")}}}
    (tasks / "small_gone.yaml").write_text(json.dumps(task | {"task": "small_gone"} | data))
    options = [one.replace("TASKS", str(tasks)) for one in options]
    assert message in refusal(capsys, "--workdir", str(workdir), *options, run=evaluate)


def test_settings_of_tasks_that_cannot_be_kept(made):
    model = model_class()(str(made[0]))
    for given, message in (
        ({"max_gen_toks": LENGTH}, "writes up to 96 tokens, and the network reads 96"),
        ({"max_gen_toks": 4, "num_beams": 2}, "generation_kwargs that are not known here: num_beams"),
    ):
        with pytest.raises(ConfigError, match=message):
            model._sampling(given)
    how = model._sampling({"do_sample": True, "temperature": 0.5, "top_k": 3, "until": "x", "max_new_tokens": 9})
    assert (how.num_tokens, how.temperature, how.top_k, how.stop, how.stop_tokens) == (9, 0.5, 3, ("x", "</s>"), (1,))
    for given in ("auto:4", "auto", None):
        assert model_class()(str(made[0]), batch_size=given).batch_size == 16
    with pytest.raises(ConfigError, match="batch_size many: give a whole number"):
        model_class()(str(made[0]), batch_size="many")
    with pytest.raises(ConfigError, match="needs the workdir of a run"):
        model_class()()


def test_contexts_that_are_cut_are_counted(made):
    model = model_class()(str(made[0]), max_length=8)
    requests = [(None, [0, *range(5, 5 + size)], [5, 6]) for size in (2, 6, 8)]  # 9 tokens are scored.
    with pytest.warns(UserWarning, match=r"1 of 3 contexts are longer than the 8 tokens .* first tokens, 2 in all"):
        model._loglikelihood_tokens(requests, disable_tqdm=True)
    info = model.get_model_info()
    assert (info["num_cut_requests"], info["num_cut_tokens"]) == (1, 2)


def test_a_run_measures_tasks_on_its_schedule(made, tmp_path):
    """The run is otherwise the same, and its last scores are those of its checkpoint."""
    (tmp_path / "a.txt").write_text("".join(f"{n} fish, {word} fish\n" for n in range(60) for word in ("red", "blue")))
    experiment = tiny_experiment(
        data=TextFiles(paths=(str(tmp_path / "a.txt"),), length=LENGTH, test_fraction=0.25),
        model=Transformer(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32),
        task=LanguageModelling(),
        batch_size=8,
        steps=5,
        mesh=MeshConfig(),
        evaluation={"every_steps": 1},
    )
    measure = LmEval(tasks=("small_choice", "small_written"), include_path=str(made[1]), every=2, limit=3)
    measured = experiment.replaced({"evaluation": experiment.evaluation.model_copy(update={"measures": (measure,)})})
    devices = jax.devices()[:1]
    plain = jaxdl.train(experiment, tmp_path / "plain", quiet=True, devices=devices)
    run = jaxdl.train(measured, tmp_path / "run", quiet=True, devices=devices)
    np.testing.assert_array_equal(run.history["train/loss"], plain.history["train/loss"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row if name.startswith("eval/lm_eval/")}
    assert names == {
        f"eval/lm_eval/{x}" for x in ("small_choice/acc", "small_choice/acc_norm", "small_written/exact_match")
    }
    assert [row["step"] for row in rows if names <= row.keys()] == [2, 4, 5]
    parts = HarnessParts.of(jaxdl.restore(tmp_path / "run"), "it")
    options = TaskOptions(measure.tasks, measure.include_path, limit=3)
    scores = scores_of(evaluate_tasks(model_class()(parts=parts), options))
    assert {f"eval/lm_eval/{name}": value for name, value in scores.items()} == {name: rows[-1][name] for name in names}


def test_a_network_that_reads_no_text_has_no_tasks(made):
    measure = LmEval(tasks=("small_choice",), include_path=str(made[1]))
    experiment = tiny_experiment(evaluation={"measures": (measure,)}, mesh=MeshConfig())
    with pytest.raises(ConfigError, match="this network reads images, and tasks are texts"):
        jaxdl.train(experiment, quiet=True, devices=jax.devices()[:1])
