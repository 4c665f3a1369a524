"""status.json, the table of runs, and what is kept of failures: files alone, no run."""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
from datetime import UTC, datetime, timedelta

import pytest
from mistakes import refusal
from rights import without_rights
from test_imports import in_a_fresh_process

from jaxdl.core.files import FAILURES_FOLDER, LEASE_FILE, METRICS_FILE, STATUS_FILE, SUMMARY_FILE
from jaxdl.parallel.lease import this_process
from jaxdl.report.status import (
    KEPT_FAILURES,
    Action,
    Reason,
    Record,
    State,
    StatusWriter,
    add_failure,
    find_workdirs,
    keep_failure,
    next_failure,
    read_record,
    read_row,
    tail_rows,
    utc_now,
    write_record,
)
from jaxdl.report.status.__main__ import main
from jaxdl.report.status.record import SILENT_SEC
from jaxdl.report.status.rows import parse_row
from jaxdl.report.status.table import for_terminal, metric_columns, note, plain, sort_rows

HERE = this_process()
ELSEWHERE = dataclasses.replace(HERE, place="another boot", host="node7")


def ago(seconds):
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")


def record(state=State.PROCESSING, **changes):
    values = {"since": ago(100), "seen": ago(1), "step": 30, "end_step": 100, "total_steps": 100, "hosts": ("a", "b")}
    return Record(state, **(values | {"process": HERE, "failure": 1} | changes))


def make_run(folder, status=None, rows=()):
    folder.mkdir(parents=True, exist_ok=True)
    if status is not None:
        write_record(folder, status)
    if rows:
        (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def gone():
    """The record of a process of this machine that has ended."""
    code = "from jaxdl.parallel.lease import this_process; print(this_process().to_bytes().decode())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return type(HERE)(**json.loads(done.stdout))


def test_a_record_comes_back_from_its_file(tmp_path):
    reason = Reason("killed", 137, utc_now())
    before = record(State.FAILED, reason=reason, next_action=Action.RESTART, next_text="restart 1 of 2", restart=3)
    write_record(tmp_path, before)
    assert read_record(tmp_path) == before
    newer = json.loads((tmp_path / STATUS_FILE).read_text()) | {"added_later": 1}
    (tmp_path / STATUS_FILE).write_text(json.dumps(newer))
    assert read_record(tmp_path) == before
    assert read_record(tmp_path / "none") is None


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b'{"state": "PROCESSING"', b'{"state": "DANCING"}', b'{"state": "FAILED", "since": "x"}'),
        *(b"\xff", b"[" * 100_000),
        *({"seen": 5}, {"since": None}, {"step": True}, {"step": 10**400}, {"end_step": "10"}, {"failure": None}),
        *({"doing": None}, {"doing": "\ud800"}, {"next_text": ["a"]}, {"restart": "x"}, {"hosts": 5}),
        *({"reason": {"text": 5}}, {"reason": {"text": "x", "exit_code": "3"}}, {"reason": ["a"]}),
        {"process": {"token": "a", "pid": "x"}},
    ],
)
def test_a_damaged_status_is_a_row_that_says_so(tmp_path, content):
    make_run(tmp_path / "a", rows=[{"step": 4, "train/loss": 1.5}])
    if isinstance(content, dict):  # Fields that no run writes.
        content = json.dumps(json.loads(record().to_bytes()) | content).encode()
    (tmp_path / "a" / STATUS_FILE).write_bytes(content)
    row = read_row(tmp_path / "a")
    assert row.state == "UNKNOWN"
    assert row.problem.startswith("status.json cannot be read")
    assert (row.step, row.metrics["train/loss"]) == (4, 1.5)
    assert "status.json cannot be read" in plain([row], [])


SUMMARY = {"status": "finished", "steps": 1, "total_steps": 3, "time": "2026-01-01"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (SUMMARY_FILE, json.dumps(SUMMARY | {"steps": float("inf")})),
        (SUMMARY_FILE, json.dumps(SUMMARY | {"total_steps": None})),
        (SUMMARY_FILE, "[" * 100_000),
        (LEASE_FILE, "[" * 100_000),
        (LEASE_FILE, json.dumps(dataclasses.asdict(HERE) | {"pid": 10**17})),
    ],
)
def test_another_damaged_file_is_a_row_that_says_so(tmp_path, name, content):
    make_run(tmp_path, rows=[{"step": 4, "train/loss": 1.5}])
    (tmp_path / name).write_text(content)
    row = read_row(tmp_path)
    assert (row.state, row.step, row.metrics) == ("UNKNOWN", 4, {"train/loss": 1.5})
    assert "cannot be read" in plain([row], [])


