"""Eight virtual CPU devices for every test, set before JAX starts; fewer are a failure, never a skip."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def eight_devices():
    assert jax.default_backend() == "cpu"
    assert jax.device_count() == 8, f"the tests need 8 virtual CPU devices; JAX found {jax.device_count()}"
