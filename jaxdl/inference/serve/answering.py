"""Carries out what a request asks for: its texts go to the engine, and come back piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from jaxdl.core.web.refusal import Refusal
from jaxdl.inference.serve.answers import Choice, Piece, usage
from jaxdl.inference.serve.engine import Engine, Full, Job, Stopped, Written
from jaxdl.inference.serve.errors import body_of
from jaxdl.inference.serve.requests import Ask, Served

_RETRY = {"Retry-After": "1"}


class Gone(Exception):
    """The client has closed its connection."""


class Answering:
    """The texts of one request, while they are written; they are given up at `close`."""

    def __init__(self, ask: Ask, served: Served, engine: Engine, timeout_sec: float) -> None:
        """Gives the texts to the engine. Raises Refusal."""
        self._ask, self._engine = ask, engine
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[int, Written] | None] = asyncio.Queue()
        self._end = self._loop.time() + timeout_sec

        self._jobs = list[Job]()
        for number, (prompt, how) in enumerate(zip(ask.prompts, ask.hows, strict=True)):
            for sample in range(ask.num_samples):
                deliver = self._deliver(len(self._jobs))
                self._jobs.append(Job(prompt, how, deliver, number, sample, ask.penalties, ask.num_top))
        codec = served.codec
        self._choices = [Choice(codec, job.prompt, ask.stop, job.how.stop_tokens) for job in self._jobs]
        try:
            engine.submit(self._jobs)
        except Full:
            message = "Too many texts wait for this server. Try again later."
            raise Refusal(429, message, headers=_RETRY) from None
        except Stopped:
            raise Refusal(503, "The server is stopping.", headers=_RETRY) from None

    def _deliver(self, index: int) -> Callable[[Written], None]:
        def deliver(written: Written) -> None:
            with contextlib.suppress(RuntimeError):  # The server has ended.
                self._loop.call_soon_threadsafe(self._news.put_nowait, (index, written))

        return deliver

    def close(self) -> None:
        """Gives up what is not written yet."""
        self._engine.cancel([job for job, choice in zip(self._jobs, self._choices, strict=True) if not choice.finish])

    @contextlib.asynccontextmanager
    async def watched(self, disconnected: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Context in which `pieces` raises Gone when the client has left; at its end all is given up."""

        async def watch() -> None:
            await disconnected()
            self._news.put_nowait(None)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            self.close()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index of a text, what has been added to it), until all texts have ended. Raises Gone and Refusal."""
        left = len(self._jobs)
        while left:
            try:
                async with asyncio.timeout_at(self._end):
                    news = await self._news.get()
            except TimeoutError:
                message = "The request took longer than this server allows."
                raise Refusal(503, message, code="timeout", headers=_RETRY) from None
            if news is None:
                raise Gone
            index, written = news
            if written.finish in ("failed", "cancelled") and not self._choices[index].finish:
                raise Refusal(503, "The server has stopped before the text was written.", headers=_RETRY)
            if self._choices[index].finish:  # Written before the engine knew of a stop text.
                continue
            piece = self._choices[index].add(written)
            if piece.finish is not None:
                left -= 1
                if written.finish is None:
                    self._engine.cancel([self._jobs[index]])
            yield index, piece

    async def whole(self) -> dict[str, Any]:
        """The answer. Raises Gone and Refusal."""
        pieces: list[list[Piece]] = [[] for _ in self._jobs]
        async for index, piece in self.pieces():
            pieces[index].append(piece)
        form = self._ask.form
        content = form.envelope([form.whole(index, each) for index, each in enumerate(pieces)], streamed=False)
        return content | {"usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; an error is one too."""
        form, usage_too = self._ask.form, self._ask.includes_usage
        more: dict[str, Any] = {"usage": None} if usage_too else {}
        try:
            for index in range(len(self._jobs)):
                if (first := form.first(index)) is not None:
                    yield _event(form.envelope([first], streamed=True) | more)
            async for index, piece in self.pieces():
                if piece.text or piece.finish or (piece.tokens and self._ask.num_top is not None):
                    yield _event(form.envelope([form.part(index, piece)], streamed=True) | more)
        except Refusal as refusal:
            yield _event(body_of(refusal))
            return
        if usage_too:
            yield _event(form.envelope([], streamed=True) | {"usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _usage(self) -> dict[str, int]:
        return usage(self._ask.num_prompt_tokens, self._choices)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