def test_rows_of_metrics_that_no_run_writes(tmp_path):
    make_run(tmp_path, record(), rows=[{"step": 31, "train/loss": 10**400, "epoch": "x"}, {"step": 10**400}])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write("[" * 100_000 + "\n")
    row = read_row(tmp_path)
    assert (row.step, row.problem) == (31, "")
    assert "inf" in plain([row], ["train/loss"])


def test_a_killed_run_is_told_from_a_live_one(tmp_path, gone):
    """By its process on this machine; by the time of its last status elsewhere."""
    cases = {
        "live": (record(), True),
        "killed": (record(process=gone, seen=ago(1)), False),
        "live elsewhere": (record(process=ELSEWHERE), True),
        "silent elsewhere": (record(process=ELSEWHERE, seen=ago(SILENT_SEC + 600)), False),
        "live here, and slow to write": (record(seen=ago(SILENT_SEC + 600)), True),
        "not begun": (record(State.QUEUED, process=None), None),
        "complete": (record(State.COMPLETED), False),
    }
    rows = {name: read_row(make_run(tmp_path / name, status)) for name, (status, _) in cases.items()}
    assert {name: row.alive for name, row in rows.items()} == {name: alive for name, (_, alive) in cases.items()}
    assert rows["killed"].next_action == "resume"
    assert "killed" in note(rows["killed"])
    assert plain([rows["killed"]], []).splitlines()[1].split()[1] == "LOST"
    starting = read_row(make_run(tmp_path / "starting", record(State.DEPLOY, process=gone, step=0, doing="compiling")))
    line = plain([starting], []).splitlines()[1]
    assert line.split()[1] == "LOST"
    assert "last seen compiling 1 s ago: killed without a message" in line or "last seen compiling 2 s ago" in line
    assert note(starting).endswith("lost, before this start made a step; the same command begins at step 0")
    assert "last seen 11 min ago" in note(rows["silent elsewhere"])
    assert rows["complete"].reason == ""


def test_a_live_run_has_the_step_of_its_newest_row(tmp_path):
    rows = [
        {"step": 50, "train/loss": 0.5},
        {"step": 50, "eval/accuracy": 0.9},
        {"step": 99, "event": "x", "kind": "other"},
    ]
    assert read_row(make_run(tmp_path / "a", record(), rows)).step == 50
    assert read_row(make_run(tmp_path / "b", record(State.HALTED), rows)).step == 30, "a rollback may have been later"
    assert read_row(tmp_path / "a").metrics == {"train/loss": 0.5, "eval/accuracy": 0.9}


def test_runs_of_older_versions(tmp_path, gone):
    summary = {"status": "interrupted", "steps": 7, "total_steps": 9, "time": ago(60)}
    make_run(tmp_path / "stopped", rows=[{"step": 7, "train/loss": 1.0}])
    (tmp_path / "stopped" / SUMMARY_FILE).write_text(json.dumps(summary))
    make_run(tmp_path / "trial")
    (tmp_path / "trial" / SUMMARY_FILE).write_text(json.dumps(summary | {"status": "stopped"}))
    make_run(tmp_path / "done")
    (tmp_path / "done" / SUMMARY_FILE).write_text(json.dumps(summary | {"status": "finished", "steps": 9}))
    for name, holder in (("live", HERE), ("killed", gone)):
        make_run(tmp_path / name, rows=[{"step": 3, "train/loss": 2.0}])
        (tmp_path / name / LEASE_FILE).write_bytes(holder.to_bytes())
    make_run(tmp_path / "diverged", rows=[{"step": 3, "train/loss": 2.0}])
    (tmp_path / "diverged" / "diverged.md").write_text("# The run diverged\n")
    make_run(tmp_path / "damaged", rows=[{"step": 3, "train/loss": 2.0}])
    (tmp_path / "damaged" / SUMMARY_FILE).write_text("{")
    found = {path.name: read_row(path) for path in find_workdirs([str(tmp_path)])}
    states = {name: (row.state, row.alive, row.step) for name, row in found.items()}
    assert states == {
        "stopped": ("HALTED", False, 7),
        "trial": ("STOPPED", False, 7),
        "done": ("COMPLETED", False, 9),
        "live": ("PROCESSING", True, 3),
        "killed": ("PROCESSING", False, 3),
        "diverged": ("FAILED", False, 3),
        "damaged": ("UNKNOWN", None, 3),
    }
    assert found["diverged"].exit_code == 3
    assert "summary.json cannot be read" in found["damaged"].problem


