"""Commands that ask the server of a fleet: to hold, resume, cancel, remove runs; to take nodes out of service."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from jaxdl.core.errors import ConfigError, OptionError
from jaxdl.core.options import parse_options
from jaxdl.platform.fleet.store import Order, Store

PROG = "python -m jaxdl.fleet"
OptionsT = TypeVar("OptionsT")
_VERBS: dict[Order, str] = {"run": "resume", "hold": "hold", "cancel": "cancel", "remove": "remove"}
"""What the commands are called."""


@dataclass(frozen=True)
class OfFleet:
    """What every command needs."""

    state: Path
    """The folder of the fleet, on a disk that server and users share."""


@dataclass(frozen=True)
class Remove(OfFleet):
    """Removes runs that have ended from the fleet, with the output of their attempts: OPTIONS 0003 0004 ...

    Their workdirs stay. The server does it, or the next one.
    """

    ended: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """All that have ended so far."""


@dataclass(frozen=True)
class Nodes(OfFleet):
    """Takes nodes out of service, or back: their runs save, and resume on others."""

    lost: tuple[str, ...] = ()
    """Nodes to take out of service, as `status` names them."""
    back: tuple[str, ...] = ()
    """Nodes that are in service again."""


def parse(kind: type[OptionsT], name: str, args: list[str]) -> OptionsT:
    """The options of a command."""
    return parse_options(kind, args, prog=f"{PROG} {name}", description=inspect.getdoc(kind))


def ask(what: Order) -> Callable[[list[str]], None]:
    """The command that asks this of some runs."""

    def command(args: list[str]) -> None:
        names, rest = _names(args)
        options = parse(OfFleet, _VERBS[what], rest)
        if not names:
            raise OptionError("give the number of a run, such as 0003.")
        ask_all(Store(options.state), names, what)

    return command


def remove(args: list[str]) -> None:
    """Asks the server to remove runs that have ended."""
    from jaxdl.platform.fleet.member import ENDED

    names, rest = _names(args)
    options = parse(Remove, "remove", rest)
    store = Store(options.state)
    if options.ended == bool(names):
        raise OptionError("give the numbers of runs that have ended, or --ended for all of them.")
    if options.ended:
        there = set(store.names())
        names = [run["run"] for run in store.view()["runs"] if run["state"] in ENDED and run["run"] in there]
        print(f"{len(names)} runs have ended")
    ask_all(store, names, "remove")


def nodes(args: list[str]) -> None:
    """Changes which nodes are in service."""
    options = parse(Nodes, "nodes", args)
    store = Store(options.state)
    view = store.view()
    lost = store.lost_nodes()
    known = {*view["nodes"], *view.get("lost", ()), *lost}
    for name in (*options.lost, *options.back):
        if name not in known:
            raise OptionError(f"{name}: there is no such node. There are: {', '.join(sorted(known))}.")
    if not options.lost and not options.back:
        raise OptionError("give --lost NODE, or --back NODE.")
    if both := sorted({*options.lost} & {*options.back}):
        raise OptionError(f"--lost {both[0]} --back {both[0]}: give either, as {both[0]} is in service or it is not.")
    store.set_lost_nodes(sorted((lost | set(options.lost)) - set(options.back)))


def _names(args: list[str]) -> tuple[list[str], list[str]]:
    """(the numbers of runs in a command line, the rest of it)."""
    places = [
        place
        for place, arg in enumerate(args)
        if arg.isdecimal() and not (place and args[place - 1] == "--state")  # `--state 7` is a folder.
    ]
    return [args[place] for place in places], [arg for place, arg in enumerate(args) if place not in places]


def ask_all(store: Store, names: Sequence[str], what: Order) -> None:
    """Asks the server this of each; of none if one of them cannot be asked it. Raises ConfigError."""
    states: dict[str, str] = {}
    with contextlib.suppress(ConfigError):  # No server has seen anything yet.
        states = {run["run"]: run["state"] for run in store.view()["runs"]}
    for name in names:
        if why := _refusal(states.get(store.run_folder(name).name), what):
            raise ConfigError(f"run {name}: {why}")
    for name in names:
        store.ask(name, what)


def _refusal(state: str | None, what: Order) -> str:
    """Why a run in this state, None if no server has seen it, cannot be asked this; empty if it can."""
    from jaxdl.platform.fleet.member import ENDED, RESUMABLE

    if what == "remove":
        seen = "it is accepted, and not seen by a server yet" if state is None else f"it is {state}"
        return "" if state in ENDED else f"{seen}. Only a run that has ended is removed: cancel it first."
    # To cancel one that has ended frees its workdir for another.
    without = state in ENDED and (what == "hold" or (what == "run" and state not in RESUMABLE))
    return f"it is {state}, so there is nothing to {_VERBS[what]}." if without else ""
