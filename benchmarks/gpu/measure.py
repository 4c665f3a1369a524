"""Measures on one GPU what RESULTS.md has no figure of a GPU for, the most worthwhile first, for 13 minutes.

python -m benchmarks.gpu.measure --out runs/gpu
python -m benchmarks.gpu.measure --out runs/gpu --only 'resnet50*' --minutes 10
python -m benchmarks.gpu.measure --out runs/toy --toy

Each measurement is a command in a process of its own, with a time limit. After each, `results.jsonl` gets a
line and `results.md` (tables, and why what is missing is missing) is written anew, so nothing is lost when the time is
up or this program is killed. A measurement that has a result in --out is not repeated: start the same command again to
go on. `logs/` has what each printed. `--toy` makes everything small and runs on a CPU too, in a few minutes.

What is measured, the most worthwhile first; each for at most two minutes:
- the training step of GPT-2 (124 million parameters, 2,048 tokens), of a decoder of 1.2 billion and of ResNet-50 at 224
  pixels, in bfloat16, the decoder in FP8 too, in turns with compiled PyTorch: medians, share of the peak, memory as
  planned and as used, the kernels that take the most time, the time to compile, and the attention that ran;
- GPT-2's and ResNet-50's step without each change that made it faster (`benchmarks.gpu.without`); the losses of the
  first steps of both decoders beside PyTorch's (`benchmarks.first_losses`); GPT-2 beside a plain JAX step;
- a whole training run, the one of `make train`; the share of LARS's update in a step;
- selection of 25.6 million entries by every method, checked, against `lax.top_k` and a copy on the device, at two
  densities; rows a second of lookups and exact updates of embedding tables, in turns with PyTorch;
- ResNet-50 at 128 and 96 pixels, and in float16, TF32 and float32.

Exit codes: 0 when everything asked for has a result, 1 when something has none, 2 for a mistake in the command or
something missing on the machine, 130 after Ctrl-C, 143 after SIGTERM.

A machine with one GPU and no network needs Python 3.11 or later, JAX with CUDA, and, to compare with, PyTorch (with
torchvision). jaxdl need not be installed: this checkout is enough. Of its packages, an image for machine learning with
JAX, flax, optax, orbax-checkpoint, rich, matplotlib and scikit-learn lacks perhaps the following; carry them as wheels
for its Python and unpack them into a folder on PYTHONPATH (`python -m pip install --no-index --no-deps --target DIR
*.whl`): annotated-types 0.8.0, docstring_parser 0.18.0, pydantic 2.14.3, pydantic_core 2.50.4,
tensorboardX 2.6.5, typing-inspection 0.4.5, tyro 1.0.17. This program names what it does not find.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import ROOT
from benchmarks.gpu import CHANGES, CHANGES_OF_RESNET
from benchmarks.gpu.results import RESULTS, TABLES, Results

NEEDED = ("jax", "flax", "optax", "orbax.checkpoint", "numpy", "pydantic", "tyro", "matplotlib", "tensorboardX",
          "sklearn", "PIL", "fsspec")  # fmt: skip
"""Modules without which nothing here runs."""
LEAST_SEC = 20
"""A measurement is not begun with less time left."""
GRACE_SEC = 10
"""From SIGTERM to SIGKILL for a measurement whose time is over."""
ENDED = "did not end in its time"


@dataclass(frozen=True)
class Measurement:
    """One command; `{out}` in its arguments is a folder or file of its own."""

    name: str
    args: tuple[str, ...]
    """The words after `python -m`."""
    minutes: float
    """Its time limit."""
    toy: tuple[str, ...] = ()
    """Further arguments that make it small; the last of two equal options counts."""
    against: bool = False
    """Also in turns with PyTorch, where that is installed; alone if that fails."""
    needs_torch: bool = False
    """Never alone."""


def all_measurements() -> list[Measurement]:
    """Everything, the most worthwhile first."""
    toy_select = ("--num-elements", "20000", "--num-repeats", "2")
    gpt2 = decoder("gpt2-124m", 16, 2048, ("12", "768", "12", "12", "3072"), 2, *GPT2)
    alone, options, resnet = replace(gpt2, against=False), gpt2.args[1:], resnet50(224, "bfloat16", 2)
    decoder_1b = decoder("decoder-1b", 4, 2048, ("16", "2048", "16", "8", "8192"), 2, "--model.no-tied-embeddings")
    fp8 = replace(decoder_1b, name="decoder-1b-fp8", args=(*decoder_1b.args, "--precision", "fp8"), toy=FP8_TOY)
    return [
        gpt2,
        decoder_1b,
        fp8,
        resnet,
        *(replace(alone, name=f"gpt2-without-{name}", args=("benchmarks.gpu.without", name, *options))
          for name in CHANGES),
        *(replace(resnet, name=f"resnet50-without-{name}", against=False,
                  args=("benchmarks.gpu.without", name, *resnet.args[1:])) for name in CHANGES_OF_RESNET),
        *(replace(one, name=f"{one.name}-losses", args=("benchmarks.first_losses", *one.args[1:]), needs_torch=True)
          for one in (gpt2, decoder_1b)),
        replace(alone, name="gpt2-plain", args=(*gpt2.args, "--against", "plain")),
        Measurement("train", ("jaxdl.train", "--config", "configs/digits.py", "--workdir", "{out}"), 2, TRAIN_TOY),
        Measurement("lars", (*resnet_args("imagenet_resnet50_lars_4k", 224, "bfloat16"),), 2, RESNET_TOY),
        Measurement("select-0.001", ("jaxdl.bench", "select", "--density", "0.001"), 2, toy_select),
        Measurement("rows-10", ("benchmarks.embedding.rows",), 2, ROWS_TOY, against=True),
        resnet50(128, "bfloat16", 2),
        resnet50(96, "bfloat16", 2),
        resnet50(224, "float16", 2),
        resnet50(224, "tensorfloat32", 2),
        resnet50(224, "float32", 2),
        Measurement("select-0.01", ("jaxdl.bench", "select", "--density", "0.01"), 2, toy_select),
        *(resnet50(size, kind, 2) for kind in ("float16", "tensorfloat32", "float32") for size in (128, 96)),
    ]  # fmt: skip


ROWS_TOY = ("--rows", "200", "--columns", "8", "--batch-size", "16", "--num-steps", "1", "--num-repeats", "2")
RESNET_TOY = ("--image-size", "32", "--batch-size", "4", "--model.depth", "18", "--model.width", "8",
              "--num-steps", "1", "--num-repeats", "2")  # fmt: skip
TRAIN_TOY = ("--max-steps", "3", "--model.width", "8", "--devices", "1", "--mesh.replica", "1", "--report.no-curves")
GPT2 = ("--model.norm", "layer", "--model.mlp", "gelu", "--model.biases", "all", "--model.positions", "learned",
        "--model.max-length", "2048")  # fmt: skip
DECODER_TOY = ("--batch-size", "2", "--data.length", "16", "--data.vocab-size", "64", "--data.num-train", "16",
               "--data.num-test", "4", "--model.num-layers", "2", "--model.embed-dim", "32", "--model.num-heads", "2",
               "--model.num-kv-heads", "2", "--model.mlp-dim", "64", "--num-steps", "1",
               "--num-repeats", "2")  # fmt: skip
FP8_TOY = (*DECODER_TOY, "--model.num-layers", "3", "--precision.min-size", "32", "--precision.emulated")


def resnet_args(config: str, size: int, precision: str) -> tuple[str, ...]:
    """The command for a ResNet-50 on one GPU, batch norm over the whole batch, as PyTorch's."""
    command = ("benchmarks.train", "--config", f"configs/{config}.py", "--batch-size", "256", "--profile")
    return (*command, "--image-size", str(size), "--precision", precision, "--model.norm-span", "replica")


