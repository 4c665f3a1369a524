"""Errors in OpenAI's form, and the refusal of a body that is not what a request may have."""

from __future__ import annotations

from typing import Any

import pydantic

from jaxdl.core.web.refusal import Refusal

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def body_of(refusal: Refusal) -> dict[str, Any]:
    """The body of the answer, in the form of OpenAI's errors: `type` and, without one of its own, `code` by status."""
    kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    code = refusal.code or _CODES.get(refusal.status)
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": code}}


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
