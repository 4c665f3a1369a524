"""Progress on the console, and the stopwatch of its phases."""

import io
import math
import re
import time

import pytest
from rich.console import Console

from jaxdl.report import (
    Progress,
    StepCounter,
    Stopwatch,
    format_row,
)
from jaxdl.report.lines import format_duration, format_number

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
    assert output.getvalue().splitlines() == [
        "resumed from step [0]",
        "compiling ...",
        "step 3/100  loss 0.5  1,000 examples/s  eta 0:00:02",
        "step 3/100  eval/accuracy 0.25",
    ]


def test_a_quiet_console_says_nothing():
    output = io.StringIO()
    with Progress(10, StepCounter(), examples_per_step=1, console=Console(file=output, quiet=True)) as progress:
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
    dumb = io.StringIO()
    console = Console(file=dumb, force_terminal=True, _environ={"TERM": "dumb"})
    with Progress(500, StepCounter(), examples_per_step=64, console=console) as progress:
        progress.report({"step": 1, "train/loss": 0.5})
    assert dumb.getvalue() == "step 1/500  loss 0.5\n"


WIDE_ROW = {"step": 12345, "epoch": 5.3, "train/loss": 0.12341, "examples_per_sec": 12345.4, "eta_sec": 31.2} | {
    f"eval/metric_{number}": number + 0.1234 for number in range(9)
}


@pytest.mark.parametrize("width", [24, 40, 79, 80, 100, 140])
def test_no_number_is_lost_on_a_narrow_terminal(width):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, color_system=None, _environ={"TERM": "xterm"})
    with Progress(99999, StepCounter(), examples_per_step=64, console=console) as progress:
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
