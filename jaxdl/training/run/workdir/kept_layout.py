"""The layout of a run as it is kept in its workdir."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kept:
    """A plan as it is kept in a workdir."""

    made_for: Mapping[str, Any]
    """The devices and the settings for which it was made, as in JSON."""
    settings: Mapping[str, Any]
    reasons: tuple[str, ...]

    def to_json(self) -> str:
        """Its file."""
        return json.dumps(dict(vars(self)), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Kept:
        """What `to_json` wrote. Raises ValueError, KeyError or TypeError for another text."""
        values = json.loads(text)
        return cls(dict(values["made_for"]), dict(values["settings"]), tuple(values["reasons"]))
