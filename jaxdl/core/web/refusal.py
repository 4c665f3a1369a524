"""What a request is refused with, in the form of OpenAI's errors."""

from __future__ import annotations

from typing import Any


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
