"""Runs that share nodes: submit them, and serve the fleet."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import OptionError, command_line, fail
from jaxdl.platform.fleet.asking import PROG, OfFleet, ask, nodes, parse, remove
from jaxdl.platform.fleet.store import SERVER_FOLDER, Store


@dataclass(frozen=True)
class Serve(OfFleet):
    """Runs what is submitted, until all is done (--until-idle) or a signal. Runs outlive their server."""

    nodes: int | None = None
    """The number of nodes; as many as --have says, or 1, by default."""
    have: tuple[str, ...] = ()
    """Of local and netns: what nodes have that runs with --needs share, such as 4x:gpus=8,cpus=64 2x:cpus=128 for six
    nodes. On Ray, the cluster says it."""
    engine: str = "local"
    """Where runs run: `local`, processes on this machine; `netns`, there too, on emulated nodes with a network (root);
    `ray`, the nodes of a Ray cluster; `slurm`, as jobs of Slurm, among those of others; `kubernetes`, the nodes, or the
    quota of a queue, of a Kubernetes cluster."""
    rate: str | None = None
    """Of netns: the rate of each node's link, such as 100mbit; unlimited by default."""
    address: str | None = None
    """Of ray: the cluster, as ray.init takes it; `auto` by default."""
    partition: str | None = None
    """Of slurm: the partition; the default one by default. --nodes is the most of its nodes that the fleet uses."""
    account: str | None = None
    """Of slurm: the account that is charged."""
    qos: str | None = None
    """Of slurm: the quality of service."""
    time: str | None = None
    """Of slurm: the time limit of each job, as sbatch takes it, such as 12:00:00; that of the partition by default. A
    run saves --grace-sec before it, and goes on in another job."""
    sbatch: str | None = None
    """Of slurm: more options of sbatch, such as "--constraint=a100 --reservation=mine"."""
    image: str | None = None
    """Of kubernetes: the container image; it contains jaxdl and its dependencies."""
    gpus_per_node: int | None = None
    """Of kubernetes: GPUs of each node, all used by its one pod; 0 for runs on CPUs."""
    cpus_per_node: int | None = None
    """Of kubernetes: CPU cores that a pod asks for."""
    volume: str | None = None
    """Of kubernetes: CLAIM:/PATH, a persistent volume claim that all pods mount at /PATH, as this machine does: it has
    the folder of the fleet, and those of the runs."""
    namespace: str | None = None
    """Of kubernetes: the namespace; that of the context otherwise."""
    context: str | None = None
    """Of kubernetes: a context of the file that kubectl uses; the current one by default, or the pod's cluster."""
    api: str | None = None
    """Of kubernetes: `jobset` (default), or `trainjob` of Kubeflow Trainer."""
    queue: str | None = None
    """Of kubernetes: the LocalQueue of Kueue in which runs wait; its quota is what the fleet decides on."""
    priority_class: str | None = None
    """Of kubernetes: the WorkloadPriorityClass that runs have in the queue."""
    node_selector: str | None = None
    """Of kubernetes: LABEL=VALUE, only nodes with this label."""
    network: str | None = None
    """The rate of a node's network, each way, such as 25gbit: `submit` then computes what the gradient exchange of a
    run takes over it, and its speed on sizes that were not measured follows. Of netns, --rate by default."""
    fairness: float = 0.2
    """How far a run may be from its fair share, as a part of all nodes."""
    resized: float = 0.1
    """The part of the running runs that one decision may resize, rounded up."""
    solve_sec: float = 0.8
    """The longest time to find places for runs with --needs; then the best that is known is taken."""
    between_sec: float = 600.0
    """The least time between the first step of a run on its nodes and its next change: ten times what saving and
    starting it takes is a good choice."""
    failures: int = 3
    """A run that fails more often than this in a row is not started again."""
    grace_sec: float = 120.0
    """How long a run may take to save and end before it is killed."""
    poll_sec: float = 1.0
    """The time between two looks at runs and submissions."""
    until_idle: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End when all runs have ended."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print what would be decided now and why, and start and stop nothing."""


