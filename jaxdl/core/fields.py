"""The fields of an experiment and their types, read from the source for the first check of a command line.

Importing the classes takes 2 s of CPU time; reading their source takes a few hundredths of a second.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections.abc import Collection
from pathlib import Path

ENTRY_POINTS = "jaxdl.kinds"
"""The group of entry points under which an installed package names modules that define kinds, see
`jaxdl.core.kinds`."""
SOURCE = "class"
"""The key in JSON that says where a class outside jaxdl is defined: `FILE:CLASS` or `MODULE:CLASS`."""

MAKE_CLASSES = {"type", "exec", "eval", "__import__", "load", "load_experiment", "from_json"}
"""Names with which a config file can define or import a class that is not visible in its source."""

_PACKAGE = Path(__file__).parent.parent
_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:$", re.MULTILINE)
_FIELD = re.compile(r"^    ([a-z]\w*): (?!ClassVar)(.+?)(?: = .*)?$", re.MULTILINE)
"""A field in the body of a class. A docstring line that looks like a field only makes the check more permissive."""
_NUMBERS = re.compile(r"Literal\[[\d, ]+\]")


@functools.cache
def experiment_fields() -> dict[str, str]:
    """Option -> its type in the source of `Experiment`, such as "int | None" or "MeshConfig"."""
    source = ast.parse((_PACKAGE / "training/experiment.py").read_bytes())
    [body] = [node.body for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Experiment"]
    return {
        node.target.id.replace("_", "-"): ast.unparse(node.annotation)
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def fields_of_part(annotation: str) -> set[str]:
    """The options in a part of the experiment, by the type of its field: of its class, and of those above it.

    None of a part whose kind is chosen by name, since another kind may be chosen than the one that has them, nor of a
    tuple, which is set in a config file.
    """
    bases, every, ambiguous = _classes()
    declared = {name: fields for name, fields in every.items() if name not in ambiguous}

    def above(name: str) -> set[str]:
        return {name}.union(*(above(base) for base in bases.get(name, ()) if base in declared))

    if annotation not in declared or any(annotation in above(name) - {name} for name in declared):
        return set()
    return {field.replace("_", "-") for name in above(annotation) for field, _ in declared[name]}


@functools.cache
def inner_fields() -> dict[str, set[str]]:
    """Last part of an option -> the types of all fields of that name in the configs of the package."""
    bases, declared, _ = _classes()

    def is_config(name: str) -> bool:
        return name == "Config" or any(map(is_config, bases.get(name, ())))

    types: dict[str, set[str]] = {}
    for name, fields in declared.items():
        for field, type_ in fields if is_config(name) else ():
            types.setdefault(field.replace("_", "-"), set()).add(type_)
    return types


@functools.cache
def _classes() -> tuple[dict[str, list[str]], dict[str, list[tuple[str, str]]], set[str]]:
    """The base classes, and the fields with their types, of the classes of the package; names of several classes."""
    ambiguous: set[str] = set()
    bases: dict[str, list[str]] = {}
    declared: dict[str, list[tuple[str, str]]] = {}
    for path in _PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        matches = list(_CLASS.finditer(text))
        for match, following in itertools.zip_longest(matches, matches[1:]):
            below = text[match.end() : following.start() if following else None]
            body = re.split(r"^(?=\S)", below, flags=re.MULTILINE)[0]
            ambiguous |= {match[1]} & bases.keys()
            bases.setdefault(match[1], []).extend(base.strip() for base in (match[2] or "").split(","))
            declared.setdefault(match[1], []).extend(_FIELD.findall(body))
    return bases, declared, ambiguous


def not_of_type(types: Collection[str], value: str) -> str | None:
    """The kind of number that a value should be but is not; None if it fits, or if a type is not a number."""
    kinds = {_NUMBERS.sub("int", kind) for type_ in types for kind in type_.split(" | ")}
    if not kinds <= {"int", "float", "None"} or kinds == {"None"}:
        return None
    if "None" in kinds and value in ("None", "none"):
        return None
    number = float if "float" in kinds else int
    try:
        number(value)
    except ValueError:
        return ("a whole number" if number is int else "a number") + (" or None" if "None" in kinds else "")
    return None


def is_stock(path: Path, seen: set[Path]) -> bool:
    """Whether a config file can only return jaxdl's own Experiment: it defines no class and imports known modules only.

    Known modules are jaxdl, the standard library, and files in the same folder for which this holds too. The
    config.json of a run must name no class. `seen` has the files checked so far.
    """
    if path in seen:
        return True
    seen.add(path)
    try:
        content = path.read_bytes()
        if path.suffix != ".py":
            return f'"{SOURCE}":'.encode() not in content
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.ClassDef) or name in MAKE_CLASSES:
            return False
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            imported = ["." * node.level + (node.module or "")]
        for name in imported:
            root = name.partition(".")[0]
            if root == "jaxdl":
                continue
            beside = path.with_name(f"{root or '.'}.py")
            if beside.is_file():
                if not is_stock(beside, seen):
                    return False
            elif path.with_name(root or ".").is_dir() or root not in sys.stdlib_module_names - {"importlib", "runpy"}:
                return False
    return True
