"""What a request is refused with; in which form a client is told it is the application's."""

from __future__ import annotations


class Refusal(Exception):
    """An error that a client is told, with the status of its answer.

    Attributes:
      status: the HTTP status.
      message: what is wrong, and what to do.
      param: the field of the request that it is about.
      code: a word for programs; None: that of the status.
      headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}
