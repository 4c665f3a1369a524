"""Images a second of the input pipeline, per core and per machine, compared with other loaders on the same crops.

Every side reads the same files (from the page cache) and cuts the same random boxes out of them. Other loaders are
measured if they are installed: tf.data (tensorflow), a PyTorch DataLoader (torch) and Grain.
Each runs in a separate process, bound to one core or with workers for all cores; they take turns.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxdl.core.config import ConfigError
from jaxdl.data import remote
from jaxdl.data.images.cpus import num_cpus
from jaxdl.performance.bench.input_sides import BATCH, SIDES
from jaxdl.performance.bench.shared import bench, make_table, median_ratio, parse_bench, write_json

_HEIGHT, _WIDTH, _BYTES, _MADE = 375, 500, 110_000, 384
"""Size of the generated images (that of an average ImageNet photograph) and their number: too many for a CPU cache."""
_WARM_UP, _WARM_UP_OF_WORKER = 6, 4
"""Untimed batches at the start of a turn: more than a side and its workers prefetched during the others' turns."""
_NOTE = (
    "Sides with a cache cut their parts out of its images, whose shorter side is 256; tf.data resizes without "
    "antialiasing unless it is said."
)
_BASE = "jaxdl"
"""The baseline of the comparison."""


@dataclass(frozen=True)
class InputBench:
    """Times jaxdl's image pipeline, cold and cached, and other loaders."""

    images: Path | None = None
    """A folder of JPEG files; None makes some of 500 x 375 pixels and about 110 KB from photographs of scikit-learn."""
    num_images: int = 640
    """Images in one measurement."""
    size: int = 224
    """Height and width of the crops."""
    num_rounds: int = 5
    """How often each side is measured; medians are reported."""
    workers: int | None = None
    """Processes (or threads) for the figure of the machine; None takes the number of CPUs."""
    sides: tuple[str, ...] = ()
    """Which sides to measure; all that are installed by default."""
    json: Path | None = None
    """A file for the results."""


@bench("input", "the image pipeline, cold and cached, against tf.data, PyTorch's DataLoader and Grain")
def main(args: list[str]) -> None:
    """Runs the measurement and prints the table."""
    command = parse_bench(InputBench, args, __name__, num_images=1, num_rounds=1, size=1, workers=1)
    unknown = [side for side in command.sides if side not in SIDES]
    if unknown:
        raise ConfigError(f"--sides {unknown[0]}: there is no such side; choose from {', '.join(map(repr, SIDES))}.")
    console = Console(width=120, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="jaxdl-bench-") as folder:
        images = command.images or make_images(Path(folder) / "images", _MADE)
        files = check_images(images)
        kilobytes = sum(os.path.getsize(name) for name in files) / len(files) / 1e3
        results = measure(command, images, Path(folder), console)
    summarize(results)
    title = (
        f"images a second: {len(files)} files of {kilobytes:.0f} kB, random parts made {command.size} x {command.size}"
    )
    console.print(table(results, title))
    for line in (_NOTE, *conclusions(results)):
        console.print(line)
    settings = {name: str(value) for name, value in asdict(command).items()}
    settings |= {"workers": command.workers or num_cpus(), "num_files": len(files), "kilobytes": kilobytes}
    write_json(command.json, {"settings": settings, "versions": versions(), "results": results})


def versions() -> dict[str, str]:
    """Versions of Python and of the measured packages, where they are installed."""
    installed = {"python": platform.python_version()}
    names = (
        "numpy",
        "simplejpeg",
        "opencv-python-headless",
        "pillow",
        "tensorflow",
        "tensorflow-cpu",
        "torch",
        "grain",
    )
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def check_images(folder: Path) -> list[str]:
    """The images in the folder. Raises ConfigError without any."""
    images = [file.address for file in remote.find(str(folder), (".jpg", ".jpeg"))]
    if not images:
        raise ConfigError(f"--images {folder}: no JPEG file in it.")
    return images


def make_images(folder: Path, count: int) -> Path:
    """The folder, filled with parts of two photographs, 500 x 375 pixels, at a quality that gives about 110 KB."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    folder.mkdir()
    photographs, random, qualities = load_sample_images().images, np.random.default_rng(0), dict[int, int]()
    for number in range(count):
        which = number % len(photographs)
        pixels = photographs[which]
        top, left = random.integers(0, pixels.shape[0] - _HEIGHT + 1), random.integers(0, pixels.shape[1] - _WIDTH + 1)
        image = Image.fromarray(pixels[top : top + _HEIGHT, left : left + _WIDTH])
        if which not in qualities:
            sizes = {quality: len(encode(image, quality)) for quality in (90, 93, 95, 96, 97, 98, 99)}
            qualities[which] = min(sizes, key=lambda quality: abs(sizes[quality] - _BYTES))
        (folder / f"{number:05d}.jpg").write_bytes(encode(image, qualities[which]))
    return folder


def encode(image: Any, quality: int) -> bytes:
    """JPEG with the usual subsampling of colour."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


