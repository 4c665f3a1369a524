"""What the processes of a run say to each other, each message with its fields, types and ranges.

Whatever comes over the network is read here, and only here, so that nothing of another shape goes further: `Malformed`
says what is wrong with it. Text of others is stripped of control characters before it can reach a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field, StringConstraints

PROTOCOL = 2
"""The version of these messages; a process with another one is refused."""
MAX_PROCESSES = 100_000
"""More processes than any run has: a larger number is a mistake or an attack."""
MAX_NAME = 255
"""Characters of a host's name."""
MAX_REASON = 10_000
"""Characters of a reason or verdict; longer ones are cut."""
_MAX_DEPTH = 32
"""How deeply a value of a config may be nested."""


class Malformed(ValueError):
    """What came is no message of jaxdl; says why."""


def printable(text: str) -> str:
    """The text with a `?` in place of every character that a terminal might obey."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _is_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be printable")
    return text


def _is_shallow(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """The value itself; raises ValueError when lists and dictionaries are nested too deeply in it."""
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
    """One message, sent as a JSON object. Fields that are not known are an error."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True, extra="forbid")

    def to_json(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        return self.model_dump()


# Before the meeting's end: what a process says of itself, and what process 0 answers.


class Claim(Message):
    """The part of a hello that every version of jaxdl sends: who somebody says to be."""

    model_config = pydantic.ConfigDict(extra="ignore")

    jaxdl: Count
    """Its `PROTOCOL`."""
    process: Count
    num_processes: Annotated[int, Field(ge=1, le=MAX_PROCESSES)]
    host: Name
    nonce: Hex | None = None
    proof: Hex | None = None
    """Shows that it knows the run's token (`token.proof`); None when it has none."""

    @pydantic.model_validator(mode="after")
    def _is_one_of_them(self) -> Claim:
        if self.process >= self.num_processes:
            raise ValueError(f"process {self.process} of {self.num_processes} cannot be")
        return self


class Description(Message):
    """What a process says of its software, code, experiment and devices (`consistency.describe_process`)."""

    versions: dict[str, str]
    files: dict[str, str]
    config: dict[str, Value]
    devices: Annotated[int, Field(ge=1)] | None


class Hello(Claim):
    """What a process says of itself."""

    own_name: Annotated[list[Name], Field(min_length=2, max_length=2)] | None
    """The host's own name and the loopback address that it stands for, if it does and that matters."""
    description: Description


class Greeting(Message):
    """Process 0's first word to everybody who connects."""

    nonce: Hex


class Here(Message):
    """Which processes have come: their hosts by number."""

    here: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6}$")], Name]


class Verdict(Message):
    """Process 0's decision: None lets the run begin, a text ends all processes."""

    verdict: Reason | None
    mistake: bool
    """Whether the text is about a mistake of the user's."""
    hosts: list[Name]
    proof: Hex | None = None


# After the meeting: what a process says to process 0 (`ToFirst`), and process 0 to all (`FromFirst`).


class Beat(Message):
    """The sender lives: its last step and its phase."""

    kind: Literal["beat"] = "beat"
    step: Count | None
    phase: Phase


class Bye(Message):
    """The sender is about to end in good order."""

    kind: Literal["bye"] = "bye"


class Failed(Message):
    """The sender ends with this code."""

    kind: Literal["failed"] = "failed"
    reason: Reason
    code: Code


class Hang(Message):
    """The sender's loop has stood still for so long."""

    kind: Literal["hang"] = "hang"
    idle_sec: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Signalled(Message):
    """A signal came to the sender, for which all should stop."""

    kind: Literal["signal"] = "signal"
    signum: Signal


class Arrived(Message):
    """How often the sender has called `wait_for_all`."""

    kind: Literal["arrived"] = "arrived"
    times: Count


class Held(Message):
    """The sender holds still after so many polls."""

    kind: Literal["held"] = "held"
    polls: Count


class Hold(Message):
    """All are to hold still before their next poll."""

    kind: Literal["hold"] = "hold"


class StopAt(Message):
    """All stop at this poll because of a signal."""

    kind: Literal["stop"] = "stop"
    poll: Count
    signum: Signal


class Passed(Message):
    """All processes have called `wait_for_all` so often."""

    kind: Literal["passed"] = "passed"
    times: Count


class End(Message):
    """All end with this code, after writing their stacks if `dump` says so."""

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
    """The JSON object as a message of this kind. Raises Malformed."""
    try:
        return kind.model_validate(dict(fields))
    except pydantic.ValidationError as error:
        raise Malformed(_why(error)) from None


def read_answer(fields: Mapping[str, Any]) -> Greeting | Here | Verdict:
    """What process 0 says during the meeting. Raises Malformed."""
    kind = next((kind for key, kind in _ANSWERS.items() if key in fields), None)
    if kind is None:
        raise Malformed("no such message")
    return read(kind, fields)


def read_to_first(fields: Mapping[str, Any]) -> ToFirst:
    """What another process says to process 0 after the meeting. Raises Malformed."""
    try:
        return _TO_FIRST.validate_python(fields)
    except pydantic.ValidationError as error:
        raise Malformed(_why(error)) from None


def read_from_first(fields: Mapping[str, Any]) -> FromFirst:
    """What process 0 says to another after the meeting. Raises Malformed."""
    try:
        return _FROM_FIRST.validate_python(fields)
    except pydantic.ValidationError as error:
        raise Malformed(_why(error)) from None


def _why(error: pydantic.ValidationError) -> str:
    """The first thing that is wrong, in a few words, without the values."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return printable(f"{where}: {first['msg']}" if where else first["msg"])[:200]
