"""What a process sets for its machine: memory that is freed and allocated again, and the threads of XLA on CPUs."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from runs import ROOT

from jaxdl.parallel.cluster.machine import enlarge_thread_pool

FAULTS = """
import ctypes, resource
from jaxdl.parallel.cluster.machine import keep_freed_memory
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.memset.argtypes, library.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):  # More than the 32 MiB above which glibc always asks the kernel.
        buffer = library.malloc(2**26)
        library.memset(buffer, 1, 2**26)
        library.free(buffer)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fresh = faults()
keep_freed_memory()
faults()
print(fresh, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are those of glibc")
@pytest.mark.parametrize(("chosen", "keeps"), [({}, True), ({"MALLOC_TOP_PAD_": "4096"}, False)])
def test_freed_memory_is_kept_unless_the_environment_has_settings_of_its_own(chosen, keeps):
    inherited = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    printed = subprocess.check_output([sys.executable, "-c", FAULTS], cwd=ROOT, env=inherited | chosen, text=True)
    fresh, again = map(int, printed.split())
    assert fresh >= 4 * 2**26 // 2**21, "each page of at most 2 MiB is a fault"
    assert (again < fresh / 10) == keeps, (fresh, again)


@pytest.mark.parametrize(
    ("chosen", "num_devices", "num_threads"),
    [({}, 96, "192"), ({}, 1, None), ({"NPROC": "3"}, 96, None), ({"PJRT_NPROC": "4"}, 96, "4")],
)
def test_virtual_devices_have_two_threads_each_unless_the_environment_has_a_number(
    monkeypatch, chosen, num_devices, num_threads
):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    enlarge_thread_pool(num_devices)
    assert os.environ.get("PJRT_NPROC") == num_threads


@pytest.mark.skipif(platform.system() != "Linux", reason="threads are counted in /proc")
def test_xla_takes_the_size_of_its_pool_from_the_environment():
    assert jax.device_count() == 8
    names = [(thread / "comm").read_text(encoding="utf-8") for thread in Path("/proc/self/task").iterdir()]
    assert sum("XLAEigen" in name for name in names) == int(os.environ["PJRT_NPROC"]) == 16