def measure(command: InputBench, images: Path, scratch: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Side -> images a second of every round, on one core and on the machine; or why it was not measured."""
    workers = command.workers or num_cpus()
    results: dict[str, dict[str, Any]] = {name: {} for name in command.sides or SIDES}
    scopes = {"core": 0, "machine": workers}
    with contextlib.ExitStack() as stack:
        open_sides: dict[tuple[str, str], _Side] = {}
        with console.status("starting") as status:
            for name, (scope, count) in itertools.product(results, scopes.items()):
                status.update(f"starting {name}, {scope}")
                side = stack.enter_context(_Side(name, scratch / f"{name}-{scope}.log"))
                job = {"folder": str(images), "scratch": str(scratch), "size": command.size, "workers": count}
                if "missing" not in results[name] and "missing" not in (answer := side.ask(job)):
                    open_sides[name, scope], results[name][scope] = side, []
                elif "missing" not in results[name]:
                    results[name] = answer
        turns = [(number, *key) for number in range(command.num_rounds) for key in open_sides]
        for number, name, scope in track(turns, "measuring", console=console):
            if "missing" in results[name]:
                continue
            # With workers, each Grain worker makes whole batches.
            first = scratch / f"{name}.npy" if number == 0 and scope == "core" else None
            warm_up = _WARM_UP + _WARM_UP_OF_WORKER * scopes[scope]
            answer = open_sides[name, scope].ask(
                {"warm_up": warm_up, "batches": -(-command.num_images // BATCH), "save": first and str(first)}
            )
            if "missing" in answer:
                results[name] = answer
            else:
                results[name][scope].append(answer["per_sec"])
                if first is not None:
                    results[name]["pixels"] = np.load(first)
    return results


class _Side:
    """Context: a process that measures one side."""

    def __init__(self, name: str, log: Path) -> None:
        self._log = log.open("w+", encoding="utf-8")  # Libraries print a lot.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxdl.performance.bench.input_sides", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, encoding="utf-8",
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # It then exits and deletes its cache.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):  # Its own workers too.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer of the process, or an error with the reason if it has exited."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            said = self._log.read().strip().splitlines()
            return {"missing": f"failed with code {code}: {said[-1] if said else 'it said nothing'}"}
        return json.loads(line)


def table(results: dict[str, dict[str, Any]], title: str) -> Table:
    """The table: medians, jaxdl's speed relative to each side, and the difference of their pixels from jaxdl's."""
    sides_table = make_table(title, ("side", "one core", "jaxdl is", "machine", "jaxdl is", "pixels differ by"))
    for name, result in results.items():
        if "missing" in result:
            sides_table.add_row(name, result["missing"])
            continue
        cells = []
        for scope in ("core", "machine"):
            ratio = result.get(f"{scope} ratio")
            cells += [f"{result[f'{scope} median']:,.0f}", "" if ratio is None else f"{ratio:.2f} x"]
        differ = result.get("differ")
        sides_table.add_row(name, *cells, "" if differ is None else f"{differ:.2f} grey levels")
    return sides_table


def summarize(results: dict[str, dict[str, Any]]) -> None:
    """Adds to each side its medians, the median of jaxdl's rate over its own in a round, and pixel differences."""
    base = results.get(_BASE, {})
    wanted = base.get("pixels")
    for name, result in results.items():
        for scope in ("core", "machine"):
            if not result.get(scope):
                continue
            result[f"{scope} median"] = statistics.median(result[scope])
            if base.get(scope) and name != _BASE:
                result[f"{scope} ratio"] = median_ratio(base[scope], result[scope])
        pixels = result.pop("pixels", None)
        if name != _BASE and pixels is not None and wanted is not None and pixels.any():
            result["differ"] = float(np.abs(pixels.astype(float) - wanted).mean())


def conclusions(results: dict[str, dict[str, Any]]) -> list[str]:
    """The gain of the cache, and Grain's own overhead, where they were measured."""
    lines = []
    cold, warm = (results.get(f"jaxdl{which}", {}) for which in (", filling the cache", " from memory"))
    for scope, where in (("core", "one core"), ("machine", "the machine")):
        if cold.get(scope) and warm.get(scope):
            ratio = median_ratio(warm[scope], cold[scope])
            lines.append(f"memory against the first epoch, which fills the cache: {ratio:.1f} x ({where})")
    idle = results.get("grain, nothing to do", {}).get("core median")
    if idle:
        lines.append(f"Grain's own work: {1e6 / idle:.0f} us an image (one core)")
    return lines
