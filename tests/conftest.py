"""Eight virtual CPU devices for every test, set before JAX starts; fewer are a failure, never a skip."""

import atexit
import os
import shutil
import tempfile

# Many tests, and the processes that they start, compile the same programs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxdl-programs-")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import pytest

atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def eight_devices():
    assert jax.default_backend() == "cpu"
    assert jax.device_count() == 8, f"the tests need 8 virtual CPU devices; JAX found {jax.device_count()}"
