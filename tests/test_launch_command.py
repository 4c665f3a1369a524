"""The command line of the launcher: its death, Ctrl-C, mistakes and exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch import LONG_SEC, ROOT, WAITS_FOR_SIGTERM, alive, wait_until

from jaxdl.core.config import ConfigError
from jaxdl.platform.launch import Launch, local_hosts
from jaxdl.platform.launch.__main__ import JOB_FILES
from jaxdl.platform.launch.host import describe_code, exit_code
from jaxdl.platform.launch.jobs import COMMANDS
from jaxdl.platform.launch.processes import free_port
from jaxdl.platform.launch.reaper import session_members


class CommandLine:
    """Starts `python -m jaxdl.launch ...` in a new session."""

    def __init__(self, *args, **options):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxdl.launch", *args],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def wait_for_pids(self, path):
        wait_until(lambda: path.exists() or self.process.poll() is not None, "the file of pids")
        assert path.exists(), self.process.communicate()
        return json.loads(path.read_text())

    def end(self):
        out, err = self.process.communicate(timeout=LONG_SEC)
        return self.process.returncode, out.splitlines(), err.splitlines()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Only Linux kills a process with its parent.")
def test_when_the_launcher_is_killed_nothing_stays_behind(tmp_path):
    """SIGKILL to the launcher kills the processes and what they started, even in other process groups."""
    pids_file, note = tmp_path / "pids.json", tmp_path / "children"
    code = f"""
import os, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, process_group=0)]
with open({str(note)!r}, "a") as file: file.write("".join(f"{{child.pid}}\\n" for child in children))
time.sleep(100)
"""
    line = CommandLine("local", "--hosts", "2", "--pids", str(pids_file), "--", "python", "-S", "-c", code)
    pids = line.wait_for_pids(pids_file)
    assert pids["launcher"] == line.process.pid
    assert pids["restart"] == 0
    assert list(pids["hosts"]) == ["host0", "host1"]
    wait_until(lambda: note.exists() and len(note.read_text().splitlines()) == 4)
    everyone = [*pids["hosts"].values(), *map(int, note.read_text().split())]
    assert all(map(alive, everyone))
    line.process.kill()
    line.end()
    wait_until(lambda: not any(map(alive, everyone)), "the end of the processes")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Only Linux kills a process with its parent.")
def test_the_workers_end_with_their_launcher_even_without_the_reaper(tmp_path):
    pids_file = tmp_path / "pids.json"
    line = CommandLine("local", "--pids", str(pids_file), "--", "python", "-S", "-c", "import time; time.sleep(100)")
    workers = list(line.wait_for_pids(pids_file)["hosts"].values())
    children = Path(f"/proc/{line.process.pid}/task/{line.process.pid}/children").read_text().split()
    [reaper] = set(map(int, children)) - set(workers)
    os.kill(reaper, signal.SIGKILL)
    wait_until(lambda: not alive(reaper))
    assert all(map(alive, workers)), "the run goes on without it"
    wait_until(lambda: all(b"die_with_parent.py" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in workers))
    line.process.kill()
    line.end()
    wait_until(lambda: not any(map(alive, workers)))


def test_ctrl_c_reaches_every_process_once(tmp_path):
    pids_file = tmp_path / "pids.json"
    code = """
import os, signal, sys, time
count = 0
def note(signum, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, note)
print("ready", flush=True)
while not count: time.sleep(0.01)
time.sleep(0.2)
print("signals", count)
sys.exit(130)
"""
    line = CommandLine("local", "--hosts", "2", "--restarts", "2", "--pids", str(pids_file), "--", "python", "-c", code)
    for _ in range(2):
        assert "ready" in line.process.stdout.readline()
    os.killpg(line.process.pid, signal.SIGINT)  # As a terminal does: to the whole group in front.
    result, out, err = line.end()
    assert result == 130
    assert sorted(out) == ["host0    | signals 1", "host1    | signals 1"]
    assert not [text for text in err if "restart" in text]


def test_when_nobody_reads_any_more_the_run_is_told_to_end():
    code = WAITS_FOR_SIGTERM.replace("time.sleep(100)", "while True: print(time.sleep(0.02), flush=True)")
    line = CommandLine("local", "--hosts", "1", "--", "python", "-c", code)
    line.process.stdout.readline()
    line.process.stdout.close()
    with line.process.stderr as stream:
        err = stream.read()
    assert line.process.wait(LONG_SEC) == 143
    assert "SIGTERM is forwarded" in err
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["local", "--hosts", "0", "--", "true"], "0 hosts"),
        (["local", "--hosts", "2"], "no command"),
        (["local", "--hosts", "2", "--"], "no command"),
        (["local", "--", "no-such-program"], "no-such-program: no such program"),
        (["local", "--devices-per-host", "0", "--", "true"], "devices_per_host = 0"),
        (["local", "--restarts", "-1", "--", "true"], "restarts = -1"),
        (["locale"], "locale: there is no such command; choose one of local, netns"),
    ],
)
def test_mistakes_are_one_message(args, said):
    result, out, err = CommandLine(*args).end()
    assert result == 2
    assert not out
    assert len(err) == 1
    assert err[0].startswith("error: ")
    assert said in err[0]


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="0 hosts"):
        Launch(["true"], [], devices_per_host=1)
    with pytest.raises(ConfigError, match="grace_sec = nan"):
        Launch(["true"], local_hosts(1), devices_per_host=1, grace_sec=float("nan"))


def test_codes_are_those_of_shells():
    assert [exit_code(code) for code in (0, 7, -9)] == [0, 7, 137]
    assert [describe_code(code) for code in (7, -9, 143, 130)] == [
        "exit code 7",
        "SIGKILL",
        "exit code 143 (SIGTERM)",
        "exit code 130 (SIGINT)",
    ]


def test_ports_are_free_and_not_always_the_same():
    assert len({free_port() for _ in range(8)}) > 1


def test_a_session_has_its_members_only():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], start_new_session=True)
    try:
        assert session_members(child.pid) == [child.pid]
    finally:
        child.kill()
        child.wait()
    assert session_members(child.pid) == []


def test_what_the_launcher_fails_with_is_raised(monkeypatch, tmp_path):
    launch = Launch(["true"], local_hosts(1), devices_per_host=1, environment={"NOT\0POSSIBLE": ""})
    with pytest.raises(ValueError, match="null byte"):
        launch.start().wait(LONG_SEC)
    with pytest.raises(ConfigError, match="does not exist; make it first"):
        Launch(["true"], local_hosts(1), devices_per_host=1, pids_file=tmp_path / "none" / "pids.json")


def test_the_commands_that_print_job_files_are_known_by_name():
    assert tuple(COMMANDS) == JOB_FILES
