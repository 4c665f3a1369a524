"""Reports: history and its resume, TensorBoard events, progress lines, curves, the stopwatch and the summary."""

import io
import json
import math
import re
import struct
import time

import numpy as np
import pandas
import pytest
from PIL import Image
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from jaxdl.config import ConfigError
from jaxdl.files import METRICS_FILE, TENSORBOARD_FOLDER
from jaxdl.report import (
    History,
    Progress,
    ReportConfig,
    StepCounter,
    Stopwatch,
    format_row,
    make_summary,
    plot_history,
    print_summary,
    write_summary,
)
from jaxdl.report import plots as plots_module
from jaxdl.report.history import replace_file
from jaxdl.report.lines import format_duration, format_number
from jaxdl.report.summary import what_next


def lines_of(workdir):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (workdir / METRICS_FILE).read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# ---- history


def test_history_keeps_rows_and_writes_each_line_at_once(tmp_path):
    rows = [{"step": 10, "epoch": 0.5, "train/loss": 2.25}, {"step": 20, "epoch": 1.0, "eval/accuracy": 0.75}]
    with History(tmp_path / "new" / "run", tensorboard=False) as history:
        for count, row in enumerate(rows, start=1):
            history.write(row)
            assert lines_of(tmp_path / "new" / "run") == rows[:count]  # on disk before the run ends
    assert history.rows == rows
    assert not (tmp_path / "new" / "run" / TENSORBOARD_FOLDER).exists()


def test_history_takes_array_scalars(tmp_path):
    import jax.numpy as jnp

    with History(tmp_path, tensorboard=False) as history:
        history.write(
            {"step": np.int64(3), "a": jnp.float32(0.5), "b": np.float32(0.25), "c": jnp.bfloat16(2), "d": True}
        )
    assert lines_of(tmp_path) == [{"step": 3, "a": 0.5, "b": 0.25, "c": 2.0, "d": True}]
    assert type(history.rows[0]["step"]) is int
    with pytest.raises(AssertionError, match="integer step"):
        history.write({"step": 1.5})


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    with History(tmp_path) as history:
        history.write({"step": 1, "train/loss": math.nan, "x": math.inf, "y": np.float32("-inf")})
    assert lines_of(tmp_path) == [{"step": 1, "train/loss": None, "x": None, "y": None}]
    assert math.isinf(history.rows[0]["x"])  # in memory the value is kept
    with History(tmp_path, resume_step=1) as again:
        assert math.isnan(again.columns()["train/loss"][0])


def test_resume_drops_later_rows_and_a_half_written_line(tmp_path):
    with History(tmp_path, tensorboard=False) as history:
        for step in range(10, 60, 10):
            history.write({"step": step, "train/loss": 1 / step})
        history.write({"step": 30, "eval/loss": 3.0})
    path = tmp_path / METRICS_FILE
    with path.open("ab") as file:
        file.write(b'{"step": 60, "train/lo')
    with History(tmp_path, resume_step=30, tensorboard=False) as resumed:
        assert [row["step"] for row in resumed.rows] == [10, 20, 30, 30]
        assert lines_of(tmp_path) == resumed.rows
        resumed.write({"step": 40, "train/loss": 9.0})
    assert [(row["step"], row.get("train/loss")) for row in lines_of(tmp_path)[3:]] == [(30, None), (40, 9.0)]
    assert [file.name for file in tmp_path.iterdir()] == [METRICS_FILE]  # no temporary file is left


@pytest.mark.parametrize("tail", [b'{"step": 2', b"\x00\x00\x00", b'{"step": 2, "name": "\xff', b"7", b'{"loss": 1}'])
def test_whatever_a_kill_left_behind_is_dropped(tmp_path, tail):
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n' + tail)
    with History(tmp_path, resume_step=5, tensorboard=False) as history:
        assert history.rows == [{"step": 1}]


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path):
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n{"step": 2}')
    with History(tmp_path, resume_step=5, tensorboard=False) as history:
        history.write({"step": 6})
    assert [row["step"] for row in lines_of(tmp_path)] == [1, 2, 6]


def test_a_bad_line_in_the_middle_is_dropped_with_a_warning(tmp_path):
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\ngarbage\n{"step": 2}\n')
    with pytest.warns(UserWarning, match="line 2"):
        history = History(tmp_path, resume_step=5, tensorboard=False)
    assert [row["step"] for row in history.rows] == [1, 2]
    history.close()


