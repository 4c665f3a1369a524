"""A trained network that answers: its chat template makes prompts of conversations, and says where an answer ends."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.data.text.answers import Renderer
from jaxdl.inference.decoding.text import Completion
from jaxdl.inference.predictor import Predictor

Message = Mapping[str, Any]
_ANSWER_SHARE = 4
"""One part in so many of what the network reads is left for the answer."""


class Chat:
    """Answers of a network to conversations.

    Attributes:
      template: its chat template.
      stop: texts that end an answer, where what ends a turn is not one token.
      stop_tokens: the tokens that end an answer.
    """

    def __init__(self, predictor: Predictor) -> None:
        """Raises ConfigError for a network that reads no text, and for a template that cannot be read."""
        predictor.check_text("chat")
        self._predictor, self.template = predictor, predictor.chat_template
        end = Renderer(self.template).turn_end()
        tokens = predictor.codec.encode(end)
        self.stop_tokens: tuple[int, ...] = tuple(tokens) if len(tokens) == 1 else ()
        self.stop: tuple[str, ...] = (end,) if len(tokens) > 1 else ()

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """The tokens of a conversation up to its answer.

        `tools` and `variables` are those of `ChatTemplate.render`. Raises `TemplateRefusal`, a ConfigError, where the
        template does not take the conversation.
        """
        text = self.template.render(
            messages, tools=tools, add_generation_prompt=True, now=datetime.datetime.now(), **variables
        )
        return self._predictor.codec.encode(text)

    def fitting(
        self, messages: Sequence[Message], num_tokens: int, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], int]:
        """(the prompt of a conversation, how many messages are left out of it so that an answer fits in).

        The oldest questions are left out, each with what follows it; a message of the system stays, and so does the
        last question.
        """
        limit = self._predictor.decoder.context
        first = 1 if messages and messages[0]["role"] == "system" else 0
        starts = [number for number, message in enumerate(messages) if message["role"] == "user" and number >= first]
        prompt = self.prompt(messages, tools)
        if limit is None:
            return prompt, 0
        room = limit - min(num_tokens, limit // _ANSWER_SHARE)
        for start in starts:
            prompt = self.prompt([*messages[:first], *messages[start:]], tools)
            if len(prompt) <= room:
                return prompt, start - first
        return prompt, (starts[-1] - first) if starts else 0

    def answer(self, prompt: Sequence[int], *, stop: Sequence[str] = (), **options: Any) -> Iterator[str]:
        """The answer to a prompt, piece by piece as it is written; `options` are those of `Predictor.generate`."""
        return self._predictor.generate(prompt, **self._with_ends(stop, options))

    def answers(
        self, prompts: Sequence[Sequence[int]], *, stop: Sequence[str] = (), **options: Any
    ) -> Iterator[Completion]:
        """The answer to each prompt, in order; `options` are those of `Predictor.complete`."""
        return self._predictor.complete(prompts, **self._with_ends(stop, options))

    def _with_ends(self, stop: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
        """The options with what ends an answer; without `stop_at_end` nothing is added."""
        if not options.get("stop_at_end", True):
            return options | {"stop": tuple(stop)}
        return options | {
            "stop": (*stop, *self.stop),
            "stop_tokens": (*options.get("stop_tokens", ()), *self.stop_tokens),
        }


def checked_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Messages that end with what is to be answered. Raises ConfigError, which begins with `where`, for others."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: give a list of messages, each with a role and a content.")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: a message is not an object with a role and a content: {str(message)[:60]}")
    if value[-1]["role"] == "assistant":
        raise ConfigError(f"{where}: the last message is the assistant's: there is nothing to answer. Leave it out.")
    return value
