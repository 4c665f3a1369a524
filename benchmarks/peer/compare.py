"""Seconds a training step of PyTorch's DDP and of jaxdl, with their gradient exchanges, on one emulated cluster.

Hosts are network namespaces behind limited links. On each are three processes: one of PyTorch, one of jaxdl, and one of
jaxdl that knows of no others. One side at a time works, while all others wait. Model, parameters at the start, batches
and optimizer are the same, in float32, and the losses of the first steps with a dense exchange are compared.

In each round every side has a turn: a warm-up step, then measured ones in a row, without a barrier between them, as in
training. A step's time is the mean over the hosts, and the figure of a side the median of all its steps at a rate. MB
of a host are those of its interface, headers included; CPU seconds are those of one process in a step.

"local" is the floor of each framework: the same step on all hosts, no process knowing of the others. "no exchange" is
all that a framework does but its exchange of gradients: DDP with PyTorch's `noop_hook`, and jaxdl's step with its small
sums of metrics.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.peer.jaxdl_host import SIDES
from benchmarks.peer.steps import LOCAL
from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticText
from jaxdl.models import Transformer
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.cluster import ClusterConfig
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.bench.cluster.cluster_hosts import HostFailed, Workers, alone, joined
from jaxdl.performance.bench.shared import make_table, parse_bench, run_module, write_json
from jaxdl.platform.launch.host import Host
from jaxdl.platform.launch.netns import Network, check_possible, parse_rate
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import LanguageModelling

JAXDL, TORCH = "jaxdl", "PyTorch"
DENSE = {JAXDL: "dense", TORCH: "plain"}
MOST_DIFFERENT = 2e-3
"""Of the losses of both frameworks in the first steps."""
_TORCH_PORT, _PATIENCE_SEC = 29_700, 600.0
UNLIMITED = "none"


@dataclass(frozen=True)
class PeerBench:
    """Times training steps of both frameworks at several rates of the links."""

    rates: tuple[str, ...] = ("25mbit", "100mbit")
    """Rates of the links; `none` is no limit."""
    num_steps: int = 5
    """Measured steps of a side in one round."""
    num_rounds: int = 3
    """Rounds at each rate."""
    hosts: int = 4
    """Hosts, each a replica."""
    num_layers: int = 2
    """Layers of the network."""
    embed_dim: int = 256
    """Its width."""
    length: int = 128
    """Tokens of an example."""
    batch_size: int = 96
    """Examples of a step, on all hosts."""
    torch_threads: int = 1
    """Threads with which a process of PyTorch computes; Gloo has two more."""
    jaxdl_threads: int = 2
    """Threads of XLA in a process. If there is one, it may wait for the network when it should compute."""
    torch_sides: tuple[str, ...] = ()
    """Exchanges of PyTorch, by their names in the table; all of them if none is given."""
    jaxdl_sides: tuple[str, ...] = tuple(SIDES)
    """Exchanges of jaxdl."""
    torch_python: Path = Path(sys.executable)
    """A Python that has PyTorch."""
    json: Path | None = None
    """A file for the results."""


@dataclass(frozen=True)
class Turn:
    """The steps of a side in one round."""

    seconds: Sequence[float]
    """Of each step, the mean over the hosts."""
    host_bytes: float
    """That a host sent in a step."""
    cpu_sec: float
    counted_bytes: float | None
    """Bytes of a step by the exchange's own count."""


@dataclass(frozen=True)
class SideTimes:
    """A side at one rate."""

    rate: str
    framework: str
    side: str
    step_sec: float
    """The median."""
    quartiles_sec: tuple[float, float]
    over_local_sec: float | None
    """Beyond the framework's step without an exchange; None where that is not measured."""
    times_faster: float | None
    """Than the framework's own dense exchange."""
    host_bytes: float
    counted_bytes: float | None
    cpu_sec: float


def main(args: list[str]) -> None:
    """Runs the measurement and prints a table for each rate."""
    command = parse_command(args)
    check_possible()
    try:
        results = measure(command, Console(width=130))
    except HostFailed as error:
        raise SystemExit(str(error)) from None
    write_json(command.json, results)


def parse_command(args: list[str]) -> PeerBench:
    """The command line. Raises ConfigError, or exits after --help."""
    names = ("num_steps", "num_rounds", "num_layers", "embed_dim", "length", "torch_threads", "jaxdl_threads")
    command = parse_bench(PeerBench, args, __name__, hosts=2, **dict.fromkeys(names, 1))
    for rate in command.rates:
        if rate != UNLIMITED:
            parse_rate(rate)
    if command.batch_size < 1 or command.batch_size % command.hosts:
        raise ConfigError(f"--batch-size {command.batch_size}: it cannot be split over {command.hosts} hosts.")
    if unknown := [side for side in command.jaxdl_sides if side not in SIDES]:
        listed = ", ".join(f'"{side}"' for side in SIDES)
        raise ConfigError(f"--jaxdl-sides {unknown[0]!r}: there is no such side. Choose from {listed}.")
    if not set(command.jaxdl_sides) - {LOCAL}:
        raise ConfigError("--jaxdl-sides: give one that exchanges gradients, such as dense.")
    return command