def test_a_run_that_starts_over_has_a_new_history(tmp_path):
    with History(tmp_path, tensorboard=False) as history:
        history.write({"step": 0, "eval/loss": 1.0})
    with History(tmp_path, tensorboard=False) as history:
        assert history.rows == []
        assert lines_of(tmp_path) == []


def test_without_a_workdir_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with History(None) as history:
        history.write({"step": 1, "train/loss": 0.5})
    assert history.columns() == {"step": [1], "train/loss": [0.5]}
    assert list(tmp_path.iterdir()) == []


def test_columns_are_ready_for_pandas():
    history = History(None)
    history.write({"epoch": 0.5, "step": 1, "train/loss": 2.0})
    history.write({"step": 2, "eval/loss": 1.0, "note": "best"})
    columns = history.columns()
    assert list(columns) == ["step", "epoch", "train/loss", "eval/loss", "note"]
    frame = pandas.DataFrame(columns)
    assert frame["step"].dtype == np.int64
    assert frame["train/loss"].dtype == np.float64
    assert frame["train/loss"].isna().tolist() == [False, True]
    assert columns["note"] == [None, "best"]
    assert History(None).columns() == {}


def test_replace_file_leaves_the_old_content_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def broken(*paths):
        raise OSError("disk gone")

    monkeypatch.setattr("jaxdl.report.history.os.replace", broken)
    with pytest.raises(OSError, match="disk gone"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_report_config_refuses_a_profile_length_without_a_start():
    assert ReportConfig().replaced({"profile_start_step": 5, "profile_steps": 7}).profile_steps == 7
    with pytest.raises(ConfigError, match="profile_start_step is not set"):
        ReportConfig().replaced({"profile_steps": 7})
    with pytest.raises(ConfigError, match="every_steps"):
        ReportConfig().replaced({"every_steps": 0})


# ---- TensorBoard


def crc32c(data):
    """The masked CRC-32C of the TFRecord format, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events_of(path):
    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == crc32c(data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == crc32c(body)
        events.append(Event.FromString(body))
        data = data[16 + length :]
    return events


def test_tensorboard_events_and_purge_on_resume(tmp_path):
    with History(tmp_path) as history:
        history.write({"step": 10, "train/loss": 0.5, "note": "text", "bad": math.nan})
        history.write({"step": 20, "train/loss": 0.25})
    with History(tmp_path, resume_step=10) as history:
        history.write({"step": 20, "train/loss": 0.125})
    first, second = sorted((tmp_path / TENSORBOARD_FOLDER).iterdir(), key=lambda path: path.name.endswith("from10"))
    scalars = [(e.step, v.tag, v.simple_value) for e in events_of(first) for v in e.summary.value]
    assert scalars == [(10, "train/loss", 0.5), (20, "train/loss", 0.25)]
    events = events_of(second)
    assert [e.step for e in events if e.HasField("session_log")] == [11]  # hides what came after step 10
    assert [(e.step, v.simple_value) for e in events for v in e.summary.value] == [(20, 0.125)]


# ---- progress


def test_format_row_is_the_documented_line():
    row = {"lr": 0.05, "step": 120, "epoch": 5.3, "train/loss": 0.12341, "examples_per_sec": 12345.4, "eta_sec": 31.2}
    line = "step 120/840  epoch 5.3  loss 0.1234  lr 0.05  12,345 examples/s  eta 0:00:31"
    assert format_row(row, 840) == line
    evaluated = {"step": 840, "eval/loss": 0.5, "eval/accuracy": 0.98764, "x": None, "train/loss": math.nan}
    assert format_row(evaluated, 840) == "step 840/840  loss nan  eval/loss 0.5  eval/accuracy 0.9876"
    text = {"step": 1, "examples_per_sec": 90.0, "tokens_per_sec": 9000.0}
    assert format_row(text, 2, unit="tokens") == "step 1/2  9,000 tokens/s"
    assert "  lr 1e-05" in format_row({"step": 1, "learning_rate": 1e-5}, 2)


def test_numbers_and_durations():
    assert [format_number(value) for value in (1234567, 12345.6, 0.00012341, math.inf, "word", 3)] == [
        "1,234,567",
        "12,346",
        "0.0001234",
        "inf",
        "word",
        "3",
    ]
    assert [format_duration(value) for value in (0.4, 59.6, 3661, 90061, math.inf)] == [
        "0:00:00",
        "0:01:00",
        "1:01:01",
        "1d 1:01:01",
        "?",
    ]


def test_plain_lines_where_there_is_no_terminal():
    output = io.StringIO()
    with Progress(100, StepCounter(), examples_per_step=64, console=Console(file=output)) as progress:
        progress.note("resumed from step [0]")
        progress.status("compiling")
        progress.status("training")
        for step in range(1, 4):
            advance(progress, step)
        progress.report({"step": 3, "train/loss": 0.5, "examples_per_sec": 1e3, "eta_sec": 2.0})
        progress.report({"step": 3, "eval/accuracy": 0.25})
        progress.warn("the disk is slow")
    assert output.getvalue().splitlines() == [
        "resumed from step [0]",
        "compiling ...",
        "step 3/100  loss 0.5  1,000 examples/s  eta 0:00:02",
        "step 3/100  eval/accuracy 0.25",
        "warning: the disk is slow",
    ]


def test_a_quiet_console_says_nothing():
    output = io.StringIO()
    with Progress(
        10, StepCounter(), examples_per_step=1, console=Console(file=output, quiet=True), quiet=True
    ) as progress:
        progress.note("hidden")
        progress.report({"step": 1, "train/loss": 0.5})
    assert output.getvalue() == ""


def advance(progress, step):
    """As the loop does."""
    progress._counter.step = step
    progress.advance()


def test_a_terminal_gets_a_bar_and_keeps_evaluations():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=140, height=30, _environ={"TERM": "xterm"})
    with Progress(
        500, StepCounter(), examples_per_step=64, epoch_at=lambda step: step / 50, console=console
    ) as progress:
        progress.status("evaluating")
        advance(progress, 125)
        progress.report({"step": 125, "train/loss": 0.8765, "train/accuracy": 0.5})
        progress.report({"step": 125, "eval/accuracy": 0.4321})
        progress.stop()
        progress.stop()
    text = output.getvalue()
    for part in ("evaluating", "125/500", "epoch 2.5", "loss 0.8765", "eval/accuracy 0.4321", "━"):
        assert part in text
    assert text.count("step 125/500") == 1  # the training row is in the bar, the evaluation is a line that stays
    quiet = io.StringIO()
    console = Console(file=quiet, force_terminal=True, _environ={"TERM": "xterm"})
    with Progress(500, StepCounter(), examples_per_step=64, console=console, quiet=True) as progress:
        progress.report({"step": 1, "train/loss": 0.5})
    assert quiet.getvalue() == "step 1/500  loss 0.5\n"


WIDE_ROW = {"step": 12345, "epoch": 5.3, "train/loss": 0.12341, "examples_per_sec": 12345.4, "eta_sec": 31.2} | {
    f"eval/metric_{number}": number + 0.1234 for number in range(9)
}


@pytest.mark.parametrize("width", [24, 40, 79, 80, 100, 140])
@pytest.mark.parametrize("quiet", [False, True])
def test_no_number_is_lost_on_a_narrow_terminal(width, quiet):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, color_system=None, _environ={"TERM": "xterm"})
    with Progress(99999, StepCounter(), examples_per_step=64, console=console, quiet=quiet) as progress:
        progress.report(WIDE_ROW)
        progress.note("training waits for data 25 % of the time; the slowest stage is 'decode', 80 % of the work")
    text = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    lines = re.split("[\r\n]+", text)
    assert max(map(len, lines)) <= width
    whole = format_row(WIDE_ROW, 99999)
    for part in whole.split("  "):
        assert any(part in line for line in lines), part
    if width == 80:  # The row needs more than one line, and the bar fits too.
        assert whole not in text


def test_a_pipe_gets_whole_lines():
    output = io.StringIO()
    Progress(99999, StepCounter(), examples_per_step=64, console=Console(file=output, width=40)).report(WIDE_ROW)
    assert output.getvalue() == format_row(WIDE_ROW, 99999) + "\n"
    assert len(output.getvalue()) > 200


def test_plain_lines_say_what_takes_long_and_how_long(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("jaxdl.report.progress.time.perf_counter", lambda: now[0])
    output = io.StringIO()
    progress = Progress(9, StepCounter(), examples_per_step=32, console=Console(file=output))
    progress.status("compiling")
    now[0] += 75
    for number in range(2):  # The second time, the statuses have been shown before.
        progress.status("evaluating")
        for done in range(4):
            progress.part(done, 4)
            now[0] += 6
        progress.status("training")
        progress.report({"step": number, "train/loss": 1.0})
    progress.status("compiling")
    progress.status("saving")
    assert output.getvalue().splitlines() == [
        "compiling ...",
        "compiling: 0:01:15",
        "evaluating ...",
        "evaluating 2/4",
        "evaluating: 24.0 s",
        "step 0/9  loss 1",
        "evaluating 2/4",
        "step 1/9  loss 1",
        "compiling ...",  # It took less than a second.
    ]


def test_a_notebook_is_not_flooded(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr("jaxdl.report.progress.time.perf_counter", lambda: now[0])
    console = Console(file=io.StringIO(), force_jupyter=True)
    progress = Progress(100, StepCounter(), examples_per_step=32, console=console)
    monkeypatch.setattr(progress, "_say", lambda text, style: said.append(text))
    for step in range(1, 101):
        now[0] += 1
        progress.report({"step": step, "train/loss": 1.0})
    progress.report({"step": 100, "eval/loss": 1.0})
    assert len(said) == 12  # Step 1, one every 10 s, the last step, and the evaluation.
    assert said[-2:] == ["step 100/100  loss 1", "step 100/100  eval/loss 1"]


def test_rate_and_time_left_leave_out_what_is_not_training(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("jaxdl.report.progress.time.perf_counter", lambda: now[0])
    output = io.StringIO()
    progress = Progress(1000, StepCounter(100), examples_per_step=32, console=Console(file=output))
    assert progress.eta_sec() is None
    progress.status("compiling")
    now[0] += 60
    progress.status("training")
    for step in range(101, 201):
        now[0] += 0.1
        advance(progress, step)
    assert progress.steps_per_sec() == pytest.approx(10, rel=0.03)
    assert progress.eta_sec() == pytest.approx(80, rel=0.03)
    progress.status("evaluating")
    now[0] += 1000
    progress.status("training")
    assert progress.steps_per_sec() == pytest.approx(10, rel=0.03)  # nothing new is known, so the old rate holds
    for step in range(201, 301):
        now[0] += 0.2
        advance(progress, step)
    assert progress.steps_per_sec() == pytest.approx(5, rel=0.03)
    progress.report({"step": 300, "train/loss": 1.0})
    assert output.getvalue().splitlines()[-1] == "step 300/1000  loss 1  160 examples/s  eta 0:02:20"


def test_the_window_is_about_ten_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("jaxdl.report.progress.time.perf_counter", lambda: now[0])
    progress = Progress(10**6, StepCounter(), examples_per_step=1, console=Console(file=io.StringIO()))
    progress.status("training")
    step = 0
    for speed in (1, 100):
        for _ in range(200):
            now[0] += 0.1
            step += speed
            advance(progress, step)
    assert progress.steps_per_sec() == pytest.approx(1000)


def test_advance_is_cheap():
    progress = Progress(10**6, StepCounter(), examples_per_step=64, console=Console(file=io.StringIO()))
    progress.status("training")
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        for step in range(2000):
            advance(progress, step)
        best = min(best, (time.perf_counter() - begin) / 2000)
    assert best < 20e-6


# ---- stopwatch


class FakeClock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


def test_nested_phases_are_exclusive_and_add_up():
    clock = FakeClock()
    watch = Stopwatch(clock)
    clock.now += 1
    with watch("train"):
        clock.now += 2
        with watch("eval"):
            clock.now += 4
            with watch("data"):
                clock.now += 8
            with watch("eval"):  # the same phase inside itself is not counted twice
                clock.now += 16
        clock.now += 32
        assert watch.seconds() == {"other": 1, "train": 34, "eval": 20, "data": 8}
        clock.now += 64
    clock.now += 128
    assert watch.seconds() == {"other": 129, "train": 98, "eval": 20, "data": 8}
    assert sum(watch.seconds().values()) == clock.now - 50


def test_an_error_closes_its_phase():
    clock = FakeClock()
    watch = Stopwatch(clock)

    def fail():
        clock.now += 1
        raise RuntimeError

    with pytest.raises(RuntimeError), watch("train"), watch("data"):
        fail()
    clock.now += 2
    assert watch.seconds() == {"other": 2, "train": 0, "data": 1}


def test_phases_add_up_on_a_real_clock():
    begin = time.perf_counter()
    watch = Stopwatch()
    for _ in range(1000):
        with watch("train"), watch("data"):
            pass
    total = sum(watch.seconds().values())
    assert 0 < total <= time.perf_counter() - begin


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
        "use it": f"python -m jaxdl.sample --workdir {tmp_path} --prompt ...",
        "resume": "start the same command again without --max-steps",
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
