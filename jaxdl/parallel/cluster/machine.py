"""Checks of XLA flags and devices that would otherwise abort the process; the memory of this host."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import mmap
import os
import re
from pathlib import Path

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.meeting import ClusterError
from jaxdl.parallel.cluster.shutdown import from_the_network

DEVICE_COUNT = "xla_force_host_platform_device_count"
"""The XLA flag that users set most; its value is a number."""

_MALLOC_OPTIONS = {-1: 2**31 - 1, -2: 2**26, -4: 0, -8: 1}
"""M_TRIM_THRESHOLD, M_TOP_PAD (64 MiB), M_MMAP_MAX and M_ARENA_MAX of malloc.h."""
_POOL_SIZE = ("PJRT_NPROC", "NPROC")
"""The variables from which XLA takes the number of threads of its pool on CPUs; the first one counts."""
_UNKNOWN_PLATFORM = "is not in the list of known backends"
"""JAX's error text for an unknown platform or a missing plugin: retrying is useless."""


def check_xla_flags() -> None:
    """Raises ConfigError for a flag in XLA_FLAGS that jaxlib lacks: XLA would abort the process.

    Searches jaxlib's library for the name (0.3 s of CPU time, only if flags are set). Checks no values but that of
    `DEVICE_COUNT`.
    """
    text = os.environ.get("XLA_FLAGS", "").strip()
    if not text:
        return
    if not text.startswith("--"):
        if Path(text).is_file():
            return
        raise ConfigError(f"XLA_FLAGS={text}: neither a list of flags (--xla_...) nor a file of flags.")
    given = [word.removeprefix("--").partition("=") for word in text.split() if word.startswith("--")]
    for name, equals, value in given:
        if name == DEVICE_COUNT and equals and not re.fullmatch(r"-?[0-9]{1,9}", value):
            raise ConfigError(f"XLA_FLAGS: --{name}={value}: not a whole number. Set one, or remove the flag.")
    spec = importlib.util.find_spec("jaxlib")
    library = Path(str(spec.origin)).with_name("libjax_common.so") if spec is not None else Path()
    if not library.is_file():
        return  # This jaxlib is packaged differently.
    with io.FileIO(library) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        unknown = [name for name, _, _ in given if not _names_flag(name, content)]
    if unknown:
        raise ConfigError(
            f"XLA_FLAGS: this jaxlib has no flag --{unknown[0]}. Remove it from the environment variable; flags change "
            "from version to version."
        )


def _names_flag(name: str, library: mmap.mmap) -> bool:
    """Whether XLA has a flag of this name: a whole string of the library, not the end of a longer one."""
    if not re.fullmatch(r"(xla|legacy)_[a-z0-9]+_[a-z0-9_]+", name):  # `xla_cpu` is a string, but not a flag.
        return False
    there = library.find(name.encode() + b"\0")
    while there > 0 and re.fullmatch(rb"[A-Za-z0-9_]", library[there - 1 : there]):
        there = library.find(name.encode() + b"\0", there + 1)
    return there > 0


def enlarge_thread_pool(num_devices: int) -> None:
    """Gives XLA's CPU backend two threads for each of `num_devices` virtual devices, before JAX starts.

    The devices share one pool, by default of one thread for each device or core. A device that waits in two collectives
    that do not depend on each other holds two threads; without spare ones another device never arrives, and XLA ends
    the process after its timeout. Does nothing where the cores are enough, or the environment has a number of its own.
    """
    num_threads = 2 * num_devices
    if num_devices > 1 and num_threads > (os.cpu_count() or 1) and not any(name in os.environ for name in _POOL_SIZE):
        os.environ[_POOL_SIZE[0]] = str(num_threads)


def keep_freed_memory() -> None:
    """Lets the C library keep freed memory for the next allocation, for steps on CPUs.

    XLA allocates a program's temporary buffer, often hundreds of megabytes, anew in each step. glibc would map it and
    unmap it each time, and the kernel would clear every page of it again: up to a fifth of a step. Kept memory has to
    be in the one arena that grows without limit. Does nothing without glibc, or where the environment has settings of
    its own for it (`MALLOC_...`, or `glibc.malloc...` in `GLIBC_TUNABLES`).
    """
    library = ctypes.CDLL(None)
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    chosen = chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or not hasattr(library, "gnu_get_libc_version"):
        return
    for option, value in _MALLOC_OPTIONS.items():
        library.mallopt(option, value)


def open_devices() -> None:
    """Starts JAX's backend; in a run of several processes, together with theirs.

    Raises:
      ConfigError: the requested platform does not exist, or JAX runs on CPUs though another comes first.
      ClusterError: another attempt may succeed, as in one of several processes.
      RuntimeError: JAX's own, if another process was unreachable (`shutdown.from_the_network`).
    """
    import jax

    from jaxdl.parallel.mesh import asked_platforms

    wanted = getattr(jax.config, "jax_platforms", None)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        several, network = jax.distributed.is_initialized(), from_the_network(error)
        if several and network:
            raise
        why = " ".join(str(error).split()) or "no device of that platform, or its JAX plugin is missing"
        unknown = isinstance(error, AssertionError) or _UNKNOWN_PLATFORM in why
        if (several or network) and not unknown:
            raise ClusterError(f"JAX could not start on the devices of this host: {why}") from None
        named, unset = (f"JAX_PLATFORMS={wanted}: ", "Unset the variable, or give") if wanted else ("", "Give")
        raise ConfigError(
            f"{named}{why}. {unset} --devices N for N virtual CPU devices; for NVIDIA GPUs install jaxdl[cuda13]."
        ) from None
    # Of cuda,cpu JAX leaves out without a word what it has no plugin for.
    if (asked := asked_platforms()) is not None and jax.default_backend() == "cpu":
        first = asked.split(",")[0].strip()
        raise ConfigError(
            f"JAX_PLATFORMS={asked}: there is no device of {first} here, and JAX would run on the CPU. Unset the "
            "variable, or give --devices N for N virtual CPU devices; for NVIDIA GPUs install jaxdl[cuda13]."
        )


def host_memory_bytes() -> int:
    """The memory of this host, or the limit of the container, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            limits.append(int(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue  # No such limit: the file is missing, or says "max".
    return min(limits)
