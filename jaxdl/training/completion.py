"""`jaxdl --print-completion bash`: a script with which a shell completes commands, options and their values.

zsh reads the same script through its `bashcompinit`; tried by hand with zsh 5.9, the tests have bash alone.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, Literal

from jaxdl.core.config import Config, is_config, several_of
from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import Choice, kinds
from jaxdl.core.startup import OTHERS, VALUED, shipped_configs

OPTION = "--print-completion"


def option_values(cls: type[Config], prefix: str = "", inside: tuple[type, ...] = ()) -> dict[str, list[str]]:
    """Option -> the values that it has, none if they cannot be listed, for all fields of a config and of every kind."""
    options: dict[str, list[str]] = {}
    for name, field in cls.model_fields.items():
        path, part = f"{prefix}{name}".replace("_", "-"), field.annotation
        several = several_of(part)
        if several is not None and issubclass(several, Choice):
            options[f"--{path}"] = list(kinds(several))
            for kind, class_ in kinds(several).items():
                options |= option_values(class_, f"{prefix}{name}.{kind}.", (*inside, class_))
            continue
        if not is_config(part):
            if not any(is_config(arg) for arg in typing.get_args(part)):
                options |= _of_field(path, part)
            continue
        every = [part]
        if issubclass(part, Choice) and not part.kind:
            options[f"--{path}"] = [*kinds(part), *part.presets]
            every = list(kinds(part).values())
        for config in every:
            if config not in inside:
                options |= option_values(config, f"{prefix}{name}.", (*inside, config))
    return options


def _of_field(path: str, annotation: Any) -> dict[str, list[str]]:
    """The options of one field: a switch has two."""
    if annotation is bool:
        group, dot, last = path.rpartition(".")
        return {f"--{path}": [], f"--{group}{dot}no-{last}": []}
    return {f"--{path}": _literals(annotation)}


def _literals(annotation: Any) -> list[str]:
    """The words that a type lists: those of its Literals, and None where it has that."""
    if typing.get_origin(annotation) is Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [word for arg in typing.get_args(annotation) for word in ([] if arg is type(None) else _literals(arg))]


def script(args: Sequence[str], commands: Sequence[str]) -> str:
    """The script for the shell named in `args`, which completes `jaxdl COMMAND` and the options of `jaxdl train`.

    Its options are those of `Experiment` with the fields of all kinds, also of installed packages. Raises ConfigError
    for another shell.
    """
    if list(args) not in (["bash"], ["zsh"]):
        raise ConfigError(
            f"{OPTION} {' '.join(args) or repr('')}: give {OPTION} bash, or zsh; there are no others yet."
        )
    from jaxdl.training.experiment import Experiment

    options: dict[str, list[str]] = {f"--{name}": [] for name in (*VALUED, *OTHERS)}
    options["--init-step"] = ["newest", "best"]
    options |= option_values(Experiment)
    cases = "\n".join(f"    {name}) offered='{' '.join(words)}' ;;" for name, words in options.items() if words)
    begin = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" if args[0] == "zsh" else ""
    # `words` is a variable of zsh itself.
    return f"""# Completion of jaxdl for {args[0]}: source this.
{begin}_jaxdl() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" offered=''
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(commands)}' -- "$word"))
    return
  fi
  if [ "${{COMP_WORDS[1]}}" != train ]; then
    COMPREPLY=($(compgen -f -- "$word"))
    return
  fi
  case "$before" in
    --config) COMPREPLY=($(compgen -f -- "$word") $(compgen -W '{" ".join(shipped_configs())}' -- "$word")); return ;;
    --workdir|--init-from) COMPREPLY=($(compgen -d -- "$word")); return ;;
{cases}
  esac
  if [ -z "$offered" ] || [ "${{word:0:2}}" = -- ]; then
    offered='{" ".join(options)}'
  fi
  COMPREPLY=($(compgen -W "$offered" -- "$word"))
}}
complete -F _jaxdl jaxdl"""
