"""Hosts in network namespaces: they communicate at the requested rate and leave nothing behind.

The rate is counted over about a second between plain sockets: a check that the limit holds, no measurement.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdl.core.config import ConfigError
from jaxdl.platform.launch import Network, clean_up_stale, netns, processors

ROOT = Path(__file__).parent.parent
LONG_SEC = 30.0


def why_not():
    """The reason why namespaces cannot be made here; empty if they can."""
    try:
        netns.check_possible()
        with Network(1):
            pass
    except ConfigError as error:
        return str(error)
    return ""


WHY_NOT = why_not()


def needs_namespaces(test):
    """Skips if there can be none; slow, because it waits for the kernel."""
    return pytest.mark.slow(pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)(test))


RECEIVE = """
import socket, time
server = socket.create_server(("", 5000))
print("ready", flush=True)
connection, _ = server.accept()
received, began = len(connection.recv(1)), time.monotonic()
while data := connection.recv(1 << 20):
    received += len(data)
print(received * 8 / (time.monotonic() - began))
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=10)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    connection.sendall(bytes(1 << 16))
"""


def inside(host, code, *args):
    """Starts Python code inside a host; waits for its first line of output, if it has one."""
    return subprocess.Popen(
        [*host.prefix, sys.executable, "-S", "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def transfer(network, senders, receiver, seconds=1.0):
    """Bits per second that reach `receiver` from each of `senders`, all at once."""
    rates = []
    servers = [inside(network.hosts[receiver], RECEIVE.replace("5000", str(5000 + sender))) for sender in senders]
    for server in servers:
        assert server.stdout.readline() == "ready\n"
    clients = [
        inside(network.hosts[sender], SEND.replace("5000", str(5000 + sender)), f"host{receiver}", str(seconds))
        for sender in senders
    ]
    for client in clients:
        _, err = client.communicate(timeout=LONG_SEC)
        assert client.returncode == 0, err
    for server in servers:
        out, err = server.communicate(timeout=LONG_SEC)
        assert server.returncode == 0, err
        rates.append(float(out))
    return rates


def reaches(network, sender, receiver):
    """Whether a packet arrives within a second."""
    code = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
sender.settimeout(1.0)
try:
    sender.connect((sys.argv[1], 9))
except ConnectionRefusedError:
    print("there")  # Nobody listens, says the other host.
except OSError as error:
    print(error)
"""
    out, err = inside(network.hosts[sender], code, network.hosts[receiver].address).communicate(timeout=LONG_SEC)
    assert not err
    return out == "there\n"


def ours(pid):
    """What a launcher has left behind: namespaces, folders, lock."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    names = [name for name in listed if name.startswith(f"jaxdl-{pid}-")]
    names += [path.name for path in netns.HOSTS_FOLDER.glob(f"jaxdl-{pid}-*")]
    names += [path.name for path in netns.LOCK_FOLDER.glob(f"{pid}.lock")]
    return names


def links():
    """The links of this machine."""
    return sorted(name for _, name in socket.if_nameindex())


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + LONG_SEC
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_namespaces
def test_hosts_have_names_and_addresses_and_reach_each_other():
    before = links()
    with Network(3) as network:
        with pytest.raises(ConfigError, match="already has a network"), Network(1):
            pass
        assert links() == before, "the links of the machine are not touched"
        assert [host.name for host in network.hosts] == ["host0", "host1", "host2"]
        code = """
