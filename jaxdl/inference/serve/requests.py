"""What a request asks for: its body becomes texts to write, or is refused."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import pydantic

from jaxdl.core.errors import ConfigError
from jaxdl.core.web.refusal import Refusal
from jaxdl.data import Codec
from jaxdl.inference.chatting import Chat
from jaxdl.inference.decoding.settings import Sampling
from jaxdl.inference.serve.answers import ChatForm, CompletionForm, Form
from jaxdl.inference.serve.bodies import Body, ChatBody, CompletionBody
from jaxdl.inference.serve.drawing import Penalties
from jaxdl.inference.serve.errors import of_invalid
from jaxdl.inference.serve.programs import NUM_STOP

_USUAL_TOKENS = 16
"""Of `/v1/completions` without `max_tokens`, as OpenAI's reference says."""

BodyT = TypeVar("BodyT", bound=Body)


@dataclass(frozen=True)
class Served:
    """The network that is served.

    Attributes:
      name: by which requests ask for it.
      step: of its checkpoint.
      codec: between text and tokens.
      context: the most tokens of a prompt and its continuation.
      max_tokens: the most that a request may ask for.
      most_texts: the most texts of one request.
      chat: its chat template; None where it has none that can be used.
    """

    name: str
    step: int
    codec: Codec
    context: int
    max_tokens: int
    most_texts: int
    chat: Chat | None

    @property
    def fingerprint(self) -> str:
        """What tells a client that the network behind a name is another one."""
        return f"step_{self.step}"


@dataclass(frozen=True)
class Ask:
    """The texts that a request asks for: `num_samples` of each prompt."""

    prompts: list[list[int]]
    num_samples: int
    hows: list[Sampling]
    """Of each prompt."""
    penalties: Penalties
    stop: tuple[str, ...]
    num_top: int | None
    form: Form
    streams: bool
    includes_usage: bool

    @property
    def num_prompt_tokens(self) -> int:
        """Those of all prompts."""
        return sum(map(len, self.prompts))


def read_completion(raw: bytes, served: Served) -> Ask:
    """What the body of `/v1/completions` asks for. Raises Refusal."""
    body = _parsed(CompletionBody, raw, served)
    try:
        given = body.prompts
    except ValueError as error:
        raise Refusal(400, f"{error}.", param="prompt") from None
    prompts = [_tokens(prompt, served) for prompt in given]
    number = body.n or 1

    def echo(index: int) -> str:
        prompt = given[index // number]
        return prompt if isinstance(prompt, str) else served.codec.decode(prompt)

    form = CompletionForm(served.codec, served.name, served.fingerprint, body.num_top is not None)
    if body.echo:
        form.echoes = echo
    return _ask(body, prompts, form, served, _USUAL_TOKENS)


def read_chat(raw: bytes, served: Served) -> Ask:
    """What the body of `/v1/chat/completions` asks for. Raises Refusal."""
    body = _parsed(ChatBody, raw, served)
    if served.chat is None:
        raise Refusal(400, f"{served.name} has no chat template. Use /v1/completions.", param="messages")
    if body.usable_tools and not served.chat.template.reads_tools:
        raise Refusal(
            400, f"tools: the chat template of {served.name} does not read them. Leave them out.", param="tools"
        )
    try:
        prompt = served.chat.prompt(body.messages, body.usable_tools)
    except ConfigError as error:
        raise Refusal(400, f"messages: {error}", param="messages") from None
    form = ChatForm(served.codec, served.name, served.fingerprint, body.num_top is not None)
    ends = ((), ()) if body.ignore_eos else (served.chat.stop, served.chat.stop_tokens)
    return _ask(body, [prompt], form, served, None, *ends)


def _parsed(kind: type[BodyT], raw: bytes, served: Served) -> BodyT:
    try:
        body = kind.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise of_invalid(error) from None
    if body.model not in (None, served.name):
        raise Refusal(
            404,
            f"The model {body.model[:100]!r} does not exist. This server has {served.name!r}.",
            param="model",
            code="model_not_found",
        )
    return body


def _tokens(prompt: str | list[int], served: Served) -> list[int]:
    """The tokens of a prompt."""
    if isinstance(prompt, str):
        return served.codec.prompt(prompt)
    if wrong := [token for token in prompt if not 0 <= token < served.codec.vocab_size]:
        raise Refusal(
            400,
            f"prompt: there is no token {wrong[0]}; they are numbered from 0 to {served.codec.vocab_size - 1}.",
            param="prompt",
        )
    return prompt


def _ask(
    body: Body, prompts: list[list[int]], form: Form, served: Served, usual: int | None, stop: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
) -> Ask:  # fmt: skip
    number, codec = body.n or 1, served.codec
    if number * len(prompts) > served.most_texts:
        raise Refusal(
            400,
            f"{number * len(prompts)} texts are asked for; this server takes {served.most_texts} at once. Ask for "
            "fewer.",
            param="n",
        )
    if body.most_tokens is not None and body.most_tokens > served.max_tokens:
        raise Refusal(400, f"max_tokens: this server writes at most {served.max_tokens:,} tokens.", param="max_tokens")
    ends = () if body.ignore_eos else (*stop_tokens, *codec.ends)
    stop_tokens = tuple(dict.fromkeys((*(body.stop_token_ids or ()), *ends)))
    if wrong := [token for token in stop_tokens if not 0 <= token < codec.vocab_size]:
        raise Refusal(400, f"stop_token_ids: there is no token {wrong[0]}.", param="stop_token_ids")
    if len(stop_tokens) > NUM_STOP:
        raise Refusal(400, f"stop_token_ids: at most {NUM_STOP - len(ends)} are taken.", param="stop_token_ids")
    seed = secrets.randbits(63) if body.seed is None else body.seed
    temperature = 1.0 if body.temperature is None else body.temperature
    draws = temperature > 0  # Else what limits the draws has no effect, and clients send it nevertheless.
    hows = [
        Sampling(
            num_tokens=_room(body, prompt, served, usual),
            temperature=temperature,
            top_k=body.top_k if draws and (body.top_k or 0) > 0 else None,
            top_p=body.top_p if draws else None,
            min_p=body.min_p or None if draws else None,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            seed=seed,
            stop_tokens=stop_tokens,
        )
        for prompt in prompts
    ]
    penalties, options = Penalties(body.presence_penalty or 0.0, body.frequency_penalty or 0.0), body.stream_options
    return Ask(
        prompts, number, hows, penalties, (*(body.stop or ()), *stop), body.num_top, form, bool(body.stream),
        bool(options and options.include_usage),
    )  # fmt: skip


def _room(body: Body, prompt: list[int], served: Served, usual: int | None) -> int:
    """How many tokens may be written after a prompt."""
    room, wanted = served.context - len(prompt), body.most_tokens
    if room < 1 or (wanted is not None and wanted > room):
        asked = "" if wanted is None else f", and {wanted:,} more were asked for"
        raise Refusal(
            400,
            f"This model's maximum context length is {served.context:,} tokens. The prompt has {len(prompt):,}{asked}. "
            "Shorten the prompt, or ask for fewer tokens.",
            param="messages" if usual is None else "prompt",
            code="context_length_exceeded",
        )
    most = room if usual is None else min(usual, room)
    return min(most, served.max_tokens) if wanted is None else wanted
