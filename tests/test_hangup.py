"""A terminal that is closed, a reader that is gone, a second Ctrl-C: how a run ends, and what is printed after."""

import os
import pty
import signal
import subprocess
import sys

import jax
import pytest
from runs import ONE_DEVICE, finish, start, write_config

import jaxdl
from jaxdl.core.errors import _survivor, command_line, survive_readers
from jaxdl.core.runs import newest_step
from jaxdl.data import Tabular
from jaxdl.models import Perceptron
from jaxdl.optim import SGD
from jaxdl.parallel.cluster import shutdown
from jaxdl.parallel.cluster.exits import stop_signals
from jaxdl.platform.launch.processes import signals_to
from jaxdl.report import ReportConfig
from jaxdl.report.status import State, read_record
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.result import Interrupted, ended_at_once
from jaxdl.training.run.signals import Stop, StopSignals
from jaxdl.training.run.status import RunStatus
from jaxdl.training.tasks import Classification


def hang_up():
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.fixture
def ignoring():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_stops_a_run_and_ends_it_as_sigterm_does():
    with StopSignals() as stop:
        hang_up()
        with pytest.raises(Stop, match="SIGHUP") as raised:
            stop.poll()
        hang_up()  # Shells and the kernel send one each; the run is saving.
        assert stop.signum == signal.SIGHUP
        assert Interrupted(raised.value.signum, "").code == 143
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_hangup_after_another_signal_does_not_end_the_save():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        hang_up()
        assert stop.signum == signal.SIGTERM


@pytest.mark.usefixtures("ignoring")
def test_who_ignores_it_goes_on():
    assert stop_signals() == (signal.SIGTERM, signal.SIGINT)
    with StopSignals() as stop, signals_to(lambda signum: pytest.fail("forwarded")):
        hang_up()
        stop.poll()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_launcher_forwards_a_hangup_once_and_as_sigterm():
    """A second signal would kill its hosts while they save."""
    forwarded = []
    with signals_to(forwarded.append):
        hang_up()
        hang_up()
        assert forwarded == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGINT)
        hang_up()
    assert forwarded == [signal.SIGTERM, signal.SIGINT]


def test_what_is_printed_after_the_terminal_is_closed_is_lost_and_nothing_else():
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:
        stream = _survivor(terminal)
        print("seen", file=stream)
        assert os.read(master, 100) == b"seen\r\n"
        os.close(master)
        with pytest.raises(OSError, match="Input/output"):
            os.write(slave, b"lost")
        print("lost", file=stream, flush=True)
        print("lost too", file=stream, flush=True)


@pytest.mark.parametrize("signals", [[], [signal.SIGINT]])
def test_a_run_that_nobody_reads_saves_and_ends_as_the_signal_before_or_after_says(monkeypatch, signals):
    """As under `2>&1 | tee log`, where Ctrl-C ends tee too."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout, open(os.dup(writer), "w") as stderr:
        monkeypatch.setattr("sys.stdout", stdout)
        monkeypatch.setattr("sys.stderr", stderr)
        with command_line(), StopSignals() as stop:
            print("lost", file=sys.stderr)
            assert stop.signum is None
            with survive_readers(stop.unread):
                print("lost", flush=True)
                for signum in signals:
                    os.kill(os.getpid(), signum)
                print("lost too", file=sys.stderr, flush=True)
                with pytest.raises(Stop) as raised:
                    stop.poll()
        assert sys.stdout is stdout
    assert Interrupted(raised.value.signum, "").code == (130 if signals else 141)


def test_a_last_word_that_nobody_reads_changes_no_exit_code():
    program = "from jaxdl.core.errors import command_line, ConfigError\nwith command_line(): raise ConfigError('no')"
    done = subprocess.run(["bash", "-c", '"$0" -c "$1" 2>&1 | true; exit ${PIPESTATUS[0]}', sys.executable, program])
    assert done.returncode == 2


def test_a_second_ctrl_c_without_a_workdir_says_that_nothing_was_kept(monkeypatch, capsys):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(shutdown.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended, ended_at_once(), RunStatus(None, None, None, None):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == (
        "a second signal: ended at step 0; nothing was kept: the run has no workdir.\ninterrupted\n"
    )


INTERRUPTED_TWICE = """
import atexit, os, signal, threading, time
from pathlib import Path

def interrupt():
    while not [*Path("WORKDIR/checkpoints").glob("step_40*")]:  # It is being written.
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
atexit.register(print, "an ordinary end")
"""


@pytest.mark.slow
def test_a_second_ctrl_c_ends_where_the_run_is_and_it_resumes_from_the_newest_checkpoint(tmp_path):
    """At an ordinary end of the interpreter threads that compile or write would crash."""
    (tmp_path / "x.csv").write_text("x,label\n" + "0.5,0\n-0.5,1\n" * 8)
    experiment = Experiment(
        data=Tabular(train=(str(tmp_path / "x.csv"),), label="label"), model=Perceptron(units=()),
        task=Classification(), optimizer=SGD(learning_rate=0.1), batch_size=4, steps=10**6, mesh=ONE_DEVICE,
        report=ReportConfig(curves=False, tensorboard=False), checkpoint=CheckpointConfig(every_steps=20),
    )  # fmt: skip
    config, workdir = write_config(tmp_path, experiment), tmp_path / "run"
    config.write_text(config.read_text() + INTERRUPTED_TWICE.replace("WORKDIR", str(workdir)))
    code, printed = finish(start(config, workdir, "--devices", "1"))
    assert (code, "an ordinary end" in printed) == (130, False)
    record, newest = read_record(workdir), newest_step(workdir)
    assert record is not None
    assert record.state == State.HALTED
    assert record.reason.text.endswith(f"the newest checkpoint is of step {newest}")
    assert "interrupted" in printed.splitlines()
    seen = []
    run = jaxdl.train(
        experiment, workdir, devices=jax.devices()[:1], max_steps=newest + 2, quiet=True,
        on_step=lambda info: seen.append(info.step),
    )  # fmt: skip
    assert (seen, run.summary["steps"]) == ([newest + 1, newest + 2], newest + 2)
