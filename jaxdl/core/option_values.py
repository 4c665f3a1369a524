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
        return tuple(plain(one) for one in typing.get_args(annotation))
    return (annotation,)


def takes_many(annotation: Any, *, fixed: bool = True) -> bool:
    """Whether an option of this type takes several words; without `fixed`, whether any number of them."""
    every = [(typing.get_origin(one), typing.get_args(one)) for one in members(annotation)]
    return any(origin in (list, dict) or (origin is tuple and (fixed or ... in inner)) for origin, inner in every)


def convert(annotation: Any, words: Sequence[str]) -> Any:
    """The value of this type that the words spell. Raises ValueError when there is none."""
    for one in sorted(members(annotation), key=lambda one: one is not type(None)):  # "None" is not a string.
        origin, inner = typing.get_origin(one), typing.get_args(one)
        try:
            if origin is dict:
                return dict(_pair(inner[1], word) for word in words)
            if origin in (tuple, list):
                each = inner if origin is tuple and inner[-1] is not Ellipsis else [inner[0]] * len(words)
                return origin(convert(type_, [word]) for type_, word in zip(each, words, strict=True))
            if len(words) == 1:
                return _single(one, words[0])
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
        return values[[str(one) for one in values].index(word)]
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


def wanted(annotation: Any) -> str:
    """`a number or None`: the values that an option of this type takes."""
    found = []
    if members(annotation) == (int, float):
        return _NOUNS[float]
    for one in sorted(members(annotation), key=lambda one: one is type(None)):
        inner = typing.get_args(one)
        if typing.get_origin(one) is Literal:
            found.append(("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner)))
        elif typing.get_origin(one) in (tuple, list):
            count = f"{len(inner)} values" if inner[-1] is not Ellipsis else "values"
            found.append(f"{count}, each {wanted(inner[0])}")
        elif typing.get_origin(one) is dict:
            found.append("NAME=VALUE pairs" + ("" if inner[1] is Any else f", each VALUE {wanted(inner[1])}"))
        else:
            found.append(_NOUNS.get(one, getattr(one, "__name__", str(one))))
    return " or ".join(found)
