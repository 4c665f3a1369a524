"""What is left of each time that a run failed: `failures/N` in its workdir.

The first process of a run writes most of it, each process its own error, and a launcher, which survives them all, the
end of what each host printed on stderr. All of it is written at most once, nothing is raised, and only the newest
`KEPT_FAILURES` folders are kept.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxdl.core.files import CONFIG_FILE, FAILURE_FILE, FAILURES_FOLDER, METRICS_FILE, replace_file
from jaxdl.report.status.rows import tail_rows

KEPT_FAILURES = 10
"""Number of folders that are kept, the newest ones."""
LAST_ROWS = 20
"""Number of rows of metrics.jsonl that are kept."""
STDERR_LINES, STDERR_BYTES = 400, 1 << 17
"""At most so much of the end of a host's stderr is kept."""
PACKAGES = ("jaxdl", "jax", "jaxlib", "numpy")
"""The packages that a failure may depend on."""


def next_failure(workdir: Path) -> int:
    """The number of the next failure: one more than the largest there is, from 1 on. Raises nothing."""
    return max(_numbers(workdir), default=0) + 1


def failure_folder(workdir: Path, number: int) -> Path:
    """The folder of a failure."""
    return workdir / FAILURES_FOLDER / str(number)


def error_file(process: int) -> str:
    """The name of the file with the error of one process."""
    return f"error-{process}.txt"


def stderr_file(host: str) -> str:
    """The name of the file with the end of what a host printed on stderr; its name as far as a file can have it."""
    allowed = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in host)
    return f"stderr-{allowed[:100]}.txt"


def keep_failure(workdir: Path, number: int, facts: Mapping[str, Any], config: bytes | None = None) -> None:
    """Writes `failure.json`, unless it is there, with `facts`, the versions and the last metrics; and the config.

    `config` is the resolved config as JSON; without it that of the workdir is copied. Removes the oldest folders.
    Raises nothing.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        folder = failure_folder(workdir, number)
        if (folder / FAILURE_FILE).exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        rows = tail_rows(workdir / METRICS_FILE, LAST_ROWS)
        content = {**facts, "versions": package_versions(PACKAGES), "last_metrics": rows}
        replace_file(folder / FAILURE_FILE, (json.dumps(content, indent=2) + "\n").encode())
        if config is None and (workdir / CONFIG_FILE).is_file():
            config = (workdir / CONFIG_FILE).read_bytes()
        if config is not None:
            replace_file(folder / CONFIG_FILE, config)
    with contextlib.suppress(OSError):
        for old in sorted(_numbers(workdir))[:-KEPT_FAILURES]:
            shutil.rmtree(failure_folder(workdir, old), ignore_errors=True)


def add_failure(workdir: Path, number: int, name: str, text: str) -> None:
    """Writes one more file into the folder of a failure. Raises nothing."""
    with contextlib.suppress(OSError):
        folder = failure_folder(workdir, number)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / name, text.encode(errors="replace"))


def end_of(lines: Iterable[str]) -> str:
    """The last lines, as many as are kept."""
    content = "".join(f"{line}\n" for line in list(lines)[-STDERR_LINES:]).encode(errors="replace")
    return content[-STDERR_BYTES:].decode(errors="replace")


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of packages; "unknown" for one that is not installed."""
    return {"python": platform.python_version()} | {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _numbers(workdir: Path) -> list[int]:
    try:
        return [int(path.name) for path in (workdir / FAILURES_FOLDER).iterdir() if path.name.isdecimal()]
    except OSError:
        return []