def resnet50(size: int, precision: str, minutes: float) -> Measurement:
    """The step of ResNet-50 at a size and precision."""
    args = resnet_args("imagenet_resnet50", size, precision)
    return Measurement(f"resnet50-{size}-{precision}", args, minutes, RESNET_TOY, against=True)


def decoder(name: str, batch: int, length: int, sizes: tuple[str, ...], minutes: float, *more: str) -> Measurement:
    """The step of a decoder; sizes are layers, embedding, heads, key and value heads, MLP."""
    names = ("num-layers", "embed-dim", "num-heads", "num-kv-heads", "mlp-dim")
    model = [word for option, size in zip(names, sizes, strict=True) for word in (f"--model.{option}", size)]
    text = ("--data", "synthetic_text", "--data.vocab-size", "50304", "--data.length", str(length),
            "--data.num-train", "256", "--data.num-test", "64")  # fmt: skip
    args = ("benchmarks.train", "--config", "configs/python_lm.py", *text, "--batch-size", str(batch), *model)
    return Measurement(name, (*args, "--precision", "bfloat16", "--profile", *more), minutes, DECODER_TOY, against=True)


def main() -> None:
    """Runs what was asked for and has no result yet."""
    args = parse()
    chosen = [
        measurement
        for measurement in all_measurements()
        if any(fnmatch.fnmatch(measurement.name, word) for word in args.only)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "logs").mkdir(exist_ok=True)
    console, results = (
        Console(),
        Results(args.out, [measurement.name for measurement in all_measurements()], toy=args.toy),
    )
    deadline = time.monotonic() + 60 * args.minutes
    signal.signal(signal.SIGTERM, _stop)
    try:
        for measurement in chosen:
            if results.has(measurement.name):
                console.print(f"{measurement.name}: in {results.folder / RESULTS} already")
                continue
            left = deadline - time.monotonic()
            if left < LEAST_SEC:
                results.add({"name": measurement.name, "status": "not begun", "why": "the time was up"})
                continue
            results.add(measure(measurement, args, left, console))
    except KeyboardInterrupt:
        console.print(f"stopped; what was measured is in {results.folder / TABLES}")
        raise SystemExit(130) from None
    missing = [measurement.name for measurement in chosen if not results.has(measurement.name)]
    console.print(f"{len(chosen) - len(missing)} of {len(chosen)} measured: {results.folder / TABLES}")
    for name in missing:
        console.print(f"{name}: {results.why_not(name)}", highlight=False, soft_wrap=True)
    raise SystemExit(1 if missing else 0)


