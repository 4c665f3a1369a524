"""Trains ResNet-50 to 93 % top-5 as DAWNBench's fastest entry did, and writes an entry in its format and a report.

TFDS_DATA_DIR=... python scripts/reproduce_dawnbench.py --nodes 1 --gpus-per-node 8 --price-per-hour 98.32

On several nodes start it once a node, as python -m jaxdl.train is (docs/howto/clusters.md): srun, mpirun, or
python -m jaxdl.launch local. The recipe is configs/imagenet_resnet50_dawnbench.py; everything after `--` changes it.
First, while the clock is stopped, the machine, the data and the network are checked. A stopped run resumes in the same
workdir, but is then no entry to submit.

--rehearse does all of it in minutes on a CPU: a small ResNet in the same phases at smaller sizes, on virtual devices,
with `imagenet2012` of the data folder if that is a small stand-in, else with scikit-learn's digits as image files.
"""

from __future__ import annotations

import time

START = time.perf_counter()
"""Start of the benchmark's clock; the imports below count."""

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
from datetime import UTC, datetime  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402

import jaxdl  # noqa: E402
from benchmarks import ROOT  # noqa: E402
from benchmarks.dawnbench.checks import (  # noqa: E402
    Line,
    data_lines,
    expectation_lines,
    machine_lines,
    must_be_fine,
    network_lines,
)
from benchmarks.dawnbench.entry import check_record, reached, write_entry  # noqa: E402
from benchmarks.dawnbench.report import epochs_of, exchange_seconds, was_resumed, write_report  # noqa: E402
from benchmarks.studies.trials import parse, side_flags  # noqa: E402
from jaxdl.core.config import ConfigError  # noqa: E402
from jaxdl.core.files import CONFIG_FILE  # noqa: E402
from jaxdl.core.options import parse as parse_options  # noqa: E402
from jaxdl.data import Digits, ImageFolder, Photos  # noqa: E402
from jaxdl.data.phases import Phase  # noqa: E402
from jaxdl.exchange import Auto, Dense  # noqa: E402
from jaxdl.models import ResNet  # noqa: E402
from jaxdl.parallel.cluster import end_together  # noqa: E402
from jaxdl.parallel.cluster.agree import from_first_process  # noqa: E402
from jaxdl.parallel.mesh import MeshConfig  # noqa: E402
from jaxdl.parallel.precision import Float32  # noqa: E402
from jaxdl.report import replace_file  # noqa: E402
from jaxdl.training.experiment import Experiment  # noqa: E402
from jaxdl.training.run.plan.build import make_parts, make_plan, start_mesh  # noqa: E402
from jaxdl.training.run.plan.exchange import choose_exchange  # noqa: E402
from jaxdl.training.run.result import exit_codes  # noqa: E402

CONFIG = ROOT / "configs/imagenet_resnet50_dawnbench.py"
_MOST_REHEARSED = 5_000
"""Most images of an `imagenet2012` that is taken for a stand-in."""
_IMAGES_AT_A_TIME = 256
"""32,768 images on the 128 GPUs of the entry."""
_LENGTH = 2
"""The rehearsal has this many times the epochs of the recipe: 28 of a few hundred images teach little."""
_REHEARSED_SIZES = {96: 64, 128: 80, 224: 112, 288: 144}
"""Pixels of the recipe -> of the rehearsal."""


