"""The engine of a fleet by its name."""

from __future__ import annotations

from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.platform.fleet import (  # noqa: F401  (they register themselves)
    kubernetes_engine,
    ray_engine,
    slurm_engine,
)
from jaxdl.platform.fleet.engine import Engine, engines
from jaxdl.platform.fleet.store import Store


def engine_options() -> list[str]:
    """The options of `serve` that are for some engine."""
    return sorted({option for engine in engines.values() for option in engine.options})


def make_engine(name: str, store: Store, num_nodes: int, **given: Any) -> Engine:
    """The engine of a name; `given` are the options of engines, None where they are not set.

    Raises ConfigError if there is no such engine, or an option is for another.
    """
    if name not in engines:
        raise ConfigError(f"--engine {name}: there is no such engine; choose one of {', '.join(sorted(engines))}.")
    kind = engines[name]
    for option, value in given.items():
        if value is not None and option not in kind.options:
            owners = ", ".join(sorted(other for other, engine in engines.items() if option in engine.options))
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise ConfigError(
                f"--{option.replace('_', '-')} {shown}: the engine {name} has no such option. It is for {owners}."
            )
    return kind(store, num_nodes, **{option: given.get(option) for option in kind.options})


def rehearsal_note(engine: Engine) -> str:
    """What to say of an engine whose nodes are all this machine; empty for one that has a cluster."""
    if not engine.rehearses:
        return ""
    others = " or ".join(f"--engine {name}" for name, kind in sorted(engines.items()) if not kind.rehearses)
    return f"--engine {engine.name}: a rehearsal, all nodes are processes of this machine. A cluster needs {others}."
