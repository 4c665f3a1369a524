"""The overlap of the gradient exchange with compute: the compiled schedule of the training step, simulated once.

XLA fixes the order of a GPU program when it compiles. This reads that order and where each collective starts and is
waited for, gives kernels the least time that an H100 needs and messages the time of their bytes on a network of a given
speed, and computes the length of the step and the share of the messages that overlaps with kernels. With `--h100` it
compiles for 8 x H100, each replica a host, on a machine without a GPU. Nothing runs: real kernels take longer, which
hides more. Where replicas agree less often it shows each program: the local step, each merge, and merges beside local
steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jaxdl.core.config import ConfigError
from jaxdl.exchange import ExchangeConfig, kinds
from jaxdl.parallel.compiler import Links, hlo
from jaxdl.parallel.compiler.options import ASSUMED_GBPS
from jaxdl.parallel.compiler.overlap import Message, Timeline, play
from jaxdl.parallel.mesh import SLOW_AXES, ways
from jaxdl.performance.bench.shared import ExperimentBench, make_table, parse_experiment_bench, run_module, write_json
from jaxdl.performance.planner.h100 import NUM_DEVICES, compile_programs, h100_mesh
from jaxdl.report import replace_file, style
from jaxdl.training.run.compile import own_options
from jaxdl.training.run.plan.build import make_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OF_A_MESSAGE = (
    "kind", "axes", "sent_bytes", "times", "started_sec", "begin_sec", "end_sec", "needed_sec", "kernels",
    "compute_sec", "hidden",
)  # fmt: skip
STREAMS = "xla_gpu_executable_num_communication_streams"


@dataclass(frozen=True)
class ScheduleBench(ExperimentBench):
    """Shows how much of the exchange overlaps with compute."""

    h100: bool = False
    """Compile for 8 x H100; no GPU is needed, but JAX's CUDA packages are."""
    all_exchanges: bool = False
    """Also show every other kind of exchange, with the experiment's delay and bucket size."""
    gbps: float | None = None
    """Gb/s that one device sends to other replicas in the simulation; XLA orders the program for it too, unless
    --compiler.network-gbps gives another speed for that. None takes --compiler.network-gbps, or 100 as a run does."""
    only: tuple[str, ...] = ()
    """Of several programs, only those of these names, in which * stands for any text: "local step" "merge 0*"."""
    json: Path | None = None
    """A file for the results."""
    plot: Path | None = None
    """A PNG file for a figure: kernels and messages over time."""


def main(args: list[str]) -> None:
    """Compiles the step with each exchange, and prints, writes and draws the overlap."""
    command, _ = parse_experiment_bench(ScheduleBench, args, __name__)
    devices = _devices(command)
    if command.gbps is not None and command.gbps <= 0:
        raise ConfigError(f"--gbps {command.gbps:g}: give a speed above 0.")
    compiler = command.experiment.compiler
    ordered, gbps = speeds(command.gbps, compiler.network_gbps)
    console = Console(width=150)
    timelines: dict[str, Timeline] = {}
    for exchange in exchanges(command):
        plan = make_plan(command.experiment.replaced({"exchange": exchange}), devices)
        experiment = plan.experiment.replaced({"compiler.network_gbps": ordered})
        name = exchange.label + (", 1 step late" if exchange.delay_steps else "")
        if ways(plan.parts.layout.mesh.shape, SLOW_AXES) == 1:
            raise ConfigError("one replica exchanges nothing. Give --mesh.replica 2 or more, or --mesh.stage.")
        streams = (own_options(plan) | compiler.values()).get(STREAMS, 1)
        links = Links(1e9 * gbps / 8, replica_latency_sec=1e-6 * compiler.network_latency_us, apart=int(streams) > 1)
        for program, compiled in compile_programs(replace(plan, experiment=experiment), command.only):
            label = f"{name}: {program}" if plan.parts.agreement.keeps_replicas else name
            text = compiled.as_text() or ""
            timelines[label] = play(hlo.parse(text), plan.parts.layout.mesh.shape, links)
            console.print(messages_table(timelines[label], label))
    console.print(summary_table(timelines, f"{command.config}, {gbps:g} Gb/s"))
    values = {name: as_json(timeline) for name, timeline in timelines.items()}
    write_json(command.json, values)
    if command.plot:
        replace_file(command.plot, figure(values))


