"""User errors, and how a program exits because of one. Only the standard library is imported here."""

from __future__ import annotations

import os
import signal
import sys
import typing


class ConfigError(ValueError):
    """A user error. The message has the value, the reason, and what to do instead."""

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows instead of a traceback."""
        return [f"error: {self}"]


def fail(message: str) -> typing.NoReturn:
    """Exits with code 2 after a user error and prints the message on stderr."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def print_out(text: str) -> None:
    """Prints on stdout what another program may read; ends without a word when that, such as `head`, has ended."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.pipe()[1], sys.stdout.fileno())  # Python flushes it again at its end.
        raise SystemExit(128 + signal.SIGPIPE) from None


def end_interrupted() -> typing.NoReturn:
    """Exits after Ctrl-C: one line on stderr, exit code 130 (128 + SIGINT) as in shells."""
    print("interrupted", file=sys.stderr)
    raise SystemExit(130)
