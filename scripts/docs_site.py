"""The hook of mkdocs (see mkdocs.yml) that writes the generated pages of the site: `make docs`.

- reference/config/*.md: every field of `Experiment`, from the config classes themselves;
- results.md, contributing.md and changelog.md: the files of the root, with their links turned towards the site.

After the build it checks that the pages find words without a server and without the network.

`pages()` returns them as text, so that a test can read them without mkdocs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import pydantic

from jaxdl.core.config import Config, several_of
from jaxdl.core.kinds import Choice, choices, kinds
from jaxdl.training.experiment import Experiment

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "reference/config"
FROM_ROOT = ("RESULTS", "CONTRIBUTING", "CHANGELOG")
LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "multiple of", "min_length": "items >="}
"""Name of a limit in the annotated types that pydantic keeps -> how it is shown."""


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages to the site: an event of mkdocs."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_post_build(config: Any) -> None:
    """Checks that the search of the built site needs no server: an event of mkdocs."""
    check_offline(Path(config.site_dir))


setattr(on_post_build, "mkdocs_priority", -200)  # noqa: B010  After the plugin `offline`, which writes the index at -100.


def check_offline(site: Path) -> None:
    """Raises if pages that are opened as files would not find words, or if one loads a script from the network."""
    for path in site.rglob("*.html"):
        scripts = re.findall(r'<script[^>]* src="?([^" >]+)', path.read_text(encoding="utf-8"))
        assert any("iframe-worker" in script for script in scripts), f"{path}: no script iframe-worker"
        assert not [script for script in scripts if "//" in script], f"{path}: a script from the network"
    index = (site / "search/search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = {"), "search/search_index.js is no script of the index"


def pages() -> dict[str, str]:
    """The generated pages: path inside the site -> Markdown."""
    found = {f"{REFERENCE}/{name}.md": "\n".join(lines) + "\n" for name, lines in config_pages().items()}
    return found | {
        f"{name.lower()}.md": for_site((ROOT / f"{name}.md").read_text(encoding="utf-8")) for name in FROM_ROOT
    }


def for_site(text: str) -> str:
    """A page of the repository's root with links as seen from the root of the site."""
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(rf"\]\(({'|'.join(FROM_ROOT)})\.md", lambda match: f"]({match[1].lower()}.md", text)


def config_pages() -> dict[str, list[str]]:
    """The lines of the pages on configs: `experiment` first, then one for each choice and each part."""
    found = {"experiment": _experiment_page()}
    for name, field in Experiment.model_fields.items():
        parts = list(configs_in(field.annotation))
        if parts:
            found[name] = _part_page(name, field, parts)
    return found


def _experiment_page() -> list[str]:
    lines = [
        "# Experiment",
        "",
        f"`{Experiment.__module__}.Experiment`. {_about(Experiment)}",
        "",
        "A config file's `config()` returns one. On the command line a field is an option, `batch_size` being "
        "`--batch-size`; a field of a part is `--optimizer.learning-rate`. `--optimizer lars` chooses a part by name; "
        "it then has the fields of that kind. Limits that join several fields are not in the tables: the message of "
        "the error says what to change.",
        "",
    ]
    return lines + _table(Experiment, "", links=True)


def _part_page(name: str, field: Any, parts: list[type[Config]]) -> list[str]:
    switched = name in choices(Experiment)
    lines = [f"# {name}", "", _plain(help_text(Experiment, name))]
    if switched:
        default = field.get_default(call_default_factory=True)
        names = ", ".join(f"[`{_kind(one)}`](#{_anchor(one)})" for one in parts)
        lines += ["", f"Kinds: {names}. Default: `{_kind(type(default))}`. Switch with `--{_option(name)} KIND`."]
    seen: set[type[Config]] = set()
    for one in parts:
        lines += _sections(one, name, seen, switched=switched)
    return lines


def _sections(cls: type[Config], path: str, seen: set[type[Config]], *, switched: bool = False) -> list[str]:
    """The section of a config class, and those of the classes inside it."""
    if cls in seen:
        return []
    seen.add(cls)
    title = f"`{_kind(cls)}`: {cls.__name__}" if switched else cls.__name__
    lines = ["", f"## {title} {{ #{_anchor(cls)} }}", "", f"`{cls.__module__}.{cls.__name__}`. {_about(cls)}", ""]
    lines += _table(cls, path)
    for name, field in cls.model_fields.items():
        for inner in configs_in(field.annotation):
            inner_path = f"{path}.{name}" + (f".{_kind(inner)}" if several_of(field.annotation) else "")
            lines += _sections(inner, inner_path, seen, switched=bool(getattr(inner, "kind", "")))
    return lines


