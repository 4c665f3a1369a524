"""Texts of users in YAML files."""

from __future__ import annotations

import json
import re

_RAW = re.compile("[\n\t\x20-\x7e\xa0-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]*")
_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")


def quote(text: str) -> str:
    """A text in double quotes, in ASCII, as every reader of YAML takes it.

    That is JSON, but for characters beyond U+FFFF: JSON writes two surrogates, which YAML has not. Without quotes
    `no`, `null` and `1:8` would be no texts.
    """
    return '"' + "".join(_escape(character) for character in text) + '"'


def _escape(character: str) -> str:
    if character > "\uffff":
        return f"\\U{ord(character):08x}"
    return "\\x7f" if character == "\x7f" else json.dumps(character)[1:-1]


def block(key: str, text: str) -> str:
    """`key: text` with the text on lines of its own, or in quotes where lines cannot have it unchanged."""
    plain = _RAW.fullmatch(text) and not _LINE_BREAKS.search(text) and not text.startswith((" ", "\n"))
    if not plain or not text.endswith("\n") or text.endswith("\n\n"):
        return f"{key}: {quote(text)}\n"
    return f"{key}: |\n" + "".join(f"  {line}\n" if line else "\n" for line in text[:-1].split("\n"))
