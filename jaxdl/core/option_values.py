"""From the words of a command line to a value of a field's type; and what values a type takes, in words."""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from jaxdl.core.reference import Reference


def plain(annotation: Any) -> Any:
    """The type without what is noted of it."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    annotation = plain(annotation)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(plain(member) for member in typing.get_args(annotation))
    return (annotation,)


def takes_many(annotation: Any, *, fixed: bool = True) -> bool:
    """Whether an option of this type takes several words; without `fixed`, whether any number of them."""
    every = [(typing.get_origin(member), typing.get_args(member)) for member in members(annotation)]
    return any(origin in (list, dict) or (origin is tuple and (fixed or ... in inner)) for origin, inner in every)


def convert(annotation: Any, words: Sequence[str]) -> Any:
    """The value of this type that the words spell. Raises ValueError when there is none."""
    for member in sorted(members(annotation), key=lambda member: member is not type(None)):  # "None" is not a string.
        origin, inner = typing.get_origin(member), typing.get_args(member)
        try:
            if origin is dict:
                return dict(_pair(inner[1], word) for word in words)
            if origin in (tuple, list):
                each = inner if origin is tuple and inner[-1] is not Ellipsis else [inner[0]] * len(words)
                return origin(convert(type_, [word]) for type_, word in zip(each, words, strict=True))
            if len(words) == 1:
                return _single(member, words[0])
        except ValueError:
            continue
    raise ValueError


def _pair(annotation: Any, word: str) -> tuple[str, Any]:
    """(name, value) of `NAME=VALUE`. Raises ValueError for another word."""
    name, equals, value = word.rpartition("=")
    if not (name and equals):
        raise ValueError
    return name, convert(annotation, [value])


def _single(annotation: Any, word: str) -> Any:
    if annotation is Any:  # A value as in Python, or a text.
        try:
            return ast.literal_eval(word)
        except (ValueError, SyntaxError):
            return word
    if annotation is type(None):
        if word not in ("None", "none"):
            raise ValueError
        return None
    if typing.get_origin(annotation) is Literal:
        values = typing.get_args(annotation)
        return values[[str(value) for value in values].index(word)]
    if annotation is bool:
        return bool(("false", "true").index(word.lower()))
    if annotation is Reference:
        return word
    assert annotation in (int, float, str, Path), f"options of type {annotation} are not read"
    return annotation(word)


_NOUNS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "a path",
    Reference: "FILE:NAME or MODULE:NAME",
    Any: "a value",
    type(None): "None",
}


def describe_type(annotation: Any) -> str:
    """`a number or None`: the values that an option of this type takes."""
    texts = []
    if members(annotation) == (int, float):
        return _NOUNS[float]
    for member in sorted(members(annotation), key=lambda member: member is type(None)):
        inner = typing.get_args(member)
        if typing.get_origin(member) is Literal:
            texts.append(("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner)))
        elif typing.get_origin(member) in (tuple, list):
            count = f"{len(inner)} values" if inner[-1] is not Ellipsis else "values"
            texts.append(f"{count}, each {describe_type(inner[0])}")
        elif typing.get_origin(member) is dict:
            texts.append("NAME=VALUE pairs" + ("" if inner[1] is Any else f", each VALUE {describe_type(inner[1])}"))
        else:
            texts.append(_NOUNS.get(member, getattr(member, "__name__", str(member))))
    return " or ".join(texts)
