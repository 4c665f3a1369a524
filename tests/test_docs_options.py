"""Options in the text of README, CONTRIBUTING and the pages of docs/: they exist, and take the values given to them."""

import functools
import itertools
import re
import shlex
import sys

import pydantic
import pytest
from runs import ROOT
from test_docs import PAGES

import jaxdl
from jaxdl.core.config import Config, several_of
from jaxdl.core.kinds import choices
from jaxdl.core.options import parse
from jaxdl.platform.launch import asynchronous
from jaxdl.platform.search.config import SearchConfig
from jaxdl.training.experiment import Experiment

sys.path.insert(0, str(ROOT / "scripts"))
import docs_site


def option_paths(cls, prefix="", inside=()):
    """The options of all fields of a config class, of every kind of its choices too."""
    for name, field in cls.model_fields.items():
        yield f"--{prefix}{name}".replace("_", "-")
        if field.annotation is bool:
            yield f"--{prefix}no-{name}".replace("_", "-")
        several = several_of(field.annotation) is not None
        for one in docs_site.configs_in(field.annotation):
            if one not in inside:
                path = f"{prefix}{name}.{one.kind}." if several else f"{prefix}{name}."
                yield from option_paths(one, path, (*inside, one))


def test_options_in_the_text_exist():
    known = {path for one in (Experiment, asynchronous.Asynchronous, SearchConfig) for path in option_paths(one)}
    named = {
        (name, one)
        for name, text in PAGES.items()
        for one in re.findall(r"--[a-z-]+\.[a-z0-9-]+(?:\.[a-z0-9-]+)*", text)
    }
    assert not [f"{name}: {one}" for name, one in sorted(named) if one not in known]
    assert len(named) > 40


def inline_options(text):
    """The words of each `--option value ...` in backticks outside of blocks; none with a placeholder (FILE, ...)."""
    spans = re.findall(r"`(--[a-z][^`\n]* [^`\n]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return [shlex.split(span) for span in spans if not re.search(r"[A-Z]{2}|\.\.\.|(?<= )[A-Z](?= |$)|\$'", span)]


def first_part(word):
    """The field of a config that `--part.field` is in."""
    return word.removeprefix("--").partition(".")[0].partition("=")[0].replace("-", "_")


@functools.cache
def alone(config):
    """A config with the fields of a class, each checked by itself: what an option goes with is said in words."""
    fields = {name: (field.annotation, field) for name, field in config.model_fields.items()}
    made = pydantic.create_model(config.__name__, __base__=Config, __module__=__name__, **fields)
    digits = jaxdl.load(ROOT / "configs/digits.py")
    return made(**{name: getattr(digits, name) for name in fields} if config is Experiment else {})


def why_refused(words):
    """What the parser of training, searches or learners says against options with values; None if it takes them.

    A field of a part with kinds is one of any kind of it, where the words do not choose. Options of other programs,
    which are no field of these configs, are taken.
    """
    options = [word for word in words if word.startswith("--")]
    parts = {first_part(option) for option in options}
    defaults = (alone(Experiment), alone(SearchConfig), alone(asynchronous.Asynchronous))
    default = next((one for one in defaults if parts <= type(one).model_fields.keys()), None)
    if default is None:
        dotted = [option for option in options if "." in option]
        return f"{dotted[0]}: there is no such part" if dotted else None
    paths = {**choices(type(default)), **choices(type(default), several=True)}
    open_paths = [path for path in paths if f"--{path}" not in words and any(inside(one, path) for one in options)]
    refusals = []
    for kinds_of in itertools.product(*[[None, *paths[path]] for path in open_paths]):
        switched = [word for path, kind in zip(open_paths, kinds_of, strict=True) if kind for word in (path, kind)]
        front = [f"--{word}" if place % 2 == 0 else word for place, word in enumerate(switched)]
        try:
            parse(default, [*front, *words])
        except jaxdl.ConfigError as error:
            refusals.append(str(error))
        else:
            return None
    return refusals[0]


def inside(option, path):
    """Whether an option is a field of the part at a path."""
    return option.removeprefix("--").replace("-", "_").startswith(f"{path}.")


def test_options_with_values_in_the_text_are_taken():
    shown = {name.lower() for text in PAGES.values() for name in re.findall(r"^class (\w+)\(", text, re.M)}
    given = {
        (name, tuple(words))
        for name, text in PAGES.items()
        for words in inline_options(text)
        if words[-1].replace("_", "") not in shown and ".py:" not in words[-1]  # Kinds and files that a page makes.
    }
    refusals = [f"{name}: {shlex.join(words)}: {why}" for name, words in sorted(given) if (why := why_refused(words))]
    assert not refusals, "\n".join(refusals)
    assert len(given) > 60


@pytest.mark.parametrize(
    "text",
    ["`--report.tensorboard False`", "| `--report.tensorbord True` |", "`--optimizer.b1 much`", "`--mesh.fsdp 0`",
     "`--precision.static True`", "`--exchange topk --exchange.density 3`", "`--exchange nothing`", "`--parts.fsdp 1`",
     "`--scheduler.reduction few`"],
)  # fmt: skip
def test_an_option_that_cannot_be_is_found_in_the_text(text):
    (words,) = inline_options(text)
    assert why_refused(words)
