"""How a cluster balances compute and communication: three kernels, at several ratios of the two, on one page.

After BSMBench (Bennett et al., arXiv 1401.3733), for training: (1) an all-reduce of one number, again and again, the
least latency of a step; (2) the local step, in which nothing crosses `replica`: compute, and which host is slow; (3)
the whole step with each exchange. Regimes are networks and batches with more or fewer operations for each byte of
gradient: a transformer block at 0.5, 1 and 2 times the balance point of this machine, which is probed, and two that are
the same everywhere, to compare machines. Weak and strong sets repeat one regime on fewer replicas.

Correctness comes first: if a step is wrong, nothing is timed. Then the iterations of a test are doubled until it takes
--min-seconds, and tests run in turns; all hosts begin each together.

Run it alone, on 8 virtual CPU devices or this machine's GPUs, or in every process of a cluster: python -m jaxdl.launch
local --hosts 2 -- python -m jaxdl.bench balance.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.exchange import Dense, ExchangeConfig, Machine, kinds, predict
from jaxdl.exchange.probe import probe_link, repeated_sum
from jaxdl.parallel.cluster import ClusterConfig, end_together, launched_cpu_devices, start_devices, wait_for_all
from jaxdl.parallel.cluster.agree import of_first_process
from jaxdl.parallel.mesh import FILLING_AXIS, Axis, MeshConfig, gpus_chosen, make_mesh, platform
from jaxdl.performance.bench.balance.balance_check import Checked, check_all, or_inf
from jaxdl.performance.bench.balance.balance_report import (
    LOCAL,
    SUM,
    KernelTimes,
    alike,
    checks_table,
    figure,
    machine_lines,
    make_row,
    regimes_table,
    sets_table,
)
from jaxdl.performance.bench.balance.balance_run import (
    Clock,
    Side,
    first_devices,
    hosts_of,
    machine_kind,
    measure,
    step_side,
)
from jaxdl.performance.bench.balance.balance_thresholds import (
    Thresholds,
    check_about,
    compare,
    file_bytes,
    of_rows,
    parse_thresholds,
)
from jaxdl.performance.bench.balance.balance_work import (
    PATIENCE_SEC,
    RELATIVE,
    Work,
    balanced_rate,
    block,
    make_work_plan,
    with_intensity,
    work_of,
)
from jaxdl.performance.bench.balance.options import FAILED, BalanceBench
from jaxdl.performance.bench.cluster.cluster_variants import EXCHANGES, VARIANTS
from jaxdl.performance.bench.shared import bench, import_exchanges, parse_bench, write_json
from jaxdl.report import replace_file
from jaxdl.training.run.compile import programs, shared_programs
from jaxdl.training.run.plan.exchange import exchanged_gradients
from jaxdl.training.run.result import exit_codes

_REPLICA = Axis.REPLICA.value
_DEVICES = 8
_SUMS = (1, 1000)


@bench("balance", "all-reduces of one number, local steps and whole steps, at several ratios of compute")
def main(args: list[str]) -> None:
    """Runs the measurement in this process, which may be one of several, and prints the page in the first one."""
    least = {"devices": 2, "devices_per_replica": 1, "num_rounds": 1, "most_examples": 1}
    command = parse_bench(BalanceBench, args, __name__, **least)
    _check(command)
    with end_together(), exit_codes(), shared_programs(programs()):
        import_exchanges(command.imports)
        exchanges = exchanges_of(command.exchanges)
        launched = launched_cpu_devices()
        count = command.devices or (None if launched or gpus_chosen() else _DEVICES)
        patient = ClusterConfig(start_timeout_sec=PATIENCE_SEC, silence_timeout_sec=PATIENCE_SEC)
        start_devices(MeshConfig(cpu_devices=count), patient, experiment=_same(command))
        console = Console(width=130, quiet=jax.process_index() > 0)
        if not report(command, exchanges, console):
            raise SystemExit(FAILED)


def _same(command: BalanceBench) -> dict[str, Any]:
    """The options that all processes must have alike."""
    return json.loads(json.dumps(asdict(command), default=str))


def _check(command: BalanceBench) -> None:
    if command.devices is not None and launched_cpu_devices():
        raise ConfigError(f"--devices {command.devices}: the launcher sets it. Give it --devices-per-host instead.")
    for option, value in (("min-seconds", command.min_seconds), ("tolerance", command.tolerance)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"--{option} {value}: give a number above 0.")
    if not command.regimes and not command.sets:
        raise ConfigError("--regimes and --sets: both are empty. Give something to measure.")
    if command.tolerance != BalanceBench.tolerance and command.write_thresholds is None:
        raise ConfigError("--tolerance: it is written with the thresholds. Give --write-thresholds too.")
    if command.thresholds is not None and command.thresholds == command.write_thresholds:
        raise ConfigError("--write-thresholds: it is the file of --thresholds, so a slow drift would never be seen. "
                          "Give another file.")  # fmt: skip
    for option, given in (("plot", command.plot), ("counts", command.counts)):
        if given and not command.sets:
            raise ConfigError(f"--{option}: it is about the sets, and there are none. Give --sets too.")


def exchanges_of(names: Sequence[str]) -> dict[str, ExchangeConfig]:
    """The exchanges by their names. Raises ConfigError for one that is unknown."""
    known: dict[str, ExchangeConfig] = {name: kind() for name, kind in kinds().items()}
    known |= {name: VARIANTS[name].config or Dense() for name in EXCHANGES if not VARIANTS[name].is_flat}
    for name in names:
        if name not in known:
            listed = ", ".join(f'"{choice}"' for choice in known)
            raise ConfigError(f"--exchanges {name!r}: there is no such exchange. Choose from {listed}.")
    return {name: known[name] for name in names}


class Measurement:
    """The measurement on the devices of a run; all processes call its methods alike."""

    def __init__(self, command: BalanceBench, exchanges: Mapping[str, ExchangeConfig], console: Console) -> None:
        self.command, self.exchanges, self.console = command, exchanges, console
        self.inner, self.num_devices = command.devices_per_replica, jax.device_count()
        self.replicas = self.num_devices // self.inner
        if self.replicas < 2 or self.num_devices % self.inner:
            raise ConfigError(
                f"--devices-per-replica {self.inner}: of {self.num_devices} devices this does not make two or more "
                "equal replicas, and an exchange needs them. Use more devices, or fewer in a replica."
            )
        self.mesh: Mesh = make_mesh(MeshConfig(replica=self.replicas, fsdp=self.inner))
        self.clock = Clock(self.mesh)
        self.counts = self._counts()
        kind = machine_kind()
        self.about: dict[str, Any] = {
            "devices": f"{self.num_devices} x {kind}",
            "processes": jax.process_count(),
            "devices_per_replica": self.inner,
            "size": command.size,
            "precision": command.precision,
        }

    def _counts(self) -> list[int]:
        powers = [2**power for power in range(self.replicas.bit_length()) if self.replicas % 2**power == 0]
        given = list(self.command.counts) or powers
        for count in given:
            if not 0 < count <= self.replicas or self.replicas % count:
                raise ConfigError(
                    f"--counts {count}: not a divisor of {self.replicas}, the number of replicas. Choose another one."
                )
        return sorted({*given, self.replicas})

    def say(self, what: str) -> None:
        """Prints what is being done, on stderr of the first process."""
        if jax.process_index() == 0:
            print(what, file=sys.stderr, flush=True)

    def check(self) -> list[Checked]:
        """The test of correctness: the sum, and each exchange with each network."""
        self.say("checking the sum of one number")
        sums = repeated_sum(self.mesh, _REPLICA)
        wait_for_all()
        far = max((abs(sums(count) - count) for count in _SUMS), key=or_inf)
        checks = [Checked(SUM, "counting", max(self.clock.every(far), key=or_inf), 0.0)]
        works = {
            dataclasses.replace(work_of(regime, self.command.size), examples=1).model: regime
            for regime in reversed((*self.command.regimes, self.command.set_regime))
        }
        for regime in works.values():
            name = "block" if regime in RELATIVE else regime
            self.say(f"checking every exchange with the network of {name}")
            work = dataclasses.replace(work_of(regime, self.command.size), examples=1)
            sizes = {"replicas": self.replicas, "inner": self.inner, "precision": self.command.precision}
            some = check_all(work, self.exchanges, **sizes, clock=self.clock)
            checks += [dataclasses.replace(check, name=f"{check.name}, {name}") for check in some]
        return checks

    def sum(self) -> KernelTimes:
        """The first kernel."""
        self.say("timing the sum of one number")
        side = Side(repeated_sum(self.mesh, _REPLICA), hosts_of(self.mesh))
        times = self._timed({SUM: side})[SUM]
        return make_row("", SUM, times, replicas=self.replicas, devices=self.num_devices)

    def balance(self) -> dict[str, float]:
        """The balance point, operations for each byte of gradient: a local step then takes as long as an exchange."""
        self.say("probing the links, and a device")
        links = {_REPLICA: probe_link(self.mesh, _REPLICA, ("all_reduce/float32", "all_gather"))}
        if self.inner > 1:
            links[FILLING_AXIS] = probe_link(self.mesh, FILLING_AXIS, ("all_gather",))
        work = block(self.command.size)
        plan = self._plan(work, None, self.replicas)
        gradients = exchanged_gradients(plan.experiment, plan.splits.train.spec, self.mesh)
        exchange_sec = predict(Dense(), gradients, Machine(links)).total_sec
        size = 4.0 * gradients.num_elements
        sizes = {"gradient_bytes": size, "most": self.command.most_examples}
        rate = balanced_rate(work, self._local_sec, exchange_sec=exchange_sec, **sizes)
        return {
            "latency_sec": links[_REPLICA].latency_sec,
            "bytes_per_sec": links[_REPLICA].bytes_per_sec,
            "gradient_bytes": size,
            "exchange_sec": exchange_sec,
            "flops_per_sec": rate,
            "balance": rate * exchange_sec / size,
        }

    def _local_sec(self, work: Work) -> float:
        return self._timed({LOCAL: step_side(self._plan(work, None, self.replicas))})[LOCAL].slowest_sec

    def works(self, machine: Mapping[str, float], earlier: Thresholds | None) -> dict[str, Work]:
        """The network and batch of each regime; with thresholds, the batches that they have been measured with."""
        wanted: list[str] = [*self.command.regimes, *([self.command.set_regime] if self.command.sets else [])]
        works: dict[str, Work] = {}
        for regime in wanted:
            work = work_of(regime, self.command.size)
            if earlier is not None and regime in earlier.examples:
                work = dataclasses.replace(work, examples=earlier.examples[regime])
            elif regime in RELATIVE:
                intensity = RELATIVE[regime] * machine["balance"]
                work = with_intensity(work, intensity, machine["gradient_bytes"], self.command.most_examples)
            works[regime] = work
        return works

    def rows(self, regime: str, work: Work, replicas: int, scaling: str = "") -> list[KernelTimes]:
        """The second and the third kernel: the local step, and the whole step with each exchange."""
        what = f"{scaling} {regime} on {replicas} of {self.replicas} replicas".strip()
        self.say(f"compiling {what}")
        chosen_sides = {LOCAL: None, **(self.exchanges if replicas > 1 else {})}
        plans = {name: self._plan(work, config, replicas) for name, config in chosen_sides.items()}
        sides = {name: step_side(plan) for name, plan in plans.items()}
        self.say(f"timing {what}")
        times = self._timed(sides)
        plan, devices = plans[LOCAL], replicas * self.inner
        size = 4.0 * exchanged_gradients(plan.experiment, plan.splits.train.spec, plan.parts.layout.mesh).num_elements
        common: dict[str, Any] = {
            "scaling": scaling,
            "replicas": replicas,
            "devices": devices,
            "examples": work.examples * devices,
            "flops": work.flops(work.examples * devices),
            "gradient_bytes": size,
            "local_sec": times[LOCAL].slowest_sec,
        }
        return [make_row(regime, name, time, **common) for name, time in times.items()]

    def set_rows(self, work: Work, measured: Sequence[KernelTimes]) -> list[KernelTimes]:
        """The sets: the rows of their regime on all devices, which may be measured already, and on fewer replicas."""
        regime = self.command.set_regime
        rows = [row for row in measured if row.regime == regime] or self.rows(regime, work, self.replicas)
        for scaling in self.command.sets:
            for count in self.counts[:-1]:
                more = 1 if scaling == "weak" else self.replicas // count
                rows += self.rows(regime, dataclasses.replace(work, examples=more * work.examples), count, scaling)
        return rows

    def _plan(self, work: Work, config: ExchangeConfig | None, replicas: int) -> Any:
        devices = first_devices(replicas * self.inner)
        sizes = {"replicas": replicas, "inner": self.inner, "precision": self.command.precision}
        return make_work_plan(work, config, **sizes, devices=devices)

    def _timed(self, sides: Mapping[str, Side]) -> Any:
        options = {"min_sec": self.command.min_seconds, "num_rounds": self.command.num_rounds}
        return measure(sides, **options, clock=self.clock)


def report(command: BalanceBench, exchanges: Mapping[str, ExchangeConfig], console: Console) -> bool:
    """Measures, prints the page and writes the files; returns whether all is right, and nothing too slow."""
    measurement = Measurement(command, exchanges, console)
    earlier = None
    if (path := command.thresholds) is not None:
        earlier = parse_thresholds(of_first_process(lambda: file_bytes(path)).decode(errors="replace"), path)
        check_about(measurement.about, earlier, path)
    checks = measurement.check()
    console.print(checks_table(checks))
    if wrong := list(dict.fromkeys(check.name for check in checks if not check.fine)):
        console.print(f"wrong: {'; '.join(wrong)}. Nothing was timed.", markup=False, soft_wrap=True)
        return False
    first, machine = measurement.sum(), measurement.balance()
    works = measurement.works(machine, earlier)
    rows = [row for regime in command.regimes for row in measurement.rows(regime, works[regime], measurement.replicas)]
    of_sets = measurement.set_rows(works[command.set_regime], rows) if command.sets else []
    every = list(dict.fromkeys([first, *rows, *of_sets]))
    _print(measurement, machine, first, rows, of_sets)
    drawn = f"{measurement.about['devices']}, {measurement.about['processes']} processes, regime {command.set_regime}"
    if jax.process_index() == 0:
        content = {"about": measurement.about, "machine": machine, "checks": [asdict(check) for check in checks]}
        content["rows"] = [asdict(row) | {"flops_per_sec": row.flops_per_sec} for row in every]
        write_json(command.json, content)
        if command.plot:
            replace_file(command.plot, figure(of_sets, command.sets, drawn))
        if command.write_thresholds:
            examples = {regime: work.examples for regime, work in works.items()}
            write_json(
                command.write_thresholds, of_rows(measurement.about, every, examples, command.tolerance).to_json()
            )
    return earlier is None or _compare(console, every, earlier)


def _print(
    measurement: Measurement,
    machine: Mapping[str, float],
    first: KernelTimes,
    rows: Sequence[KernelTimes],
    of_sets: Sequence[KernelTimes],
) -> None:
    console, about = measurement.console, measurement.about
    processes = f"{about['processes']} process{'es' * (about['processes'] > 1)}"
    networks = f"{about['size']} networks, {about['precision']}"
    console.print(f"{about['devices']} in {processes}, {measurement.replicas} replicas, {networks}", soft_wrap=True)
    for line in machine_lines(machine, first):
        console.print(f"  - {line}", soft_wrap=True)
    if rows:
        console.print(regimes_table(rows, machine["balance"]))
        for line in alike(rows):
            console.print(line, soft_wrap=True)
    if of_sets:
        console.print(sets_table(of_sets, measurement.command.sets))
    if platform(measurement.mesh) == "cpu":
        console.print(
            "Virtual CPU devices share the cores of a machine, so more of them do not compute more: their ideal is not "
            "to be expected in sets.",
            soft_wrap=True,
        )


def _compare(console: Console, rows: Sequence[KernelTimes], earlier: Thresholds) -> bool:
    """Prints what has become slower or faster; returns whether nothing is too slow."""
    comparison = compare(rows, earlier)
    for what, lines in (
        ("slower than the thresholds allow", comparison.slower),
        ("faster than the thresholds by more than the tolerance", comparison.faster),
        ("in the thresholds and not measured", comparison.missing),
        ("measured and not in the thresholds", comparison.added),
    ):
        if lines:
            console.print(f"{what}:", highlight=False)
            for line in lines:
                console.print(f"  - {line}", soft_wrap=True, markup=False, highlight=False)
    if not comparison.slower:
        console.print("nothing is slower than the thresholds allow")
    return not comparison.slower
