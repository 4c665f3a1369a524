"""Rows of data sets as conversations: messages with roles, prompt and completion, instructions, ShareGPT's turns.

Whatever a row looks like, it becomes messages as chat templates take them, or the two texts of a completion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.data.text.answers import ASSISTANT, Unusable

COLUMNS = ("messages", "prompt", "completion", "instruction", "input", "output", "system", "tools")
"""What is looked for in a row."""
_ALSO = {"messages": ("conversations", "conversation")}
"""Other usual names of columns."""
ROLES = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": ASSISTANT, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT,
    "model": ASSISTANT, "bot": ASSISTANT, "function_call": ASSISTANT,
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "ipython",
}  # fmt: skip
"""The names of roles in data sets -> what templates call them."""
_LONGEST_NAME = 40


class Conversation(NamedTuple):
    """Messages with "role" and "content", the schemas of the tools, and which of the answers are not learned."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    without: frozenset[int] = frozenset()


class Completion(NamedTuple):
    """Two texts that follow each other without a template."""

    prompt: str
    completion: str


class Columns:
    """Under which names columns are looked for."""

    def __init__(self, renamed: Mapping[str, str]) -> None:
        """`renamed`: the names of those that are others, "instruction" -> "question". Raises ConfigError."""
        if unknown := [name for name in renamed if name not in COLUMNS]:
            raise ConfigError(
                f"--data.columns {unknown[0]}={renamed[unknown[0]]}: there is no such column to be found. "
                f"Choose from {', '.join(COLUMNS)}."
            )
        self._names = {name: (renamed[name],) if name in renamed else (name, *_ALSO.get(name, ())) for name in COLUMNS}

    @property
    def every(self) -> tuple[str, ...]:
        """All columns that are looked for."""
        return tuple(dict.fromkeys(name for names in self._names.values() for name in names))

    def read(self, row: Any) -> tuple[Conversation | Completion, tuple[str, ...]]:
        """(what a row says, the names of the columns that were not used). Raises Unusable."""
        if not isinstance(row, dict):
            raise Unusable("a row that is not an object with columns")
        names = {name: next((x for x in known if row.get(x) is not None), None) for name, known in self._names.items()}
        values = {name: row[column] for name, column in names.items() if column is not None}
        used, read = _form(values, row)
        taken = {names[name] for name in used} | {name for name in self.every if row.get(name) is None}
        return read, tuple(str(name) for name in row if name not in taken)


