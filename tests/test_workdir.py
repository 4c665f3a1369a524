"""Two runs in one workdir: the second is refused, and the first is unharmed."""

import os
import re
import threading
import time

import jax
import numpy as np
import pytest
from runs import assert_bit_equal, finish, measured, nothing_is_written, start, tiny_experiment, write_config

import jaxdl
from jaxdl.core.files import LEASE_FILE, STATUS_FILE
from jaxdl.parallel.cluster import exits
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report.status import read_record

ONE = jax.devices()[:1]
EXPERIMENT = tiny_experiment(mesh=MeshConfig(), steps=6, checkpoint={"every_steps": 2}, evaluation={"every_steps": 3})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The final state and the history of a run without a competitor."""
    workdir = tmp_path_factory.mktemp("alone")
    run = train(workdir)
    assert not list(workdir.glob("*lease*"))
    return jax.tree.map(np.asarray, run.state), measured(workdir)


def train(workdir, *on_step):
    return jaxdl.train(EXPERIMENT, workdir, quiet=True, devices=ONE, on_step=on_step)


def contents(workdir):
    return {
        path: path.read_bytes()
        for path in workdir.rglob("*")
        if path.is_file() and "tensorboard" not in path.parts and path.name not in (LEASE_FILE, STATUS_FILE)
    }


def test_a_second_run_is_refused_and_changes_nothing(tmp_path, monkeypatch, alone):
    """Once from another process, as a user starts it, and once from another thread of this process."""
    workdir = tmp_path / "run"
    config = write_config(tmp_path, EXPERIMENT.replaced({"mesh.cpu_devices": 1}))
    seen = {}

    def in_a_thread():
        with pytest.raises(jaxdl.ConfigError, match=r"is in use: .* \(this one\)"):
            train(workdir)

    def intrude(info):
        if info.step == 3:
            nothing_is_written()
            (workdir / ".claim.of-another.tmp").touch()
            before = contents(workdir)
            seen["code"], seen["output"] = finish(start(config, workdir))
            thread = threading.Thread(target=in_a_thread)
            thread.start()
            thread.join()
            assert contents(workdir) == before
            assert read_record(workdir).process.pid == os.getpid()
            (workdir / ".claim.of-another.tmp").unlink()

    run = train(workdir, intrude)
    assert seen["code"] == 2, seen["output"]
    assert "Traceback" not in seen["output"]
    (message,) = [line for line in seen["output"].splitlines() if line.startswith("error:")]
    pattern = rf"is in use: process {os.getpid()} on host \S+ has been training in it since 2\d\d\d-\d\d-\d\d \S+ UTC"
    assert re.search(pattern, message), message
    assert_bit_equal(jax.tree.map(np.asarray, run.state), alone[0])
    assert measured(workdir) == alone[1]


def test_a_run_that_fails_gives_its_lease_back(tmp_path):
    def fail(info):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        train(tmp_path, fail)
    assert not list(tmp_path.glob("*lease*"))


def test_a_run_looks_at_its_lease_before_it_trains_and_saves(tmp_path, monkeypatch, alone):
    """After a suspension the thread of the lease may come too late."""

    class Ended(BaseException):
        pass

    def end(reason, code, **_):
        assert code == 75
        raise Ended(reason)

    clock = time.clock_gettime

    def lose(info):
        assert info.step < 4, "it trained on"
        if info.step == 3:
            (tmp_path / LEASE_FILE).write_bytes(b"{}")
            monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 1000)

    monkeypatch.setattr(exits, "end_process", end)
    with pytest.raises(
        Ended, match=r"has lost the lease of --workdir .* a process that left no name has taken it over"
    ):
        train(tmp_path, lose)
