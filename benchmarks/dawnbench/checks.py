"""The checks of `reproduce` before the training (machine, data, network), and the expected results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.dawnbench.entry import ALIBABA_IMAGES_PER_SEC
from jaxdl.core.config import ConfigError
from jaxdl.data.images.cpus import processes_of_host
from jaxdl.data.images.shm import available_bytes
from jaxdl.exchange import Dense
from jaxdl.exchange.cost import predict
from jaxdl.exchange.probe import probe
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.cluster.agree import all_processes
from jaxdl.parallel.mesh import Axis
from jaxdl.report.summary import versions
from jaxdl.training.run.plan.build import Plan
from jaxdl.training.run.plan.exchange import exchanged_gradients

TRAIN_IMAGES, VALIDATION_IMAGES = 1_281_167, 50_000
_CHECKPOINT_COPIES = 4
"""The kept checkpoints, and the one being written."""
_AHEAD = 4
"""Batches in memory on a host: prefetched, current, and on their way to the devices."""


class Line(NamedTuple):
    """One check."""

    what: str
    found: str
    fine: bool = True


def machine_lines(plan: Plan, workdir: Path) -> list[Line]:
    """Versions, devices, memory for the batches, and room for the checkpoints in the workdir."""
    mesh = plan.parts.layout.mesh
    device = mesh.devices.flat[0]
    installed = versions()
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(plan.parts.state_spec.shapes))
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir {workdir}: no folder can be made there: {error.strerror}.") from None
    free, needed = shutil.disk_usage(workdir).free, _CHECKPOINT_COPIES * state
    sizes = [
        (plan.sources(segment)[0].spec.blank()["image"].nbytes, segment.batch_size)
        for segment in plan.timeline.segments
    ]
    batches = processes_of_host() * max(_AHEAD * image * size // jax.process_count() for image, size in sizes)
    memory = available_bytes()
    return [
        Line(
            "versions", ", ".join(f"{name} {installed[name]}" for name in ("python", "jax", "jaxlib", "flax", "optax"))
        ),
        Line(
            "devices",
            f"{mesh.size} x {device.device_kind} ({device.platform}) of {jax.process_count()} processes, "
            + " x ".join(f"{name} {size}" for name, size in mesh.shape.items()),
        ),
        Line("room in the workdir", f"{_size(free)}, {_size(needed)} needed", free >= needed),
        Line("memory on this host", f"{_size(memory)}, {_size(batches)} needed for batches", memory >= batches),
    ]


def data_lines(plan: Plan, *, is_rehearsal: bool) -> list[Line]:
    """The number of images; the benchmark's are ImageNet's."""
    train, test = len(plan.splits.train), len(plan.splits.test)
    sizes_text = f"{train:,} to train on, {test:,} to validate"
    if is_rehearsal:
        return [Line("images", f"{sizes_text} (a rehearsal)")]
    fine = (train, test) == (TRAIN_IMAGES, VALIDATION_IMAGES)
    return [Line("images", sizes_text + ("" if fine else f", not {TRAIN_IMAGES:,} and {VALIDATION_IMAGES:,}"), fine)]


def network_lines(plan: Plan) -> tuple[list[Line], float | None]:
    """The links between replicas as measured, and the predicted seconds of the exchange; all processes call it."""
    mesh, config = plan.parts.layout.mesh, plan.exchange
    replicas = mesh.shape[Axis.REPLICA]
    if replicas == 1:
        return [Line("network", "one node: no network is used")], None
    gradients = exchanged_gradients(plan.experiment, plan.splits.train.spec, mesh)
    wait_for_all()  # Gloo gives up when a process measures 30 s after another.
    figures = config.figures
    machine = probe(mesh, methods=figures.methods, bits=figures.bits, num_repeats=3)
    link = machine.links[Axis.REPLICA.value]
    lines = [
        Line(
            "network",
            f"a device sends {8e-9 * link.bytes_per_sec:.3g} Gb/s to another node while all do, "
            f"{1e6 * link.latency_sec:.0f} us a message",
        )
    ]
    try:
        seconds = {exchange.label: predict(exchange, gradients, machine).total_sec for exchange in (Dense(), config)}
    except ValueError:  # The cost model lacks a measurement for this exchange.
        return lines, None
    lines += [Line(f"exchange {name}", f"{1e3 * took:.1f} ms predicted") for name, took in seconds.items()]
    return lines, seconds[config.label]


def expectation_lines(plan: Plan, exchange_sec: float | None, *, is_rehearsal: bool) -> list[str]:
    """The plan of the run, in sentences."""
    lines = []
    for segment in plan.timeline.segments:
        assert segment.phase is not None
        parts = plan.experiment.step.microbatches * plan.parts.layout.mesh.size
        lines.append(
            f"{segment.phase.epochs:g} epochs of {segment.phase.size} x {segment.phase.size} pixels: "
            f"{segment.num_steps:,} steps of {segment.batch_size:,} images, "
            f"{segment.batch_size // parts:,} at a time on a device (--step.microbatches changes that)"
        )
    if exchange_sec is not None:
        total = exchange_sec * plan.total_steps
        lines.append(
            f"exchange: {total:.1f} s in {plan.total_steps:,} steps, if none of it overlaps with compute (predicted)"
        )
    if is_rehearsal:
        return [*lines, "a rehearsal: its times and accuracies say nothing about ImageNet"]
    num_devices = plan.parts.layout.mesh.size
    seconds = sum(
        segment.num_steps * segment.batch_size / (ALIBABA_IMAGES_PER_SEC[segment.phase.size] * num_devices / 128)
        for segment in plan.timeline.segments
        if segment.phase is not None and segment.phase.size in ALIBABA_IMAGES_PER_SEC
    )
    return [
        *lines,
        f"at the speed that each V100 of Alibaba's entry had, these {num_devices} devices would take {seconds:,.0f} s",
        "expected after the last epoch: top-5 93.04 %, top-1 75.75 % (Alibaba's entry; not run here)",
    ]


def must_be_fine(lines: list[Line]) -> None:
    """Raises ConfigError on all processes when a check failed on one."""
    wrong = [f"{line.what}: {line.found}" for line in lines if not line.fine]
    if not all_processes(not wrong):
        wrong = wrong or ["another host lacks room or memory"]
        raise ConfigError(f"{'; '.join(wrong)}. Fix it, or use --rehearse for a run outside the benchmark.")


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
