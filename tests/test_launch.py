"""The launcher on this machine, with short commands: output, failures, restarts, signals, and its own death."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdl.config import ConfigError
from jaxdl.launch import Launch, local_hosts
from jaxdl.launch import processes as processes_module
from jaxdl.launch.__main__ import JOB_FILES
from jaxdl.launch.host import describe_code, exit_code
from jaxdl.launch.jobs import COMMANDS
from jaxdl.launch.processes import free_port
from jaxdl.launch.reaper import session_members

ROOT = Path(__file__).parent.parent
LONG_SEC = 20.0
"""Seconds within which everything here happens, even on a busy machine."""


def run(code, hosts=2, *, devices_per_host=1, **options):
    """Runs Python `code` on every host; returns (exit code, lines on stdout, lines on stderr)."""
    stdout, stderr = io.StringIO(), io.StringIO()
    launch = Launch(
        ["python", "-S", "-c", code],
        local_hosts(hosts),
        devices_per_host=devices_per_host,
        stdout=stdout,
        stderr=stderr,
        **options,
    )
    result = launch.start().wait(LONG_SEC)
    assert result is not None, f"did not end: {stdout.getvalue()} {stderr.getvalue()}"
    return result, stdout.getvalue().splitlines(), stderr.getvalue().splitlines()


def started(code, hosts=2, **options):
    """(a launch whose processes have all printed `ready`, its stderr)."""
    stdout, stderr = io.StringIO(), io.StringIO()
    launch = Launch(
        ["python", "-S", "-c", code], local_hosts(hosts), devices_per_host=1, stdout=stdout, stderr=stderr, **options
    ).start()
    wait_until(lambda: stdout.getvalue().count("ready") == hosts)
    return launch, stderr


def wait_until(condition, what=""):
    deadline = time.monotonic() + LONG_SEC
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in time: {what}"
        time.sleep(0.01)


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_each_process_is_told_who_it_is_and_its_lines_are_prefixed():
    code = """
import hashlib, os, sys
for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES",
             "PYTHONUNBUFFERED", "JAXDL_HOST", "JAXDL_RESTART", "JAXDL_RESTART_REASON"):
    print(name, repr(os.environ[name]))
token = os.environ["JAXDL_RUN_TOKEN"]
print("secret", token not in open("/proc/self/cmdline").read(), len(token))
print(hashlib.sha256(token.encode()).hexdigest())
print(os.environ["HOME_MADE"], os.getsid(0) == os.getpid(), sys.stdin.read() == "")
print("a problem", file=sys.stderr)
"""
    given = dict(os.environ) | {"HOME_MADE": "kept", "JAXDL_RUN_TOKEN": "of-the-launcher's-own-run"}
    result, out, err = run(code, 3, devices_per_host=5, environment=given)
    assert result == 0
    addresses, tokens = set(), set()
    for index in range(3):
        own = [line.removeprefix(f"host{index}    | ") for line in out if line.startswith(f"host{index} ")]
        tokens.add(own[-2])
        assert own[-3] == "secret True 32"
        values = dict(line.split(" ", 1) for line in own[:-3])
        addresses.add(values.pop("JAX_COORDINATOR_ADDRESS"))
        assert values == {
            "JAX_NUM_PROCESSES": "'3'",
            "JAX_PROCESS_ID": f"'{index}'",
            "JAX_PLATFORMS": "'cpu'",
            "JAX_NUM_CPU_DEVICES": "'5'",
            "PYTHONUNBUFFERED": "'1'",
            "JAXDL_HOST": f"'host{index}'",
            "JAXDL_RESTART": "'0'",
            "JAXDL_RESTART_REASON": "''",
        }
        assert own[-1] == "kept True True"
        assert f"host{index}    | a problem" in err
    [address] = addresses
    assert address.startswith("'127.0.0.1:")
    [token] = tokens
    assert token != hashlib.sha256(given["JAXDL_RUN_TOKEN"].encode()).hexdigest(), "each start has its own"
    assert err[-1].startswith("launcher | all 3 hosts finished after ")


def test_the_first_failure_decides_and_the_others_may_end_by_themselves():
    code = """
import os, sys, time
index = int(os.environ["JAX_PROCESS_ID"])
if index == 1: sys.exit(7)
time.sleep(0.3)
print("with my own reason")
sys.exit(9)
"""
    result, out, err = run(code, 3, grace_sec=LONG_SEC)
    assert result == 7
    assert sorted(out) == ["host0    | with my own reason", "host2    | with my own reason"]
    assert err[-1].startswith("launcher | host1 ended with exit code 7 after ")


def test_a_process_that_ended_because_of_another_is_not_the_first_failure():
    code = """
import os, sys, time
if os.environ["JAX_PROCESS_ID"] == "0": sys.exit(75)
time.sleep(0.3)
sys.exit(3)
"""
    result, _, err = run(code, grace_sec=LONG_SEC, restarts=2)
    assert result == 3, "75 says: because of another one"
    assert "host1 ended with exit code 3" in err[-1]
    assert "diverged" in err[-1]
    assert not [line for line in err if "restart " in line]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_who_does_not_end_is_killed_after_the_grace_also_when_stopped():
    code = """
