"""A terminal that is closed: SIGHUP ends a run as SIGTERM does, and what is printed after it fails nothing."""

import os
import pty
import signal

import pytest

from jaxdl.cluster import shutdown
from jaxdl.cluster.exits import stop_signals
from jaxdl.errors import _outliving
from jaxdl.launch.processes import signals_to
from jaxdl.run.result import Interrupted, ended_at_once
from jaxdl.run.signals import Stop, StopSignals
from jaxdl.run.status import RunStatus


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
        stream = _outliving(terminal)
        print("seen", file=stream)
        assert os.read(master, 100) == b"seen\r\n"
        os.close(master)
        with pytest.raises(OSError, match="Input/output"):
            os.write(slave, b"lost")
        print("lost", file=stream, flush=True)
        print("lost too", file=stream, flush=True)


def test_a_second_ctrl_c_without_a_workdir_says_that_nothing_was_kept(monkeypatch, capsys):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(shutdown.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended, ended_at_once(), RunStatus(None, None, None, None):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == (
        "SIGINT twice: ended at step 0; nothing was kept: the run has no workdir.\ninterrupted\n"
    )