def _table(cls: type[Config], path: str, *, links: bool = False) -> list[str]:
    """The fields of a class; with `links`, those that are parts lead to their own page."""
    fields = cls.model_fields
    if not fields:
        return ["No fields."]
    lines = ["| field | type | default | limits | meaning |", "|---|---|---|---|---|"]
    for name, field in fields.items():
        shown = f"[`{name}`]({name}.md)" if links and list(configs_in(field.annotation)) else f"`{name}`"
        anchor = f'<span id="{_option(f"{path}.{name}" if path else name)}-of-{_anchor(cls)}"></span>'
        kind = (
            "a part with kinds"
            if links and name in choices(cls)
            else _type(field.annotation, f"{name}.md" if links else "")
        )
        cells = [anchor + shown, kind, _default(field), _limits(field), _plain(help_text(cls, name))]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if isinstance(value, Config):
        return f"`{type(value).__name__}()`"
    return f"`{value!r}`".replace("|", "\\|")


def _limits(field: Any) -> str:
    """`>= 1, < 10` from what pydantic checks of the field by itself."""
    metadata = [*field.metadata, *_inner_metadata(field.annotation)]
    found = [
        f"{sign}&nbsp;{_number(getattr(one, name))}"
        for one in metadata
        for name, sign in LIMITS.items()
        if getattr(one, name, None) is not None
    ]
    return ", ".join(dict.fromkeys(found))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _inner_metadata(annotation: Any) -> Iterator[Any]:
    """What `Annotated` types inside an annotation say."""
    if typing.get_origin(annotation) is Annotated:
        for one in annotation.__metadata__:
            yield from (one.metadata if isinstance(one, pydantic.fields.FieldInfo) else (one,))
    for one in typing.get_args(annotation):
        yield from _inner_metadata(one)


def _type(annotation: Any, page: str = "") -> str:
    """A type in words, a config class as a link to its section, on another page if that is given."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _type(args[0], page)
    if origin is Literal:
        return " or ".join(f"`{one!r}`" for one in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one, page) for one in args)
    if several_of(annotation) is not None:
        return f"any of {', '.join(_type(one, page) for one in configs_in(annotation))}"
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return f"tuple of {_type(args[0], page)}"
    if origin is tuple:
        return f"({', '.join(_type(one, page) for one in args)})"
    if origin in (dict, typing.get_origin(typing.Mapping[str, int])):
        return f"mapping of {_type(args[0], page)} to {_type(args[1], page)}"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return f"[`{annotation.__name__}`]({page}#{_anchor(annotation)})"
    if annotation is type(None):
        return "`None`"
    return f"`{getattr(annotation, '__name__', annotation)}`"


def configs_in(annotation: Any) -> Iterator[type[Config]]:
    """The config classes that a type mentions; for a part with kinds, those of its kinds."""
    if isinstance(annotation, type) and issubclass(annotation, Choice) and not annotation.kind:
        yield from kinds(annotation).values()
    elif isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for one in typing.get_args(annotation):
        yield from configs_in(one)


def _kind(cls: Any) -> str:
    return cls.kind


def _anchor(cls: type[Config]) -> str:
    return cls.__name__.lower()


def _option(path: str) -> str:
    return path.replace("_", "-")


def _about(cls: type[Config]) -> str:
    """The docstring as it is: it may have formulas in an indented block."""
    text = inspect.getdoc(cls)
    assert text, f"{cls.__name__} has no docstring"
    return text


def help_text(cls: type[Config], name: str) -> str | None:
    """The string below a field, in the class that declares it; None without one."""
    owner = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    return _strings_below(owner).get(name)


@functools.cache
def _strings_below(cls: type[Config]) -> dict[str, str]:
    """Field -> the string below it, of the fields that a class declares itself."""
    source = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    [body] = [node.body for node in source.body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _plain(text: str | None) -> str:
    """A help text on one line, safe in a table."""
    assert text, "every config class and every field has a help text"
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
