"""Runs beside each other: values, places of curves, differences of configs, the command."""

import json

import numpy as np
import pytest
from mistakes import refusal
from rights import without_rights

import jaxdl
from jaxdl.core.files import CONFIG_FILE, EXAMPLES_FILE, METRICS_FILE
from jaxdl.core.kinds import kinds
from jaxdl.models import Model
from jaxdl.report.compare import config_differences, plot_runs, read_curves, short_names
from jaxdl.report.compare.__main__ import main
from jaxdl.report.compare.curves import FORMER_FIELDS, metrics_of
from jaxdl.report.status import Record, State, utc_now, write_record

EXAMPLES, BATCH = 200, 20


def make_run(folder, losses, rates, config):
    """A run of a report every 10 steps, and an evaluation after each other report."""
    folder.mkdir(parents=True)
    rows = []
    for number, (loss, rate) in enumerate(zip(losses, rates, strict=True), start=1):
        place = {"step": 10 * number, "epoch": 10 * number * BATCH / EXAMPLES}
        rows.append(place | {"train/loss": loss, "examples_per_sec": rate})
        if number % 2 == 0:
            rows.append(place | {"eval/accuracy": 1 - loss / 10, "eval/loss": None if loss > 5 else loss})
    rows.insert(1, {"step": 10, "event": "resumed", "kind": "resume"})
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 999, "tra'
    (folder / METRICS_FILE).write_text(text)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    (folder / EXAMPLES_FILE).write_text(json.dumps({"train": {"examples": EXAMPLES}}))
    return folder


@pytest.fixture
def runs(tmp_path):
    one = {"optimizer": {"kind": "sgd", "learning_rate": 0.1}, "seed": 0, "phases": []}
    other = {"optimizer": {"kind": "lars", "learning_rate": 0.1, "trust": 1}, "seed": 0, "phases": []}
    return [
        make_run(tmp_path / "runs" / "a", [4, 3, 2, 2.5], [100, 50, 100, 200], one),
        make_run(tmp_path / "runs" / "sweep" / "b", [9, 8], [100, 100], other),
    ]


def test_curves_by_step_by_examples_and_by_time(runs):
    one = read_curves(runs[0])
    steps, losses = one.points("train/loss")
    assert (list(steps), list(losses)) == ([10, 20, 30, 40], [4, 3, 2, 2.5])
    np.testing.assert_allclose(one.points("train/loss", "examples")[0], [200, 400, 600, 800])
    # 200 examples a report, by its own rate.
    np.testing.assert_allclose(one.points("train/loss", "time")[0], [2, 6, 8, 9])
    np.testing.assert_allclose(one.points("eval/accuracy", "time")[0], [6, 9])
    assert list(read_curves(runs[1]).points("eval/loss")[0]) == [], "a loss that is not finite has no place"


