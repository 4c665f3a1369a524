"""A share of the processor for each emulated host: control groups of Linux with a quota (root).

Hosts of one machine share its cores. A host that waits for the network leaves its time to the others, which real hosts
cannot do; with a quota each has its own part, whether the others work or wait. Both versions of control groups will do.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from pathlib import Path

from jaxdl.core.config import ConfigError

_PERIOD_US, _LONGEST_US = 2_000, 20_000
"""The quota is granted so often. It should be short: a host that has waited for the network has its whole quota left,
and computes without a limit until that is used up, which saves it up to a period after each message."""
_LEAST_US = 1_000
"""The kernel takes no smaller quota: for less than half of a core the period is longer."""
_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
"""Where control groups are: of the first version, with `cpu.cfs_quota_us`; and of the second, with `cpu.max`."""
_QUOTA, _PERIOD, _BOTH = "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.max"
_PATIENCE_SEC = 5.0


def check_limit(cores: float) -> None:
    """Raises ConfigError for a share that cannot be given, or where this machine cannot limit one."""
    least = _LEAST_US / _LONGEST_US
    if not least <= cores <= 1024:
        raise ConfigError(f"--cores {cores:g}: a host has from {least:g} to 1024 cores; 0.5 is half of one.")
    if not can_limit():
        raise ConfigError(
            "--cores: this process cannot limit what a host takes of the processor: there is no control group of "
            f"Linux that it may make under {_ROOTS[1]}. Leave the option out; hosts then share all cores."
        )


def can_limit() -> bool:
    """Whether this process can make a group with a quota."""
    return _root() is not None


def limit(name: str, cores: float) -> tuple[str, ...]:
    """Makes a group whose processes together have `cores` cores; returns the words that enter it and exec a command.

    Raises ConfigError where that is not possible.
    """
    root = _root()
    if root is None:
        raise ConfigError(f"{name}: no control group can be made under {_ROOTS[1]}.")
    (root / name).mkdir(exist_ok=True)
    set_quota(name, cores)
    # Before the command enters a network namespace: `ip netns exec` hides the control groups.
    return ("sh", "-c", 'echo $$ >"$0" && exec "$@"', str(root / name / "cgroup.procs"))


def set_quota(name: str, cores: float | None) -> None:
    """Changes how many cores the processes of a group have together; None: all. Raises ConfigError."""
    period = _PERIOD_US if cores is None else max(_PERIOD_US, math.ceil(_LEAST_US / cores))
    quota = None if cores is None else round(cores * period)
    for folder in (root / name for root in _ROOTS if (root / name).is_dir()):
        try:
            if (folder / _BOTH).exists():
                (folder / _BOTH).write_text(f"{'max' if quota is None else quota} {period}", encoding="utf-8")
            else:
                # Without a quota any period will do: the kernel refuses one whose quota would be too large a part.
                (folder / _QUOTA).write_text("-1", encoding="utf-8")
                (folder / _PERIOD).write_text(str(period), encoding="utf-8")
                (folder / _QUOTA).write_text(str(-1 if quota is None else quota), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{folder}: the quota cannot be set: {error.strerror}. Leave --cores out.") from None


def groups(prefix: str) -> list[str]:
    """The names of all groups that begin so."""
    return sorted({path.name for root in _ROOTS for path in root.glob(f"{prefix}*") if path.is_dir()})


def remove(name: str) -> None:
    """Removes a group whose processes have ended."""
    for root in _ROOTS:
        end = time.monotonic() + _PATIENCE_SEC
        while (root / name).is_dir():
            with contextlib.suppress(OSError):  # A process that was killed may still be there for a moment.
                (root / name).rmdir()
                break
            if time.monotonic() > end:
                break
            time.sleep(0.02)


@functools.cache
def _root() -> Path | None:
    """Where this process can make groups with a quota; None if it cannot."""
    for root in _ROOTS:
        trial = root / f"trial-jaxdl-{os.getpid()}"
        try:
            trial.mkdir()
        except OSError:
            continue
        try:
            if (trial / _QUOTA).exists() or (trial / _BOTH).exists():
                return root
        finally:
            trial.rmdir()
    return None
