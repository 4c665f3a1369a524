"""Rows of files with a prompt and two answers, of which the first is preferred, as texts.

The forms are those of TRL (huggingface.co/docs/trl/dataset_formats): the prompt may be in a column of its own, or the
beginning that both answers have in common; each may be a text, or a list of messages, which the chat template of the
tokenizer makes one text.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxdl.data.text.chat_template import ChatTemplate, TemplateRefusal

TOOLS, VARIABLES = "tools", "chat_template_kwargs"
"""Columns that conversations may have besides: functions that may be called, and what else the template takes."""
_ROLE, _CONTENT = "role", "content"


class Columns(NamedTuple):
    """The names of the columns."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"

    @property
    def every(self) -> tuple[str, ...]:
        """All that are read."""
        return (*self, TOOLS, VARIABLES)


class PairTexts(NamedTuple):
    """The texts of a pair: the prompt, and the prompt with each answer."""

    prompt: str
    chosen: str
    rejected: str
    rendered: bool
    """Whether a template made them, which then has put marks where it wants them."""


class UnusableRow(Exception):
    """A row that cannot be used; the message says why, in the same words for each such row."""


def pair_texts(row: Any, columns: Columns, template: ChatTemplate, now: datetime.datetime | None = None) -> PairTexts:
    """The texts of a row; `now` is what the template takes for the present. Raises UnusableRow."""
    if not isinstance(row, Mapping):
        raise UnusableRow("no object with columns")
    for column in (columns.chosen, columns.rejected):
        if row.get(column) is None:
            raise UnusableRow(f"no {column!r}")
    prompt = row.get(columns.prompt)
    chosen, rejected = (_checked(row[name], name) for name in (columns.chosen, columns.rejected))
    prompt = None if prompt is None else _checked(prompt, columns.prompt)
    if all(isinstance(x, str) for x in (chosen, rejected)) and not isinstance(prompt, list):
        prompt, chosen, rejected = _split_texts(prompt, chosen, rejected)
        return PairTexts(prompt, prompt + chosen, prompt + rejected, rendered=False)
    if prompt is None and type(chosen) is not type(rejected):
        raise UnusableRow("one answer is a text and the other a list of messages, without a prompt")
    prompt, chosen, rejected = _split_messages(prompt, _as_messages(chosen), _as_messages(rejected))
    return _rendered((prompt, chosen, rejected), row, template, now)


def _split_texts(prompt: Any, chosen: Any, rejected: Any) -> tuple[str, str, str]:
    """The prompt and both answers behind it, of texts."""
    if chosen == rejected:
        raise UnusableRow("both answers are the same")
    if prompt is not None:
        return prompt, chosen, rejected
    place = common_length(chosen, rejected)
    if place == min(len(chosen), len(rejected)):  # One is the beginning of the other; as TRL has it.
        place = max(0, place - 1)
    elif place and chosen[place - 1] == " ":  # A space belongs to the word behind it.
        place -= 1
    return chosen[:place], chosen[place:], rejected[place:]


def _split_messages(prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The messages of the prompt, and those of both answers behind it."""
    if chosen == rejected:
        raise UnusableRow("both answers are the same")
    place = common_length(chosen, rejected)
    if isinstance(prompt, list):
        if prompt and prompt == chosen[: len(prompt)] == rejected[: len(prompt)]:  # Whole conversations.
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    elif prompt is None or place:  # A text beside whole conversations repeats what they have.
        place = min(place, len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = chosen[:place], chosen[place:], rejected[place:]
        if not prompt:
            raise UnusableRow("no prompt: the conversations have no message in common")
    else:
        prompt = [{_ROLE: "user", _CONTENT: prompt}]
    if not chosen or not rejected:
        raise UnusableRow("an answer without a message")
    return prompt, chosen, rejected


def _rendered(
    messages: tuple[list[Any], list[Any], list[Any]], row: Mapping[str, Any], template: ChatTemplate, now: Any
) -> PairTexts:
    prompt, *answers = messages
    tools, variables = row.get(TOOLS), row.get(VARIABLES) or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        variables = json.loads(variables) if isinstance(variables, str) else variables
        more = {"tools": tools or None, "now": now, **variables}
        before = template.render(prompt, add_generation_prompt=True, **more)
        texts = [template.render([*prompt, *answer], **more) for answer in answers]
    except TemplateRefusal as error:
        raise UnusableRow(str(error).rstrip(".")) from None
    except (ValueError, TypeError):
        raise UnusableRow(f"{TOOLS!r} or {VARIABLES!r} cannot be read") from None
    if texts[0] == texts[1]:
        raise UnusableRow("the chat template makes both answers the same")
    return PairTexts(before, texts[0], texts[1], rendered=True)


def _checked(value: Any, column: str) -> str | list[Any]:
    """A text, or a list of messages. Raises UnusableRow."""
    if isinstance(value, str):
        _check_unicode(value, column)
        return value
    if not isinstance(value, list | tuple):
        raise UnusableRow(f"{column!r} is {type(value).__name__}, neither a text nor a list of messages")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get(_ROLE), str):
            raise UnusableRow(f"{column!r} has a message without a {_ROLE!r}")
        if isinstance(content := message.get(_CONTENT), str):
            _check_unicode(content, column)
        elif isinstance(content, list | tuple):
            kinds = {part.get("type", "text") if isinstance(part, Mapping) else "text" for part in content}
            if kinds - {"text"}:
                raise UnusableRow(f"{column!r} has a message that is more than text ({', '.join(sorted(kinds))})")
    return list(value)


def _check_unicode(text: str, column: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UnusableRow(f"{column!r} has half a surrogate pair, which is not a character") from None


def _as_messages(answer: Any) -> list[Any]:
    """An answer as messages."""
    return [{_ROLE: "assistant", _CONTENT: answer}] if isinstance(answer, str) else answer


def common_length(some: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements at the beginnings of both are the same."""
    limit = min(len(some), len(other))
    if some[:limit] == other[:limit]:
        return limit
    return next(place for place in range(limit) if some[place] != other[place])