def _form(values: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[tuple[str, ...], Conversation | Completion]:
    """(the columns that a row is made of, what it says). Raises Unusable."""
    with_context = tuple(name for name in ("system", "tools") if name in values)
    if "messages" in values:
        messages = _listed(values["messages"], "messages")
        return ("messages", *with_context), _conversation(messages, values)
    if "prompt" in values and "completion" in values:
        prompt, completion = values["prompt"], values["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise Unusable("no answer: the completion is empty")
            return ("prompt", "completion"), Completion(_checked(prompt), _checked(completion))
        turns = [*_turns(prompt, "user"), *_turns(completion, ASSISTANT)]
        return ("prompt", "completion", *with_context), _conversation(turns, values)
    if "instruction" in values and "output" in values:
        texts = [values["instruction"], values.get("input", "")]
        if not all(isinstance(text, str) for text in (*texts, values["output"])):
            raise Unusable("an instruction, input or output that is not a text")
        question = "\n\n".join(text for text in texts if text.strip())
        turns = [*_turns(question, "user"), *_turns(values["output"], ASSISTANT)]
        used = tuple(name for name in ("instruction", "input", "output", *with_context) if name in values)
        return used, _conversation(turns, values)
    missing = next((f"{one} without {other}" for one, other in (("prompt", "completion"), ("instruction", "output"),
                    ("completion", "prompt"), ("output", "instruction")) if one in values), None)  # fmt: skip
    names = ", ".join(sorted(f"{name} (null)" if value is None and name in COLUMNS else str(name)
                             for name, value in row.items()))[:200]  # fmt: skip
    raise Unusable(
        f"{missing or 'no messages, no prompt and completion, no instruction and output'} (the columns are {names})"
    )


def _listed(value: Any, what: str) -> list[Any]:
    """A list, which may be given as its JSON. Raises Unusable."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Unusable(f"{what} that are a text, not a list") from None
    if not isinstance(value, list):
        raise Unusable(f"{what} that are not a list")
    return value


def _turns(value: Any, role: str) -> list[Any]:
    if not isinstance(value, str | list):
        raise Unusable("a prompt or a completion that is neither a text nor messages")
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _conversation(turns: Sequence[Any], values: Mapping[str, Any]) -> Conversation:
    """The conversation of turns in either form. Raises Unusable."""
    messages = [_message(turn) for turn in turns]
    without = frozenset(number for number, message in enumerate(messages) if message.pop("weight", 1) == 0)
    if not messages:
        raise Unusable("empty: no messages")
    system = values.get("system", "")
    if not isinstance(system, str):
        raise Unusable("a column system that is not a text")
    if system.strip():
        if messages[0]["role"] == "system":
            raise Unusable("a column system, and a message of the role system")
        messages.insert(0, {"role": "system", "content": _checked(system)})
        without = frozenset(number + 1 for number in without)
    answers = [(number, message) for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not any(message["content"].strip() or message.get("tool_calls") for _, message in answers):
        raise Unusable("no answer: no text of the assistant")
    if all(number in without for number, _ in answers):
        raise Unusable("no answer: the weight of each is 0")
    tools = _listed(values["tools"], "tools") if values.get("tools") else None
    if tools and not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("tools that are not objects")
    return Conversation(messages, tools or None, without)


def _message(turn: Any) -> dict[str, Any]:
    """A message, its role as templates call it. Raises Unusable."""
    if not isinstance(turn, dict):
        raise Unusable("a message that is not an object with a role and a content")
    share_gpt = "role" not in turn and "from" in turn
    given = turn.get("from" if share_gpt else "role")
    if not isinstance(given, str) or given not in ROLES:
        raise Unusable("no role" if given is None else f"the unknown role {str(given)[:_LONGEST_NAME]!r}")
    content = turn.get("value", turn.get("content")) if share_gpt else turn.get("content")
    names = ("from", "value", "role", "content")
    message: dict[str, Any] = {"role": ROLES[given], "content": _content(content)}
    message |= {name: value for name, value in turn.items() if name not in names and value is not None}
    if message.get("weight", 1) not in (0, 1):
        raise Unusable("a weight of a message that is not 0 or 1")
    if given == "function_call":
        message = _called(message)
    if "tool_calls" in message:
        message["tool_calls"] = [tool_call(call) for call in _listed(message["tool_calls"], "tool_calls")]
    return message


def _content(content: Any) -> str:
    """The text of a message: a string, or parts that are texts. Raises Unusable."""
    if content is None:
        return ""
    if isinstance(content, list):
        kinds = {part.get("type", "text") if isinstance(part, dict) else "text" for part in content}
        if others := sorted(str(kind)[:_LONGEST_NAME] for kind in kinds if kind != "text"):
            raise Unusable(f"a content with {', '.join(others)}, which is not text")
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise Unusable("a content that is not a text")
    return _checked(content)


def _checked(text: str) -> str:
    """The text. Raises Unusable where it is no Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unusable("half a surrogate pair, which is not a character") from None
    return text


def _called(message: dict[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT that calls a function, whose content is JSON, as a message that does."""
    try:
        call = json.loads(message["content"])
        return message | {"content": "", "tool_calls": [{"name": call["name"], "arguments": call["arguments"]}]}
    except (ValueError, KeyError, TypeError):
        return message


def tool_call(call: Any) -> dict[str, Any]:
    """A call as templates take it: arguments are an object, not its JSON, as OpenAI writes them. Raises Unusable."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable("a tool call without the name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise Unusable("a tool call whose arguments are not JSON") from None
    return {"type": "function"} | call | {"function": {"name": function["name"], "arguments": arguments}}