def test_the_tail_of_a_long_file_is_the_end_of_the_whole(tmp_path):
    path = tmp_path / METRICS_FILE
    rows = [{"step": step, "text": "x" * (step % 700)} for step in range(3000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tail_rows(path, 40) == rows[-40:]
    with path.open("a") as file:
        file.write('{"step": 3000, "tr')  # It is being written.
    assert tail_rows(path, 40) == rows[-40:]
    assert tail_rows(tmp_path / "none") == []
    path.write_text("not a row\n" * 5)
    assert METRICS_FILE in read_row(tmp_path).problem


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o400], ids=oct)
def test_a_folder_that_may_not_be_read_is_a_row_that_says_so(tmp_path, monkeypatch, capsys, mode):
    make_run(tmp_path / "runs" / "mine", record(State.COMPLETED))
    make_run(tmp_path / "runs" / "other").chmod(mode | mode >> 3 | mode >> 6)
    (tmp_path / "runs" / "loop").symlink_to("loop")
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # For folders above may not be searched.
    with without_rights():
        main(["runs"])
    (tmp_path / "runs" / "other").chmod(0o700)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["runs/mine", "COMPLETED"], ["runs/other", "UNKNOWN"]]
    assert lines[1].endswith("cannot be read: Permission denied")


def test_rows_are_sorted_and_those_without_the_value_come_last(tmp_path):
    make_run(tmp_path / "b", record(step=10), [{"step": 10, "eval/accuracy": 0.9}])
    make_run(tmp_path / "a", record(step=40), [{"step": 40, "eval/accuracy": 0.1}])
    make_run(tmp_path / "c", record(State.FAILED, step=20))
    rows = [read_row(path) for path in find_workdirs([str(tmp_path)])]

    def order(key, **how):
        return "".join(row.workdir[-1] for row in sort_rows(rows, key, **how))

    assert (order("workdir"), order("step"), order("state")) == ("abc", "bca", "abc")
    assert order("eval/accuracy", reverse=True) == "bac"
    assert metric_columns(rows) == ["eval/accuracy"]


