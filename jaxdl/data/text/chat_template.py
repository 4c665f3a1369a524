"""Chat templates: a conversation as the one text that a network reads, by the Jinja template of its tokenizer.

`template_of` finds the template of a tokenizer, `ChatTemplate.render` applies it. Templates come with checkpoints, from
strangers, so they run in Jinja's sandbox, with the same filters and functions as transformers gives them
(huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.codec import TOKENIZER_CONFIG_FILE, Codec

TEMPLATE_FILE, TEMPLATES_FOLDER = "chat_template.jinja", "additional_chat_templates"
"""The files of templates in a tokenizer's folder: the default one, and others by their names."""
_SPECIAL_FILE = "special_tokens_map.json"
_LEGACY_FILE = "chat_template.json"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
"""The names of templates where a tokenizer has several."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The fields of a message's reasoning, the usual name first."""

PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception("the plain template knows the roles system, user and assistant, not " + message['role']) }}
    {%- endif %}
    {%- if message['content'] is not string %}
        {{- raise_exception("the plain template takes contents that are texts alone") }}
    {%- endif %}
    {{- message['role'] | capitalize + ':\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + eos_token }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] | trim + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:\\n' }}
{%- endif %}
"""
"""The template where a tokenizer has none: `User:`, a new line, the text, an empty line, `Assistant:`, a new line, the
answer and the end of text. A text begins with the tokenizer's start, or where it has none its end of text."""
PLAIN_ORIGIN = "the plain chat template"

Message = Mapping[str, Any]


