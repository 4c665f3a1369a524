"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package: it imports the names that the package's `if TYPE_CHECKING:` block imports."""

    @functools.cache
    def modules() -> dict[str, str]:
        import ast

        spec: Any = sys.modules[package].__spec__
        body = ast.parse(spec.loader.get_source(spec.name)).body
        [block] = [node.body for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        return {
            alias.name: str(node.module) for node in block if isinstance(node, ast.ImportFrom) for alias in node.names
        }

    def load(name: str) -> Any:
        if name.startswith("__") or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules()[name]), name)

    return load
