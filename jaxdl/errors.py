"""The user's mistakes, and how a program ends because of one. Nothing but the standard library is imported here."""

from __future__ import annotations

import sys
import typing


class ConfigError(ValueError):
    """What the user wrote cannot be run. The message has the value, why not, and what to do instead."""


def fail(message: str) -> typing.NoReturn:
    """Ends the program as the user's mistake: the message on stderr, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def end_interrupted() -> typing.NoReturn:
    """Ends the program after Ctrl-C: one line on stderr, exit code 130 (128 + SIGINT) as in shells."""
    print("interrupted", file=sys.stderr)
    raise SystemExit(130)
