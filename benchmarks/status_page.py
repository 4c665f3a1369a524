"""The page of runs with many workdirs: seconds until its first answer, and of later ones, by real HTTP.

The workdirs are made up: status, config, and rows of metrics as a run of `--num-rows` reports writes them. The command
`python -m jaxdl.status FOLDER --serve` is started; its start is not counted. The first page is read with no run known;
it is read again while one run has written; then what a browser asks for every three seconds.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdl.core.files import CONFIG_FILE, METRICS_FILE
from jaxdl.parallel.lease import this_process
from jaxdl.performance.bench.shared import make_table, parse_bench, write_json
from jaxdl.report.status import Record, State, utc_now, write_record

_STATES = (State.COMPLETED, State.STOPPED, State.FAILED, State.PROCESSING)


@dataclass(frozen=True)
class PageBench:
    """Options of the measurement."""

    num_runs: int = 1000
    """Number of workdirs."""
    num_rows: int = 500
    """Rows of metrics of each."""
    num_repeats: int = 10
    """How often each answer is asked for; medians are reported."""
    json: Path | None = None
    """A file for the results."""


def main(args: list[str]) -> None:
    """Makes the workdirs, asks, and prints the seconds."""
    command = parse_bench(PageBench, args, __name__, num_runs=1, num_rows=1, num_repeats=1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "runs"
        for number in range(command.num_runs):
            write_run(folder / f"run{number:05}", number, command.num_rows)
        seconds = measure(folder, command)
    title = f"the page of {command.num_runs:,} runs, {command.num_rows:,} rows each"
    table = make_table(title, ("answer", "median", "max", "CPU", "kB"))
    for name, (times, cpu, size) in seconds.items():
        shown = (statistics.median(times), max(times), statistics.median(cpu))
        table.add_row(name, *(f"{value:.3f} s" for value in shown), f"{size / 1e3:,.1f}")
    Console().print(table)
    write_json(command.json, {name: {"sec": times, "cpu_sec": cpu} for name, (times, cpu, _) in seconds.items()})


def write_run(workdir: Path, number: int, num_rows: int) -> None:
    """A workdir as a run leaves it."""
    workdir.mkdir(parents=True)
    now, steps = utc_now(), 10 * num_rows
    state = _STATES[number % len(_STATES)]
    write_record(workdir, Record(state, now, now, step=steps, end_step=steps, hosts=("node1",), process=this_process()))
    lines = []
    for step in range(10, steps + 1, 10):
        row = {"step": step, "epoch": step / 100, "train/loss": 2 / step, "train/accuracy": 1 - 1 / step}
        row |= {"train/learning_rate": 0.1, "train/grad_norm": 0.3, "examples_per_sec": 1e4 + number}
        lines.append(json.dumps(row))
        if step % 100 == 0:
            lines.append(json.dumps({"step": step, "epoch": step / 100, "eval/loss": 3 / step, "eval/accuracy": 0.9}))
    (workdir / METRICS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = {"batch_size": 64, "model": {"kind": "resnet"}, "optimizer": {"kind": "sgd", "learning_rate": number}}
    (workdir / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")


def measure(folder: Path, command: PageBench) -> dict[str, tuple[list[float], list[float], int]]:
    """Answer -> (seconds of each time, CPU seconds of the server, bytes)."""
    line = [sys.executable, "-m", "jaxdl.status", str(folder), "--serve", "--port", "0"]
    found: dict[str, tuple[list[float], list[float], int]] = {}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8") as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rstrip("/\n").rpartition(":")[2])
            ask(port, "/health")
            answers = [("the first page, first time", "/", 1), ("the first page, later", "/", command.num_repeats)]
            answers += [("sorted by a metric", "/?sort=eval/loss", command.num_repeats)]
            answers += [("what a browser polls", "/api/runs", command.num_repeats)]
            for name, path, num_repeats in answers:
                times, cpu, size = [], [], 0
                for _ in range(num_repeats):
                    if name != answers[0][0]:
                        touch(folder / "run00000")
                        time.sleep(5.1)  # Otherwise it would be the answer of a moment ago.
                    before = cpu_sec(server.pid)
                    sec, size = ask(port, path)
                    times.append(sec)
                    cpu.append(cpu_sec(server.pid) - before)
                found[name] = times, cpu, size
        finally:
            server.send_signal(signal.SIGINT)
    return found


def touch(workdir: Path) -> None:
    """The run writes one row more."""
    with (workdir / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 10**6, "epoch": 9.0, "train/loss": 0.1}) + "\n")
    os.utime(workdir / METRICS_FILE)


def cpu_sec(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(port: int, path: str) -> tuple[float, int]:
    """(seconds, bytes) of an answer."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, (path, answer.status)
    return time.perf_counter() - start, len(content)


if __name__ == "__main__":
    main(sys.argv[1:])
