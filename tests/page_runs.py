"""Workdirs for the tests of the page `python -m jaxdl.status --serve`, and its application in this process."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from starlette.testclient import TestClient

from jaxdl.core.files import CONFIG_FILE, METRICS_FILE
from jaxdl.parallel.lease import this_process
from jaxdl.platform.page.app import make_app
from jaxdl.platform.page.scan import address_of_folder
from jaxdl.report.status import Reason, Record, State, add_failure, keep_failure, write_record

TOKEN = "a-token-of-the-tests"
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


def ago(seconds):
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")


def rows(last=200, period=10, loss=2.0):
    """Rows of metrics as a run writes them: training, and every fifth time an evaluation."""
    found = []
    for step in range(period, last + 1, period):
        found.append({"step": step, "epoch": step / 20, "train/loss": loss / step, "examples_per_sec": 100.0 + step})
        if step % (5 * period) == 0:
            found.append({"step": step, "epoch": step / 20, "eval/loss": loss / step, "eval/accuracy": 1 - 1 / step})
    return found


def write_rows(workdir, lines):
    (workdir / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")


def make_run(folder: Path, state=State.COMPLETED, *, lines=None, config=None, **status):
    """A workdir with status, metrics and config."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = rows() if lines is None else lines
    values = {"since": ago(100), "seen": ago(5), "step": 200, "end_step": 200, "total_steps": 200, "hosts": ("node1",)}
    write_record(folder, Record(state, **(values | {"process": this_process()} | status)))
    write_rows(folder, lines)
    config = {"batch_size": 64, "optimizer": {"kind": "sgd", "learning_rate": 0.1}} if config is None else config
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    return folder


def make_folder(folder: Path):
    """Runs in several states: good, running, failed, lost."""
    make_run(folder / "good")
    (folder / "good" / "confusion.png").write_bytes(PNG)
    (folder / "good" / "output.log").write_text("first\nstep 1\rstep 2\rstep 3\nlast\n", encoding="utf-8")
    make_run(folder / "running", State.PROCESSING, doing="training", step=100, lines=rows(100), seen=ago(1))
    reason = Reason("out of memory on device 3", 1, ago(50))
    failed = make_run(folder / "failed", State.FAILED, step=20, lines=rows(20), reason=reason, process=None)
    keep_failure(failed, 1, {"reason": reason.text, "exit_code": 1, "step": 20})
    add_failure(failed, 1, "error-0.txt", "Traceback (most recent call last):\nMemoryError: 12 GB\n")
    gone = dataclasses.replace(this_process(), place="another boot", host="node7")
    make_run(folder / "lost", State.PROCESSING, doing="training", seen=ago(900), since=ago(1000), process=gone)
    return folder


def client(*folders, **options):
    """A client of the page of these folders."""
    names = options.pop("hosts", {"localhost"})
    app = make_app([str(folder) for folder in folders], hosts=names, **options)
    return TestClient(app, base_url="http://localhost", follow_redirects=False)  # pyright: ignore[reportArgumentType]


def address(folder):
    return f"/run/{address_of_folder(folder)}"