def test_last_and_best(runs):
    one = read_curves(runs[0])
    assert (one.last("train/loss"), one.best("train/loss")) == (2.5, (2, 30))
    assert one.best("eval/accuracy") == (0.75, 40)
    assert (one.last("eval/top5"), one.best("eval/top5")) == (None, None)


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("eval/error", {"best": 0.9, "best_step": 2}),  # As the task says.
        ("eval/rank", {"best": None, "best_step": None}),
        ("eval/loss_share", {"best": None, "best_step": None}),
        ("eval/loss/wiki", {"best": 0.1, "best_step": 1}),
        ("eval/loss/accuracy", {"best": 0.1, "best_step": 1}),  # Of a source of that name, and of the next one.
        ("eval/loss/error", {"best": 0.1, "best_step": 1}),
        ("eval/bits_per_byte/wiki", {"best": 0.1, "best_step": 1}),
        ("eval/error/wiki", {"best": 0.9, "best_step": 2}),
        ("eval/replicas/error", {"best": 0.9, "best_step": 2}),
        ("eval/accuracy_top5", {"best": 0.9, "best_step": 2}),
    ],
)
def test_the_best_value_is_that_of_the_task_and_none_where_it_is_not_known(tmp_path, capsys, metric, best):
    task = {"kind": "loss", "best_metric": "error", "best_mode": "max"}
    for name in "ab":
        folder = make_run(tmp_path / name, [], [], {"task": task})
        rows = [{"step": 1, metric: 0.1}, {"step": 2, metric: 0.9}]
        (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    main([str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"]["a"]["metrics"] == {metric: {"last": 0.9} | best}
    main([str(tmp_path), "--out", str(tmp_path / "out.png")])
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells == ["a", "2", "0.9"] + ([f"{best['best']:g}", "at", str(best["best_step"])] if best["best"] else [])


@pytest.mark.parametrize(
    ("mode", "best"), [("max", (0.75, 20)), ("min", (0.5, 40)), ("", None)], ids=["max", "min", "older version"]
)
def test_the_best_metric_of_an_own_task_is_in_the_status(tmp_path, mode, best):
    folder = make_run(tmp_path / "a", [], [], {"task": {"kind": "mine:Ranking"}})
    rows = [{"step": 20, "eval/right": 0.75}, {"step": 40, "eval/right": 0.5}]
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    now = utc_now()
    write_record(folder, Record(State.COMPLETED, now, now, best_metric="right" if mode else "", best_mode=mode))
    assert read_curves(folder).best("eval/right") == best


def test_what_a_run_measured_after_it_diverged_is_not_its_best(runs, tmp_path, capsys, monkeypatch):
    gone = make_run(tmp_path / "runs" / "gone", [4, 3, 2e9, 8e21, 8e21, 8e21], [100] * 6, {"seed": 1})
    with (gone / METRICS_FILE).open("a") as file:
        file.write("\n" + json.dumps({"step": 60, "eval/accuracy": 0.96}) + "\n")
    run = read_curves(gone)
    assert run.last("eval/accuracy") == 0.96
    assert run.best("eval/accuracy") == (pytest.approx(0.7), 20)
    assert read_curves(runs[0]).divergence is None
    monkeypatch.chdir(tmp_path)
    main(["runs", "--json"])
    found = json.loads(capsys.readouterr().out)["runs"]
    why = "the training loss is 8e+21 at step 60, and had been 4"
    assert [found[name]["diverged"] for name in ("a", "gone")] == [None, why]
    main(["runs"])
    assert f"gone diverged at step 30: {why}; its best values are those before" in capsys.readouterr().out


def test_differences_of_configs(runs):
    curves = [read_curves(run) for run in runs]
    assert config_differences(curves) == {"optimizer.kind": ["sgd", "lars"], "optimizer.trust": [None, 1]}
    assert short_names(runs) == ["a", "sweep/b"]
    assert metrics_of(curves) == ["train/loss", "eval/loss", "eval/accuracy"]


def test_fields_of_earlier_versions_have_their_names_of_now(tmp_path):
    former = {old: new for kind in kinds(Model).values() for old, new in kind.former_names.items()}
    assert {f"model.{old}": f"model.{new}" for old, new in former.items()} == FORMER_FIELDS
    configs = ({"model": {"layers_per_turn": 2}}, {"model": {"scan_unroll": 2}}, {"model": {"scan_unroll": 1}})
    curves = [read_curves(make_run(tmp_path / str(n), [1], [1], config)) for n, config in enumerate(configs)]
    assert config_differences(curves) == {"model.scan_unroll": [2, 2, 1]}


def test_a_figure_has_a_line_for_each_run_that_has_the_metric(runs):
    curves = [read_curves(run) for run in runs]
    figure = plot_runs(curves, ["a", "b"], ["train/loss", "eval/loss"], "examples")
    panels = figure.axes
    assert [len([line for line in axes.lines if len(line.get_xdata())]) for axes in panels] == [2, 1]
    assert panels[0].get_xlabel() == "training examples seen"


def test_the_command(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["runs"])
    text = capsys.readouterr().out
    assert "2 at 30" in text
    assert [line.split() for line in text.splitlines() if line.startswith("optimizer.")] == [
        ["optimizer.kind", "sgd", "lars"],
        ["optimizer.trust", "1"],
    ]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "compare.png").unlink()
    main(["runs/a", "runs/sweep/b", "--json", "--metric", "train/loss"])
    found = json.loads(capsys.readouterr().out)
    assert found["runs"]["a"]["metrics"] == {"train/loss": {"last": 2.5, "best": 2.0, "best_step": 30}}
    assert found["config"]["optimizer.kind"] == {"a": "sgd", "sweep/b": "lars"}
    assert not (tmp_path / "compare.png").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["--metric", "train/loss", "runs/a", "runs/sweep/b", "--json"],
        ["--json", "--metric", "train/loss", "runs/*", "runs/sweep"],
        ["runs/a", "--metric", "train/loss", "runs/sweep", "--json"],
        ["--json", "runs/a", "runs/sweep", "--metric", "train/loss"],
    ],
)
def test_workdirs_may_follow_the_metrics(runs, tmp_path, capsys, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    main(args)
    found = json.loads(capsys.readouterr().out)["runs"]
    assert {name: [*run["metrics"]] for name, run in found.items()} == {"a": ["train/loss"], "sweep/b": ["train/loss"]}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no workdir"),
        (["--metric", "eval/loss", "rums"], "no workdir: --metric took eval/loss rums. Put workdirs first"),
        (["runs/a"], "this is one run"),
        (["runs", "--metric", "beauty"], "none of these runs has it"),
        (["runs", "--by", "moon"], "invalid choice: 'moon'"),
        (["runs", "--out", "none/x.png"], "there is no folder none"),
    ],
)
def test_mistakes_are_one_message(runs, tmp_path, monkeypatch, capsys, args, words):
    monkeypatch.chdir(tmp_path)
    assert words in refusal(capsys, *args, run=main)


