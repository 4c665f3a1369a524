"""The curves and the summary of a run."""

import io
import json
import math

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from jaxdl.report import (
    History,
    make_summary,
    plot_history,
    print_summary,
    write_summary,
)
from jaxdl.report import plots as plots_module
from jaxdl.report.summary import what_next

# ---- curves


def make_columns(num_rows=60, *, evaluate=True, seed=0):
    noise, history = np.random.default_rng(seed), History(None)
    for step in range(10, 10 * num_rows + 1, 10):
        loss = 2.3 * math.exp(-step / 200) + 0.1 * noise.random()
        history.write(
            {
                "step": step,
                "epoch": step / 90,
                "train/loss": loss,
                "learning_rate": 0.1,
                "examples_per_sec": 900.0 + step,
            }
        )
        if evaluate and step % 100 == 0:
            history.write({"step": step, "epoch": step / 90, "eval/loss": loss + 0.2, "eval/accuracy": 1 - loss / 3})
    return history.columns()


def pixels(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"), np.int32)


def last_label(axes):
    return axes.get_legend().get_texts()[-1].get_text()


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


@pytest.mark.slow
def test_curves_show_what_there_is(tmp_path):
    figure = plot_history(make_columns(), tmp_path / "new" / "curves.png", title="digits")
    assert titles(figure) == ["Loss", "Accuracy", "Learning rate", "Throughput"]
    image = pixels(tmp_path / "new" / "curves.png")
    assert image.shape[1] > 1200
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["curves.png"]
    label = last_label(figure.axes[1])
    assert label.startswith("best 9")
    assert label.endswith("% at step 600")


def test_curves_differ_with_the_data(tmp_path):
    for name, columns in {"a": make_columns(), "b": make_columns(), "c": make_columns(seed=1)}.items():
        plot_history(columns, tmp_path / name)
    a, b, c = (pixels(tmp_path / name) for name in "abc")
    assert np.array_equal(a, b)
    assert (a != c).any(axis=-1).sum() > 200


def test_curves_of_odd_histories(tmp_path):
    empty = plot_history({}, tmp_path / "empty.png")
    assert [text.get_text() for text in empty.texts] == ["Nothing measured yet"]
    assert pixels(tmp_path / "empty.png").std() > 0
    one = plot_history({"step": [0], "epoch": [0.0], "train/loss": [2.0]}, tmp_path / "one.png")
    assert titles(one) == ["Loss"]
    assert titles(plot_history(make_columns(evaluate=False))) == ["Loss", "Learning rate", "Throughput"]
    nothing = {"step": [1, 2], "train/loss": [math.nan, math.inf], "eval/accuracy": [None, "x"]}
    assert plot_history(nothing).axes == []
    holes = {"step": [1, 2, 3], "train/loss": [1.0, math.nan, 0.5], "eval/bits_per_byte": [math.nan, 2.0, math.inf]}
    figure = plot_history(holes, tmp_path / "holes.png")
    assert titles(figure) == ["Loss", "Bits per byte"]
    assert np.asarray(figure.axes[0].lines[0].get_xdata()).tolist() == [1, 3]


def test_the_best_evaluation_is_the_lowest_loss_and_the_highest_accuracy():
    columns = {"step": [1, 2, 3], "eval/loss": [3.0, 1.0, 2.0], "eval/accuracy": [0.5, 0.25, 0.125]}
    loss, accuracy = plot_history(columns).axes
    assert last_label(loss) == "best 1 at step 2"
    assert last_label(accuracy) == "best 50.00 % at step 1"


def test_the_best_evaluation_is_that_of_the_task_and_not_marked_where_it_is_not_known():
    columns = {"step": [1, 2, 3], "eval/error": [3.0, 1.0, 2.0], "eval/loss_share": [3.0, 1.0, 2.0]}
    error, share = plot_history(columns, best=("error", "max")).axes
    assert (last_label(error), last_label(share)) == ("best 3 at step 1", "evaluation")
    assert last_label(plot_history(columns).axes[0]) == "best 1 at step 2"


def test_the_legend_says_how_the_training_loss_differs():
    figure = plot_history(make_columns(), objective="with label smoothing 0.1")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels[:2] == ["training, with label smoothing 0.1", "evaluation, without label smoothing 0.1"]
    assert figure.axes[1].get_legend().get_texts()[0].get_text() == "evaluation", "of the loss only"


def test_of_text_the_throughput_is_drawn_in_tokens():
    columns = {"step": [1, 2], "examples_per_sec": [1.0, 2.0], "tokens_per_sec": [64.0, 128.0]}
    (axes,) = plot_history(columns).axes
    assert axes.get_ylabel() == "tokens / s"


def test_smoothing_keeps_a_constant_drops_a_spike_and_does_not_lag():
    assert plots_module._smooth(np.full(50, 3.0)) == pytest.approx(3.0)
    spike = np.ones(300)
    spike[150] = 1e6
    assert plots_module._smooth(spike) == pytest.approx(1.0)
    line = np.arange(1000.0)
    assert plots_module._smooth(line)[100:900] == pytest.approx(line[100:900])


# ---- summary


def summary_of(path):
    summary = make_summary(
        status="interrupted",
        steps=300,
        total_steps=840,
        metrics={"eval/accuracy": np.float32(0.5), "train/loss": math.nan},
        seconds={"train": 9.0, "eval": 1.0},
        mesh={"replica": 2, "fsdp": 4, "tensor": 1},
        extra={"seed": 7},
    )
    if path is not None:
        write_summary(path, summary)
    return summary


def test_summary_is_whole_and_valid(tmp_path):
    path = tmp_path / "run" / "summary.json"
    written = summary_of(path)
    read = json.loads(path.read_text())
    assert read == written == summary_of(None) | {"time": written["time"]}
    assert read["metrics"] == {"eval/accuracy": 0.5, "train/loss": None}
    assert (read["status"], read["steps"], read["total_sec"], read["extra"]) == ("interrupted", 300, 10.0, {"seed": 7})
    assert read["devices"] == {"platform": "cpu", "kind": "cpu", "num_devices": 8, "num_processes": 1}
    import jax

    assert read["versions"]["jax"] == jax.__version__
    assert set(read["versions"]) == {"python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "jaxdl"}
    assert [file.name for file in path.parent.iterdir()] == ["summary.json"]


def test_a_package_that_is_absent_has_an_unknown_version(monkeypatch):
    monkeypatch.setattr("jaxdl.report.summary.PACKAGES", ("no-such-package-here",))
    assert summary_of(None)["versions"]["no-such-package-here"] == "unknown"


def test_the_end_says_where_the_run_is_and_how_to_go_on(tmp_path):
    assert what_next(None, "finished", "images") == [
        ("kept", "nothing; give --workdir FOLDER to keep checkpoints and curves")
    ]
    assert what_next(tmp_path, "finished", "text") == [], "only what is there"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "curves.png").touch()
    found = dict(what_next(tmp_path, "stopped", "text"))
    assert found == {
        "curves": f"{tmp_path}/curves.png",
        "checkpoints": f"{tmp_path}/checkpoints",
        "use it": f"python -m jaxdl.generate --workdir {tmp_path} --prompt ...",
    }
    assert dict(what_next(tmp_path, "interrupted", "images"))["resume"] == "start the same command again"


def test_summary_on_the_console():
    plain, fancy = io.StringIO(), io.StringIO()
    print_summary(summary_of(None), Console(file=plain), [("curves", "runs/x/curves.png")])
    assert plain.getvalue().splitlines() == [
        "interrupted  step 300 of 840",
        "eval/accuracy  0.5",
        "train/loss  nan",
        "wall time  0:00:10: train 0:00:09 (90%), eval 0:00:01 (10%)",
        "mesh  replica 2 x fsdp 4 x tensor 1",
        "devices  8 x cpu (cpu), 1 process",
        "curves  runs/x/curves.png",
    ]
    print_summary(summary_of(None), Console(file=fancy, force_terminal=True, width=100, _environ={"TERM": "xterm"}))
    assert "replica 2 x fsdp 4 x tensor 1" in fancy.getvalue()
    assert "─" in fancy.getvalue()
