"""Eight virtual CPU devices for every test, set before JAX starts; fewer are a failure, never a skip."""

import atexit
import gc
import importlib.metadata
import os
import shutil
import signal
import tempfile
from pathlib import Path

FIRST_PROCESS = "PYTEST_XDIST_WORKER" not in os.environ
"""Whether this process is pytest's own and not one of the workers, which inherit its environment."""

if FIRST_PROCESS:
    # Many tests, and the processes that they start, compile the same programs.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxdl-programs-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    # A device may wait in two collectives at a time: with a thread for each device the last one could find none.
    os.environ["PJRT_NPROC"] = "16"
    # Each program runs a few times on little data: compiling it is what takes time. XLA cuts each in up to 32 parts
    # for as many cores; here the workers use them, and the parts cost a tenth more.
    fast_compile = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if importlib.metadata.version("jaxlib") < "0.11":  # Later ones do not know the flag.
        fast_compile.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *fast_compile]).strip()

import jax
import pytest
from budget import Budget

# The processes that a test starts find the programs of each other in a folder that ends with the run, since some are
# killed while they write. Those of this process are kept from run to run: a second run takes about a third less.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parents[1] / ".pytest_cache/d/programs"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

# A shell that starts pytest in the background of a script has it ignore SIGINT, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# JAX keeps millions of objects: to search all of them for garbage takes half a second, and is done less often here.
gc.set_threshold(50_000, 10, 100)

if FIRST_PROCESS:
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def eight_devices():
    assert jax.default_backend() == "cpu"
    assert jax.device_count() == 8, f"the tests need 8 virtual CPU devices; JAX found {jax.device_count()}"


@pytest.fixture(autouse=True, scope="module")
def shared_steps():
    """The runs of a file compile each program once; those of a test that counts compilations ask for their own."""
    from jaxdl.training.run.compile import (
        shared_programs,  # Here, because the tests of lint and documents need no engine.
    )

    with shared_programs() as programs:
        yield programs


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The tiny run on replica 2 x fsdp 2 x tensor 2: 4 steps, with checkpoints of steps 2 and 4.

    It has a moving average and batch statistics, and its evaluation pads the last batch. A test that writes to its
    folder copies it.
    """
    from runs import tiny_experiment

    import jaxdl

    experiment = tiny_experiment(
        steps=4,
        checkpoint={"every_steps": 2},
        evaluation={"every_steps": 2},
        mesh={"replica": 2, "fsdp": 2, "tensor": 2},
    )
    return jaxdl.train(experiment, tmp_path_factory.mktemp("tiny") / "run", quiet=True)


def pytest_configure(config):
    config.pluginmanager.register(Budget(config.option.markexpr))


@pytest.fixture
def on_command_line(monkeypatch):
    """Messages name settings as options, as in a program with a command line whose functions the test calls itself."""
    monkeypatch.setattr("jaxdl.core.errors._options", True)