class TemplateRefusal(ConfigError):
    """A template does not render a conversation: it raised an error, which the message has."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template of conversations, with the tokens that it names.

    Attributes:
      source: the Jinja template.
      tokens: the texts of the special tokens, by the names that it has for them: "bos_token", "eos_token".
      with_tools: the template for conversations with tools, where it is another one.
      origin: where it was found, for messages.
    """

    source: str
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    with_tools: str | None = None
    origin: str = "the chat template"

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime.datetime | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: each with "role", "content" and what else the template knows, such as "tool_calls"; a field that is
            None is as one that is not there.
          add_generation_prompt: end with what comes before an answer.
          tools: the JSON schemas of functions that may be called.
          now: what the template takes for the present (`strftime_now`); None: the present.
          variables: what else the template takes, such as `enable_thinking`.

        Raises TemplateRefusal where the template does not take the conversation.
        """
        compiled = _compiled(self._for(tools), self.origin)
        return self._render(compiled, False, messages, add_generation_prompt, tools, now, variables)

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime.datetime | None = None,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """`(text, [first character, end) of each part that the template marks as written by the assistant)`.

        The marks are blocks `{% generation %}`, as in transformers; see `marks_answers`. Raises TemplateRefusal.
        """
        compiled = _compiled(self._for(tools), self.origin)
        text = self._render(compiled, False, messages, False, tools, now, variables)
        marked = self._render(compiled, True, messages, False, tools, now, variables)
        spans, pieces, length, starts = [], [], 0, list[int]()
        for piece in _split_at_marks(marked):
            if piece == _START:
                starts.append(length)
            elif piece == _END and starts:
                spans.append((starts.pop(), length))
            else:
                pieces.append(piece)
                length += len(piece)
        if "".join(pieces) != text:
            raise TemplateRefusal(
                f"{self.origin}: the parts that it marks with generation cannot be found in the text."
            )
        return text, sorted(span for span in spans if span[0] < span[1])

    def marks_answers(self, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Whether the template says itself which parts the assistant writes, by blocks `{% generation %}`."""
        return bool(_compiled(self._for(tools), self.origin).environment.marks)  # pyright: ignore

    @property
    def reads_tools(self) -> bool:
        """Whether the text of a conversation can say which functions may be called."""
        names = _compiled(self._for([{}]), self.origin).environment.names  # pyright: ignore
        return "tools" in names

    def to_json(self) -> dict[str, Any]:
        """The content of a file for `from_json`."""
        return {"template": self.source, "tokens": dict(self.tokens), "with_tools": self.with_tools}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], origin: str) -> ChatTemplate:
        """The template that `to_json` wrote. Raises ConfigError for other content."""
        try:
            template = cls(content["template"], content["tokens"], content["with_tools"], origin)
            assert isinstance(template.source, str)
            assert isinstance(template.with_tools, str | None)
            assert all(isinstance(text, str) for text in template.tokens.values())
        except (KeyError, TypeError, AttributeError, AssertionError):
            raise ConfigError(f"{origin}: it is not a chat template that jaxdl wrote. Restore the file.") from None
        return template.checked()

    def checked(self) -> ChatTemplate:
        """Itself. Raises ConfigError for a source that is not a template."""
        for tools in (None, [{}]):
            _compiled(self._for(tools), self.origin)
        return self

    def _for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        return self.with_tools if tools and self.with_tools is not None else self.source

    def _render(
        self, compiled: Any, marking: bool, messages: Sequence[Message], prompt: bool, tools: Any, now: Any, more: Any
    ) -> str:
        def strftime_now(form: str) -> str:
            return (now or datetime.datetime.now()).strftime(form)

        given = {
            "messages": [_message(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": prompt,
            "strftime_now": strftime_now,
        }
        try:
            return compiled.render(**{**self.tokens, **given, **more}, **{_MARKING: marking})
        except Exception as error:  # A template is a program, which may raise anything.
            kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
            raise TemplateRefusal(f"{self.origin} does not take this conversation ({kind}{error}).") from None


def template_of(codec: Codec, path: str | None = None) -> ChatTemplate:
    """The template of a tokenizer, or that of `path`: a file of Jinja, or the folder of another tokenizer.

    Where the tokenizer has none it is `PLAIN`. Raises ConfigError for files that cannot be read, and for a tokenizer
    without a token that ends a text where it needs one.
    """
    if path is None:
        return own_template(codec) or plain_template(codec)
    place = expand_home(path)
    tokens = _tokens(codec)
    if place.is_dir():
        there = _find(place, tokens)
        if there is None:
            raise ConfigError(f"--data.template {path}: there is no chat template in this folder.")
        return there
    return ChatTemplate(_text(place, f"--data.template {path}"), tokens, origin=path).checked()


def own_template(codec: Codec) -> ChatTemplate | None:
    """The template that lies in the folder of a tokenizer, None without one. Raises ConfigError for a damaged file."""
    if codec.tokenizer is None:
        return None
    path = expand_home(codec.tokenizer)
    return _find(path if path.is_dir() else path.parent, _tokens(codec)) if path.is_dir() or _is_named(path) else None


def plain_template(codec: Codec) -> ChatTemplate:
    """`PLAIN` for a tokenizer. Raises ConfigError for one without a token that ends a text."""
    end = None if codec.end is None else _text_of(codec, codec.end)
    if end is None:
        raise ConfigError(
            f"tokenizer {codec.tokenizer}: it has no chat template, and no token for the end of a text such as </s>: "
            "the network could not say where an answer ends. Give --data.template FILE, or another tokenizer."
        )
    start = None if codec.start is None else _text_of(codec, codec.start)
    return ChatTemplate(PLAIN, {"bos_token": start or end, "eos_token": end}, origin=PLAIN_ORIGIN)


def _find(folder: Path, tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template in a folder, in any of the forms in which tokenizers have it; a file of its own comes first."""
    config = folder / TOKENIZER_CONFIG_FILE
    given = _object(config).get("chat_template")
    if given is None:
        given = _object(folder / _LEGACY_FILE).get("chat_template")
    named = _named(given, config)
    file = folder / TEMPLATE_FILE
    origin = f"the chat template of {config}"
    if file.is_file():
        named[_DEFAULT], origin = _text(file, str(file)), f"the chat template {file}"
    for other in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja")):
        named[other.stem] = _text(other, str(other))
    if not named:
        return None
    if _DEFAULT not in named:
        raise ConfigError(
            f"{config}: its chat templates are {', '.join(sorted(named))}, and none is the {_DEFAULT} one. Name it so, "
            "or give --data.template FILE."
        )
    return ChatTemplate(named[_DEFAULT], tokens, named.get(_WITH_TOOLS), origin).checked()


def _named(given: Any, config: Path) -> dict[str, str]:
    """Templates by name, from the value of `chat_template`: one, or a list of {"name", "template"}."""
    if given is None:
        return {}
    pairs = [{"name": _DEFAULT, "template": given}] if isinstance(given, str) else given
    try:
        named = {pair["name"]: pair["template"] for pair in pairs}
        assert all(isinstance(text, str) for pair in named.items() for text in pair)
    except (KeyError, TypeError, AssertionError):
        raise ConfigError(f"{config}: chat_template is not a template, nor a list of such. Correct it there.") from None
    return named


def _tokens(codec: Codec) -> dict[str, str]:
    """The texts of the special tokens by name, as its files say; what they leave open, as it has them."""
    tokens = {"bos_token": codec.start, "eos_token": codec.end, "pad_token": codec.pad}
    texts = {name: _text_of(codec, token) for name, token in tokens.items() if token is not None}
    known: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
    if codec.tokenizer is not None:
        path = expand_home(codec.tokenizer)
        if path.is_dir() or _is_named(path):
            folder = path if path.is_dir() else path.parent
            for file in (_SPECIAL_FILE, TOKENIZER_CONFIG_FILE):
                known |= {name: value for name, value in _object(folder / file).items() if name.endswith("_token")}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in known.items()}
    return {name: text for name, text in contents.items() if isinstance(text, str)}


def _is_named(path: Path) -> bool:
    """Whether the files beside a tokenizer's file are those of the same tokenizer, by its name."""
    return path.name in ("tokenizer.json", "tokenizer.model")


def _text_of(codec: Codec, token: int) -> str | None:
    """The text that is encoded as this token alone; None where there is none."""
    text = codec.decode([token])
    return text if text and codec.encode(text) == [token] else None


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_text(path, str(path)))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not JSON ({error}). Fetch the file again.") from None
    return content if isinstance(content, dict) else {}


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{what}: no such file. Give a file with a Jinja template.") from None
    except OSError as error:
        raise ConfigError(f"{what}: it cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: it is not text in UTF-8. Give a file with a Jinja template.") from None


def _message(message: Message) -> dict[str, Any]:
    """A message without fields that are None, its reasoning under the names that templates read."""
    known = {name: value for name, value in message.items() if value is not None}
    reasoning = next((known[name] for name in _REASONING if name in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


_START, _END = "\U000f5e60", "\U000f5e61"
"""What stands around a marked part while it is looked for: characters for private use, which no text has."""
_MARKING = "jaxdl_marking"


def _split_at_marks(text: str) -> list[str]:
    """The text cut before and after each mark."""
    return re.split(f"([{_START}{_END}])", text)


@functools.lru_cache(maxsize=32)
def _compiled(source: str, origin: str) -> Any:
    """The template, compiled; its environment says in `marks` whether it has a block `{% generation %}`, and in `names`
    which variables it reads.

    Raises ConfigError for what is not a template.
    """
    import jinja2
    import jinja2.ext
    import jinja2.meta
    import jinja2.nodes
    from jinja2 import sandbox

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %} ... {% endgeneration %}` around what the assistant writes."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            setattr(self.environment, "marks", True)  # noqa: B010
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marking = jinja2.nodes.Name(_MARKING, "load")
            call = self.call_method("_mark", [marking])
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, marking: Any, caller: Any) -> str:
            return f"{_START}{caller()}{_END}" if marking is True else caller()

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Namespace(jinja2.utils.Namespace):
        """What `namespace()` makes, without names that begin with an underscore: those are Python's own."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace has no name such as {name}")
            super().__setitem__(name, value)

    environment: Any = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.marks = False
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "namespace": Namespace}
    try:
        environment.names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source)
    except jinja2.exceptions.TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        raise ConfigError(f"{origin}: it is not a template of Jinja ({where}{error}). Correct it.") from None
