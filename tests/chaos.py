"""A run on emulated hosts that is harmed again and again: what a chaos test does to it, and when."""

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from orbax.checkpoint.utils import checkpoint_steps
from runs import ROOT, rows

from jaxdl.core.config import ConfigError
from jaxdl.core.files import CHECKPOINTS_FOLDER, step_dir
from jaxdl.platform.launch.netns import Network, check_possible

FAULTS = ("kill a worker", "stop a worker", "cut a link", "kill the launcher", "terminate one host", "damage")
NUM_HOSTS = 2


@functools.cache
def why_no_hosts() -> str | None:
    """Why there can be no emulated hosts here; None when there can."""
    try:
        check_possible()
        with Network(1):  # Root without root's full rights, as in a container, finds out only so.
            pass
    except ConfigError as error:
        return str(error)
    return None


def draw(seed: int, num_faults: int) -> list[str]:
    """Faults in random order: each kind at least once. Damage alone shows only in the next start, so it is not last."""
    dice = random.Random(seed)
    faults = [*FAULTS, *dice.choices(FAULTS, k=num_faults - len(FAULTS))]
    dice.shuffle(faults)
    while faults[-1] == "damage":
        dice.shuffle(faults)
    return faults


class Chaos:
    """A launcher and its hosts, started anew when the launcher itself is gone; `output` is all that they print."""

    def __init__(self, config: Path, workdir: Path, *options: str) -> None:
        self.workdir, self.pids = workdir, workdir.with_suffix(".pids.json")
        launch = ["netns", "--hosts", str(NUM_HOSTS), "--devices-per-host", "1", "--restarts", "100"]
        self.command = [
            *(sys.executable, "-m", "jaxdl.launch", *launch, "--grace-sec", "3", "--pids", str(self.pids), "--"),
            *("python", "-m", "jaxdl.train", "--config", str(config), "--workdir", str(workdir), *options),
        ]
        self.output: list[str] = []
        self.num_launches = 0
        self._harmed: list[int] = []

    def launch(self) -> None:
        """Starts the launcher, as a machine's supervisor would."""
        self.num_launches += 1
        environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
        # A process that starts again need not compile again.
        environment["JAX_COMPILATION_CACHE_DIR"] = str(self.workdir.parent / "cache")
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.output.append(line)

    def step(self) -> int:
        """The last step that the run has reported, in this attempt or an earlier one."""
        return max((row["step"] for row in rows(self.workdir)), default=0)

    def wait_for_step(self, step: int, timeout_sec: float) -> None:
        """Returns when the run has come to a step, and trains again since the last fault; the launcher must not end."""
        end_sec = time.monotonic() + timeout_sec
        while self.step() < step or not self.trains():
            assert self.process.poll() is None, f"the launcher ended with {self.process.returncode}: {self.tail()}"
            assert time.monotonic() < end_sec, f"step {step} was not reached, only {self.step()}: {self.tail()}"
            time.sleep(0.02)

    def wait_for_halt(self, for_sec: float = 1.5) -> None:
        """Returns when neither the last step nor the checkpoints have changed for so long: a cut link stops a run soon,
        but not at once, and a checkpoint that it still writes is a newer one."""
        seen, since_sec = None, time.monotonic()
        while time.monotonic() - since_sec < for_sec:
            now = self.step(), sorted(path.name for path in (self.workdir / CHECKPOINTS_FOLDER).iterdir())
            if now != seen:
                seen, since_sec = now, time.monotonic()
            time.sleep(0.05)

    def trains(self) -> bool:
        """Whether the newest processes, and not those of the last fault, have written metrics since they were started.

        Otherwise a fault might meet processes that are gone, or ones that another fault is ending already.
        """
        state, metrics = json.loads(self.pids.read_text()), self.workdir / "metrics.jsonl"
        newer = metrics.stat().st_mtime_ns > self.pids.stat().st_mtime_ns
        return newer and [state["launcher"], state["restart"]] != self._harmed

    def harm(self, fault: str, dice: random.Random) -> None:
        """Does one fault to a host drawn at random."""
        state = json.loads(self.pids.read_text())
        host = dice.randrange(NUM_HOSTS)
        if fault != "damage":
            self._harmed = [state["launcher"], state["restart"]]
        if fault == "kill the launcher":
            self.process.kill()
            self.process.wait()
            self.launch()
        elif fault == "cut a link":
            network = Network.of(state["launcher"])
            network.set_link(host, up=False)
            threading.Timer(12, mend, (network, host)).start()
        elif fault == "damage":
            newest = step_dir(self.workdir, max(checkpoint_steps(self.workdir / CHECKPOINTS_FOLDER)))
            damage(newest, dice)
        else:
            signum = {"kill a worker": signal.SIGKILL, "stop a worker": signal.SIGSTOP}.get(fault, signal.SIGTERM)
            os.kill(state["hosts"][f"host{host}"], signum)

    def tail(self, num_lines: int = 60) -> str:
        """The last lines of what was printed."""
        return "".join(self.output[-num_lines:])

    def close(self) -> None:
        """Ends the launcher, and with it the hosts, if a failed test leaves them running."""
        while self.process.poll() is None:
            self.process.terminate()  # The second time it kills them.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)


def mend(network: Network, host: int) -> None:
    """Mends a cut link, unless its launcher has been killed since."""
    with contextlib.suppress(ConfigError):
        network.set_link(host, up=True)


def damage(folder: Path, dice: random.Random) -> None:
    """Flips bits in the largest file of a checkpoint."""
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for _ in range(20):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    largest.write_bytes(content)
