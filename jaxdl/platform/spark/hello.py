"""How a process of a job and its driver prove to each other that they know the job's secret, which is never sent."""

from __future__ import annotations

from typing import Annotated

import pydantic
from pydantic import StringConstraints

from jaxdl.parallel.cluster.messages import Claim, Hex, Message, printable


class Joining(Claim):
    """What a process sends first, when it was greeted: which one it is, of which start of the job."""

    model_config = pydantic.ConfigDict(extra="forbid")

    start: Annotated[str, StringConstraints(max_length=300), pydantic.AfterValidator(printable)]
    """Equal in all processes that are started together."""


class Go(Message):
    """The driver's answer: the process may start its command."""

    go: bool
    proof: Hex | None = None
