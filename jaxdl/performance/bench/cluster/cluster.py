"""The cost of a slow network in a training step, with exchanges and agreements, measured on an emulated cluster.

Every host is a network namespace with one JAX process; the links between them are limited
(`jaxdl.platform.launch.netns`). The real train step runs on resident data with every exchange in turn, and without any
exchange (the floor). "dense" is the paper's baseline: reduce-scatter inside a host, all-reduce between hosts,
all-gather inside.

Of an agreement, whose rounds are long, the local step and the merges of one round are timed apart, in turns with all
else; its step is the average one, a local step and its share of the merges. Where messages are sent beside local steps,
in one program with them, these steps are subtracted, so what is left is what a merge is waited for. Hosts begin each
local step together, which in a run they do not.

With `--pipeline M` the hosts are also measured as stages of a pipeline with M micro-batches. They share cores, so a
stage that waits leaves its cores to others: messages and forward passes that are computed twice show here, but not a
pipeline's idle time.

Rates are chosen so that the dense exchange takes 0.2 to 4 times as long as the rest of the step; a ResNet-50 at 96
pixels on 16 x 8 V100 with 25 Gb/s has about 0.4 (Shi et al. 2021). What a rate means depends on the model: the default
one, a ResNet-14 of three times the usual width (1.6 M parameters) with 12 images a device, computes 20 thousand
operations for each gradient that a device exchanges; on that cluster it is 45 thousand, and a GPU selects gradients
faster, for the time it takes to convolve, than a CPU. So the computation of an exchange costs relatively more here than
there.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.core.options import choices_help, parse_options, take_choices
from jaxdl.data import SyntheticImages
from jaxdl.models import ResNet
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.cluster import ClusterConfig
from jaxdl.parallel.cluster.exits import stop_code, stop_signals
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.bench.cluster.cluster_hosts import HostFailed, Workers
from jaxdl.performance.bench.cluster.cluster_report import (
    Merges,
    Turn,
    choose_rate,
    curves,
    figure,
    host_bytes,
    make_rows,
    rate_table,
    summary,
)
from jaxdl.performance.bench.cluster.cluster_variants import (
    AGREEMENTS,
    BASELINE,
    EXCHANGES,
    FLOOR,
    LOCAL,
    PIPELINE,
    VARIANTS,
    floor_of,
    merges_of_round,
)
from jaxdl.performance.bench.shared import bench, check_options, program, write_json
from jaxdl.platform.launch.netns import Network, check_possible, parse_rate
from jaxdl.report import replace_file
from jaxdl.training.experiment import Experiment, load_experiment

_PATIENCE_SEC = 600.0
RATIOS = (0.2, 0.4, 1.0, 2.0, 4.0)


def default_experiment() -> Experiment:
    """The experiment without `--config`."""
    return Experiment(
        model=ResNet(depth=14, width=48, stem="cifar"),
        data=SyntheticImages(),
        optimizer=SGD(learning_rate=0.1, momentum=0.9),
        schedule=Constant(),
        batch_size=96,
        steps=1000,
    )


@dataclass(frozen=True)
class ClusterBench:
    """Times the train step with exchanges and agreements on an emulated cluster, at several rates of its links."""

    config: Path | None = None
    """The experiment, a Python file with a function config(); its mesh, exchange and length are not used. Without it, a
    small ResNet on synthetic images."""
    experiment: Annotated[Experiment, tyro.conf.arg(name="")] = field(default_factory=default_experiment)
    hosts: int = 4
    """Hosts, each a replica."""
    devices_per_host: int = 2
    """Virtual CPU devices of each host; its replica is sharded over them."""
    rates: tuple[str, ...] = ()
    """Rates of the links, such as 100mbit; by default they are chosen for --ratios."""
    ratios: tuple[float, ...] = RATIOS
    """Times of the dense exchange to aim for, relative to the rest of the step."""
    exchanges: tuple[str, ...] = EXCHANGES
    """The exchanges to compare, by their names in the table; the floor and dense are always included."""
    agreements: tuple[str, ...] = AGREEMENTS
    """The agreements to compare, by their names in the table."""
    pipeline: int = 0
    """Micro-batches of a pipeline whose stages are the hosts, which is compared too; 0: none. For decoders."""
    num_rounds: int = 5
    """Rounds at each rate; every exchange and agreement runs once in each. Medians are reported."""
    num_steps: int = 1
    """Steps of each exchange in one round; of an agreement, how many times all merges are made."""
    num_repeats: int = 5
    """How often the probe sends each message."""
    json: Path | None = None
    """A file for the results."""
    plot: Path | None = None
    """A PNG file for a figure."""


@bench("cluster", "every gradient exchange in the train step, on an emulated cluster with a slow network")
def main(args: list[str]) -> None:
    """Runs the measurement and prints a table for each rate."""
    command = parse_command(args)
    check_possible()
    console = Console(width=120)
    try:
        results = measure(command, console)
    except HostFailed as error:
        console.print(f"{error}", markup=False, soft_wrap=True)
        raise SystemExit(1) from None
    for line in summary(results["rows"]):
        console.print(f"  - {line}", soft_wrap=True)
    hosts = f"{command.hosts} hosts x {command.devices_per_host} devices"
    title = f"Emulated cluster: {hosts}, {results['num_parameters']:,} parameters"
    at, series = curves(results["rows"])
    drawn = {"title": title, "dense_over_computation": at, "series": {k: v._asdict() for k, v in series.items()}}
    if command.plot:
        replace_file(command.plot, figure(at, series, title))
    results["rows"] = [
        asdict(row) | {"error": row.error, "exchange_error": row.exchange_error}
        for rows in results["rows"]
        for row in rows
    ]
    about = {"hosts": command.hosts, "devices_per_host": command.devices_per_host}
    write_json(command.json, results | about | drawn)


def parse_command(args: Sequence[str]) -> ClusterBench:
    """The command line. Raises ConfigError for values that do not fit, or exits after --help."""
    given, left = default_experiment(), list(args)
    if "--config" in left[:-1]:
        given = load_experiment(left[left.index("--config") + 1])
    experiment, left = take_choices(given, left)
    default, description = ClusterBench(experiment=experiment), f"{__doc__}\n{choices_help(experiment)}"
    command = parse_options(ClusterBench, args=left, default=default, prog=program(__name__), description=description)
    _check(command, given)
    return command


def _check(command: ClusterBench, given: Experiment) -> None:
    check_options(command, hosts=2, devices_per_host=1, num_rounds=1, num_steps=1, num_repeats=1)
    for name, advice in (
        ("mesh", "Give --hosts and --devices-per-host instead."),
        ("exchange", "Give --exchanges instead."),
        ("agreement", "Give --agreements instead."),
        ("steps", "Give --num-rounds instead."),
        ("epochs", "Give --num-rounds instead."),
        ("tokens", "Give --num-rounds instead."),
        ("cluster", "Leave it out."),
    ):
        value = getattr(command.experiment, name)  # A length that is given unsets the others.
        if value is not None and value != getattr(given, name):
            raise ConfigError(f"--{name}: the measurement sets this itself. {advice}")
    for option, what, known in (("exchanges", "exchange", EXCHANGES), ("agreements", "agreement", AGREEMENTS)):
        for name in getattr(command, option):
            if name not in known:
                listed = ", ".join(f'"{choice}"' for choice in known)
                raise ConfigError(f"--{option} {name!r}: there is no such {what}. Choose from {listed}.")
    if command.pipeline:
        _check_pipeline(command)
    if command.rates and command.ratios != RATIOS:
        raise ConfigError("--rates and --ratios: the ratios follow from the rates. Give one of them.")
    if not command.rates and (not command.ratios or min(command.ratios) <= 0):
        raise ConfigError(f"--ratios {command.ratios}: give one or more numbers above 0.")
    for rate in command.rates:
        parse_rate(rate)


def _check_pipeline(command: ClusterBench) -> None:
    """Raises ConfigError for what the hosts cannot compute as stages."""
    experiment, least = command.experiment, command.hosts
    if not experiment.model.splits_layers:
        raise ConfigError(
            f"--pipeline {command.pipeline}: model {experiment.model.kind} cannot spread its layers over hosts. Give a "
            "decoder, such as --config configs/python_lm.py, or leave it out."
        )
    if command.pipeline < least or experiment.batch_size % (command.pipeline * command.devices_per_host):
        raise ConfigError(
            f"--pipeline {command.pipeline}: give at least {least} micro-batches, one for each host, that divide "
            f"--batch-size {experiment.batch_size} on {command.devices_per_host} devices."
        )


def measure(command: ClusterBench, console: Console) -> dict[str, Any]:
    """All results: `rows`, a list for each rate, and plain values."""
    chosen = [FLOOR, BASELINE, *command.exchanges, *command.agreements, *([PIPELINE] if command.pipeline else [])]
    names = [name for name in VARIANTS if name in chosen or name in map(floor_of, chosen)]
    mesh = MeshConfig(replica=command.hosts, fsdp=command.devices_per_host)
    # Hosts share cores and wait while one compiles; they must not be taken for lost.
    patient = ClusterConfig(start_timeout_sec=_PATIENCE_SEC, silence_timeout_sec=_PATIENCE_SEC)
    experiment = command.experiment.replaced(
        {"mesh": mesh, "cluster": patient, "epochs": None, "tokens": None, "steps": 1_000_000}
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        network = stack.enter_context(Network(command.hosts))
        workers = stack.enter_context(Workers(network.hosts, devices_per_host=command.devices_per_host))
        say = stack.enter_context(_progress(console))
        about = _prepare(workers, experiment, names, command.pipeline, say)
        device_bytes = workers.ask("start")[0]
        say("measuring the devices")
        speeds = workers.ask("probe_devices", num_repeats=command.num_repeats)[0]
        floor_sec = statistics.median(_turn(workers, network, FLOOR, 2).step_sec for _ in range(3))
        sent = host_bytes(BASELINE, device_bytes[BASELINE], command.devices_per_host)
        rates = command.rates or [
            choose_rate(ratio, host_bytes=sent, floor_sec=floor_sec) for ratio in sorted(command.ratios)
        ]
        console.print(
            f"{about['num_parameters']:,} parameters, batch {experiment.batch_size}; a step without exchange takes "
            f"{floor_sec:.3f} s, a host sends {sent / 1e6:.3g} MB in a dense one",
            soft_wrap=True,
        )
        rows, networks = [], {}
        for rate in rates:
            network.set_rate(rate)
            say(f"{rate}: measuring the network")
            probed = workers.ask("predict", num_repeats=command.num_repeats)[0]
            turns: dict[str, list[Turn]] = {name: [] for name in names}
            for number in range(command.num_rounds):
                merges = {}
                for name in names[::-1] if number % 2 else names:
                    say(f"{rate}: round {number + 1} of {command.num_rounds}, {name}")
                    if name in AGREEMENTS:
                        merges[name] = _merges(workers, network, name, command.num_steps)
                    else:
                        turns[name].append(_turn(workers, network, name, command.num_steps))
                for name, merge in merges.items():
                    round_steps = VARIANTS[name].agreement.round_steps(command.hosts)
                    turns[name].append(merge.turn(turns[LOCAL][-1], round_steps))
            networks[rate] = probed
            rows.append(make_rows(parse_rate(rate), turns, probed["costs"], devices_per_host=command.devices_per_host))
            console.print(rate_table(rows[-1]))
    return about | {"rows": rows, "floor_sec": floor_sec, "devices": speeds, "networks": networks}


def _prepare(
    workers: Workers, experiment: Experiment, names: Sequence[str], microbatches: int, say: Callable[[str], None]
) -> dict[str, Any]:
    say("starting the hosts")
    about = workers.ask("setup", experiment=experiment.to_json(), names=names, microbatches=microbatches)[0]
    everybody_else = range(1, experiment.mesh.replica)
    for number, name in enumerate(names):
        say(f"compiling {number + 1} of {len(names)}: {name}")
        # One host compiles for all: they share a few cores.
        [compiled] = workers.ask("compile", only=[0], name=name)
        about.setdefault("compile_sec", {})[name] = compiled.pop("sec")
        workers.ask("load", only=everybody_else, name=name, **compiled)
    say("first steps")
    return about


def _turn(workers: Workers, network: Network, name: str, num_steps: int) -> Turn:
    """Runs some steps of a variant; a step ends when it has ended on every host."""
    before = _sent_bytes(network)
    seconds = [answer["seconds"] for answer in workers.ask("run", name=name, num_steps=num_steps)]
    sent = _sent_bytes(network) - before
    steps = [max(of_hosts) for of_hosts in zip(*seconds, strict=True)]
    return Turn(statistics.mean(steps), sent / len(network.hosts) / num_steps)


def _merges(workers: Workers, network: Network, name: str, num_rounds: int) -> Merges:
    """Runs the merges of some rounds of an agreement; one ends when it has ended on every host."""
    before = _sent_bytes(network)
    seconds = [answer["seconds"] for answer in workers.ask("merge", name=name, num_rounds=num_rounds)]
    sent = _sent_bytes(network) - before
    merges = merges_of_round(VARIANTS[name].agreement, len(network.hosts))
    return Merges(
        seconds=sum(max(of_hosts) for of_hosts in zip(*seconds, strict=True)) / num_rounds,
        wire_bytes=sent / len(network.hosts) / num_rounds,
        num_merges=len(merges),
        num_steps=sum(beside for _, beside in merges),
    )


def _sent_bytes(network: Network) -> int:
    return sum(network.sent_bytes(number) for number in range(len(network.hosts)))


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end the program like Ctrl-C, after the hosts and their network are removed."""

    def end(signum: int, _: object) -> None:
        raise SystemExit(stop_code(signum))

    before = {signum: signal.signal(signum, end) for signum in stop_signals() if signum != signal.SIGINT}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Context: a function that shows the current activity, on one updated line of a terminal, else line by line."""
    if not console.is_terminal:
        yield functools.partial(print, file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield status.update
