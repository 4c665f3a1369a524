"""Code of users that a model runs: what it raises becomes one message."""

from __future__ import annotations

import contextlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxdl.errors import ConfigError

_LIBRARIES = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen")
_INSTALLED = {"site-packages", "dist-packages"}
_MAX_CHARACTERS = 400

_TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False}
"""Arguments that tell a network whether it is trained -> their value in training."""


@contextlib.contextmanager
def user_code(what: str | None) -> Iterator[None]:
    """Context in which a user's code runs: what it raises becomes a ConfigError of one line.

    It begins with `what` and names the user's file and line. With None, for jaxdl's own code, nothing is changed.
    """
    if what is None:
        yield
        return
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if len(text) > _MAX_CHARACTERS:
            text = f"{text[:_MAX_CHARACTERS]}..."
        raise ConfigError(f"{what}{_place(error)}: {type(error).__name__}: {text}") from error


def _place(error: BaseException) -> str:
    """`, /home/ada/mine.py, line 12`: the innermost line of a file of no library; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARIES) and not _INSTALLED & set(Path(frame.filename).parts):
            return f", {frame.filename}, line {frame.lineno}"
    return ""


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters, by name, with which a function or class is called."""
    if not isinstance(function, type):
        return dict(inspect.signature(function).parameters)
    # Flax's metaclass hides the signature of a class.
    found = list(inspect.signature(function.__init__).parameters.items())[1:]
    return dict(found)


def takes_any(found: dict[str, inspect.Parameter]) -> bool:
    """Whether there is a `**kwargs` among the parameters."""
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values())


def required(found: dict[str, inspect.Parameter]) -> list[str]:
    """The parameters without a default, but for `*args` and `**kwargs`."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in found.items() if one.default is inspect.Parameter.empty and one.kind not in several]


def mode_arguments(found: dict[str, inspect.Parameter], *, train: bool) -> dict[str, bool]:
    """Those parameters that tell whether the network is trained, with their values."""
    return {name: train == value for name, value in _TRAINING.items() if name in found}