def experiment_of(command: PeerBench, replicas: int, batch_size: int) -> Experiment:
    """The run, of so many replicas with one device each."""
    # Hosts that wait while one compiles, on cores that they share, are not lost.
    patient = ClusterConfig(start_timeout_sec=_PATIENCE_SEC, silence_timeout_sec=_PATIENCE_SEC)
    model = Transformer(num_layers=command.num_layers, embed_dim=command.embed_dim, num_heads=4, scan_layers=False)
    return Experiment(
        model=model,
        data=SyntheticText(vocab_size=256, length=command.length),
        task=LanguageModelling(),
        optimizer=SGD(learning_rate=0.05, momentum=0.9),
        schedule=Constant(),
        batch_size=batch_size,
        steps=1_000_000,
        mesh=MeshConfig(replica=replicas, fsdp=1),
        cluster=patient,
    )


class Cluster:
    """The processes on the hosts, and what is asked of them."""

    def __init__(self, command: PeerBench, network: Network, stack: contextlib.ExitStack) -> None:
        self.command, self.network = command, network
        hosts, xla = network.hosts, {"NPROC": str(command.jaxdl_threads)}
        ours = (sys.executable, "-m", "benchmarks.peer.jaxdl_host")
        theirs = (str(command.torch_python), "-m", "benchmarks.peer.torch_host")

        def start(program: Sequence[str], environments: Sequence[Mapping[str, str]]) -> Workers:
            return stack.enter_context(Workers(hosts, program=program, environments=environments))

        self.local = start(ours, [alone(host) | xla for host in hosts])
        self.jaxdl = start(ours, [environment | xla for environment in joined(hosts, 1)])
        self.torch = start(theirs, [_torch_environment(host, command.torch_threads) for host in hosts])
        self.sides: list[tuple[str, str]] = []

    def prepare(self, folder: str, console: Console) -> dict[str, Any]:
        """Compiles all sides and takes their first steps; returns what they are, and these losses."""
        command, num_hosts = self.command, self.command.hosts
        alone_with_all = experiment_of(command, 1, command.batch_size).to_json()
        self.local.ask("setup", only=[0], experiment=alone_with_all, names=[LOCAL])
        self.local.ask("export", only=[0], folder=folder)
        share = experiment_of(command, 1, command.batch_size // num_hosts).to_json()
        self.local.ask("setup", experiment=share, names=[LOCAL])
        self._compile(self.local, [LOCAL], console)
        whole = experiment_of(command, num_hosts, command.batch_size).to_json()
        names = [name for name in command.jaxdl_sides if name != LOCAL]
        about = {JAXDL: self.jaxdl.ask("setup", experiment=whole, names=names)[0]}
        self._compile(self.jaxdl, names, console)
        losses = {JAXDL: {name: self.jaxdl.ask("first", name=name)[0] for name in names}}
        address = f"{self.network.hosts[0].address}:{_TORCH_PORT}"
        common = {"experiment": whole, "names": command.torch_sides, "folder": folder, "address": address}
        each = [{"rank": number, "world": num_hosts} for number in range(num_hosts)]
        about[TORCH] = self.torch.ask("setup", each=each, threads=command.torch_threads, **common)[0]
        losses[TORCH] = {name: _means(self.torch.ask("first", name=name)) for name in about[TORCH]["names"]}
        assert about[TORCH]["num_parameters"] == about[JAXDL]["num_parameters"], about
        lists = [[(TORCH, name) for name in about[TORCH]["names"]], [(JAXDL, name) for name in command.jaxdl_sides]]
        self.sides = [side for side in chain.from_iterable(zip_longest(*lists)) if side is not None]
        return {"about": about, "first_losses": losses}

    def _compile(self, workers: Workers, names: Sequence[str], console: Console) -> None:
        """The first host compiles for all: they share the cores."""
        for name in names:
            console.print(f"compiling {name}")
            [program] = workers.ask("compile", only=[0], name=name)
            del program["sec"]
            workers.ask("load", only=range(1, self.command.hosts), name=name, **program)
        workers.ask("make_states")
        if LOCAL in names:
            workers.ask("first", name=LOCAL)

    def turn(self, framework: str, name: str) -> Turn:
        """Some steps of a side."""
        workers = self.torch if framework == TORCH else self.local if name == LOCAL else self.jaxdl
        num_steps, num_hosts, before = self.command.num_steps, self.command.hosts, self._sent_bytes()
        answers = workers.ask("turn", name=name, num_steps=num_steps, warm_up=1)
        return Turn(
            _means([answer["seconds"] for answer in answers]),
            (self._sent_bytes() - before) / num_hosts / (num_steps + 1),
            statistics.mean(answer["cpu_sec"] for answer in answers),
            answers[0].get("bytes_sent"),
        )

    def _sent_bytes(self) -> int:
        return sum(self.network.sent_bytes(number) for number in range(self.command.hosts))

    def without_others(self) -> dict[str, list[float]]:
        """Seconds of local steps of one process of each framework, while all others wait."""
        seconds: dict[str, list[float]] = {TORCH: [], JAXDL: []}
        for _ in range(self.command.num_rounds):
            for framework, workers, more in ((TORCH, self.torch, {"together": False}), (JAXDL, self.local, {})):
                if (framework, LOCAL) in self.sides:
                    arguments = {"name": LOCAL, "num_steps": self.command.num_steps, "warm_up": 1, **more}
                    [answer] = workers.ask("turn", only=[0], **arguments)
                    seconds[framework] += answer["seconds"]
        return seconds


def _torch_environment(host: Host, threads: int) -> dict[str, str]:
    count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return count | {"GLOO_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": "", "JAXDL_HOST": host.name}


def _means(of_hosts: Sequence[Sequence[float]]) -> list[float]:
    """The mean over the hosts of each step."""
    return [statistics.mean(step) for step in zip(*of_hosts, strict=True)]


def compare_losses(losses: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """What the first losses with dense exchanges say. Exits with 1 if the frameworks do not train the same network."""
    ours, theirs = (losses[framework].get(DENSE[framework]) for framework in (JAXDL, TORCH))
    if ours is None or theirs is None:
        return "losses are not compared: the sides have no dense exchange of both"
    difference = float(np.max(np.abs(np.subtract(ours, theirs))))  # NaN if any loss is: `max` would pass over it.
    shown = [" ".join(f"{loss:.5f}" for loss in side_losses) for side_losses in (ours, theirs)]
    text = f"losses of the first steps: jaxdl {shown[0]}, PyTorch {shown[1]}; difference {difference:.1e} at most"
    if not difference <= MOST_DIFFERENT:
        raise SystemExit(f"{text}: the two do not train the same network.")
    return text


def measure(command: PeerBench, console: Console) -> dict[str, Any]:
    """All results; prints them as they come."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxdl-peer-"))
        network = stack.enter_context(Network(command.hosts))
        cluster = Cluster(command, network, stack)
        results = cluster.prepare(folder, console)
        about = results["about"]
        console.print(
            f"{about[JAXDL]['num_parameters']:,} parameters; {about[TORCH]['about']}; {about[JAXDL]['about']}"
        )
        console.print(compare_losses(results["first_losses"]), soft_wrap=True)
        results["without_others_sec"] = cluster.without_others()
        rows: list[SideTimes] = []
        for rate in command.rates:
            network.set_rate(None if rate == UNLIMITED else rate)
            turns: dict[tuple[str, str], list[Turn]] = {side: [] for side in cluster.sides}
            for side in _rounds(cluster.sides, command.num_rounds):
                turns[side].append(cluster.turn(*side))
            rows += make_rows(rate, turns)
            console.print(table([row for row in rows if row.rate == rate]))
        load = os.getloadavg()[0]
    return results | {"rows": [asdict(row) for row in rows], "load": load}


def _rounds(sides: Sequence[tuple[str, str]], num_rounds: int) -> Iterator[tuple[str, str]]:
    """The sides of every round, each second round in the opposite order."""
    for number in range(num_rounds):
        yield from sides[::-1] if number % 2 else sides


def make_rows(rate: str, turns: Mapping[tuple[str, str], Sequence[Turn]]) -> list[SideTimes]:
    """The rows of one rate."""
    steps = {side: [sec for turn in some for sec in turn.seconds] for side, some in turns.items()}
    medians = {side: statistics.median(seconds) for side, seconds in steps.items()}
    rows = []
    for (framework, name), some in turns.items():
        median, seconds = medians[framework, name], steps[framework, name]
        local, dense = medians.get((framework, LOCAL)), medians.get((framework, DENSE[framework]))
        low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else 3 * [median]
        rows.append(
            SideTimes(
                rate,
                framework,
                name,
                step_sec=median,
                quartiles_sec=(low, high),
                over_local_sec=None if local is None else median - local,
                times_faster=None if dense is None else dense / median,
                host_bytes=statistics.median(turn.host_bytes for turn in some),
                counted_bytes=some[0].counted_bytes,
                cpu_sec=statistics.median(turn.cpu_sec for turn in some),
            )
        )
    return rows


def table(rows: Sequence[SideTimes]) -> Table:
    """The sides at one rate."""
    columns = ("", "exchange", "step s", "quartiles", "beyond local, s", "faster than dense", "MB of a host", "CPU s")
    made = make_table(f"links of {rows[0].rate}", columns, left=columns[:2])
    for row in rows:
        low, high = row.quartiles_sec
        made.add_row(
            row.framework,
            row.side,
            f"{row.step_sec:.3f}",
            f"{low:.2f} to {high:.2f}",
            "" if row.over_local_sec is None else f"{row.over_local_sec:+.2f}",
            "" if row.times_faster is None else f"{row.times_faster:.2f}x",
            f"{row.host_bytes / 1e6:.2f}",
            f"{row.cpu_sec:.2f}",
        )
    return made


if __name__ == "__main__":
    run_module(main)
