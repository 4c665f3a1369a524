"""User errors, how their messages name settings, and how a program exits because of one.

Only the standard library is imported here.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import io
import os
import re
import resource
import select
import signal
import stat
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator

ParamsT = typing.ParamSpec("ParamsT")
ResultT = typing.TypeVar("ResultT")

_OPTION = re.compile(
    r"(?<![\w-])--([a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*)(?![\w=])"
    r"(?: (None|True|False|[A-Z]+(?::[A-Z]+)?|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![.\w]*\w)(?! -?\d))?"
)
"""An option, and the value that follows it if that is one number, None, True, False or a placeholder such as FOLDER."""
_DIFFERENT = {
    "checkpoint.start-over": "checkpoint.start_over=True",
    "config": "config file",
    "devices": "mesh.cpu_devices",
    "explain": "jaxdl train --explain",
    "init-step": "InitFrom.step",
    "init-names": "InitFrom.names",
}
"""Option -> its name in Python, where that is not the field or argument of the same name."""
_NOT_OURS = ("ulimit", "help", "devices-per-host")
"""Options that have no name in Python: those of the launcher and of other programs."""
_GARBAGE = (20_000, 10, 100)
"""How often garbage is looked for in a program: JAX makes objects by the million and leaves little garbage, so Python's
own numbers cost a process a tenth of its start."""
_options = False


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """Context of a program with a command line: messages name settings as its options.

    A ConfigError ends the program with its message and exit code 2, and so do a variable of JAX with a value that JAX
    refuses, and a limit of this shell that is too low; Ctrl-C ends it with one line and 130. If nobody reads
    stdout any more, as after `| head`, it ends without a message.
    """
    global _options
    before, _options = _options, True
    garbage = gc.get_threshold()
    gc.set_threshold(*_GARBAGE)
    make_writable()
    try:
        with survive_readers():  # Around the last words too.
            try:
                with _end_when_unread():
                    yield
            except ConfigError as error:
                fail(str(error))
            except KeyboardInterrupt:
                end_interrupted()
            except Exception as error:
                reason = _of_machine(error)
                if reason is None:
                    raise
                atexit.register(_end_quietly)
                fail(reason)
    finally:
        _options = before
        gc.set_threshold(*garbage)


def make_writable() -> None:
    """Makes stdout and stderr take every text, so that nothing that is printed can end the program.

    A stream that is closed (`>&-`, daemons) writes to nowhere: its file descriptor is taken, since the next file that
    the program opens would get what libraries print. A letter that its encoding lacks is escaped, as in `\\u65e5`.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # It gets the lowest number that is free: this one.
            os.set_inheritable(nowhere, True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or stream.closed:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _end_quietly() -> None:
    """Discards what the interpreter says at its end of objects that were half made when a limit was met."""
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None


def _of_machine(error: BaseException) -> str | None:
    """The message for an error that is of the environment of this process, and would come again; None for others."""
    text, seen = str(error), error
    raised_in = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        raised_in = frame.f_code.co_filename
    if "/jax/" in raised_in.replace(os.sep, "/"):
        # With "raise" and "strict" JAX checks the program, and what it finds is not a fault of the variable.
        given = {name: value for name, value in os.environ.items()
                 if name.startswith("JAX_") and value not in ("", "raise", "strict")}  # fmt: skip
        named = [name for name in given if re.search(rf"\b{name}\b", text.replace(".", "_"), re.IGNORECASE)]
        for name in (*named, *(name for name, value in given.items() if f"'{value}'" in text)):
            said = text.splitlines()[0]
            return f"{name}={given[name]}: JAX refuses it ({said}). Set another value, or unset the variable."
    while seen is not None:
        files = isinstance(seen, OSError) and seen.errno in (errno.EMFILE, errno.ENFILE)
        if files or re.search(r"RESOURCE_EXHAUSTED.*Too many open files", str(seen), re.DOTALL):  # TensorStore's text.
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"too many open files: {limit} are allowed. Allow more: ulimit -n 4096."
        if isinstance(seen, RuntimeError) and "start new thread" in str(seen):
            return "no new thread can be started. Allow more processes (ulimit -u) and more memory (ulimit -v)."
        memory = isinstance(seen, MemoryError) or getattr(seen, "errno", None) == errno.ENOMEM
        if memory or "failed to map segment" in str(seen) or "Cannot allocate memory" in str(seen):
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            if limit != resource.RLIM_INFINITY:
                return (
                    f"there is no memory left: ulimit -v allows {limit // 1024:,} kB. Allow more, or do not limit it."
                )
        seen = seen.__cause__ or seen.__context__
    return None


def as_typed(text: str) -> str:
    """A message with its settings named as the user types them.

    Messages are written with the options of the command line, `--mesh.replica 4` and `--max-steps N`. In a program that
    uses jaxdl from Python they become `mesh.replica=4`, the field as `Experiment.replaced` and `jaxdl.fit` take it, and
    `max_steps=N`, the argument.
    """
    if _options:
        return text

    def in_python(match: re.Match[str]) -> str:
        (option, value), before = match.groups(), match.string[: match.start()]
        if option in _NOT_OURS or "python -m" in before or before.endswith("jaxdl train "):
            return match[0]
        name = _DIFFERENT.get(option, option.replace("-", "_"))
        return name if value is None else f"{name}={value}"

    return _OPTION.sub(in_python, text).replace("same command", "same call")


class ConfigError(ValueError):
    """A user error. The message has the value, the reason, and what to do instead."""

    def __str__(self) -> str:
        return as_typed(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows instead of a traceback."""
        return [f"error: {self}"]


def without_frames(function: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """A function for users, whose ConfigErrors show the user's line and the message, not the lines inside jaxdl."""

    @functools.wraps(function)
    def called(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise error.with_traceback(None) from None

    return called


class OptionError(ConfigError):
    """A user error in options as the user typed them, also in Python: `jaxdl.load(file, ["--steps", "3"])`."""

    __str__ = ValueError.__str__


def fail(message: str) -> typing.NoReturn:
    """Exits with code 2 after a user error and prints the message on stderr."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def print_out(text: str, end: str = "\n") -> None:
    """Prints on stdout what another program may read; ends without a message when that, such as `head`, has ended."""
    with _end_when_unread():
        print(text, end=end)


@contextlib.contextmanager
def _end_when_unread() -> Iterator[None]:
    """Context in which the program ends without a message if stdout is not read any more.

    A broken pipe of another program is raised as usual.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        os.dup2(os.pipe()[1], sys.stdout.fileno())  # Python flushes it again at its end.
        raise SystemExit(128 + signal.SIGPIPE) from None


class _Outliving(io.FileIO):
    """A terminal or a pipe; when it is not read any more, what is written is lost, and the program continues."""

    unread: Callable[[], None] | None = None
    """Called at each write to a pipe that is not read any more."""

    def write(self, data: typing.Any) -> int:
        """The number of bytes that are written, or lost."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            if error.errno == errno.EPIPE and self.unread is not None:
                self.unread()
            return len(data)


@contextlib.contextmanager
def survive_readers(unread: Callable[[], None] | None = None) -> Iterator[None]:
    """Context in which a terminal that is closed fails no print, and neither does an stderr that is not read any more
    (`2>&1 | tee log`, where Ctrl-C ends tee first): a run that ignores SIGHUP, or saves after a signal, goes on.

    With `unread` a stdout that nobody reads fails no print either, but calls it. Standard output and error are other
    objects meanwhile if they are terminals or pipes.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = _survivor(sys.stdout, unread, pipes=unread is not None)
    sys.stderr = _survivor(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream not in before:
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        sys.stdout, sys.stderr = before


def _survivor(stream: typing.TextIO, unread: Callable[[], None] | None = None, *, pipes: bool = True) -> typing.TextIO:
    if type(stream) is not io.TextIOWrapper or stream.closed:
        return stream
    try:
        kind = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # It is in memory, or its descriptor was closed.
        return stream
    if not (stream.isatty() or (pipes and (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)))):
        return stream
    with contextlib.suppress(BrokenPipeError):
        stream.flush()
    raw = _Outliving(stream.fileno(), "w", closefd=False)
    raw.unread = unread
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)


def _is_unread(stream: typing.TextIO) -> bool:
    """Whether a stream is a pipe that is not read any more."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # It is in memory, or closed.
        return False
    watched = select.poll()
    watched.register(number, select.POLLERR)
    return bool(watched.poll(0))


def end_interrupted() -> typing.NoReturn:
    """Exits after Ctrl-C: one line on stderr, exit code 130 (128 + SIGINT) as in shells."""
    print("interrupted", file=sys.stderr)
    raise SystemExit(130)
