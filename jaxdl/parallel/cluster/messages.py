"""The messages between the processes of a run: their fields, types and ranges.

All network input is validated here and nowhere else; `Malformed` says what is wrong with it. Control characters are
removed from received text before it can reach a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field, StringConstraints

PROTOCOL = 2
"""Version of these messages; a process with a different one is refused."""
MAX_PROCESSES = 100_000
"""Upper bound on the processes of a run: a larger number is a mistake or an attack."""
MAX_NAME = 255
"""Longest host name, in characters."""
MAX_REASON = 10_000
"""Longest reason or verdict, in characters; longer ones are cut."""
_MAX_DEPTH = 32
"""Deepest nesting of a config value."""


class Malformed(ValueError):
    """Received data that is not a valid message; says why."""


def printable(text: str) -> str:
    """The text with `?` for every control character, which a terminal might interpret."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _is_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be printable")
    return text


def _is_shallow(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Returns the value; raises ValueError when its lists and dictionaries are nested too deeply."""
    if isinstance(value, list | dict):
        if depth == 0:
            raise ValueError("it is nested too deeply")
        for inner in value.values() if isinstance(value, dict) else value:
            _is_shallow(inner, depth - 1)
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME), pydantic.AfterValidator(_is_printable)]
Reason = Annotated[str, pydantic.AfterValidator(lambda text: printable(text[:MAX_REASON]))]
Phase = Annotated[str, StringConstraints(max_length=100), pydantic.AfterValidator(printable)]
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32,64}$")]
Value = Annotated[Any, pydantic.AfterValidator(_is_shallow)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Signal = Annotated[int, Field(ge=1, le=64)]
Code = Annotated[int, Field(ge=0, le=255)]


class Message(pydantic.BaseModel):
    """One message, sent as a JSON object. Unknown fields are an error."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True, extra="forbid")

    def to_json(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        return self.model_dump()


# During the rendezvous: how a process describes itself, and how process 0 answers.


class Claim(Message):
    """The part of a hello that every version of jaxdl sends: who the sender claims to be."""

    model_config = pydantic.ConfigDict(extra="ignore")

    jaxdl: Count
    """Its `PROTOCOL`."""
    process: Count
    num_processes: Annotated[int, Field(ge=1, le=MAX_PROCESSES)]
    host: Name
    nonce: Hex | None = None
    proof: Hex | None = None
    """Proves that the sender knows the run token (`token.Handshake.proof`); None when it has none."""

    @pydantic.model_validator(mode="after")
    def _is_one_of_them(self) -> Claim:
        if self.process >= self.num_processes:
            raise ValueError(f"process {self.process} of {self.num_processes} does not exist")
        return self


class Description(Message):
    """Software, code, experiment and devices of a process (`consistency.describe_process`)."""

    versions: dict[str, str]
    files: dict[str, str]
    config: dict[str, Value]
    devices: Annotated[int, Field(ge=1)] | None


class Hello(Claim):
    """How a process introduces itself to process 0."""

    own_name: Annotated[list[Name], Field(min_length=2, max_length=2)] | None
    """The host's own name and the loopback address that it resolves to; None if it does not, or if it is not needed."""
    description: Description


class Greeting(Message):
    """The first message of process 0 on every connection."""

    nonce: Hex


class Here(Message):
    """Which processes have joined so far: number -> host."""

    here: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6}$")], Name]


class Verdict(Message):
    """The decision of process 0: None starts the run, a text ends all processes."""

    verdict: Reason | None
    mistake: bool
    """Whether the text reports a user error."""
    hosts: list[Name]
    proof: Hex | None = None


# After the rendezvous: messages to process 0 (`ToFirst`), and from process 0 to all (`FromFirst`).


class Beat(Message):
    """Heartbeat: the last step and the phase of the sender."""

    kind: Literal["beat"] = "beat"
    step: Count | None
    phase: Phase


class Bye(Message):
    """The sender is about to exit normally."""

    kind: Literal["bye"] = "bye"


class Failed(Message):
    """The sender exits with this code."""

    kind: Literal["failed"] = "failed"
    reason: Reason
    code: Code


class Hang(Message):
    """The loop of the sender has made no progress for this long."""

    kind: Literal["hang"] = "hang"
    idle_sec: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Signalled(Message):
    """The sender received a signal; all processes should stop."""

    kind: Literal["signal"] = "signal"
    signum: Signal


class Arrived(Message):
    """How often the sender has called `wait_for_all`."""

    kind: Literal["arrived"] = "arrived"
    times: Count


class Held(Message):
    """The sender holds before its next poll, after this many."""

    kind: Literal["held"] = "held"
    polls: Count


class Hold(Message):
    """All processes hold before their next poll."""

    kind: Literal["hold"] = "hold"


class StopAt(Message):
    """All processes stop at this poll because of a signal."""

    kind: Literal["stop"] = "stop"
    poll: Count
    signum: Signal


class Passed(Message):
    """How often every process has called `wait_for_all` so far."""

    kind: Literal["passed"] = "passed"
    times: Count


class End(Message):
    """All processes exit with this code; with `dump` they write their stacks first."""

    kind: Literal["end"] = "end"
    reason: Reason
    code: Code
    dump: bool


ToFirst = Beat | Bye | Failed | Hang | Signalled | Arrived | Held
FromFirst = Beat | Bye | Hold | StopAt | Passed | End
_TO_FIRST = pydantic.TypeAdapter[ToFirst](Annotated[ToFirst, Field(discriminator="kind")])
_FROM_FIRST = pydantic.TypeAdapter[FromFirst](Annotated[FromFirst, Field(discriminator="kind")])
_ANSWERS: dict[str, type[Greeting | Here | Verdict]] = {"nonce": Greeting, "here": Here, "verdict": Verdict}
MessageT = TypeVar("MessageT", bound=Message)


def read(kind: type[MessageT], fields: Mapping[str, Any]) -> MessageT:
    """Parses a JSON object as a message of this kind. Raises Malformed."""
    try:
        return kind.model_validate(dict(fields))
    except pydantic.ValidationError as error:
        raise Malformed(_why(error)) from None


def read_any(kinds: pydantic.TypeAdapter[MessageT], fields: Mapping[str, Any]) -> MessageT:
    """Parses a JSON object as a message of one of several kinds. Raises Malformed."""
    try:
        return kinds.validate_python(fields)
    except pydantic.ValidationError as error:
        raise Malformed(_why(error)) from None


def read_answer(fields: Mapping[str, Any]) -> Greeting | Here | Verdict:
    """Parses a message of process 0 during the rendezvous. Raises Malformed."""
    kind = next((kind for key, kind in _ANSWERS.items() if key in fields), None)
    if kind is None:
        raise Malformed("unknown kind of message")
    return read(kind, fields)


def read_to_first(fields: Mapping[str, Any]) -> ToFirst:
    """Parses a message to process 0 after the rendezvous. Raises Malformed."""
    return read_any(_TO_FIRST, fields)


def read_from_first(fields: Mapping[str, Any]) -> FromFirst:
    """Parses a message from process 0 after the rendezvous. Raises Malformed."""
    return read_any(_FROM_FIRST, fields)


def _why(error: pydantic.ValidationError) -> str:
    """The first error in a few words, without the received values."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return printable(f"{where}: {first['msg']}" if where else first["msg"])[:200]