def speeds(gbps: float | None, network_gbps: float | None) -> tuple[float, float]:
    """The Gb/s for which XLA orders the program (0: XLA alone decides), and those of the simulation.

    Both are the same unless the options differ.

    Args:
      gbps: the option --gbps.
      network_gbps: the option --compiler.network-gbps.
    """
    played = gbps or network_gbps or ASSUMED_GBPS
    return (played if network_gbps is None else network_gbps), played


def exchanges(command: ScheduleBench) -> list[ExchangeConfig]:
    """The exchanges to show: that of the experiment, and with `all_exchanges` one of each other kind."""
    exchange = command.experiment.exchange
    if not isinstance(exchange, ExchangeConfig):
        raise ConfigError("--exchange auto: a schedule belongs to one exchange. Give one, such as --exchange topk.")
    if not command.all_exchanges:
        return [exchange]
    same = {"delay_steps": exchange.delay_steps, "bucket_mib": exchange.bucket_mib}
    return [exchange, *(kind(**same) for kind in kinds().values() if kind is not type(exchange))]


def _devices(command: ScheduleBench) -> list[Any] | None:
    if command.h100:
        return list(h100_mesh(command.experiment.mesh.sizes(NUM_DEVICES)).devices.flat)
    import jax

    if jax.default_backend() == "cpu":
        raise ConfigError("these devices are CPUs, whose programs do not overlap messages with compute. Give --h100.")
    return None


def messages_table(timeline: Timeline, title: str) -> Table:
    """The messages over the slow network one by one; those inside a replica by kind."""
    columns = ("message", "over", "MB sent", "starts in backward", "ms", "kernels beside", "their ms", "hidden")
    table = make_table(title, columns, left=("message", "over", "kernels beside"))
    for message in timeline.exchange:
        kernels = ", ".join(f"{number} {sort}" for sort, number in sorted(message.kernels.items()))
        table.add_row(
            message.kind
            + ("" if message.is_async else " (waits)")
            + (f" x {message.times}" if message.times > 1 else ""),
            "+".join(message.axes),
            f"{message.sent_bytes / 1e6:.3f}",
            f"{100 * place_in_backward(timeline, message):.0f} %",
            f"{1e3 * message.seconds:.3f}",
            kernels or "-",
            f"{1e3 * message.compute_sec:.3f}",
            f"{100 * message.hidden:.0f} %",
        )
    for kind, (number, sent, seconds) in inner_messages(timeline).items():
        table.add_row(f"{kind} x {number}", "inside", f"{sent / 1e6:.3f}", "", f"{1e3 * seconds:.3f}", "", "", "")
    return table


def place_in_backward(timeline: Timeline, message: Message) -> float:
    """Where a message starts: 0 is the beginning of the backward pass, 1 its end."""
    begin, end = timeline.backward
    return (message.started_sec - begin) / (end - begin) if end > begin else 0.0


def inner_messages(timeline: Timeline) -> dict[str, tuple[int, float, float]]:
    """Of the messages inside a replica: kind -> (number, bytes, seconds)."""
    by_kind: dict[str, tuple[int, float, float]] = {}
    for message in timeline.messages:
        if not message.over_slow:
            number, sent, seconds = by_kind.get(message.kind, (0, 0.0, 0.0))
            by_kind[message.kind] = (
                number + message.times,
                sent + message.times * message.sent_bytes,
                seconds + message.times * message.seconds,
            )
    return by_kind