import json, socket
names = [name for _, name in socket.if_nameindex()]
addresses = [socket.gethostbyname(f"host{index}") for index in range(3)]
control = socket.socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
idle = open("/proc/sys/net/ipv4/tcp_slow_start_after_idle").read().strip()
print(json.dumps([socket.gethostname(), addresses, names, control.decode(), idle]))
"""
        for host in network.hosts:
            out, err = inside(host, code).communicate(timeout=LONG_SEC)
            assert not err
            own_name, addresses, names, control, idle = json.loads(out)
            assert control.strip("\0") == "reno", "whatever the machine has"
            assert idle == "0", "no slow start after a pause"
            assert own_name == host.name
            assert addresses == [other.address for other in network.hosts]
            assert names == ["lo", "eth0"]
        assert reaches(network, 0, 2)
        assert reaches(network, 2, 1)
        assert reaches(network, 1, 1), "a host reaches itself"
    assert not ours(os.getpid())
    assert links() == before


@needs_namespaces
def test_the_rate_holds_and_can_be_changed():
    with Network(2, "20mbit") as network:
        sent, received = network.sent_bytes(0), network.received_bytes(1)
        [rate] = transfer(network, [0], 1)
        assert rate == pytest.approx(20e6, rel=0.2)
        carried = network.sent_bytes(0) - sent
        assert 1.5e6 < carried < 6e6
        assert network.received_bytes(1) - received == pytest.approx(carried, rel=0.01)
        network.set_rate("40mbit")
        [rate] = transfer(network, [0], 1)
        assert rate == pytest.approx(40e6, rel=0.2)
        network.set_rate(None)
        network.set_rate(None)
        [rate] = transfer(network, [0], 1, seconds=0.3)
        assert rate > 100e6


@needs_namespaces
def test_a_host_has_its_share_of_the_processor():
    if not processors.can_limit():
        pytest.skip("this machine lets nobody make control groups")
    code = """
import time
start, end = time.process_time(), time.monotonic() + 1.0
while time.monotonic() < end:
    pass
print(time.process_time() - start)
"""
    with Network(2, cores=0.25) as network:
        out, _ = inside(network.hosts[1], code).communicate(timeout=LONG_SEC)
        assert float(out) < 0.35
        network.set_cores(limited=False)
        out, _ = inside(network.hosts[1], code).communicate(timeout=LONG_SEC)
        assert float(out) > 0.4
        assert processors.groups(f"jaxdl-{os.getpid()}-") == [f"jaxdl-{os.getpid()}-{i}" for i in range(2)]
    assert not processors.groups(f"jaxdl-{os.getpid()}-")
    with pytest.raises(ConfigError, match=r"cores=0: a host has from 0\.05"):
        Network(1, cores=0)


@needs_namespaces
def test_what_several_send_to_one_is_limited_too():
    with Network(3, "20mbit") as network:
        rates = transfer(network, [0, 2], 1)
        assert sum(rates) < 1.3 * 20e6, "the receiver's link carries no more"


@needs_namespaces
def test_a_cut_link_carries_nothing_until_it_is_mended():
    with Network(3) as network:
        network.set_link(1, False)
        assert not reaches(network, 0, 1)
        assert not reaches(network, 1, 2)
        assert reaches(network, 0, 2)
        network.set_link(1, True)
        wait_until(lambda: reaches(network, 0, 1))  # The kernel takes up to a second to notice.


@needs_namespaces
def test_what_runs_inside_ends_with_the_network():
    with Network(1) as network:
        inside_it = inside(network.hosts[0], "import time; print('ready', flush=True); time.sleep(100)")
        assert inside_it.stdout.readline() == "ready\n"
    assert inside_it.wait(LONG_SEC) == -signal.SIGKILL
    inside_it.communicate()
    assert not ours(os.getpid())


@needs_namespaces
def test_a_failure_while_it_is_made_leaves_nothing(monkeypatch):
    monkeypatch.setattr(netns, "_LATENCY_MS", "no number ")
    with pytest.raises(ConfigError, match=r"`tc .* failed"), Network(2, "20mbit"):
        pass
    assert not ours(os.getpid())


def launcher(tmp_path, code, *options):
    """`python -m jaxdl.launch netns` that runs Python code on 2 hosts, and its pids once they run."""
    pids_file = tmp_path / f"pids{random.random()}.json"
    options = ("--hosts", "2", "--pids", str(pids_file), *options)
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxdl.launch", "netns", *options, "--", "python", "-S", "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: pids_file.exists() or process.poll() is not None)
    assert pids_file.exists(), process.communicate()
    return process, json.loads(pids_file.read_text())


SLEEP = "import time; print('ready', flush=True); time.sleep(100)"


@needs_namespaces
def test_stale_networks_are_removed_and_live_ones_are_not(tmp_path):
    live, _ = launcher(tmp_path, SLEEP)
    # A grandchild in a session of its own outlives its launcher: only the namespace tells whose it is.
    sleep = "[sys.executable, '-S', '-c', 'import time; time.sleep(100)']"
    code = f"import subprocess, sys; subprocess.Popen({sleep}, start_new_session=True); {SLEEP}"
    dead, pids = launcher(tmp_path, code)
    for _ in pids["hosts"]:
        assert dead.stdout.readline().endswith("ready\n")
    dead.kill()
    dead.communicate()
    wait_until(lambda: not any(map(alive, pids["hosts"].values())))
    try:
        name = f"jaxdl-{dead.pid}-0"
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
        [survivor] = listed.split()
        assert alive(survivor)
        removed = clean_up_stale()
        assert {f"jaxdl-{dead.pid}-{part}" for part in ("0", "1", "bridge")} <= set(removed)
        assert not [one for one in removed if one.startswith(f"jaxdl-{live.pid}-")]
        assert not ours(dead.pid)
        assert not alive(survivor)
        assert live.poll() is None
        assert len(ours(live.pid)) == 3 + 2 + 1
        network = Network.of(live.pid)
        assert [host.name for host in network.hosts] == ["host0", "host1"]
        assert reaches(network, 0, 1)
        network.set_link(0, False)
        assert not reaches(network, 0, 1)
    finally:
        live.terminate()
        live.communicate(timeout=LONG_SEC)
    assert live.returncode == 143
    assert not ours(live.pid)


@needs_namespaces
def test_a_number_that_another_process_has_by_now_protects_nothing():
    """This process has the pid of a dead launcher, but not its lock."""
    name = f"jaxdl-{os.getppid()}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    foreign = f"jaxdl-other-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        assert clean_up_stale().count(name) == 1
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert foreign in listed, "only what has our form of name is ours"
        assert name not in listed
    finally:
        subprocess.run(["ip", "netns", "delete", foreign], check=True)


@needs_namespaces
def test_the_command_line_runs_inside_and_gives_the_exit_code(tmp_path):
    code = """
