"""The launcher on this machine, with short commands: output, failures, restarts and signals."""

import hashlib
import io
import os
import queue
import signal
import sys
import time
from pathlib import Path

import pytest

from jaxdl.platform.launch import Launch, local_hosts
from jaxdl.platform.launch import processes as processes_module
from jaxdl.platform.launch.attempt import UNREAD, Attempt

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


@pytest.mark.parametrize("signals", [(signal.SIGINT, UNREAD, UNREAD), (UNREAD, signal.SIGINT)])
def test_ctrl_c_that_ends_the_reader_of_the_output_too_is_no_second_signal(signals):
    """As under `| tee log`: the hosts save."""
    events, heard = queue.SimpleQueue(), []

    class Process:
        failed, killed, ended_sec, host = True, False, 0.0, local_hosts(1)[0]
        code = property(lambda self: None if not events.empty() else 143)  # It ends last.
        signal, kill = staticmethod(heard.append), staticmethod(lambda: heard.append("killed"))
        clean_up = staticmethod(lambda _: False)

    process = Process()
    for event in (*signals, process):
        events.put(event)
    Attempt([process], events, grace_sec=1.0, say=lambda _: None).run()
    assert heard == [signal.SIGTERM if signals[0] == UNREAD else signal.SIGINT]


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
