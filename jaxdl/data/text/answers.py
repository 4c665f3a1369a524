"""Which characters of a rendered conversation the assistant wrote, each answer with the text that ends its turn.

Where a template marks them itself (`{% generation %}`) these are its marks. Elsewhere they are found by rendering
prefixes of the conversation: an answer begins where the prompt of the messages before it ends. Some templates render a
turn otherwise when others follow (they leave out what was thought, or put tools before the last question): there the
content is replaced by a text that is found again, and what stands around it says where the answer is.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxdl.data.text.chat_template import ChatTemplate, TemplateRefusal

ASSISTANT = "assistant"
_SENTINEL = "jaxdl\U000f5e62sentinel"
"""A content that no conversation has; it has no space at its ends, which templates strip."""
Message = Mapping[str, Any]


class Unusable(Exception):
    """A conversation cannot be learned from; the text says why, in the same words for each of its kind."""


class Answer(NamedTuple):
    """Characters `start` to `end` of a rendered text, which message `number` is."""

    number: int
    start: int
    end: int


class Renderer:
    """Renders conversations by one template, and finds the answers in them."""

    def __init__(self, template: ChatTemplate, now: datetime.datetime | None = None) -> None:
        """`now` is what the template takes for the present."""
        self._template, self._now = template, now
        self._turn_ends: dict[bool, str | None] = {}

    def answers(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, list[Answer]]:
        """The text of a conversation, and the answers in it, in order; an answer may have several parts.

        Raises Unusable where the template does not take the conversation, or does not say where an answer is.
        """
        numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        try:
            if self._template.marks_answers(tools):
                return self._marked(messages, tools, numbers)
            whole = _Whole(self, messages, tools)
            return whole.text, whole.answers(numbers)
        except TemplateRefusal as error:
            raise Unusable(str(error).removesuffix(".")) from None

    def turn_end(self, tools: Any = None) -> str:
        """The text behind an answer that is the last message, without the space at its end; empty where there is none.

        It is what a network is to write at the end of an answer.
        """
        key = bool(tools)
        if key not in self._turn_ends:
            messages = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": _SENTINEL}]
            try:
                text = self.text(messages, tools)
            except TemplateRefusal:
                text = ""
            self._turn_ends[key] = text.partition(_SENTINEL)[2].rstrip()
        return self._turn_ends[key] or ""

    def text(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str:
        """The text of messages. Raises TemplateRefusal."""
        return self._template.render(messages, tools=tools, add_generation_prompt=prompt, now=self._now)

    def _marked(self, messages: Sequence[Message], tools: Any, numbers: list[int]) -> tuple[str, list[Answer]]:
        text, spans = self._template.render_marked(messages, tools=tools, now=self._now)
        if len(spans) == len(numbers):
            return text, [Answer(number, *span) for number, span in zip(numbers, spans, strict=True)]
        answers, before = [], 0
        for number in numbers:
            up_to = len(self._template.render_marked(messages[: number + 1], tools=tools, now=self._now)[1])
            answers += [Answer(number, *span) for span in spans[before:up_to]]
            before = up_to
        if len(answers) != len(spans):
            raise Unusable("the chat template marks other parts when messages follow")
        return text, answers


class _Whole:
    """A whole conversation, rendered by a template without marks."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message], tools: Any) -> None:
        self._renderer, self._messages, self._tools = renderer, messages, tools
        self.text = renderer.text(messages, tools)

    def answers(self, numbers: Sequence[int]) -> list[Answer]:
        """The answers of these messages. Raises Unusable, TemplateRefusal."""
        answers, last = [], 0
        for number in numbers:
            start = self._start(number)
            end = self._end(number, start)
            if not last <= start <= end <= len(self.text):
                raise Unusable("the chat template gives no consistent prefix: its answers overlap")
            answers.append(Answer(number, start, end))
            last = end
        return answers

    def _start(self, number: int) -> int:
        """Where an answer begins: behind the prompt of what comes before it."""
        try:
            prompt = self._renderer.text(self._messages[:number], self._tools, prompt=True)
        except TemplateRefusal:  # Some templates take no conversation without a question.
            prompt = None
        if prompt is not None and self.text.startswith(prompt):
            return len(prompt)
        if number and (behind := self._behind(number - 1)) is not None:
            return behind
        content = self._content(number)
        if content is None:
            raise Unusable("the chat template gives no consistent prefix: an answer has no beginning that can be found")
        return content[0]

    def _end(self, number: int, start: int) -> int:
        """Where an answer ends: behind what ends its turn, without the space that parts it from the next one."""
        mark = self._renderer.turn_end(self._tools)
        prefix = self._renderer.text(self._messages[: number + 1], self._tools)
        if self.text.startswith(prefix):
            return self._without_space(start, len(prefix), mark)
        content = self._content(number)
        if content is not None and self.text.startswith(mark, content[1]):
            return content[1] + len(mark)
        following = self._following(number + 1)
        at = -1 if following is None or not mark else self.text.rfind(mark, start, following)
        if at < 0:
            raise Unusable("the chat template gives no consistent prefix: an answer has no end that can be found")
        return at + len(mark)

    def _without_space(self, start: int, end: int, mark: str) -> int:
        """`end` before the space behind the mark that ends a turn; a turn that only space ends keeps it."""
        return start + len(self.text[start:end].rstrip()) if mark else end

    def _content(self, number: int) -> tuple[int, int] | None:
        """Where the content of a message is in the text, seen by rendering another one; None where it is not seen."""
        if not isinstance(self._messages[number].get("content"), str):
            return None
        around = self._with_sentinel(number)
        if around is None:
            return None
        before, after = around
        fits = self.text.startswith(before) and self.text.endswith(after)
        return (len(before), len(self.text) - len(after)) if fits and len(before + after) <= len(self.text) else None

    def _behind(self, number: int) -> int | None:
        """Where the prompt of the messages up to this one ends in the text: its end, from the message's content on."""
        around, prompt = self._with_sentinel(number), self._with_sentinel(number, prompt=True)
        if around is None or prompt is None or not self.text.endswith(around[1]):
            return None
        return len(self.text) - len(around[1]) + len(prompt[1]) if around[1].startswith(prompt[1]) else None

    def _following(self, number: int) -> int | None:
        """Where the content of a message begins, if what comes before it does not depend on it."""
        around = self._with_sentinel(number)
        return len(around[0]) if around is not None and self.text.startswith(around[0]) else None

    def _with_sentinel(self, number: int, *, prompt: bool = False) -> tuple[str, str] | None:
        """What stands before and behind the content of a message when it is the sentinel, in the text of all messages,
        or in the prompt of those up to this one.
        """
        changed = [dict(message) for message in (self._messages[: number + 1] if prompt else self._messages)]
        changed[number]["content"] = _SENTINEL
        try:
            text = self._renderer.text(changed, self._tools, prompt=prompt)
            before, found, after = text.partition(_SENTINEL)
        except TemplateRefusal:
            return None
        return (before, after) if found and _SENTINEL not in after else None
