"""What the server of a fleet writes for `status` and `explain`: active runs in each turn, ended ones when one ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from jaxdl.platform.fleet.member import ENDED, Member
from jaxdl.platform.fleet.roll import in_order
from jaxdl.platform.fleet.store import Store

RunView = Mapping[str, Any]


class Views:
    """Writes views. A turn in which no run ends takes as long for any number of runs that have ended."""

    def __init__(self, store: Store, view_of: Callable[[Member], RunView]) -> None:
        self._store, self._view_of = store, view_of
        self._shown: dict[str, RunView] | None = None
        """What is in the file of runs that have ended."""

    def write(self, view: Mapping[str, Any], members: Mapping[str, Member], ended: Set[str]) -> None:
        """Writes what the server sees: `view`, without runs that have ended, and those of `ended` if any.

        `ended` are runs that have ended, or were removed, since the last call.
        """
        if self._shown is None or ended:
            before = {name: shown for name, shown in (self._shown or {}).items() if name not in ended}
            # One that runs again stays: until the other file has it, a reader would see it nowhere.
            self._shown = {
                name: before[name] if name in before else self._view_of(member)
                for name, member in members.items()
                if member.state in ENDED or name in before
            }
            self._store.write_ended([self._shown[name] for name in sorted(self._shown, key=in_order)])
        self._store.write_view(view)
