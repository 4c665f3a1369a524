"""Configs of embedding tables: what a table is, how rows are updated, and how tables are spread over the devices."""

from __future__ import annotations

import collections
import fnmatch
from collections.abc import Sequence
from typing import Annotated, Literal

import pydantic
import tyro

from jaxdl.core.config import Config, ConfigError
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.parallel.embedding.optimizers import RowOptimizer, RowWiseAdaGrad
from jaxdl.parallel.embedding.schemes import Scheme, TableWise
from jaxdl.parallel.embedding.wire import WireType

Pooling = Literal["sum", "mean"]


class Table(Config):
    """An embedding table: a vector of `columns` numbers for each id from 0 to `rows` - 1."""

    name: str = pydantic.Field(min_length=1)
    """Its name in checkpoints, plans and messages."""
    rows: int = pydantic.Field(ge=1, lt=2**31 - 2**10)
    """How many ids it has a vector for; ids are int32, also with the number of a shard added."""
    columns: int = pydantic.Field(ge=1)
    """Numbers of a vector."""
    features: tuple[str, ...] = pydantic.Field(min_length=1)
    """The features of the data whose ids it has vectors for; several may share it."""
    pooling: Pooling = "sum"
    """How the vectors of a feature with several ids become one: their sum, or their mean."""
    optimizer: RowOptimizer | None = None
    """How its rows are updated; None takes `embedding.optimizer`."""
    init_scale: float | None = pydantic.Field(default=None, ge=0)
    """Initial numbers are uniform between minus and plus this; None takes 1 / sqrt(rows)."""


class EmbeddingConfig(Config):
    """How embedding tables are updated, and how they are spread over the devices."""

    optimizer: RowOptimizer = RowWiseAdaGrad()
    """How rows are updated, of tables that do not say it themselves."""
    scheme: Scheme = TableWise()
    """How a table is spread over the devices."""
    schemes: Annotated[tuple[tuple[str, Scheme], ...], tyro.conf.Suppress] = ()
    """Pairs of a pattern of names of tables, such as `user*`, and their scheme; the first that matches counts. Only a
    config file can set them."""
    places: Annotated[tuple[tuple[str, int], ...], tyro.conf.Suppress] = ()
    """Pairs of the name of a table and the number of the device (`table_wise`) or node that has it, from 0; tables
    without one go, the most expensive first, to where least is. Only a config file can set them."""
    forward_wire: WireType = "float32"
    """The type in which pooled vectors are sent between devices. `int8` has a float32 scale for each vector, and is
    rounded at random in training."""
    backward_wire: WireType = "float32"
    """The type in which their gradients are sent, and the touched rows of `replicated` tables. Gradients of whole
    `data_parallel` tables are always float32."""
    jagged: bool = False
    """Send ids of features with a varying number of them as values and lengths, not in as many columns as the example
    with most of them needs."""
    ids_ahead: bool = False
    """Send the ids of the next batch while the network works on this one: they depend on no row, so nothing is
    stale."""
    cache: CacheConfig = CacheConfig()
    """Tables that the host holds, of which the devices have the rows that are used."""

    def scheme_of(self, table: str) -> Scheme:
        """The scheme of a table of this name."""
        return self.schemes_of([table])[table]

    def schemes_of(self, tables: Sequence[str]) -> dict[str, Scheme]:
        """Of each table its scheme: that of the first pattern of its name. A plan names hundreds of tables."""
        schemes = [*(scheme for _, scheme in self.schemes), self.scheme]
        return {table: schemes[number] for table, number in self.patterns_of(tables).items()}

    def patterns_of(self, tables: Sequence[str]) -> dict[str, int]:
        """Of each table the number of its pattern in `schemes`; as many as there are for one that matches none."""
        first: dict[str, int] = {}
        for number, (pattern, _) in enumerate(self.schemes):
            first.setdefault(pattern, number)
        wild = [number for number, (pattern, _) in enumerate(self.schemes) if _is_wild(pattern)]
        pattern_numbers = {}
        for table in tables:
            named = first.get(table, len(self.schemes))
            earlier = (pattern for pattern in wild if pattern < named and selects(self.schemes[pattern][0], table))
            pattern_numbers[table] = next(earlier, named)
        return pattern_numbers


def selects(pattern: str, table: str) -> bool:
    """Whether a pattern of names is one of this table's.

    A plan names each table. Names need not be translated as patterns are, of which few are kept translated.
    """
    if pattern == table:
        return True
    return _is_wild(pattern) and fnmatch.fnmatchcase(table, pattern)


def _is_wild(pattern: str) -> bool:
    return "*" in pattern or "?" in pattern or "[" in pattern


def check_tables(tables: Sequence[Table], features: Sequence[str], config: EmbeddingConfig) -> None:
    """Raises ConfigError for tables that do not have each of the data's `features` once, or share a name."""
    for what, names in (
        ("tables have the name", [table.name for table in tables]),
        ("tables have the feature", [feature for table in tables for feature in table.features]),
    ):
        several = [name for name, count in collections.Counter(names).items() if count > 1]
        if several:
            raise ConfigError(f"tables: several {what} {several[0]!r}. Each has one of its own.")
    known = [feature for table in tables for feature in table.features]
    for feature in known:
        if feature not in features:
            raise ConfigError(
                f"tables: {feature!r} is no feature of the data, which has {', '.join(features) or 'none'}."
            )
    for feature in features:
        if feature not in known:
            raise ConfigError(f"tables: no table has the feature {feature!r} of the data. Add one.")
    for name, place in config.places:
        if place < 0 or [placed_name for placed_name, _ in config.places].count(name) > 1:
            raise ConfigError(f"--embedding.places {name!r} {place}: give each table one place, 0 or more.")
        table = next((candidate for candidate in tables if candidate.name == name), None)
        if table is None or not config.scheme_of(name).assigned:
            reason = "there is no such table" if table is None else f"{config.scheme_of(name).kind} has no place"
            raise ConfigError(f"--embedding.places {name!r}: {reason}. Leave it out.")
    config.cache.check([table.name for table in tables])
    used = set(config.patterns_of([table.name for table in tables]).values())
    for number, (pattern, _) in enumerate(config.schemes):
        if number in used:
            continue
        if any(selects(pattern, table.name) for table in tables):
            raise ConfigError(
                f"--embedding.schemes {pattern!r}: patterns before it have all of its tables. Put it before them, or "
                "leave it out."
            )
        listed = ", ".join(table.name for table in tables)
        raise ConfigError(f"--embedding.schemes {pattern!r}: no table has such a name; there are {listed}.")
