"""What this machine can do, checked before XLA aborts the process over it: its flags, its devices, its memory."""

from __future__ import annotations

import importlib.util
import io
import mmap
import os
from pathlib import Path

from jaxdl.cluster.ending import from_the_network
from jaxdl.cluster.meeting import ClusterError
from jaxdl.config import ConfigError

MAX_CPU_DEVICES = 512
"""Virtual CPU devices of one process. Each has threads of its own; with 1000 XLA hangs or aborts."""

_UNKNOWN_PLATFORM = "is not in the list of known backends"
"""JAX's words for a platform that it does not have, or whose plugin is not installed: no attempt will succeed."""


def check_cpu_devices(count: int) -> None:
    """Raises ConfigError for more virtual CPU devices than XLA can run in one process."""
    if count > MAX_CPU_DEVICES:
        raise ConfigError(
            f"--devices {count}: a process can have at most {MAX_CPU_DEVICES} virtual CPU devices, since each has "
            f"threads of its own, and this machine has {os.cpu_count()} cores. Give fewer."
        )


def check_xla_flags() -> None:
    """Raises ConfigError for a flag in XLA_FLAGS that jaxlib does not have: XLA would abort the process.

    A flag is known when its name is in jaxlib's library; looking takes 0.3 s of CPU time, and only for flags that are
    set. Values are not checked.
    """
    text = os.environ.get("XLA_FLAGS", "").strip()
    if not text:
        return
    if not text.startswith("--"):
        if Path(text).is_file():
            return
        raise ConfigError(f"XLA_FLAGS={text}: neither flags, which begin with --, nor a file of them.")
    names = [word.removeprefix("--").partition("=")[0] for word in text.split() if word.startswith("--")]
    spec = importlib.util.find_spec("jaxlib")
    library = Path(str(spec.origin)).with_name("libjax_common.so") if spec is not None else Path()
    if not library.is_file():
        return  # A jaxlib that is built otherwise.
    with io.FileIO(library) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        unknown = [name for name in names if content.find(name.encode() + b"\0") < 0]
    if unknown:
        raise ConfigError(
            f"XLA_FLAGS: this jaxlib has no flag --{unknown[0]}. Remove it from the environment variable; flags differ "
            "from one version to the next."
        )


def open_devices() -> None:
    """Starts JAX's backend, in a run of several processes together with theirs.

    Raises:
      ConfigError: when the platform that is wanted is not there.
      ClusterError: when another attempt may succeed, as on one of several processes.
      RuntimeError: JAX's own, when another process could not be reached (`ending.from_the_network`).
    """
    import jax

    wanted = getattr(jax.config, "jax_platforms", None)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        several, network = jax.distributed.is_initialized(), from_the_network(error)
        if several and network:
            raise
        why = " ".join(str(error).split()) or "JAX finds no device of that platform, or lacks its plugin"
        unknown = isinstance(error, AssertionError) or _UNKNOWN_PLATFORM in why
        if (several or network) and not unknown:
            raise ClusterError(f"JAX could not start on the devices of this host: {why}") from None
        named, unset = (f"JAX_PLATFORMS={wanted}: ", "Unset the variable, or give") if wanted else ("", "Give")
        raise ConfigError(
            f"{named}{why}. {unset} --devices N for N virtual CPU devices; for NVIDIA GPUs install jaxdl[cuda13]."
        ) from None


def host_memory_bytes() -> int:
    """The memory of this machine, or of the container that this process runs in."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            continue  # Not under such a limit: the file is not there, or says "max".
    return min(limits)
