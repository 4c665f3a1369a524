"""Memory that a program frees and allocates again: the kernel clears its pages once, not at every step."""

import os
import platform
import subprocess
import sys

import pytest
from runs import ROOT

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