import os, signal, sys, time
index = int(os.environ["JAX_PROCESS_ID"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if index == 1: os.kill(os.getpid(), signal.SIGSTOP)
if index == 2: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""
    began = time.monotonic()
    result, _, err = run(code, 3, grace_sec=0.4)
    assert result == 128 + signal.SIGKILL
    assert 0.4 < time.monotonic() - began < LONG_SEC
    assert "launcher | host0 and host1 did not exit within 0.4 s: killed" in err
    assert err[-1].startswith("launcher | host2 ended with SIGKILL after ")


def test_a_process_that_leaves_others_behind_is_followed_by_them(tmp_path):
    note = tmp_path / "pid"
    code = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], process_group=0)
open({str(note)!r}, "w").write(str(child.pid))
"""
    result, _, err = run(code, 1, grace_sec=0.2)
    assert result == 0
    assert "launcher | host0 left processes behind, which were killed" in err
    assert not alive(int(note.read_text()))


def test_restarts_tell_the_processes_why_and_are_counted(monkeypatch):
    monkeypatch.setattr(processes_module, "FIRST_PAUSE_SEC", 0.02)
    code = """
import os, signal, sys
print(os.environ["JAXDL_RESTART"], os.environ["JAXDL_RESTART_REASON"], os.environ["JAX_COORDINATOR_ADDRESS"])
if os.environ["JAX_PROCESS_ID"] == "1":
    if os.environ["JAXDL_RESTART"] == "0": os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["JAXDL_RESTART"] == "1": sys.exit(143)
"""
    result, out, err = run(code, restarts=5)
    assert result == 0
    told = [line.split("| ")[1].split(" ", 1) for line in out if line.startswith("host1")]
    assert [number for number, _ in told] == ["0", "1", "2"]
    assert told[1][1].startswith("host1 ended with SIGKILL after ")
    assert told[2][1].startswith("host1 ended with exit code 143 (SIGTERM) after ")
    assert len({reason.split()[-1] for _, reason in told}) == 3, "every start has a port of its own"
    restarts = [line for line in err if "restart" in line]
    assert restarts[0].startswith("launcher | restart 1 of 5: host1 ended with SIGKILL after ")
    assert restarts[1].startswith("launcher | restart 2 of 5: host1 ended with exit code 143 (SIGTERM) after ")


def test_restarts_end_and_the_pause_before_them_grows(monkeypatch):
    monkeypatch.setattr(processes_module, "FIRST_PAUSE_SEC", 0.2)
    began = time.monotonic()
    result, out, err = run("import time; print('started', time.time()); raise SystemExit(5)", 1, restarts=2)
    assert result == 5
    assert time.monotonic() - began > 0.2 + 0.4
    times = [float(line.split()[-1]) for line in out]
    assert len(times) == 3
    assert times[1] - times[0] > 0.2
    assert times[2] - times[1] > 0.4
    assert err[-1].endswith("; all 2 restarts used")
    assert "host0 ended with exit code 5" in err[-1]


@pytest.mark.parametrize("code", [2, 3])
def test_the_users_mistake_and_divergence_are_not_restarted(code):
    result, out, err = run(f"print('once'); raise SystemExit({code})", 1, restarts=5)
    assert result == code
    assert len(out) == 1
    assert "not restarted" in err[-1]


WAITS_FOR_SIGTERM = """
import signal, sys, time
def save(signum, frame):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(100)
"""


def test_a_signal_is_handed_on_and_nothing_restarts():
    launch, stderr = started(WAITS_FOR_SIGTERM, restarts=3)
    launch.stop(signal.SIGTERM)
    assert launch.wait(LONG_SEC) == 143
    assert launch.num_restarts == 0
    said = stderr.getvalue().splitlines()
    assert said[0].startswith("launcher | SIGTERM is forwarded to all hosts")
    assert said[-1].startswith("launcher | ended by SIGTERM after ")


def test_the_second_signal_kills():
    code = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(100)
"""
    launch, stderr = started(code)
    pids = dict(launch.pids)
    launch.stop(signal.SIGTERM)
    assert launch.wait(0.3) is None, "the first signal lets them be"
    launch.stop(signal.SIGTERM)
    assert launch.wait(LONG_SEC) == 143
    assert not [pid for pid in pids.values() if alive(pid)]
    assert "host0 and host1 killed by the second SIGTERM" in stderr.getvalue()


def test_a_signal_in_the_pause_ends_the_run(monkeypatch):
    monkeypatch.setattr(processes_module, "FIRST_PAUSE_SEC", 100.0)
    monkeypatch.setattr(processes_module, "MAX_PAUSE_SEC", 100.0)
    stderr = io.StringIO()
    launch = Launch(
        ["python", "-S", "-c", "raise SystemExit(5)"],
        local_hosts(1),
        devices_per_host=1,
        restarts=3,
        stdout=io.StringIO(),
        stderr=stderr,
    ).start()
    wait_until(lambda: launch.pids and not any(alive(pid) for pid in launch.pids.values()))
    time.sleep(0.1)
    launch.stop(signal.SIGINT)
    assert launch.wait(LONG_SEC) == 130
    assert "while no process was running" in stderr.getvalue()


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