@dataclass(frozen=True)
class Submit(OfFleet):
    """Accepts a run: OPTIONS -- COMMAND, in which {nodes} stands for the number of nodes, or hosts.

    The command resumes what it began, as `python -m jaxdl.train` does with a workdir. When this command has printed the
    run's number, the submission is on disk.
    """

    min: int = 1
    """The fewest nodes."""
    max: int = 1
    """The most nodes."""
    sizes: tuple[int, ...] = ()
    """The numbers of nodes that the run may have, in place of --min and --max. Of either, those stay that the mesh and
    the batch of the run allow."""
    needs: str | None = None
    """What each host of the run takes of its node, such as gpus=1,cpus=4: hosts, of this run and of others, may then
    share a node, and the numbers above are of hosts. Without it a host takes a whole node."""
    weight: float = 1.0
    """Its fair share, relative to those of others."""
    priority: int = 0
    """Runs of a higher priority take nodes from it where they need them."""
    delay_sec: float = 0.0
    """Seconds from now before which it is not started."""


@dataclass(frozen=True)
class Status(OfFleet):
    """Shows the runs and the nodes."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""


def serve(args: list[str]) -> None:
    """Serves until a signal, or until all is done."""
    from jaxdl.parallel.lease import Lease
    from jaxdl.platform.fleet.engines import engine_options, make_engine, rehearsal_note
    from jaxdl.platform.fleet.policy import Rules
    from jaxdl.platform.fleet.resources import parse_nodes
    from jaxdl.platform.fleet.server import Server, Settings
    from jaxdl.platform.launch.netns import parse_rate

    options = parse(Serve, "serve", args)
    num_nodes = options.nodes if options.nodes is not None else len(parse_nodes(options.have)) or 1
    if num_nodes < 1 or options.failures < 0 or not 0 < options.poll_sec < math.inf:
        raise OptionError("--nodes: 1 or more; --failures: 0 or more; --poll-sec: a number above 0.")
    if not 0 <= options.between_sec < math.inf or not all(
        0 < seconds < math.inf for seconds in (options.grace_sec, options.solve_sec)
    ):
        raise OptionError("--between-sec: a number, 0 or more; --grace-sec, --solve-sec: a number above 0.")
    if not (0 <= options.fairness <= 1 and 0 <= options.resized <= 1):
        raise OptionError("--fairness, --resized: from 0 to 1.")
    network = options.network or options.rate
    if options.network is not None:
        try:
            parse_rate(options.network)
        except ConfigError as error:
            raise OptionError(f"--network: {error}") from None
    store = Store(options.state)
    store.folder.mkdir(parents=True, exist_ok=True)
    given = {name: None if (value := getattr(options, name)) == () else value for name in engine_options()}
    engine = make_engine(options.engine, store, num_nodes, **given)
    rules = Rules(options.fairness, options.resized, options.solve_sec)
    settings = Settings(rules, options.between_sec, options.failures, options.grace_sec, network)
    if options.dry_run:
        _print_decision(Server(store, engine, settings, read_only=True))
        return

    def lost(reason: str) -> None:
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
        os._exit(75)  # Another server has the fleet: this one must do nothing more.

    lease = Lease(store.folder / SERVER_FOLDER, lost)
    lease.acquire()
    try:
        server = Server(store, engine, settings)
        nodes = engine.resources()
        if nodes and server.sharing_runs and not any(nodes.values()):
            known = "nothing is known of what the nodes have. Say it with --have, as before"
            raise ConfigError(
                f"run {', '.join(server.sharing_runs)}: it shares nodes, and {known}; else it would stop."
            )
        if note := rehearsal_note(engine):
            print(note, file=sys.stderr, flush=True)
        _loop(server, options)
    finally:
        lease.release()


def _loop(server: Any, options: Serve) -> None:
    from jaxdl.platform.fleet.roll import in_order

    said: dict[str, tuple[str, str]] = {}
    told: list[str] = []
    while True:
        server.turn()
        problems = [*server.known.problems, *server.engine.problems()]
        for problem in problems:
            if problem not in told:
                print(f"warning: {problem}", file=sys.stderr, flush=True)
        told = problems
        for name in sorted(server.known.changed, key=in_order):
            if (member := server.members.get(name)) is None:
                print(f"{time.strftime('%H:%M:%S')}  run {name} was removed", flush=True)
                continue
            now = (member.state, member.told)
            if said.get(name) != now:
                said[name] = now
                nodes = f" on {len(member.nodes)}" if member.nodes else ""
                print(f"{time.strftime('%H:%M:%S')}  run {name} {member.state}{nodes}: {now[1]}", flush=True)
        server.known.changed.clear()
        if options.until_idle and server.idle:
            return
        time.sleep(options.poll_sec)


def _print_decision(server: Any) -> None:
    from jaxdl.platform.fleet.status_view import format_speeds

    decision = server.propose()
    for name, why in decision.reasons.items():
        unit = "host" if server.members[name].submission.needs else "node"
        print(f"run {name}: {why}\n  speed: {format_speeds(server.estimates(name), unit)}")
    if not decision.reasons:
        print("no run is waiting or running")


def submit(args: list[str]) -> None:
    """Prints the number of the run."""
    from jaxdl.platform.fleet.exchanged import exchange_of
    from jaxdl.platform.fleet.resources import parse_amounts
    from jaxdl.platform.fleet.sizes import describe_left_out, find_sizes, gpus_of_host, reader, refusal
    from jaxdl.platform.launch.command import split_command

    words, command = split_command(args)
    options = parse(Submit, "submit", words)
    if options.sizes and (options.min != 1 or options.max != 1):
        raise OptionError("--sizes: give either it or --min and --max.")
    if options.min > options.max and not options.sizes:
        raise OptionError(f"--min {options.min}: it is more than --max {options.max}.")
    sizes = options.sizes or tuple(range(options.min, options.max + 1))
    if not 0 <= options.delay_sec < math.inf:
        raise OptionError(f"--delay-sec {options.delay_sec:g}: it must be a number, 0 or more.")
    not_before = time.time() + options.delay_sec if options.delay_sec else 0.0
    needs = {} if options.needs is None else parse_amounts(options.needs, "--needs")
    store, view, unit = Store(options.state), None, "host" if needs else "node"
    with contextlib.suppress(ConfigError):  # No server has been there yet.
        view = store.view()
    if needs and view is not None and not view.get("shares", True):
        raise OptionError(f"--needs {options.needs}: in this fleet a host has a whole node. Leave it out.")
    gpus = gpus_of_host(needs, view)
    read = reader()
    fit = find_sizes(command, sizes, gpus, read)
    if not fit.allowed:
        bounds = f"--min {options.min} --max {options.max}"
        asked = f"--sizes {' '.join(map(str, options.sizes))}" if options.sizes else bounds
        raise refusal(command, asked, fit, gpus, unit)
    values = {"weight": options.weight, "priority": options.priority, "not_before": not_before}
    network, exchange, unknown = (view or {}).get("network"), None, ""
    if network and not fit.note:
        exchange, unknown = exchange_of(command, fit.allowed, gpus, network, read)
    made = store.submit(command, fit.allowed, **values, needs=needs, left_out=fit.left_out, exchange=exchange)
    print(made.name)
    notes = [fit.note] if fit.note else []
    if unknown:
        notes.append(
            f"what its exchange takes over {network} is not known on all sizes, and its speed there a guess: {unknown}"
        )
    for line in (*describe_left_out(fit.left_out, unit), *notes):
        print(f"run {made.name}: {line}", file=sys.stderr)


def _status(args: list[str]) -> None:
    from jaxdl.platform.fleet.status_view import show_status

    options = parse(Status, "status", args)
    show_status(Store(options.state), as_json=options.json)


def _explain(args: list[str]) -> None:
    from jaxdl.platform.fleet.status_view import explain

    print("\n".join(explain(Store(parse(OfFleet, "explain", args).state).view())))


def simulate(args: list[str]) -> None:
    """Prints both results."""
    from jaxdl.platform.fleet.report import Simulate, report

    report(parse(Simulate, "simulate", args))


COMMANDS: dict[str, tuple[str, Callable[[list[str]], None]]] = {
    "serve": ("runs what is submitted, and resizes it", serve),
    "submit": ("accepts a run", submit),
    "status": ("shows runs and nodes", _status),
    "explain": ("says why each run has its nodes", _explain),
    "hold": ("saves and stops runs, until `resume`", ask("hold")),
    "resume": ("lets runs run that were held, halted, or have failed", ask("run")),
    "cancel": ("saves and stops runs for good", ask("cancel")),
    "remove": ("removes runs that have ended, not their workdirs", remove),
    "nodes": ("takes nodes out of service, or back", nodes),
    "simulate": ("plays a fleet in simulated time", simulate),
}


def main(args: list[str]) -> None:
    """Runs one command; exits with code 2 after a user error."""
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: {PROG} NAME --state FOLDER [OPTIONS]\n")
        for name, (what, _) in COMMANDS.items():
            print(f"  {name:9} {what}")
        raise SystemExit(0)
    with command_line():
        if args[0] not in COMMANDS:
            fail(f"{args[0]}: there is no such command; choose one of {', '.join(COMMANDS)}.")
        try:
            COMMANDS[args[0]][1](args[1:])
        except OSError as error:
            raise ConfigError(f"{error.filename or 'fleet'}: {error.strerror}.") from None


if __name__ == "__main__":
    main(sys.argv[1:])