def main() -> None:
    """Checks, trains, and writes the entry and the report."""
    with end_together(), exit_codes():
        run_all(*parse(_parser()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder of TensorFlow Datasets with imagenet2012; default TFDS_DATA_DIR")
    parser.add_argument("--nodes", type=int, help="nodes, each a replica; default 1, in a rehearsal 2 virtual ones")
    parser.add_argument("--gpus-per-node", type=int, help="devices of each node; default 8, in a rehearsal 1")
    parser.add_argument(
        "--exchange", default="auto", metavar="KIND,OPTION=VALUE", help="over the network; auto measures and chooses"
    )
    parser.add_argument("--rehearse", action="store_true", help="in minutes, on a CPU, on small data")
    parser.add_argument("--workdir", type=Path, default=Path("runs/dawnbench"))
    parser.add_argument("--price-per-hour", type=float, help="dollars for all nodes together: adds the cost")
    parser.add_argument("--author", default="jaxdl", help="for the entry")
    parser.add_argument("--author-email", default="nobody@example.org", help="for the entry")
    parser.add_argument("--hardware", help="for the entry: machines and cloud, in words; default NODES x GPUS GPU")
    return parser


def run_all(args: argparse.Namespace, changes: list[str]) -> None:
    """Runs all parts. Raises ConfigError for arguments that do not fit."""
    experiment = _experiment(args, changes)
    check_record(_record(args, experiment), Path(_name(args)))  # Not after hours of training.
    # Starting the devices and reading the data counts; the checks, and measurements to choose an exchange, do not.
    start_mesh(experiment)
    plan = make_plan(experiment.replaced({"exchange": Dense()}))
    before_sec = time.perf_counter() - START
    spec, mesh = plan.splits.train.spec, plan.parts.layout.mesh
    exchange, reasons = choose_exchange(experiment, spec, mesh, _chosen(args.workdir / "run"))
    experiment = experiment.replaced({"exchange": exchange})
    plan = dataclasses.replace(plan, experiment=experiment, parts=make_parts(experiment, spec, mesh, plan.timeline))
    checks = machine_lines(plan, args.workdir) + data_lines(plan, is_rehearsal=args.rehearse)
    network, exchange_sec = network_lines(plan)
    checks += network
    expectations = [*reasons, *expectation_lines(plan, exchange_sec, is_rehearsal=args.rehearse)]
    for source in (plan.splits.train, plan.splits.test):
        source.close()
    if jax.process_index() == 0:
        console = Console(soft_wrap=True, highlight=False)
        console.print("[bold]DAWNBench, ImageNet training: before the start[/]")
        for line in checks:
            console.print(f"  {line.what}: " + (line.found if line.fine else f"[red]{line.found}[/]"))
        for text in expectations:
            console.print(f"- {text}")
    must_be_fine(checks)
    clock = _first_start(args.workdir, before_sec) if jax.process_index() == 0 else None
    run = jaxdl.train(experiment, args.workdir / "run")
    alone_sec = exchange_seconds(run.plan)
    if jax.process_index() > 0:
        return
    try:
        _write(args, run, clock, before_sec, checks, expectations, alone_sec)
    except OSError as error:
        text = (
            f"error: {args.workdir}: the report is not written: {error.strerror}. Make room there (or make it writable)"
        )
        raise jaxdl.Interrupted(None, f"{text}; the training is done, and the same command writes it.") from None


def _write(
    args: argparse.Namespace,
    run: jaxdl.Run,
    clock: tuple[float, str] | None,
    before_sec: float,
    checks: list[Line],
    expectations: list[str],
    alone_sec: float | None,
) -> None:
    """The report, and the entry if the run's clock counts. Raises OSError when they cannot be written."""
    before_sec, day = clock or (before_sec, _today())
    rows, name, counts = epochs_of(run, before_sec), _name(args), clock is not None and not was_resumed(run)
    if not rows or rows[-1].epoch != math.floor(run.plan.timeline.epoch(run.plan.total_steps) + 1e-9):
        raise ConfigError(
            f"{args.workdir / 'run'}: its evaluations are not all in metrics.jsonl (a full disk?), so there is nothing "
            "to report. Choose another --workdir."
        )
    page = write_report(
        args.workdir,
        run,
        rows,
        checks=checks,
        expectations=expectations,
        exchange_sec=alone_sec,
        price_per_hour=args.price_per_hour,
        before_sec=before_sec,
        is_rehearsal=args.rehearse,
        entry=name if counts else None,
    )
    print(f"written: {page}")
    if not counts:
        print("no entry is written: the run was stopped and resumed, so its clock does not count")
        return
    record = _record(args, run.plan.experiment)
    record["misc"]["reached"] = reached(rows) is not None
    record["timestamp"] = day
    print(f"written: {', '.join(str(path) for path in write_entry(args.workdir, name, record, rows))}")


def _experiment(args: argparse.Namespace, changes: list[str]) -> Experiment:
    """The recipe on the mesh that the arguments say. Raises ConfigError for those that do not fit."""
    nodes, devices = _sizes(args)
    for name, value in (("--nodes", nodes), ("--gpus-per-node", devices)):
        if value < 1:
            raise ConfigError(f"{name} {value}: give 1 or more.")
    if args.price_per_hour is not None and not 0 <= args.price_per_hour < math.inf:
        raise ConfigError(f"--price-per-hour {args.price_per_hour}: give dollars, 0 or more.")
    experiment = jaxdl.load(CONFIG)
    cpu_devices = nodes * devices if args.rehearse else None
    mesh = MeshConfig(replica=nodes, fsdp=devices, tensor=1, cpu_devices=cpu_devices)
    experiment = experiment.replaced({"mesh": mesh, "data.data_dir": args.data_dir})
    if args.rehearse:
        experiment = _rehearsal(experiment, args)
    given = [*side_flags(args.exchange), *changes]
    experiment = parse_options(experiment, given)
    if nodes == 1 and experiment.exchange.kind not in ("auto", "dense"):
        raise ConfigError(f"--exchange {args.exchange}: one node exchanges nothing. Leave it out, or give --nodes.")
    if not isinstance(experiment.model, ResNet) or not experiment.phases:
        raise ConfigError("the benchmark's run is a ResNet in phases. Leave --model as it is.")
    period = experiment.evaluation.every_epochs
    if experiment.evaluation.every_steps is not None or (period is not None and period != round(period)):
        raise ConfigError("--evaluation: an entry has whole epochs. Evaluate every 1, 2... of them.")
    if args.rehearse or any(flag.startswith("--step.microbatches") for flag in given):
        return experiment
    return fitted(experiment, nodes, devices)


def fitted(experiment: Experiment, nodes: int, devices: int) -> Experiment:
    """The experiment with as many images at a time on a GPU as the entry had, by micro-batches.

    There are fewer of them where batch norm would not have its images in the smallest batch.
    """
    smallest = min(phase.batch_size or experiment.batch_size for phase in experiment.phases)
    parts = experiment.batch_size // (nodes * devices * _IMAGES_AT_A_TIME)
    span = getattr(experiment.model, "norm_span", 1)
    if isinstance(span, int):
        parts = min(parts, smallest // (nodes * span))
    evaluated = min(experiment.evaluation.batch_size or experiment.batch_size, 2 * nodes * devices * _IMAGES_AT_A_TIME)
    return experiment.replaced({"step.microbatches": max(1, parts), "evaluation.batch_size": evaluated})


def _sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Nodes, and devices of each."""
    nodes, devices = (2, 1) if args.rehearse else (1, 8)
    return (
        nodes if args.nodes is None else args.nodes,
        devices if args.gpus_per_node is None else args.gpus_per_node,
    )


def _rehearsal(experiment: Experiment, args: argparse.Namespace) -> Experiment:
    """The recipe made small."""
    photos = {"min_scale": experiment.data.photos.min_scale, "eval_fraction": 1.0}  # pyright: ignore
    if (data := _stand_in(experiment)) is None:
        data = ImageFolder(folder=str(_digit_files(args.workdir / "digits")), photos=Photos(flip=False, **photos))
        batch_size, length = 64, 0.25
    else:
        batch_size, length = 32, _LENGTH
    phases = tuple(
        Phase(
            epochs=length * phase.epochs,
            size=_REHEARSED_SIZES[phase.size],
            batch_size=batch_size // 2 if phase.batch_size else None,
            min_scale=phase.min_scale,
        )
        for phase in experiment.phases
    )
    return experiment.replaced(
        {
            "data": data,
            "model.depth": 18,
            "model.width": 16,
            "model.norm_span": 16,
            "optimizer.learning_rate": 6.0,
            "schedule.warmup_epochs": 14.0 * length,
            "precision": Float32(),
            "batch_size": batch_size,
            "evaluation.batch_size": batch_size,
            "phases": phases,
        }
    )


def _stand_in(experiment: Experiment) -> Any:
    """The small `imagenet2012` of the data folder, if there is one."""
    data = experiment.data.model_copy(
        update={"photos": experiment.data.photos.model_copy(update={"eval_fraction": 1.0})}  # pyright: ignore
    )
    try:
        splits = data.build()
    except ConfigError:  # No data set is prepared there.
        return None
    return data if len(splits.train) <= _MOST_REHEARSED else None


def _digit_files(folder: Path) -> Path:
    """scikit-learn's digits as image files of 64 x 64 pixels, in `folder`, which is made unless it is there.

    Raises ConfigError when it cannot be written.
    """
    try:
        if not (folder / "done").exists():
            _write_digits(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}. Make room there, or choose another --workdir.") from None
    return folder


def _write_digits(folder: Path) -> None:
    from PIL import Image

    splits = Digits().build()
    for name, source in (("train", splits.train), ("val", splits.test)):
        rows = source.batch(np.arange(len(source)))
        for number, (image, digit) in enumerate(zip(rows["image"], rows["label"], strict=True)):
            path = folder / name / str(digit) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[..., 0]).convert("RGB").resize((64, 64), Image.Resampling.BICUBIC).save(path)
    (folder / "done").write_text("", encoding="utf-8")


def _chosen(workdir: Path) -> Any:
    """The exchange of the run to resume; None when there is none. The first process reads it for all."""
    path = workdir / CONFIG_FILE

    def read() -> bytes:
        try:
            return path.read_bytes() if path.is_file() else b""
        except OSError as error:
            return (error.strerror or "unreadable").encode()

    if not (text := from_first_process(read).decode(errors="replace")):
        return None
    try:
        exchange = Experiment.from_json(text).exchange
        return None if isinstance(exchange, Auto) else exchange
    except ValueError:
        raise ConfigError(f"{path}: not the config of a run ({text[:60]}...). Choose another --workdir.") from None


def _first_start(workdir: Path, before_sec: float) -> tuple[float, str] | None:
    """The seconds before the training and the day of the run's first start; None when they were not recorded.

    Raises ConfigError when they cannot be written.
    """
    path = workdir / "clock.json"
    if not (workdir / "run/config.json").exists():
        try:
            replace_file(path, json.dumps({"before_sec": before_sec, "day": _today()}).encode())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}. Make room there, or choose another --workdir.") from None
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        return float(noted["before_sec"]), str(noted["day"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _name(args: argparse.Namespace) -> str:
    """The name of the entry's files."""
    parts = (args.author, "rehearsal" if args.rehearse else "resnet50", _hardware(args), "jax")
    return "_".join(re.sub(r"[^A-Za-z0-9]+", "-", part).strip("-").lower() or "-" for part in parts)


def _hardware(args: argparse.Namespace) -> str:
    kind = "CPU" if args.rehearse else "GPU"
    nodes, devices = _sizes(args)
    return args.hardware or f"{nodes} x {devices} {kind}"


def _record(args: argparse.Namespace, experiment: Experiment) -> dict[str, Any]:
    """The content of the entry's JSON file."""
    model = experiment.model
    assert isinstance(model, ResNet)
    wide = "" if model.width in (None, 64) else f" of width {model.width}"
    record = {
        "version": "v1.0",
        "author": args.author,
        "authorEmail": args.author_email,
        "framework": f"jaxdl, JAX {jax.__version__}",
        "model": f"ResNet-{model.depth} v1.5{wide}" + (" (a rehearsal)" if args.rehearse else ""),
        "hardware": _hardware(args),
        "timestamp": _today(),
        "misc": {
            "experiment": experiment.model_dump(
                mode="json", include={"optimizer", "schedule", "precision", "phases", "exchange"}
            ),
            "batchSize": experiment.batch_size,
            "rehearsal": args.rehearse,
        },
    }
    if args.price_per_hour is not None:
        record["costPerHour"] = args.price_per_hour
    return record


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
