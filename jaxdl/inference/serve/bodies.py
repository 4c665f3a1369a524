"""The bodies of requests, as OpenAI's reference has them: what is not done here is refused, never ignored.

Fields beside OpenAI's have the names that vLLM's server uses: `top_k`, `min_p`, `repetition_penalty`,
`stop_token_ids`, `ignore_eos`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from jaxdl.data.text.turns import Unusable, tool_call
from jaxdl.inference.serve.drawing import NUM_TOP

MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
"""Stop texts, and characters of each."""
MAX_LEGACY_TOP = 5
"""Of so many likeliest tokens `/v1/completions` gives log-probabilities."""
_SEED = 2**63


class StreamOptions(pydantic.BaseModel):
    """How an answer is streamed."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(pydantic.BaseModel):
    """What both kinds of requests have in common. None is the default of each field."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str | None = None
    n: int | None = pydantic.Field(None, ge=1)
    temperature: float | None = pydantic.Field(None, ge=0, le=100)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=-1, lt=2**31)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    repetition_penalty: float | None = pydantic.Field(None, gt=0, le=100)
    seed: int | None = pydantic.Field(None, ge=-_SEED, lt=_SEED)
    stop: Any = None
    stop_token_ids: list[int] | None = pydantic.Field(None, max_length=8)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = pydantic.Field(None, ge=1)
    presence_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    frequency_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    # What would change the text, and is not done.
    logit_bias: Annotated[dict[str, float] | None, pydantic.Field(max_length=0)] = None
    # What does not change it.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @pydantic.field_validator("stop")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("give a text, or a list of texts")
        if len(texts) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_LENGTH for text in texts):
            raise ValueError(f"give at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_LENGTH} characters")
        return texts

    @pydantic.model_validator(mode="after")
    def _options_have_a_stream(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: it has no effect without stream = true. Leave it out")
        return self

    @property
    def most_tokens(self) -> int | None:
        """How many tokens are written at most; None leaves it to the server."""
        return self.max_tokens

    @property
    def num_top(self) -> int | None:
        """Of how many likeliest tokens log-probabilities are given; None: of none, nor of the token itself."""
        raise NotImplementedError


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: Any = ""
    echo: bool | None = None
    logprobs: int | None = pydantic.Field(None, ge=0, le=MAX_LEGACY_TOP)
    best_of: int | None = pydantic.Field(None, ge=1)
    suffix: Literal[""] | None = None

    @pydantic.model_validator(mode="after")
    def _is_done_here(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: texts are not ranked here. Leave it out, or give the value of n")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: log-probabilities of the prompt are not given here. Leave out echo or logprobs")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, texts or tokens. Raises ValueError for what is none."""
        given = "" if self.prompt is None else self.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and all(type(x) is int for x in given)):
            return [given]
        if isinstance(given, list) and given:
            if all(isinstance(x, str) for x in given):
                return given
            if all(isinstance(x, list) and x and all(type(y) is int for y in x) for x in given):
                return given
        raise ValueError("prompt: give a text, a list of texts, a list of tokens, or a list of lists of tokens")

    @property
    def num_top(self) -> int | None:
        """Field `logprobs`."""
        return self.logprobs


class ResponseFormat(pydantic.BaseModel):
    """The form of the text."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]


class Function(pydantic.BaseModel):
    """A function that the answer may call."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    name: str = pydantic.Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(pydantic.BaseModel):
    """What the chat template may say of a function."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    type: Literal["function"]
    function: Function


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=NUM_TOP)
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    @pydantic.field_validator("messages")
    @classmethod
    def _plain(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose content is a text."""
        return [_plain_message(number, message) for number, message in enumerate(value)]

    @pydantic.model_validator(mode="after")
    def _fits(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: it has no effect without logprobs = true. Leave it out")
        if self.tools and self.parallel_tool_calls is False:
            raise ValueError("parallel_tool_calls: the network writes as many calls as it likes. Leave it out")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens: it differs from max_completion_tokens. Give one of them")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Field `max_completion_tokens`, or the earlier `max_tokens`."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def usable_tools(self) -> list[dict[str, Any]] | None:
        """The tools as the chat template takes them, their fields as they were given; None where there are none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def num_top(self) -> int | None:
        """Field `top_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _plain_message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message with parts of text joined. Raises ValueError for what is no message, and parts that are no text."""
    where = f"message {number}"
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where} has no role that is a text")
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where} has a part that is no text; this model reads text alone")
        content = "".join(filter(None, texts))
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": _calls(calls, where)}
        content = "" if content is None else content
    if not isinstance(content, str):
        raise ValueError(f"{where} has no content that is a text")
    return {**message, "content": content}


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Earlier calls as templates take them, whose arguments are no JSON but what it says. Raises ValueError."""
    if not isinstance(calls, list):
        raise ValueError(f"{where} has tool_calls that are no list")
    try:
        return [tool_call(call) for call in calls]
    except (Unusable, RecursionError) as error:
        raise ValueError(f"{where} has {error}") from None