def summary_table(timelines: dict[str, Timeline], title: str) -> Table:
    """A row for each exchange."""
    columns = ("exchange", "messages", "MB sent", "network ms", "hidden", "kernels ms", "step ms", "waits ms")
    table = make_table(title, columns)
    for name, timeline in timelines.items():
        table.add_row(
            name,
            str(len(timeline.exchange)),
            f"{timeline.sent_bytes / 1e6:.3f}",
            f"{1e3 * timeline.network_sec:.3f}",
            f"{100 * timeline.hidden_share:.0f} % of the bytes",
            f"{1e3 * timeline.compute_sec:.2f}",
            f"{1e3 * timeline.total_sec:.2f}",
            f"{1e3 * timeline.waiting_sec:.2f}",
        )
    return table


def as_json(timeline: Timeline) -> dict[str, Any]:
    """The figures of one exchange, as plain values."""
    return {
        "sent_bytes": timeline.sent_bytes,
        "hidden_share": timeline.hidden_share,
        "network_sec": timeline.network_sec,
        "compute_sec": timeline.compute_sec,
        "step_sec": timeline.total_sec,
        "backward_sec": list(timeline.backward),
        "spans": timeline.spans,
        "messages": [
            {name: getattr(message, name) for name in _OF_A_MESSAGE} | {"async": message.is_async}
            for message in timeline.messages
        ],
    }


def figure(timelines: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A PNG: for each exchange kernels, messages inside a replica, and messages over the slow network, over time.

    Args:
      found: exchange -> the result of `as_json`.
    """
    colors = {"forward": style.FORWARD, "backward": style.BACKWARD}
    colors |= dict.fromkeys(("tables", "rest"), style.OTHER_KERNELS)
    chosen = style.looks(list(timelines))
    inner = any(
        set(SLOW_AXES).isdisjoint(message["axes"])
        for timeline in timelines.values()
        for message in timeline["messages"]
    )
    rows = ["kernels", *(["inside replicas"] if inner else []), "over replicas"]
    heights = 0.22 * len(rows) + 0.62
    drawn = style.new_figure(
        12.5, 1.2 + heights * len(timelines), "One training step: kernels and messages, all modelled"
    )
    panels = drawn.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, timeline) in zip(panels, timelines.items(), strict=True):
        for what, color in colors.items():
            _bars(panel, 0, [(begin, end) for begin, end, which in timeline["spans"] if which == what], color)
        for message in timeline["messages"]:
            over = not set(SLOW_AXES).isdisjoint(message["axes"])
            color = chosen[name].color if over else style.INNER_MESSAGES
            _bars(panel, len(rows) - 1 if over else 1, [(message["begin_sec"], message["end_sec"])], color)
        title = (
            f"{name}: {1e3 * timeline['step_sec']:.1f} ms, {100 * timeline['hidden_share']:.0f} % of the bytes hidden"
        )
        style.dress(panel, style.wrap_name(title, 110))
        style.rows_of_names(panel, rows)
    panels[-1].set_xlabel("ms since the step began", color=style.GREY, fontsize=style.SMALL)
    panels[-1].set_xlim(left=0)
    entries = [
        style.patch_entry("kernels: forward pass", color=style.FORWARD),
        style.patch_entry("kernels: backward pass", color=style.BACKWARD),
        style.patch_entry("kernels: all others", color=style.OTHER_KERNELS),
        style.patch_entry("message over replicas, in the colour of its exchange", fc="none", ec=style.INK),
    ]
    if inner:
        entries.append(style.patch_entry("message inside replicas", color=style.INNER_MESSAGES))
    style.legend(drawn, entries, width=60)
    return style.png(drawn)


def _bars(panel: Axes, row: int, spans: Sequence[tuple[float, float]], color: str) -> None:
    places = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans]
    panel.broken_barh(places, (row - 0.4, 0.8), color=color, lw=0)


if __name__ == "__main__":
    run_module(main)
