"""The status of real runs: halted by a file, failed, another's workdir, and two processes under a launcher."""

import json
import os
import signal
import time

import jax
import pytest
from runs import Started, TinyPerceptron, finish, has_step, tiny_experiment, wait_for, write_config

import jaxdl
from jaxdl.core.files import HALT_FILE
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report.status import Record, State, read_record, read_row, utc_now, write_record

ONE = jax.devices()[:1]
EXPERIMENT = tiny_experiment(model=TinyPerceptron(), mesh=MeshConfig(), steps=400, evaluation={}, checkpoint={})


def train(workdir, experiment=EXPERIMENT, **options):
    return jaxdl.train(experiment, workdir, quiet=True, devices=ONE, **options)


def halting_at(workdir, step):
    """A hook that makes the halt file at a step, and then lets each step take a while."""

    def hook(info):
        if info.step == step:
            (workdir / HALT_FILE).write_text("the node\nis needed")
        if info.step >= step:
            time.sleep(0.1)

    return hook


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    """A run that was halted by a file: its workdir and what it raised."""
    workdir = tmp_path_factory.mktemp("halted")
    with pytest.raises(BaseException) as raised:
        train(workdir, on_step=halting_at(workdir, 3))
    return workdir, raised.value


def test_a_halt_file_ends_a_run_as_a_signal_does(halted):
    workdir, error = halted
    step = error.run.summary["steps"]
    assert (error.code, error.run.summary["status"]) == (4, "interrupted")
    assert 3 <= step < 400
    assert (workdir / "checkpoints" / f"step_{step}").is_dir()
    assert not (workdir / HALT_FILE).exists()
    status = read_record(workdir)
    assert (status.state, status.step, status.reason.exit_code) == (State.HALTED, step, 4)
    assert status.reason.text == f"halt file: stopped at step {step} (the node is needed)"
    assert status.next_text == f"the same command resumes from step {step}"
    assert (status.best_metric, status.best_mode) == ("accuracy", "max")


def test_it_trains_when_it_is_started_again_and_an_old_halt_file_is_removed(halted, capsys):
    workdir, error = halted
    (workdir / HALT_FILE).touch()
    seen = []
    steps = error.run.summary["steps"] + 2
    run = jaxdl.train(
        EXPERIMENT, workdir, devices=ONE, max_steps=steps, on_step=lambda info: seen.append(read_record(workdir).reason)
    )
    assert run.summary["steps"] == steps
    assert "was there before this start: removed" in capsys.readouterr().out
    assert seen[0].exit_code == 4, "why the start before this one ended"
    status = read_record(workdir)
    assert (status.state, status.step, status.end_step, status.total_steps) == (State.STOPPED, steps, steps, 400)
    assert (status.reason.exit_code, "--max-steps" in status.reason.text) == (0, True)


def test_a_failure_is_kept_and_is_raised_as_it_is(tmp_path):
    def fail(info):
        if info.step == 2:
            raise RuntimeError("a hook broke")

    with pytest.raises(RuntimeError, match="a hook broke"):
        train(tmp_path, on_step=fail)
    status = read_record(tmp_path)
    assert (status.state, status.step, status.reason.exit_code) == (State.FAILED, 2, 1)
    kept = json.loads((tmp_path / "failures" / "1" / "failure.json").read_text())
    assert (kept["reason"], kept["step"]) == ("RuntimeError: a hook broke", 2)
    assert kept["last_metrics"][-1]["step"] == 2
    assert "in fail" in (tmp_path / "failures" / "1" / "error-0.txt").read_text()
    with pytest.raises(jaxdl.ConfigError, match="different config"):
        train(tmp_path, EXPERIMENT.replaced({"seed": 7}))
    assert read_record(tmp_path) == status, "a run that is refused leaves the status of the other as it was"
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["1"]


def refused(workdir, match, **changes):
    """The status after a command that is refused."""
    with pytest.raises(jaxdl.ConfigError, match=match):
        train(workdir, EXPERIMENT.replaced(changes))
    return read_record(workdir)


def test_a_refused_command_is_no_failed_run(tmp_path):
    status = refused(tmp_path, "only 96 training examples", batch_size=10**6)
    assert (status.state, status.step, status.reason.exit_code) == (State.REFUSED, 0, 2)
    assert status.next_action == "fix"
    complete = Record(State.COMPLETED, utc_now(), utc_now(), step=400, total_steps=400)
    write_record(tmp_path, complete)
    assert refused(tmp_path, "only 96 training examples", batch_size=10**6) == complete


@pytest.mark.slow
def test_two_processes_under_a_launcher(tmp_path):
    """One is killed: its launcher keeps the end of what each printed, and starts them again; then both are halted."""
    experiment = EXPERIMENT.replaced({"mesh": {"replica": 2}, "steps": 20_000, "checkpoint.every_steps": 5})
    config, workdir, pids = write_config(tmp_path, experiment), tmp_path / "run", tmp_path / "pids.json"
    options = ("--hosts", "2", "--restarts", "2", "--grace-sec", "60", "--pids", str(pids))
    command = ("python", "-m", "jaxdl.train", "--config", str(config), "--workdir", str(workdir))
    launcher = Started("-m", "jaxdl.launch", "local", *options, "--", *command)
    wait_for(launcher, has_step(workdir, 6))
    wait_for(launcher, lambda: read_record(workdir).state == State.PROCESSING)
    assert read_record(workdir).hosts == ("host0", "host1")
    os.kill(json.loads(pids.read_text())["hosts"]["host1"], signal.SIGKILL)
    wait_for(launcher, (workdir / "failures" / "1" / "stderr-host1.txt").exists)
    kept = json.loads((workdir / "failures" / "1" / "failure.json").read_text())
    if kept["exit_code"] == 75:
        assert "jaxdl.train" in kept["command"] or "train.py" in kept["command"], "the process itself has written it"
    else:  # It waits a few seconds for the disk, not longer: then the launcher writes it, with the first one's code.
        assert (kept["exit_code"], "command" in kept) == (137, False)
    assert "host1 (process 1) exited" in (workdir / "failures" / "1" / "stderr-host0.txt").read_text()
    wait_for(launcher, lambda: read_row(workdir).restart == 1 and read_record(workdir).state == State.PROCESSING)
    assert "SIGKILL" in read_record(workdir).reason.text
    (workdir / HALT_FILE).touch()
    code, output = finish(launcher)
    assert code == 4, output
    assert "not restarted: halted by the file" in output
    assert output.count("halt file: stopped at step") == 2, output
    assert (
        len({line.split("stopped at step ")[1].split(";")[0] for line in output.splitlines() if "halt file:" in line})
        == 1
    )
    assert (read_record(workdir).state, (workdir / HALT_FILE).exists()) == (State.HALTED, False)
