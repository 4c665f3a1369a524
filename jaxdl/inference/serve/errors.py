"""What a request is refused with, in the form of OpenAI's errors."""

from __future__ import annotations

from typing import Any

import pydantic


class Refusal(Exception):
    """An error that a client is told, with the status of its answer.

    Attributes:
      status: the HTTP status.
      message: what is wrong, and what to do.
      kind: OpenAI's `type`; by default that of the status.
      param: the field of the request that it is about.
      code: OpenAI's `code`.
      headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, *, kind: str | None = None, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}
        self.kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")

    def content(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def of_invalid(error: pydantic.ValidationError) -> Refusal:
    """The refusal of a body, by the first thing that is wrong with it."""
    first = error.errors(include_url=False, include_context=False, include_input=True)[0]
    where = [str(part) for part in first["loc"]]
    name = ".".join(where)
    if first["type"] == "json_invalid":
        return Refusal(400, f"The body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    text = first["msg"].removeprefix("Value error, ")
    if not where:  # Of fields together, which the text names first.
        found = first["type"] == "value_error"
        return Refusal(400, f"{text}.", param=text.partition(":")[0]) if found else Refusal(400, "No JSON object.")
    if first["type"] == "extra_forbidden":
        return Refusal(400, f"{name}: there is no such field here. Leave it out.", param=where[0])
    if first["type"] == "missing":
        return Refusal(400, f"{name}: it is missing.", param=where[0])
    given = repr(first["input"])
    shown = given if len(given) <= 60 else f"{given[:57]}..."
    return Refusal(400, f"{name}: {text} (given: {shown}).", param=where[0])