def _stop(number: int, _: Any) -> NoReturn:
    raise SystemExit(128 + number)


def parse() -> argparse.Namespace:
    """The command line. Exits with 2 for a mistake, or when something is missing on this machine."""
    names = [measurement.name for measurement in all_measurements()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"measurements, in their order: {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the results")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="these measurements; * and ? match")
    parser.add_argument("--minutes", type=float, default=13, help="for everything; what is not done by then is left")
    parser.add_argument("--toy", action="store_true", help="small sizes, also on a CPU; the times mean nothing")
    args = parser.parse_args()
    args.out = args.out.resolve()
    for word in args.only:
        if not fnmatch.filter(names, word):
            parser.error(f"--only {word}: there is no such measurement; choose from {', '.join(names)}.")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: no time to measure in. Give more than 0.")
    missing = [name for name in NEEDED if not _is_found(name)]
    if missing:
        parser.error(f"not found on this machine: {', '.join(missing)}. --help says how to carry packages there.")
    if not args.toy and not list(Path("/dev").glob("nvidia[0-9]*")):
        parser.error("there is no NVIDIA GPU on this machine. --toy runs everything at a small size on a CPU.")
    return args


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # The package that the module is in.
        return False


def measure(measurement: Measurement, args: argparse.Namespace, left: float, console: Console) -> dict[str, Any]:
    """Runs a measurement, without PyTorch if it fails with it, and returns what is to be written down."""
    begun, notes = time.monotonic(), []
    attempts = [()]
    if measurement.against:
        alone = [] if measurement.needs_torch else [()]
        attempts = [("--against", "torch"), *alone] if _is_found("torch") else alone
        notes += [] if _is_found("torch") else ["PyTorch is not installed"]
    row: dict[str, Any] = {}
    for more in attempts:
        limit = min(60 * measurement.minutes, left - (time.monotonic() - begun))
        if row and limit < LEAST_SEC:
            break
        row = attempt(measurement, args, more, limit, console)
        if row["status"] == "measured":
            break
        notes += [f"with PyTorch: {row['why']}"] if more else []
    row = row or {"name": measurement.name, "status": "failed", "why": "it compares with PyTorch", "toy": args.toy}
    return row | {"notes": notes, "seconds": round(time.monotonic() - begun, 1)}


def attempt(
    measurement: Measurement, args: argparse.Namespace, more: Sequence[str], limit: float, console: Console
) -> dict[str, Any]:
    """Runs the command of a measurement with `more` options, for at most `limit` seconds."""
    name = measurement.name
    logs, workdir = args.out / "logs", args.out / name
    figures, log = logs / f"{name}.json", logs / f"{name}{'-torch' if more else ''}.txt"
    words = [word.format(out=workdir) for word in (*measurement.args, *(measurement.toy if args.toy else ()), *more)]
    words += [] if words[0] == "jaxdl.train" else ["--json", str(figures)]
    figures.unlink(missing_ok=True)
    command = [sys.executable, "-m", *words]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if not args.toy:  # A measurement that is tried again need not compile again.
        env.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "measure_gpu_programs"))
    with log.open("w", encoding="utf-8") as file:
        file.write(f"{' '.join(command)}\n")
        file.flush()
        code = run(command, env, file, limit, name, console)
    row: dict[str, Any] = {"name": name, "command": " ".join(["python", *command[1:]]), "toy": args.toy}
    if code == 0:
        result = training_run(workdir) if words[0] == "jaxdl.train" else json.loads(figures.read_text(encoding="utf-8"))
        return row | {"status": "measured", "result": result}
    why = f"{ENDED} ({limit / 60:.1f} minutes)" if code is None else f"exit code {code}: {last_line(log)}"
    return row | {"status": "failed", "why": why}


def run(
    command: Sequence[str], env: dict[str, str], file: Any, limit: float, name: str, console: Console
) -> int | None:
    """The exit code of a command; None if it was ended after `limit` seconds, with the processes that it started."""
    begun = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"{name}, at most {limit / 60:.1f} min", total=limit)
            while process.poll() is None and time.monotonic() - begun < limit:
                time.sleep(0.2)
                progress.update(task, completed=time.monotonic() - begun)
        code = process.poll()
    finally:
        end(process)
    what = "measured" if code == 0 else ENDED if code is None else f"exit code {code}"
    console.print(f"{name}: {what}, {time.monotonic() - begun:.0f} s", highlight=False)
    return code


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started, which are in a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_SEC)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def last_line(log: Path) -> str:
    """The last line of a log that says something: the message of an error."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return (lines[-1] if lines else "it printed nothing")[:300]


def training_run(workdir: Path) -> dict[str, Any]:
    """What a training run wrote down at its end."""
    return json.loads((workdir / "summary.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