import os, socket, time
index = int(os.environ["JAX_PROCESS_ID"])
address, port = os.environ["JAX_COORDINATOR_ADDRESS"].split(":")
if index == 0:
    connection, _ = socket.create_server((address, int(port))).accept()
    print("from", connection.recv(100).decode())
    raise SystemExit(4)
deadline = time.monotonic() + 20
while True:
    try:
        with socket.create_connection((address, int(port)), timeout=1) as connection:
            connection.sendall(socket.gethostname().encode())
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.02)
"""
    process, _ = launcher(tmp_path, code, "--rate", "50mbit")
    out, err = process.communicate(timeout=LONG_SEC)
    assert process.returncode == 4, err
    assert out == "host0    | from host1\n"
    assert err.splitlines()[-1].startswith("launcher | host0 ended with exit code 4 after ")
    assert not ours(process.pid)


def test_rates_are_bits_per_second():
    assert netns.parse_rate("50mbit") == 50_000_000
    assert netns.parse_rate("2.5Gbit") == 2_500_000_000
    assert netns.parse_rate("500kbit") == 500_000
    for wrong in ("50", "50mbps", "fast", "-5mbit", "0mbit", "1bit", "mbit", "50 m", ""):
        with pytest.raises(ConfigError, match=r"write it as 500kbit, 50mbit or 2\.5gbit"):
            netns.parse_rate(wrong)


@pytest.mark.parametrize(
    ("patched", "said"),
    [
        ((sys, "platform", "darwin"), "need Linux; this is darwin"),
        ((os, "geteuid", lambda: 1000), "only root"),
        (
            (shutil, "which", lambda tool, path=None: None if tool == "tc" else tool),
            "no `tc` here; install .* iproute2",
        ),
    ],
)
def test_where_it_cannot_work_it_says_why(monkeypatch, patched, said):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(*patched)
    with pytest.raises(ConfigError, match=said), Network(2):
        pass


def test_numbers_of_hosts_that_cannot_be():
    for wrong in (0, -1, netns.MAX_HOSTS + 1):
        with pytest.raises(ConfigError, match=f"{wrong} hosts"):
            Network(wrong)
    assert Network(300).hosts[299].address == "10.77.1.44"


def test_a_command_line_mistake_makes_no_network():
    result = subprocess.run(
        [sys.executable, "-m", "jaxdl.launch", "netns", "--rate", "50mbps", "--", "true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: rate 50mbps: write it as")
    assert result.stderr.count("\n") == 1