def test_the_command(tmp_path, capsys):
    make_run(tmp_path / "runs" / "x" / "trial-1", record(), [{"step": 31, "train/loss": 0.25}])
    make_run(tmp_path / "runs" / "y", record(State.FAILED, reason=Reason("diverged", 3)))
    main([str(tmp_path / "runs"), "--sort", "step"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["state", "FAILED", "PROCESSING"]
    assert "31/100" in lines[2]
    assert "exit code 3; diverged" in lines[1]
    main([str(tmp_path / "runs" / "*"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(one["state"], one["exit_code"]) for one in found] == [("PROCESSING", None), ("FAILED", 3)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no workdir"),
        (["nowhere"], "no such folder"),
        (["."], "no run in it"),
        (["run", "--sort", "beauty"], "choose one of workdir"),
        (["run", "--watch", "--json"], "give one of them"),
        (["run", "--every-sec", "3"], "no effect without --watch"),
        (["run", "--watch", "--every-sec", "inf"], "at most 86,400"),
        (["run", "--watch"], "no terminal"),
        (["run", "--every", "3"], "See python -m jaxdl.status --help"),
    ],
)
def test_mistakes_are_one_message(tmp_path, monkeypatch, capsys, args, words):
    monkeypatch.chdir(tmp_path)
    if "run" in args:
        make_run(tmp_path / "run", record())
    assert words in refusal(capsys, *args, run=main)


def test_notes_without_room_are_beneath_their_runs(tmp_path):
    make_run(tmp_path / "x", record(), [{"step": 31, "train/loss": 0.25}])
    make_run(tmp_path / "y", record(State.FAILED, reason=Reason("it diverged after many steps", 3)))
    rows = [read_row(tmp_path / name) for name in "xy"]
    wide = [[line.plain for line in lines] for lines in for_terminal(rows, ["train/loss"], 1000)]
    assert ["\n".join(lines) for lines in wide] == plain(rows, ["train/loss"]).splitlines()
    head, *narrow = [[line.plain for line in lines] for lines in for_terminal(rows, ["train/loss"], 40)]
    assert head[0].endswith("hosts")
    assert "0.25" in narrow[0][0]
    assert narrow[1][1].startswith("  exit code 3; it diverged after many steps")
    styled = for_terminal(rows, [], 40)[2][0]
    assert [(styled.plain[span.start : span.end], span.style) for span in styled.spans] == [("FAILED", "red")]


def test_a_watched_table_fits_the_terminal_and_ends_with_ctrl_c(tmp_path):
    for number in range(30):
        make_run(tmp_path / f"run{number}", record(State.COMPLETED))
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
    command = [sys.executable, "-m", "jaxdl.status", str(tmp_path), "--watch", "--every-sec", "0.1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm"}
    ) as run:
        os.close(theirs)
        seen = b""
        while seen.count(b"30 runs, the first 10") < 2:
            seen += os.read(ours, 1 << 16)
        run.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # The terminal's other end is closed.
            while piece := os.read(ours, 1 << 16):
                seen += piece
    os.close(ours)
    assert run.returncode == 130
    assert seen.endswith(b"interrupted\r\n")


def test_the_command_imports_nothing_slow(tmp_path):
    make_run(tmp_path, record())
    code = f"""
import sys, json
from jaxdl.report.status.__main__ import main
main([{str(tmp_path)!r}])
print(json.dumps(sorted(sys.modules)))"""
    assert not {"jax", "numpy", "pydantic", "tyro", "rich", "matplotlib"} & set(in_a_fresh_process(code))


def test_a_writer_writes_when_the_state_changes(tmp_path):
    now = [record(State.DEPLOY, since="", seen="")]
    writer = StatusWriter(tmp_path, lambda: now[0])
    writer._look()
    first = read_record(tmp_path)
    now[0] = dataclasses.replace(now[0], step=31)
    writer._look()
    assert read_record(tmp_path) == first, "a step alone is not worth a write"
    now[0] = dataclasses.replace(now[0], state=State.PROCESSING)
    writer._look()
    assert (read_record(tmp_path).state, read_record(tmp_path).step) == (State.PROCESSING, 31)
    writer.finish(lambda: record(State.COMPLETED, since="", seen=""))
    writer._look()
    assert read_record(tmp_path).state == State.COMPLETED, "nothing is written after the last word"


def test_a_writer_on_a_disk_that_refuses_says_nothing(tmp_path):
    writer = StatusWriter(tmp_path / "none", record)
    writer._look()
    writer.finish(record)
    assert not os.path.exists(tmp_path / "none")


def test_only_the_newest_failures_are_kept_and_none_is_written_twice(tmp_path):
    make_run(tmp_path, rows=[{"step": 5, "train/loss": 3.0}])
    for number in range(1, KEPT_FAILURES + 3):
        assert next_failure(tmp_path) == number
        keep_failure(tmp_path, number, {"reason": f"reason {number}"}, b"{}")
    keep_failure(tmp_path, KEPT_FAILURES, {"reason": "another"})
    add_failure(tmp_path, KEPT_FAILURES, "error-0.txt", "Traceback")
    folder = tmp_path / FAILURES_FOLDER
    assert sorted(int(path.name) for path in folder.iterdir()) == list(range(3, KEPT_FAILURES + 3))
    kept = json.loads((folder / str(KEPT_FAILURES) / "failure.json").read_text())
    assert kept["reason"] == f"reason {KEPT_FAILURES}"
    assert {"python", "jax", "jaxlib", "jaxdl", "numpy"} == set(kept["versions"])
    assert kept["last_metrics"] == [{"step": 5, "train/loss": 3.0}]
    (tmp_path / "file").write_text("")
    keep_failure(tmp_path / "file", 1, {})  # Raises nothing.


@pytest.mark.parametrize(
    "odd", ['{"step": 3', '{"step": 3}, {"step": 4}', '{"a": [{}', "{}", '{"step": "3"}', "[3]", "{,}"]
)
def test_rows_that_are_read_together_are_those_that_are_read_alone(tmp_path, odd):
    lines = ['{"step": 1, "train/loss": 2.5}', odd, '{"step": 12345678901234567890, "event": "x"}', '{"step": 5} ']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    alone = [row for line in lines if (row := parse_row(line.encode())) is not None]
    assert tail_rows(tmp_path / "metrics.jsonl") == alone
    assert [row["step"] for row in alone] == [1, 5]
