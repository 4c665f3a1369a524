"""Emulated hosts with a slow network: one network namespace each, joined by a bridge (Linux, root).

Each host has its own address, host name and link to the bridge, which has its own namespace: the machine's own network
is untouched. Each link is limited at both ends, so that sending and receiving are both limited, also when several hosts
send to one. The namespaces are called `jaxdl-PID-...` after the process that made them and are removed when it exits;
those of a killed process are removed by the next network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from jaxdl.core.config import ConfigError
from jaxdl.platform.launch import processors
from jaxdl.platform.launch.host import Host

MAX_HOSTS = 1000  # A bridge has up to 1,023 ports.
LOCK_FOLDER = Path("/run/jaxdl")
HOSTS_FOLDER = Path("/etc/netns")
_DEVICE = "eth0"
_NAME = re.compile(r"jaxdl-(\d+)-(?:\d+|bridge)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)")
_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LATENCY_MS = 50
_BURST_SEC, _MIN_BURST_BYTES = 2e-3, 16_384
_KILL_SEC = 5.0
# Devices of one host also communicate over its loopback: with the usual MTU of 65,536 bytes, Gloo's messages of some
# sizes stall for tens of milliseconds.
_LOOPBACK_MTU = 9000
# A new namespace takes over the machine's setting. Under `bbr`, which does not slow down when the short queues of slow
# links drop packets, messages to all peers at once lose thousands, and some of them wait for timeouts of a second.
# Every Linux has `reno`, and it is allowed in every namespace. A connection that was idle while its host computed goes
# on as fast as before: with a slow start instead, a message takes longer the longer the pause before it was.
_TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
_HELD: set[int] = set()  # The pid of this process while it has a network.
# `sudo` and cron leave these out.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
# Sets the host name, then execs the command.
_NAMED = 'hostname "$0" 2>/dev/null || echo "$0" >/proc/sys/kernel/hostname && exec "$@"'


def parse_rate(rate: str) -> int:
    """Bits per second of a rate such as `50mbit` or `2.5gbit`. Raises ConfigError."""
    match = _RATE.fullmatch(rate.strip().lower())
    bits = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 8e3 <= bits <= 1e12:
        # `tc` reads mbps as megabytes per second, so only unambiguous units are accepted.
        raise ConfigError(f"rate {rate}: write it as 500kbit, 50mbit or 2.5gbit (bits per second), at least 8kbit.")
    return round(bits)


class Network:
    """Context with `num_hosts` namespaces whose links carry `rate` each way (None: unlimited); see `hosts`.

    With `cores`, the processes of each host have this many cores of the machine, also while others wait; without it
    hosts share them all. A process has one network at a time. The hosts are host0, host1, ...; with the addresses
    10.77.0.1, 10.77.0.2, ... Raises ConfigError without Linux, root or iproute2.
    """

    def __init__(self, num_hosts: int, rate: str | None = None, cores: float | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ConfigError(f"{num_hosts} hosts: there must be 1 to {MAX_HOSTS}.")
        if rate is not None:
            parse_rate(rate)
        if cores is not None:
            processors.check_limit(cores)
        self._rate, self._cores = rate, cores
        self._pid = os.getpid()
        self._lock: IO[str] | None = None
        self.hosts = [
            Host(f"host{index}", _address(index), _prefix(self._pid, index, f"host{index}"))
            for index in range(num_hosts)
        ]

    @classmethod
    def of(cls, pid: int) -> Network:
        """The network that the launcher `pid` has made and will remove: to measure it, or to do it harm."""
        num_hosts = sum(name.startswith(f"jaxdl-{pid}-") for name in _namespaces()) - 1
        if num_hosts < 1:
            raise ConfigError(f"process {pid} has no network namespaces.")
        network = cls(num_hosts)
        network._pid = pid
        network.hosts = [Host(h.name, h.address, _prefix(pid, i, h.name)) for i, h in enumerate(network.hosts)]
        return network

    def __enter__(self) -> Network:
        check_possible()
        if self._pid in _HELD:
            raise ConfigError("netns: this process already has a network; leave it before making another.")
        clean_up_stale()
        self._lock = _lock(self._pid)
        _HELD.add(self._pid)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self._pid)
        if self._lock is not None:
            _unlock(self._lock)
            _HELD.discard(self._pid)
            self._lock = None

    def set_rate(self, rate: str | None) -> None:
        """Changes the rate of all links, each way; None removes the limit."""
        bits = None if rate is None else parse_rate(rate)
        for index in range(len(self.hosts)):
            for namespace, device in ((self._namespace(index), _DEVICE), (self._bridge, f"port{index}")):
                _limit(namespace, device, bits)
        self._rate = rate

    def set_cores(self, *, limited: bool) -> None:
        """Takes the limit of cores away, as for compiling, or puts it back; without `cores` there is none."""
        for index in range(len(self.hosts) if self._cores is not None else 0):
            processors.set_quota(self._namespace(index), self._cores if limited else None)

    def set_link(self, host_index: int, up: bool) -> None:
        """Disconnects the link of a host, as if its cable were unplugged at the switch, or reconnects it."""
        _ip("-n", self._bridge, "link", "set", f"port{host_index}", "up" if up else "down")

    def kill_host(self, host_index: int) -> None:
        """Kills every process of a host, as if its power were cut; its address and link stay."""
        _empty(self._namespace(host_index))

    def sent_bytes(self, host_index: int) -> int:
        """Bytes that the host has sent over its link so far, with headers."""
        return self._statistics(host_index)["tx"]["bytes"]

    def received_bytes(self, host_index: int) -> int:
        """Bytes that have reached the host over its link so far, with headers."""
        return self._statistics(host_index)["rx"]["bytes"]

    def _statistics(self, index: int) -> dict[str, Any]:
        [link] = json.loads(_ip("-n", self._namespace(index), "-s", "-j", "link", "show", _DEVICE))
        return link["stats64"]

    @property
    def _bridge(self) -> str:
        return f"jaxdl-{self._pid}-bridge"

    def _namespace(self, index: int) -> str:
        return f"jaxdl-{self._pid}-{index}"

    def _make(self) -> None:
        # `addrgenmode none`: no IPv6 addresses, whose announcements would be counted among the bytes.
        _ip("netns", "add", self._bridge)
        _ip_batch(
            self._bridge,
            "link add br0 type bridge mcast_snooping 0",
            "link set br0 addrgenmode none up",
        )
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        for index, host in enumerate(self.hosts):
            namespace = self._namespace(index)
            folder = HOSTS_FOLDER / namespace
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
            _ip("netns", "add", namespace)
            _ip_batch(
                self._bridge,
                f"link add port{index} type veth peer name {_DEVICE} netns {namespace}",
                f"link set port{index} addrgenmode none master br0 up",
            )
            _ip_batch(
                namespace,
                f"link set lo mtu {_LOOPBACK_MTU} up",
                f"link set {_DEVICE} addrgenmode none up",
                f"addr add {host.address}/16 dev {_DEVICE}",
            )
            if self._cores is not None:
                entered = processors.limit(namespace, self._cores)
                self.hosts[index] = dataclasses.replace(host, prefix=(*entered, *host.prefix))
            settings = " && ".join(f"echo {value} >/proc/sys/net/ipv4/{name}" for name, value in _TCP.items())
            _run("ip", "netns", "exec", namespace, "sh", "-c", settings)
        if self._rate is not None:
            self.set_rate(self._rate)


def check_possible() -> None:
    """Raises ConfigError if this process cannot make network namespaces."""
    advice = "`python -m jaxdl.launch local` works without."
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"netns: network namespaces need Linux; this is {sys.platform}. {advice}")
    if os.geteuid() != 0:
        raise ConfigError(f"netns: only root can make network namespaces; run the command with `sudo`. {advice}")
    missing = [tool for tool in ("ip", "tc", "unshare", "sh") if shutil.which(tool, path=_PATH) is None]
    if missing:
        package = "util-linux" if missing == ["unshare"] else "iproute2"
        raise ConfigError(f"netns: there is no `{missing[0]}` here; install the package {package}. {advice}")


def clean_up_stale() -> list[str]:
    """Removes the namespaces of processes that have ended, and kills what runs in them. Returns their names."""
    pids = {int(match[1]) for name in _leftovers() if (match := _NAME.fullmatch(name))}
    removed: list[str] = []
    for pid in sorted(pids):
        # The lock ends with its holder; the pid alone may belong to another process by now.
        lock = _lock(pid, wait=False)
        if lock is not None:
            removed += _remove(pid)
            _unlock(lock)
    return removed


def _leftovers() -> set[str]:
    folders = {path.name for path in HOSTS_FOLDER.glob("jaxdl-*")}
    return folders | set(_namespaces()) | set(processors.groups("jaxdl-"))


def _namespaces() -> list[str]:
    """Names of all network namespaces that jaxdl has made, in this process or others."""
    names = [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]
    return [name for name in names if _NAME.fullmatch(name)]


def _remove(pid: int) -> list[str]:
    """Removes the namespaces of process `pid`, if they still exist; returns their names."""
    names = sorted(name for name in _leftovers() if name.startswith(f"jaxdl-{pid}-"))
    for name in names:
        _empty(name)
        with contextlib.suppress(ConfigError):
            _ip("netns", "delete", name)
        shutil.rmtree(HOSTS_FOLDER / name, ignore_errors=True)
        processors.remove(name)
    return names


def _empty(namespace: str) -> None:
    """Kills every process in a namespace, which would keep its links alive."""
    deadline_sec = time.monotonic() + _KILL_SEC
    while time.monotonic() < deadline_sec:
        try:
            pids = _ip("netns", "pids", namespace).split()
        except ConfigError:
            return  # The namespace no longer exists.
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _lock(pid: int, *, wait: bool = True) -> IO[str] | None:
    """The lock file of process `pid`, held until it is closed; None if another process holds it and `wait` is false."""
    LOCK_FOLDER.mkdir(parents=True, exist_ok=True)
    path = LOCK_FOLDER / f"{pid}.lock"
    while True:
        file = path.open("w", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()  # Its holder removed the file meanwhile.


def _unlock(lock: IO[str]) -> None:
    Path(lock.name).unlink(missing_ok=True)
    lock.close()


def _address(index: int) -> str:
    high, low = divmod(index + 1, 256)
    return f"10.77.{high}.{low}"


def _prefix(pid: int, index: int, name: str) -> tuple[str, ...]:
    ip = shutil.which("ip", path=_PATH) or "ip"
    return (ip, "netns", "exec", f"jaxdl-{pid}-{index}", "unshare", "--uts", "sh", "-c", _NAMED, name)


def _limit(namespace: str, device: str, bits: int | None) -> None:
    """Limits a device to sending `bits` per second; None removes the limit."""
    if bits is None:
        with contextlib.suppress(ConfigError):  # There was no limit.
            _run("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
        return
    # After a pause a burst passes at full speed. Small buckets keep small messages as slow as the link; the kernel
    # sometimes refills it late, and a full bucket loses the excess.
    burst_bytes = max(_MIN_BURST_BYTES, round(bits / 8 * _BURST_SEC))
    shape = ("rate", f"{bits}bit", "burst", f"{burst_bytes}b", "latency", f"{_LATENCY_MS}ms")
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *shape)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _ip_batch(namespace: str, *commands: str) -> None:
    _run("ip", "-n", namespace, "-batch", "-", stdin="\n".join(commands) + "\n")


def _run(*words: str, stdin: str | None = None) -> str:
    """Runs a tool and returns its output. Raises ConfigError with its error output when it fails."""
    result = subprocess.run(
        words,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        start_new_session=True,  # Ctrl-C in a terminal must reach the launcher only.
        env=os.environ | {"PATH": _PATH},
    )
    if result.returncode:
        said = result.stderr.strip() or f"exit code {result.returncode}"
        raise ConfigError(f"`{' '.join(words)}` failed: {said}. Making network namespaces needs full root privileges.")
    return result.stdout