def test_folders_that_may_not_be_read_are_left_out_unless_they_are_named(runs, tmp_path, monkeypatch, capsys):
    closed = tmp_path / "runs" / "closed"
    closed.mkdir(mode=0o000)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # For folders above may not be searched.
    with without_rights():
        main(["runs", "--json"])
        assert "runs/closed" in refusal(capsys, "runs", "runs/closed", "--json", run=main)
    closed.chmod(0o700)


def test_numbers_that_no_run_writes_are_left_out(runs):
    with (runs[0] / METRICS_FILE).open("a") as file:
        odd = [{"step": 50, "epoch": 5.0, "train/loss": 10**400, "examples_per_sec": "x"}, {"step": 10**400}]
        file.write("\n" + "".join(json.dumps(row) + "\n" for row in odd) + "[" * 100_000 + "\n")
    one = read_curves(runs[0])
    assert (one.last("train/loss"), one.rows[-1]["step"]) == (2.5, 50)
    np.testing.assert_allclose(one.points("train/loss", "time")[0], [2, 6, 8, 9])
    (runs[0] / EXAMPLES_FILE).write_text('{"train": {"examples": Infinity}}')
    assert read_curves(runs[0]).train_examples is None
    (runs[0] / CONFIG_FILE).write_text("[" * 100_000)
    with pytest.raises(jaxdl.ConfigError, match=r"runs/a: its .* cannot be read: it is nested too deeply"):
        read_curves(runs[0])


def test_a_run_that_measured_nothing_is_named(runs):
    (runs[0] / METRICS_FILE).write_text("")
    with pytest.raises(jaxdl.ConfigError, match="runs/a: there is no measurement"):
        read_curves(runs[0])
    (runs[1] / EXAMPLES_FILE).unlink()
    with pytest.raises(jaxdl.ConfigError, match="how many examples there were"):
        read_curves(runs[1]).points("train/loss", "time")
