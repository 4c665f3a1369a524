"""Real processes that meet, monitor each other and exit together; without JAX, so that each takes a second."""

import json
import multiprocessing
import signal
import socket
import tempfile
import time
from pathlib import Path

import cluster_process
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster import address, consistency, gathering, meeting, rendezvous
from jaxdl.parallel.cluster.heartbeat import Heartbeat

BROKEN, MISTAKE = 75, 2
DESCRIPTION = {"versions": {}, "files": {}, "config": {}, "devices": 2}
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["cluster_process"])
FOLDERS = []


@pytest.fixture(autouse=True)
def folder(tmp_path):
    FOLDERS.append(tmp_path)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(processes, **shared):
    """Starts processes, each with its own options."""
    shared = {"address": f"127.0.0.1:{free_port()}", "num_processes": len(processes)} | shared
    started = []
    for number, own in enumerate(processes):
        folder = Path(tempfile.mkdtemp(dir=FOLDERS[-1]))
        arguments = ({"process": number, "host": f"host{number}"} | shared | own, folder / "out", folder / "error")
        process = FORKED.Process(target=cluster_process.enter, args=arguments)
        process.start()
        started.append((process, folder))
    return started


def ends(started):
    """(exit code, stdout, stderr) of each; kills a stopped one when the rest have ended."""
    end = time.monotonic() + 30
    late = []
    while living := [process for process, _ in started if process.is_alive()]:
        if time.monotonic() > end or all(is_stopped(process.pid) for process in living):
            late = [process for process in living if not is_stopped(process.pid)]
            for process in living:
                process.kill()
                process.join()
        time.sleep(0.01)
    results = [
        (process.exitcode, *((folder / name).read_text() for name in ("out", "error"))) for process, folder in started
    ]
    assert not late, f"some did not end: {results}"
    return results


