"""The messages between a learner and the syncer. All input from the network is checked here, as in `cluster.messages`.

A connection begins with lines of JSON, as the rendezvous of `jaxdl.parallel.cluster` does: the syncer's greeting, the
learner's hello with its proof, the syncer's welcome with its own. Frames follow, the learner's first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, StringConstraints

from jaxdl.parallel.cluster.messages import Claim, Count, Hex, Message, Reason, printable, read_any

VERSION = 1
"""Version of these messages."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Life = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")]
Word = Annotated[str, StringConstraints(max_length=200), pydantic.AfterValidator(printable)]
Steps = Annotated[int, Field(ge=1, lt=2**40)]


class Hello(Claim):
    """How a learner introduces itself; `process` is its number and `num_processes` that of all learners."""

    model_config = pydantic.ConfigDict(extra="forbid")

    asynchrony: Count
    """Its `VERSION`."""
    life: Life
    size: Annotated[int, Field(ge=1, lt=2**40)]
    """Number of values of all its parameters."""
    layout: Digest
    """Hash of the names and shapes of its parameters."""
    round: Count
    """Its last round that was answered."""
    working: bool
    resumes: Word
    stream: Word
    """Names the examples that it trains on, such as a seed; empty if it does not say."""


class Welcome(Message):
    """The syncer's answer to a hello."""

    refused: Reason | None
    """Why the learner may not take part."""
    bits: Literal[4, 8, 32]
    """Bits of a value of a delta."""
    wants_initial: bool
    """Whether the learner's first frame is to bring its parameters, because the syncer has no anchor yet."""
    silence_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Who sends nothing for so long is lost."""
    proof: Hex | None = None


# Frames to the syncer (`ToSyncer`), and from it (`FromSyncer`).


class Begin(Message):
    """The learner's first frame; its payload is the initial parameters, where they are wanted."""

    kind: Literal["begin"] = "begin"


class Delta(Message):
    """A delta, the payload."""

    kind: Literal["delta"] = "delta"
    round: Count
    version: Count
    anchor: Digest
    weight: Annotated[float, Field(gt=0, lt=1e30, allow_inf_nan=False)]
    steps: Steps
    finite: bool


class Beat(Message):
    """The sender is alive."""

    kind: Literal["beat"] = "beat"


class Bye(Message):
    """The learner ends."""

    kind: Literal["bye"] = "bye"
    finished: bool
    """Whether it will not come back."""


class Anchor(Message):
    """The anchor to go on from, the payload."""

    kind: Literal["anchor"] = "anchor"
    round: Count
    """The round that this answers."""
    version: Count
    steps: Steps
    over: bool


class Replaced(Message):
    """Another process has taken the learner's number."""

    kind: Literal["replaced"] = "replaced"
    by: Reason


ToSyncer = Begin | Delta | Beat | Bye
FromSyncer = Anchor | Beat | Replaced
_TO_SYNCER = pydantic.TypeAdapter[ToSyncer](Annotated[ToSyncer, Field(discriminator="kind")])
_FROM_SYNCER = pydantic.TypeAdapter[FromSyncer](Annotated[FromSyncer, Field(discriminator="kind")])


def read_to_syncer(fields: Mapping[str, Any]) -> ToSyncer:
    """Parses the header of a frame to the syncer. Raises Malformed."""
    return read_any(_TO_SYNCER, fields)


def read_from_syncer(fields: Mapping[str, Any]) -> FromSyncer:
    """Parses the header of a frame from the syncer. Raises Malformed."""
    return read_any(_FROM_SYNCER, fields)
