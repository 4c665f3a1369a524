"""Trials on Ray. These tests need Ray (pip install 'jaxdl[ray]'), whose start alone takes half a minute."""

import sys
import time

import pytest
from children import CHILD, child_of, ends

from jaxdl.core.errors import ConfigError
from jaxdl.platform.search.engines import Job
from jaxdl.platform.search.ray_engine import OnRay

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'jaxdl[ray]'")


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


def until(workers, number):
    """The exit codes, when that of a job is among them."""
    codes, deadline = {}, time.monotonic() + 120
    while number not in codes:
        assert time.monotonic() < deadline
        codes |= workers.poll()
    return codes


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_jobs_end_with_their_codes_and_stop_as_asked(tmp_path):
    workers = OnRay().open(2, None)
    told = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('on', flush=True); "
    workers.start(Job(0, [sys.executable, "-c", "print('done'); raise SystemExit(3)"], tmp_path / "0.log"))
    workers.start(Job(1, [sys.executable, "-c", told + "time.sleep(300)"], tmp_path / "1.log"))
    assert until(workers, 0) == {0: 3}
    assert (tmp_path / "0.log").read_text() == "done\n"
    deadline = time.monotonic() + 120
    while not ((tmp_path / "1.log").exists() and (tmp_path / "1.log").read_text()):
        assert time.monotonic() < deadline
    workers.stop()
    assert until(workers, 1) == {1: 143}
    workers.close()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("how", ["killed", "closed"])
def test_what_a_job_has_started_ends_with_it(tmp_path, how):
    workers = OnRay().open(1, None)
    own = "import os; os.kill(os.getpid(), 9)" if how == "killed" else "time.sleep(300)"
    workers.start(Job(0, [sys.executable, "-c", CHILD + own], tmp_path / "log"))
    child = child_of(tmp_path / "log")
    if how == "killed":
        assert until(workers, 0) == {0: -9}
    workers.close()
    assert ends(child)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_more_than_the_cluster_has_is_refused():
    with pytest.raises(ConfigError, match="3 CPUs are needed at a time, and the Ray cluster has 2"):
        OnRay().open(3, None)
    with pytest.raises(ConfigError, match="1 GPUs are needed"):
        OnRay().open(1, 1)