def is_stopped(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def run(*processes, **shared):
    return ends(start(processes, **shared))


def last_line(error):
    return error.strip().split("\n")[-1] if error.strip() else ""


def assert_all_say(results, code, *parts, but=()):
    for number, (ended, out, error) in enumerate(results):
        if number not in but:
            assert ended == code, (number, ended, out, error)
            for part in parts:
                assert part in last_line(error), (number, out, error)


# Meeting.


def test_all_meet_and_end_in_good_order():
    results = run({"steps": 5}, {"steps": 20}, {"steps": 60})
    for code, out, error in results:
        assert (code, error) == (0, ""), results
        assert out.startswith("together ['host0', 'host1', 'host2']\n")


def connected(port):
    end = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_process_that_comes_again_is_welcome():
    port = free_port()
    shared = {"address": f"127.0.0.1:{port}", "num_processes": 3, "steps": 5}
    first = start([{"process": 0}], **shared)
    with connected(port) as lost:
        hello = {
            "jaxdl": 2,
            "process": 1,
            "num_processes": 3,
            "host": "x",
            "own_name": None,
            "description": DESCRIPTION,
        }
        lost.sendall(json.dumps(hello).encode() + b"\n")
        with lost.makefile() as answers:
            assert "nonce" in answers.readline()
            assert "here" in answers.readline(), "it was believed"
    results = ends([*first, *start([{"process": 1}, {"process": 2}], **shared)])
    assert [code for code, _, _ in results] == [0, 0, 0], results


def test_a_missing_process_is_named_on_every_host():
    before = time.monotonic()
    results = run({}, {}, {"process": 3}, num_processes=4, timeout_sec=3.0)
    assert time.monotonic() - before < 10
    for code, _, error in results:
        assert code == BROKEN
        assert "process 2 of 4 did not join within 3 s" in error
        assert "joined: host0 (process 0), host1 (process 1), host2 (process 3)" in error
    first = results[0][2]
    assert "JAX_COORDINATOR_ADDRESS=127.0.0.1:" in first
    assert "a loopback address" in first


def test_a_coordinator_that_is_not_there():
    port = free_port()
    places = [{"address": f"{host}:{port}"} for host in ("127.0.0.1", "no-such-host.invalid")]
    results = run(*places, process=3, num_processes=4, timeout_sec=2.0, host="c")
    assert_all_say(results, BROKEN, "process 3 on c could not reach process 0 at", "within 2 s")
    assert "loopback address: it leads c only to itself" in results[0][2]
    assert "refused" in results[0][2]
    assert "cannot be resolved" in results[1][2]


@pytest.mark.parametrize(
    ("processes", "parts"),
    [
        (
            [
                {"description": {"config": {"batch_size": 8, "a.b": "x"}}},
                {"description": {"config": {"batch_size": 16, "a.b": "x"}}},
            ],
            ["the same experiment: batch_size is 8 on host0 (process 0), but 16 on host1 (process 1).", "config file"],
        ),
        (
            [{"description": {"files": {"jaxdl/step.py": "ab"}}}]
            + [{"description": {"files": {"jaxdl/step.py": "cd"}}}] * 2,
            ["jaxdl/step.py on host0 (process 0) differs from host1 (process 1), host2 (process 2)"],
        ),
        (
            [{"description": {"versions": {"jax": "0.10.2"}}}] * 2 + [{"description": {"versions": {"jax": "0.11.2"}}}],
            ["software: jax is 0.10.2 on host0 (process 0), host1 (process 1), but 0.11.2 on host2 (process 2)"],
        ),
        (
            [{}, {"description": {"devices": 4}}],
            ["unequal numbers of devices: devices is 2 on host0 (process 0), but 4 on"],
        ),
        ([{}, {"process": 1}, {"process": 1}], ["2 processes claim to be process 1, on host1 and host2"]),
        ([{}, {"num_processes": 3}], ["host1 (process 1) expects 3 processes, but host0 (process 0) expects 2"]),
    ],
)
def test_what_is_not_equal_is_named_on_every_host(processes, parts):
    assert_all_say(run(*processes), MISTAKE, *parts)


def test_a_port_that_is_taken(monkeypatch):
    monkeypatch.setattr(gathering, "PORT_BUSY_SEC", 0.2)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        here = address.ClusterSpec(f"127.0.0.1:{other.getsockname()[1]}", 2, 0)
        with pytest.raises(meeting.ClusterError, match="cannot listen on port"):
            rendezvous.meet(here, DESCRIPTION, timeout_sec=5)


# Watching over each other.


@pytest.mark.parametrize("who", [0, 1])
def test_one_that_dies_ends_all_at_once_with_the_reason(who):
    processes = [{"at": 50, "do": "die"} if number == who else {} for number in range(3)]
    before = time.monotonic()
    results = run(*processes, silence_sec=2)
    assert time.monotonic() - before < 6
    assert results[who][0] == -signal.SIGKILL
    assert_all_say(
        results,
        BROKEN,
        f"host{who} (process {who}) exited unexpectedly (connection closed)",
        "last report: step",
        but=[who],
    )


@pytest.mark.parametrize("who", [0, 2])
def test_one_that_is_stopped_ends_all_within_the_time(who):
    processes = [{"at": 50, "do": "stop"} if number == who else {} for number in range(3)]
    results = run(*processes, silence_sec=2)
    assert_all_say(
        results, BROKEN, f"host{who} (process {who}) has been silent for 2 s", "last report: step", but=[who]
    )


def test_one_that_fails_tells_the_others_why():
    results = run({}, {"at": 10, "do": "crash"}, {})
    reason = "host1 (process 1): OSError: [Errno 28] No space left on device"
    assert_all_say(results, BROKEN, reason, but=[1])
    code, _, error = results[1]
    assert code == 1
    assert "Traceback" in error
    assert error.strip().endswith("No space left on device")


def test_process_0_that_fails_tells_the_others_why():
    results = run({"at": 10, "do": "crash"}, {}, {})
    assert_all_say(results, BROKEN, "host0 (process 0): OSError: [Errno 28] No space left on device", but=[0])
    assert results[0][0] == 1


def test_a_mistake_found_late_is_one_for_all():
    """All processes exit with the code of a user error, after which no launcher restarts."""
    results = run({}, {"at": 10, "do": "mistake"})
    assert_all_say(results, MISTAKE, "the data is not there.")
    results = run(*[{"at": 10, "do": "mistake"}] * 3)
    for code, _, error in results:
        assert (code, error) == (MISTAKE, "error: the data is not there.\n")


def test_one_that_is_stuck_is_named_and_all_write_their_stacks():
    """Its threads still send heartbeats; but its loop is stuck, and the other loops wait for it."""
    waiting = {"at": 11, "do": "wait"}
    results = run(waiting, {"at": 10, "do": "stuck"}, waiting, hang_sec=2)
    parts = ["no progress for 2 s", "host1 (process 1): step 10 (phase data)", "step 11"]
    assert_all_say(results, BROKEN, *parts)
    assert "in stuck_for_good" in results[1][2]
    assert all("Thread 0x" in error for _, _, error in results)


def test_a_long_compilation_is_no_hang():
    results = run({"at": 5, "do": "compile", "steps": 10}, {"steps": 100}, hang_sec=1)
    assert [code for code, _, _ in results] == [0, 0], results


def test_all_wait_for_the_one_that_compiles_longest():
    results = run({"setup_sec": 0.5, "steps": 2}, {"steps": 2}, {"setup_sec": 2, "steps": 2})
    assert [code for code, _, _ in results] == [0, 0, 0], results
    times = [float(out.split("\n")[1]) for _, out, _ in results]
    assert max(times) - min(times) < 1


# Stopping together.


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_stops_all_at_the_same_poll(who):
    """However far apart they are: the fastest is many steps ahead."""
    processes = [{"step_sec": 0.005}, {"step_sec": 0.02}, {"step_sec": 0.01}]
    processes[who] |= {"at": 20, "do": "signal"}
    results = run(*processes)
    stopped = {out.split("\n")[2] for _, out, _ in results}
    assert [code for code, _, _ in results] == [128 + signal.SIGTERM] * 3, results
    assert len(stopped) == 1, results
    assert "SIGTERM: stopped at step" in stopped.pop()


def test_a_signal_to_all_stops_all_at_the_same_poll():
    processes = [{"step_sec": step_sec, "at": 20, "do": "signal"} for step_sec in (0.01, 0.02, 0.005)]
    results = run(*processes)
    assert [code for code, _, _ in results] == [128 + signal.SIGTERM] * 3, results
    assert len({out.split("\n")[2] for _, out, _ in results}) == 1


def test_a_signal_after_the_last_poll_stops_nobody():
    results = run({"steps": 1000, "step_sec": 0.002, "at": 999, "do": "signal"}, {"steps": 1000, "step_sec": 0.002})
    assert [code for code, _, _ in results] == [0, 0], results


def test_an_end_that_could_not_be_saved_is_waited_for():
    """Process 0 may still be drawing curves when the others have finished."""
    results = run({"steps": 5, "at": 3, "do": "not saved", "step_sec": 0.3}, {"at": 3, "do": "not saved"})
    assert [code for code, _, _ in results] == [1, 1], results
    assert not any("signal" in error for _, _, error in results), results


# Its parts.


def test_heartbeat():
    now = [100.0]
    heartbeat = Heartbeat(lambda: now[0])
    now[0] += 50
    assert heartbeat.idle_sec() is None, "before the first beat nothing is expected"
    heartbeat.beat(3)
    now[0] += 5
    assert heartbeat.idle_sec() == 5
    heartbeat.beat()
    assert (heartbeat.idle_sec(), heartbeat.where()) == (0, (3, "start"))
    heartbeat.enter("compile")
    now[0] += 1000
    assert heartbeat.idle_sec() is None
    heartbeat.enter("train")
    now[0] += 7
    assert heartbeat.idle_sec() == 7
    heartbeat.forgive(4)
    assert heartbeat.idle_sec() == 3
    heartbeat.disarm()
    assert heartbeat.idle_sec() is None


def test_the_difference_of_many():
    description = [{"versions": {}, "files": {}, "config": {f"f{n}": n for n in range(9)}, "devices": 1}] * 11
    description += [description[0] | {"config": {f"f{n}": str(n) for n in range(8)}}]
    message = consistency.difference(description, [f"h{n}" for n in range(12)])
    assert message is not None
    assert "h7 (process 7) and 3 more, but 0 on h11 (process 11)" in message
    assert "and 4 more" in message
    assert consistency.difference(description[:11], ["h"] * 11) is None


def test_own_description():
    description = consistency.describe_process({"a": {"b": 1, "c": {}}, "d": None}, 4)
    assert description["config"] == {"a.b": 1, "a.c": {}, "d": None}
    assert "jaxdl/parallel/cluster/consistency.py" in description["files"]
    assert description["versions"]["numpy"] == __import__("numpy").__version__
    assert description["devices"] == 4


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two: not a number"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2: 2 processes have the numbers 0 to 1"),
        ({"JAX_COORDINATOR_ADDRESS": "host0"}, "not of the form host:port"),
        ({"JAX_COORDINATOR_ADDRESS": "host0:99999"}, "not of the form host:port"),
    ],
)
def test_places_that_are_none(environment, message, monkeypatch):
    fine = {"JAX_COORDINATOR_ADDRESS": "host0:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    for name, value in (fine | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        address.find_cluster_spec(1)


def test_places(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    job = {"JOB_ID": "4097", "STEP_NODELIST": "node[3-6]", "NTASKS": "4", "PROCID": "2", "LOCALID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert address.find_cluster_spec(1) == address.ClusterSpec("node3:61441", 4, 2)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "[::1]:5")
    found = address.find_cluster_spec(1)
    assert found is not None
    assert (found.host, found.port, found.process) == ("::1", 5, 2)


def test_loopback_names():
    assert address.loopback("localhost") is not None
    assert address.loopback("127.0.1.1") == "127.0.1.1"
    assert address.loopback("10.1.2.3") is None
    assert address.loopback("no-such-host.invalid") is None
    assert address.is_own_address("127.0.0.1")
    assert not address.is_own_address("192.0.2.1")
