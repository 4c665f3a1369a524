"""`python -m jaxdl.generate --chat`: a conversation in the terminal, and answers to a file of conversations."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import print_out
from jaxdl.core.runs import read_lines
from jaxdl.inference.chatting import Chat, checked_messages

_HELP = "Type a message and Enter; /new begins another conversation, /exit or Ctrl-D ends."


def hold(chat: Chat, system: str | None, options: dict[str, Any]) -> None:
    """Holds a conversation: reads messages from the terminal, or lines of stdin, and prints answers as they come."""
    if jax.process_count() > 1:
        raise ConfigError("--chat: a conversation takes one process. Give --prompts FILE, or run one process.")
    start = [] if system is None else [{"role": "system", "content": system}]
    messages: list[dict[str, Any]] = list(start)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(_HELP, file=sys.stderr)
    for line in _lines(is_terminal):
        text = line.strip()
        if text in ("/exit", "/quit"):
            return
        if text == "/new":
            messages = list(start)
        elif text:
            messages.append({"role": "user", "content": text})
            answer = say(chat, messages, options)
            messages.append({"role": "assistant", "content": answer})


def say(chat: Chat, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Prints the answer to a conversation as it is written; returns it."""
    shown = print_out if jax.process_index() == 0 else lambda *_, **__: None
    prompt, left_out = chat.fitting(messages, options["num_tokens"])
    if left_out and jax.process_index() == 0:
        print(f"note: the first {left_out} messages are no longer read, so that the rest fits", file=sys.stderr)
    pieces = []
    try:
        for piece in chat.answer(prompt, **options):
            pieces.append(piece)
            shown(piece, end="")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    finally:
        shown("")
    return "".join(pieces)


def read_conversations(path: Path, system: str | None) -> list[dict[str, Any]]:
    """What is to be answered: rows with "messages", and perhaps "tools". Raises ConfigError.

    A line is a question, or with the ending .jsonl an object with "messages" (or a "prompt", a text or messages); what
    else it has stays in the row.
    """
    as_json = path.suffix in (".jsonl", ".json")
    rows = []
    for number, line in enumerate(read_lines(path, "--prompts"), 1):
        if line.strip():
            row = _row(line, f"--prompts {path}: line {number}") if as_json else _question(line)
            if system is not None:
                if row["messages"][0]["role"] == "system":
                    raise ConfigError(f"--system: line {number} of {path} has a message of the system. Leave one out.")
                row["messages"] = [{"role": "system", "content": system}, *row["messages"]]
            rows.append(row)
    if not rows:
        raise ConfigError(f"--prompts {path}: it has no conversations.")
    return rows


def _question(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}).") from None
    row = value if isinstance(value, dict) else {"messages": value}
    said = row.get("messages", row.get("prompt"))
    others = {name: entry for name, entry in row.items() if name != "prompt"}
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: its tools are not a list of objects.")
    return others | (_question(said) if isinstance(said, str) else {"messages": checked_messages(said, where)})


def _lines(is_terminal: bool) -> Iterator[str]:
    """The lines that are typed, or those of stdin."""
    if not is_terminal:
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (its import gives `input` an editor)
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
    print(file=sys.stderr)
