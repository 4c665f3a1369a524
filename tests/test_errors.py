"""Messages name a setting as the user types it: an option on the command line, a field or an argument in Python."""

import os
import signal
import subprocess
import sys

import pytest

from jaxdl.core.errors import ConfigError, _of_machine, as_typed, command_line
from jaxdl.parallel.cluster import exits
from jaxdl.parallel.cluster.agree import of_first_process


@pytest.mark.parametrize(
    ("written", "in_python"),
    [
        ("--mesh.replica 2: or --mesh.cpu-devices.", "mesh.replica=2: or mesh.cpu_devices."),
        ("Give --workdir FOLDER, or --data.train FILE:NAME.", "Give workdir=FOLDER, or data.train=FILE:NAME."),
        ("--epochs 1e+308 or --epochs None, not 3.0.1", "epochs=1e+308 or epochs=None, not 3.0.1"),
        ("--devices N; --checkpoint.start-over, which", "mesh.cpu_devices=N; checkpoint.start_over=True, which"),
        ("--workdir 'a b': empty; --precision float32", "workdir 'a b': empty; precision float32"),
        ("--init-names stem; --init-step best", "InitFrom.names stem; InitFrom.step best"),
        ("--explain prints all", "jaxdl train --explain prints all"),
        ("The same command resumes", "The same call resumes"),
    ],
)
def test_settings_are_named_as_the_user_types_them(written, in_python, capsys):
    assert as_typed(written) == as_typed(in_python) == str(ConfigError(written)) == in_python
    with pytest.raises(SystemExit, match="2"), command_line(), command_line():
        raise ConfigError(written)
    assert capsys.readouterr().err == f"error: {written}\n"
    assert as_typed(written) == in_python, "the command has ended"


@pytest.mark.parametrize(
    "text",
    [
        "tfds build tiny --file_format=array_record --data_dir=/data",
        "in a container, use --ulimit nofile",
        'python -m jaxdl.generate --workdir runs/a --prompt "x"',
        "start the launcher with --devices-per-host 4",
    ],
)
def test_options_of_other_programs_stay(text):
    assert as_typed(text) == text


@pytest.mark.parametrize("buffered", ["", "1"])
def test_help_that_nobody_reads_ends_without_a_word(buffered):
    """As `--help | head`, of a program that keeps what it prints or does not."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jaxdl.train", "--help"]
    environment = os.environ | {"PYTHONUNBUFFERED": buffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">&- <&-"])
def test_a_stream_that_is_closed_ends_no_program(tmp_path, closed):
    """And no file that is opened later gets what is printed."""
    program = (
        "import os, sys; from jaxdl.core.errors import command_line\n"
        "with command_line():\n"
        f"    file = open({str(tmp_path / 'kept')!r}, 'w')\n"
        "    print('a'); print('b', file=sys.stderr); os.write(1, b'c'); os.write(2, b'd'); sys.stdout.flush()\n"
        "    file.write(f'{sys.stdout.encoding} {file.fileno() > 2}')\n"
    )
    done = subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, program], check=False)
    assert (done.returncode, (tmp_path / "kept").read_text()) == (0, "utf-8 True")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_stdout_lacks_are_escaped(encoding):
    program = "from jaxdl.core.errors import command_line\nwith command_line(): print('l\\xe4ufe/\\u65e5 \\udcff')"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding) == "läufe/日 \\udcff\n".encode(encoding, "backslashreplace").decode(encoding)


def test_a_broken_pipe_of_another_program_is_an_error():
    with pytest.raises(BrokenPipeError), command_line():
        raise BrokenPipeError


def of_jax(text):
    """An error with this text that is raised in a file of JAX."""
    try:
        exec(compile("def fail(): raise ValueError(text)\nfail()", "/x/jax/core.py", "exec"), {"text": text})
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("value", "text", "named"),
    [
        ("maybe", "invalid truth value 'maybe' for JAX_DEBUG_X", True),
        ("maybe", "jax.debug.x: it is not a value", True),
        ("maybe", "shapes do not fit", False),
        ("raise", "jax_debug_x: an array leaked", False),
        ("strict", "promotion of 'strict' dtypes", False),
    ],
)
def test_a_variable_that_jax_refuses_is_told_from_what_jax_finds_with_it(value, text, named, monkeypatch):
    monkeypatch.setenv("JAX_DEBUG_X", value)
    reason = _of_machine(of_jax(text))
    assert (reason is not None) == named
    assert not named or reason.startswith(f"JAX_DEBUG_X={value}: JAX refuses it")


def test_a_limit_of_the_shell_is_recognised():
    outer = ValueError("RESOURCE_EXHAUSTED: Error opening: [OS error 24: EMFILE Too many open files]")
    assert _of_machine(outer).endswith("Allow more: ulimit -n 4096.")
    wrapped = ValueError("a checkpoint")
    wrapped.__cause__ = RuntimeError("can't start new thread")
    assert "ulimit -u" in _of_machine(wrapped)
    assert _of_machine(ValueError("something else")) is None


def test_a_mistake_that_names_a_path_that_is_not_utf8_reaches_all_processes():
    def refuse():
        raise ConfigError("workdir a\udcff: it is a file.")

    with pytest.raises(ConfigError) as raised:
        of_first_process(refuse)
    assert str(raised.value) == "workdir a\udcff: it is a file."


def test_the_last_line_of_a_process_may_name_a_path_that_is_not_utf8(monkeypatch):
    written = []
    monkeypatch.setattr(exits, "_ending", exits.threading.Lock())
    monkeypatch.setattr(exits.os, "write", lambda number, data: written.append((number, data)))
    monkeypatch.setattr(exits.os, "dup2", lambda *_: None)

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(exits.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        exits.end_process("lost: a\udcff", exits.BROKEN)
    assert ended.value.code == exits.BROKEN
    assert written == [(2, b"error: lost: a\\udcff\n")]
    assert exits.stop_code(signal.SIGHUP) == exits.stop_code(signal.SIGTERM) == 143
