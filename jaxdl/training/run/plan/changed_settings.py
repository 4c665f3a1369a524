"""`may_change`: settings of a run that may be others when it resumes, as a search over learning rates needs.

The run's config is otherwise fixed for all its steps (`jaxdl.training.experiment.identity`). What may change are fields
that neither decide which examples a step sees nor which arrays the state has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdl.core.config import Config, ConfigError
from jaxdl.parallel.cluster.consistency import flat

PARTS = ("optimizer", "schedule", "exchange", "step", "guard", "task", "evaluation")
"""The parts of an experiment whose fields may change."""


def check_may_change(names: Sequence[str], config: Config | None = None, option: str = "--may-change") -> list[str]:
    """The dotted fields, `optimizer.learning_rate`, that `may_change` names; `-` and `_` mean the same.

    Raises ConfigError for one that cannot change while a run goes on, or that `config`, if given, does not have.
    """
    if isinstance(names, str):
        raise ConfigError(f"{option} {names!r}: a single string. Give a list of fields.")
    fields = [str(name).strip().replace("-", "_") for name in names]
    for name in fields:
        part, dot, _ = name.partition(".")
        if part not in PARTS or not dot:
            raise ConfigError(
                f"{option} {name}: it cannot change when a run resumes: what may is a field of "
                f"{', '.join(PARTS)}, such as optimizer.learning-rate. Name such a field, or choose another --workdir."
            )
        if config is not None:
            _check_field(config, name, option)
    return fields


def check_changes(names: Sequence[str], config: Config, workdir: Any) -> tuple[str, ...]:
    """The fields that `may_change` names, for a run in a workdir. Raises ConfigError."""
    fields = check_may_change(names, config)
    if fields and workdir is None:
        raise ConfigError("--may-change: it has no effect without --workdir, where the run's earlier settings are.")
    return tuple(fields)


def _check_field(config: Config, name: str, option: str) -> None:
    value: Any = config
    for part in name.split("."):
        if part not in type(value).model_fields if isinstance(value, Config) else True:
            raise ConfigError(f"{option} {name}: the experiment has no such field. --help lists the fields.")
        value = getattr(value, part)


def parts_of(names: Sequence[str]) -> list[str]:
    """The parts of the experiment that these fields belong to."""
    return sorted({name.partition(".")[0] for name in names})


def without(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A dumped config without these dotted fields."""
    rest_of_config = dict(config)
    for name in names:
        first, _, rest = name.partition(".")
        if not rest:
            rest_of_config.pop(first, None)
        elif isinstance(rest_of_config.get(first), Mapping):
            rest_of_config[first] = without(rest_of_config[first], [rest])
    return rest_of_config


def change_of_settings(earlier: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """What to say when a run resumes with other values of these fields; None when they are the same.

    `earlier` and `now` hold the parts of the dumped configs that the fields belong to.
    """
    before, after = flat(earlier), flat(now)
    inside = [field for field in after if any(field == name or field.startswith(f"{name}.") for name in names)]
    changed = [
        f"{field} from {before.get(field)} to {after[field]}" for field in inside if before.get(field) != after[field]
    ]
    return f"settings changed: {', '.join(changed)}" if changed else None
