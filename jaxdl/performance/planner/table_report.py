"""The plan of a run's embedding tables: what its batches do with them, and the plan as text and lines of a config."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from rich.table import Table as RichTable

from jaxdl.core.config import ConfigError
from jaxdl.data import Data, Source, Splits
from jaxdl.exchange.cost import Machine
from jaxdl.parallel.embedding import EmbeddingConfig, Scheme, Table
from jaxdl.parallel.embedding.layout import columns_of_ids
from jaxdl.parallel.mesh import Axis
from jaxdl.performance.planner.table_search import possible, together
from jaxdl.performance.planner.tables import TablePlan, Workload, costs_of
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.data import read_splits
from jaxdl.training.run.plan.network import tables_of
from jaxdl.training.step.parts import IDS

_SLOWER = 0.999
"""Below this share of the plan's time, one scheme for all tables is faster."""
_MOST_EXAMPLES = 65_536
"""Examples that are read to count the rows that a node's batch touches."""


def measured_workload(
    experiment: Experiment, sizes: Mapping[str, int], read: Callable[[Data, None], Splits] = read_splits
) -> Workload | None:
    """The tables of an experiment and what its batches do with them, from its data; None for a model without tables.

    Raises ConfigError for data that cannot be read, for tables that do not fit them, and for a batch that the devices
    do not divide.
    """
    source = read(experiment.data, None).train
    features = source.spec.id_features()
    tables = tables_of(experiment.model, experiment.embedding, source.spec)
    if not tables:
        return None
    devices = math.prod(sizes.values())
    if experiment.batch_size % devices:
        raise ConfigError(
            f"batch_size {experiment.batch_size}: with embedding tables it is spread over all {devices} devices. "
            "Choose a multiple."
        )
    num_ids = {feature.name: feature.num_ids for feature in features}
    distinct = distinct_of(source, tables, num_ids, experiment.batch_size // sizes[Axis.REPLICA.value])
    every = {axis.value: sizes.get(axis.value, 1) for axis in Axis}
    jagged = {feature.name: feature for feature in features} if experiment.embedding.jagged else {}
    return Workload(tables, num_ids, distinct, experiment.batch_size, every, jagged)


def distinct_of(
    source: Source, tables: Sequence[Table], num_ids: Mapping[str, int], examples: int, seed: int = 0
) -> dict[str, float]:
    """Table -> distinct rows in so many random examples; of many, fewer are read, and the last slope goes on."""
    count = min(examples, _MOST_EXAMPLES, len(source))
    chosen = np.random.Generator(np.random.Philox(seed)).choice(len(source), count, replace=False)
    ids = source.batch(chosen)[IDS]
    columns, distinct = columns_of_ids(tables, num_ids), {}
    for table in tables:
        half, whole = (_distinct(ids[:size, columns[table.name]]) for size in (max(1, count // 2), count))
        # New rows come ever more slowly, so a straight line from here on is the most that they can be.
        more = (whole - half) / max(1, count - count // 2) * (examples - count)
        distinct[table.name] = float(min(table.rows, whole + more))
    return distinct


def _distinct(ids: np.ndarray) -> int:
    values = np.unique(ids)
    return int((values >= 0).sum())


def table_of(
    work: Workload, plan: TablePlan, base: EmbeddingConfig, machine: Machine, given: Collection[str]
) -> RichTable:
    """Each table with its scheme, what it adds to a step under the plan, and the scheme that would add least else.

    `given` are the tables whose scheme was not planned.
    """
    made = RichTable(title=f"Embedding tables, batch {work.batch_size:,}: the plan")
    for column in ("table", "rows", "ids", "rows a node touches", "scheme", "place", "adds ms", "or", "adds ms "):
        made.add_column(column, justify="left" if column in ("table", "scheme", "or") else "right")
    costs = Added(work, base, plan, machine, given)
    for table in work.tables:
        chosen, added = plan.schemes[table.name].kind, costs.of(table)
        other = min((kind for kind in added if kind != chosen), key=lambda kind: added[kind])
        made.add_row(
            table.name,
            f"{table.rows:,}",
            str(sum(work.num_ids[feature] for feature in table.features)),
            f"{work.distinct[table.name]:,.0f}",
            chosen + (" (given)" if table.name in given else ""),
            str(plan.places.get(table.name, "")),
            f"{1e3 * added[chosen]:.3f}" if chosen in added else "",
            other,
            f"{1e3 * added[other]:.3f}",
        )
    return made


class Added:
    """What tables add to a step under a plan, in seconds: the tables of other schemes cost the same with and without.

    Places are those by cost, not those of the plan. Schemes of tables in `given` stay as they are.
    """

    def __init__(
        self, work: Workload, base: EmbeddingConfig, plan: TablePlan, machine: Machine, given: Collection[str] = ()
    ) -> None:
        self._work, self._machine, self._schemes, self._given = work, machine, plan.schemes, frozenset(given)
        self._base = base.model_copy(update={"schemes": (), "places": ()})
        self._known: dict[tuple[str, frozenset[str], frozenset[str]], float | None] = {}

    def of(self, table: Table) -> dict[str, float]:
        """Scheme -> what a step costs more with a table in it than without the table; all others as planned.

        In the scheme of the plan it is what the table costs: tables share messages, so this is less than it costs
        alone.
        """
        planned_kind, others = self._schemes[table.name].kind, self._given - {table.name}
        extra_sec = {scheme.kind: self._more(table.name, scheme.kind, others) for scheme in possible(table, self._work)}
        if table.name in self._given:
            extra_sec[planned_kind] = self._more(table.name, planned_kind, self._given)
        return {kind: seconds for kind, seconds in extra_sec.items() if seconds is not None}

    def _more(self, table: str, kind: str, given: frozenset[str]) -> float | None:
        """None if tables cannot be cut so."""
        others = frozenset(name for name, scheme in self._schemes.items() if scheme.kind == kind and name != table)
        before, after = self._seconds(kind, others, given), self._seconds(kind, others | {table}, given)
        return None if after is None else after - (before or 0.0)

    def _seconds(self, kind: str, names: frozenset[str], given: frozenset[str]) -> float | None:
        """Of these tables with one scheme."""
        if not names:
            return 0.0
        key = kind, names, given & names
        if key not in self._known:
            fixed = {name: self._schemes[name] for name in key[2]}
            self._known[key] = None
            with contextlib.suppress(ConfigError):
                some = together(self._work, self._base, kind, names, fixed)
                self._known[key] = costs_of(*some, self._machine).total_sec
        return self._known[key]


def remarks(plan: TablePlan, memory: float, given: Collection[str] = ()) -> list[str]:
    """What a step costs under the plan and under each scheme, and what binds; `given` as in `table_of`."""
    lines = ["a step's tables (between nodes, inside, memory of rows), and the memory of a device:"]
    for name, costs in [("the plan", plan.costs), *sorted(plan.alone.items(), key=lambda item: item[1].total_sec)]:
        times = ", ".join(f"{1e3 * x:.3f}" for x in (costs.slow_sec, costs.inner_sec, costs.memory_sec))
        fits = "" if costs.needed_bytes <= memory else ", which does not fit"
        lines.append(f"  {name}: {1e3 * costs.total_sec:.3f} ms ({times}), {format_bytes(costs.device_bytes)}{fits}")
    fitting = {name: costs.total_sec for name, costs in plan.alone.items() if costs.needed_bytes <= memory}
    fastest = min(fitting, key=lambda name: fitting[name], default=None)
    if fastest is not None and fitting[fastest] < _SLOWER * plan.costs.total_sec:
        times = f"{1e3 * fitting[fastest]:.3f} ms against {1e3 * plan.costs.total_sec:.3f}"
        named = f"these have a scheme that is given: {', '.join(sorted(given))}" if given else "the search missed it"
        lines.append(f"{fastest} for all tables would be faster than the plan, {times}: {named}")
    parts = {
        "the network between nodes": plan.costs.slow_sec,
        "messages inside a node": plan.costs.inner_sec,
        "the memory of the devices": plan.costs.memory_sec,
    }
    binds = max(parts, key=lambda name: parts[name])
    full = plan.costs.needed_bytes > 0.9 * memory
    lines.append(f"what binds: {binds}" + (", and the room for tables is nearly full" if full else ""))
    return lines


def config_lines(plan: TablePlan) -> list[str]:
    """The plan as arguments of `EmbeddingConfig` in a config file; the scheme of most tables is that of all others."""
    texts = {name: _text(scheme) for name, scheme in plan.schemes.items()}
    [(most, _)] = Counter(texts.values()).most_common(1)
    lines = [f"    scheme={most},"]
    if others := [f"        ({name!r}, {text})," for name, text in texts.items() if text != most]:
        lines += ["    schemes=(", *others, "    ),"]
    if plan.places:
        lines += ["    places=(", *(f"        ({name!r}, {place})," for name, place in plan.places.items()), "    ),"]
    return lines


def _text(scheme: Scheme) -> str:
    values = {name: x for name, x in scheme.model_dump(exclude_defaults=True).items() if name != "kind"}
    return f"{type(scheme).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def format_bytes(num_bytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= 0.1 * size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"
