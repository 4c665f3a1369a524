"""The history of a run, and TensorBoard's events."""

import errno
import json
import math
import os
import struct

import numpy as np
import pandas
import pytest
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from jaxdl.core.config import ConfigError
from jaxdl.core.files import METRICS_FILE, TENSORBOARD_FOLDER, partial_path, replace_file
from jaxdl.report import (
    History,
    ReportConfig,
)


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
        raise OSError(errno.EIO, "disk gone")

    monkeypatch.setattr("jaxdl.report.history.os.replace", broken)
    with pytest.raises(OSError, match="disk gone"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    with pytest.raises(NotADirectoryError, match=f"'{path / 'b'}'$"):  # Not the name of the partial file.
        replace_file(path / "b", b"new")


def test_writers_with_equal_process_ids_do_not_share_a_partial_file(tmp_path, monkeypatch):
    long = tmp_path / ("ä" * 120 + ".json")
    names = {partial_path(long).name for _ in range(2)}
    assert len(names) == 2
    assert all(len(name.encode()) <= 255 and name.startswith(".ä") and name.endswith(".tmp") for name in names)
    replace_file(long, b"whole")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {long.name: b"whole"}
    monkeypatch.setattr("socket.gethostname", lambda: "node/7 é")
    assert partial_path(tmp_path / "status.json").match(f".status.json.node-7---{os.getpid()}-*.tmp")


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
