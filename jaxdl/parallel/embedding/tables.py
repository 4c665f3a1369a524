"""All embedding tables of a run on its mesh: their state, lookups, and updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.parallel.collectives.primitive import key_bits
from jaxdl.parallel.compiler.hlo import TABLES
from jaxdl.parallel.embedding import lookup, update
from jaxdl.parallel.embedding.initial import initial_rows
from jaxdl.parallel.embedding.jagged import Capacity, Feature, buckets, is_jagged
from jaxdl.parallel.embedding.layout import Buffer, make_buffers
from jaxdl.parallel.embedding.places import Places
from jaxdl.parallel.embedding.table import EmbeddingConfig, Table, check_tables
from jaxdl.parallel.embedding.wire import make_wire

TableState = dict[str, dict[str, jax.Array]]
"""Buffer -> `rows`, float32 `[rows, columns]`, and what its optimizer keeps of each row."""
Found = dict[str, Any]
"""Buffer -> a value of each device, along the first dimension."""
ROWS = "rows"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocatedIds:
    """Where the ids of a batch are: what `Tables.located` returns."""

    buffers: dict[str, lookup.Located]
    """Buffer -> values of each device, along the first dimension."""
    capacity: Capacity | None = field(default=None, metadata={"static": True})
    """The bucket of a batch with jagged features."""


class Tables:
    """The tables of a run: pure functions of their state, to be traced.

    Batches have ids int32 `[batch, ids]`: of each feature of the data, in their order, so many columns; -1 is no id.
    With jagged features they have lengths int32 `[batch, features]` too, and ids as `jagged.packed` makes them for the
    examples of a device. Pooled vectors are float32 `[batch, all columns]`, of the features in the same order.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        num_ids: Mapping[str, int],
        config: EmbeddingConfig,
        mesh: Mesh,
        jagged: Sequence[Feature] = (),
    ) -> None:
        """`num_ids` are the features of the data, in its order, and how many columns of ids each has.

        Batches with lengths are of `jagged`, the same features; some of them are jagged.

        Raises ConfigError for tables that do not fit the features, or cannot be cut as they should.
        """
        check_tables(tables, list(num_ids), config)
        self.config, self.mesh, self.tables = config, mesh, tuple(tables)
        self.buffers: tuple[Buffer, ...] = make_buffers(tables, num_ids, config, dict(mesh.shape))
        columns = {feature: table.columns for table in tables for feature in table.features}
        self.columns: dict[str, int] = {feature: columns[feature] for feature in num_ids}
        """The columns of each feature's vector, in the order of the data."""
        self._everywhere = PartitionSpec(tuple(mesh.axis_names))
        self._features = tuple(jagged)

    def buckets(self, batch_size: int) -> tuple[Capacity, ...]:
        """The capacities for ids of batches of this size, with jagged features; none without any."""
        return buckets(self._features, batch_size // self.mesh.size) if self._features else ()

    @functools.cache  # noqa: B019 - as many entries as buckets, and a run has one object
    def buffers_for(self, capacity: Capacity | None) -> tuple[Buffer, ...]:
        """The buffers for the ids of a bucket."""
        if capacity is None:
            return self.buffers
        jagged = [is_jagged(feature) for feature in self._features]
        return tuple(buffer.with_capacity(capacity, jagged) for buffer in self.buffers)

    @functools.cached_property
    def shapes(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """The shapes of the state."""
        return jax.eval_shape(self.init, jax.random.key(0))

    @functools.cached_property
    def specs(self) -> dict[str, dict[str, PartitionSpec]]:
        """The PartitionSpecs of the state."""
        return {
            buffer.name: {ROWS: buffer.rows_spec}
            | {
                name: buffer.number_spec if one_number else buffer.rows_spec
                for name, one_number in buffer.optimizer.row_numbers.items()
            }
            for buffer in self.buffers
        }

    def init(self, key: jax.Array) -> TableState:
        """The fresh state, equal on every mesh and under every scheme."""

        def one_device(words: jax.Array) -> TableState:
            state = {}
            for buffer in self.buffers:
                rows = initial_rows(buffer, words)
                state[buffer.name] = {ROWS: rows} | {
                    name: jnp.zeros(rows.shape[:1] if one_number else rows.shape, jnp.float32)
                    for name, one_number in buffer.optimizer.row_numbers.items()
                }
            return state

        # Folded with 2: a split of the key, for all else, has two folds with 0 and 1.
        words = jax.random.key_data(jax.random.fold_in(key, 2))
        return self._mapped(one_device, PartitionSpec(), self.specs)(words)

    def locate(self, ids: jax.Array, lengths: jax.Array | None = None) -> LocatedIds:
        """Sends the ids of a batch to where their rows are; this depends on no row."""
        capacity = None
        if lengths is not None:
            capacity = next(bucket for bucket in self.buckets(len(ids)) if sum(bucket) == ids.shape[1])
        buffers, everywhere = self.buffers_for(capacity), self._everywhere

        def one_device(ids: jax.Array, lengths: jax.Array | None) -> dict[str, lookup.Located]:
            return {buffer.name: lookup.locate(buffer, ids, lengths) for buffer in buffers}

        return LocatedIds(self._mapped(one_device, (everywhere, everywhere), everywhere)(ids, lengths), capacity)

    def lookup(self, rows: Mapping[str, jax.Array], located: LocatedIds, key: jax.Array | None = None) -> jax.Array:
        """The pooled vectors of a batch, from the rows of each buffer.

        `key` is for rounding vectors at random before they are sent; without one they are rounded to the nearest.
        """
        draws, buffers = key is not None, self.buffers_for(located.capacity)

        def one_device(rows: dict[str, jax.Array], located: dict[str, lookup.Located], words: jax.Array) -> jax.Array:
            parts = {}
            send = make_wire(self.config.forward_wire, words if draws else None, self.mesh)
            for buffer in buffers:
                sums = lookup.pooled(buffer, rows[buffer.name], located[buffer.name], send)
                parts |= {slot.vector: sums[:, number] for number, slot in enumerate(buffer.slots)}
            return jnp.concatenate([parts[first] for first in sorted(parts)], axis=1)

        specs, everywhere = {name: arrays[ROWS] for name, arrays in self.specs.items()}, self._everywhere
        run = self._mapped(one_device, (specs, everywhere, PartitionSpec()), everywhere)
        return run(dict(rows), located.buffers, key_bits(key))

    def by_feature(self, vectors: jax.Array) -> dict[str, jax.Array]:
        """Pooled vectors of the features, `[batch, columns]` each, from those that `lookup` returned."""
        ends = np.cumsum(list(self.columns.values()))[:-1].tolist()
        return dict(zip(self.columns, jnp.split(vectors, ends, axis=1), strict=True))

    def gradients(self, located: LocatedIds, grads: jax.Array, key: jax.Array | None = None) -> tuple[Found, jax.Array]:
        """The touched rows with the sums of their gradients, for `updated`; and the sum of squares of all of these.

        `grads` are those of the batch's pooled vectors, `[batch, all columns]`; `key` is as in `lookup`, another one.
        """
        draws, buffers = key is not None, self.buffers_for(located.capacity)

        def one_device(
            located: dict[str, lookup.Located], grads: jax.Array, words: jax.Array
        ) -> tuple[Found, jax.Array]:
            touched, square = {}, jnp.float32(0)
            send = make_wire(self.config.backward_wire, words if draws else None, self.mesh)
            for buffer in buffers:
                mine = [grads[:, slot.vector : slot.vector + buffer.columns] for slot in buffer.slots]
                where = located[buffer.name]
                here = lookup.owned_grads(buffer, jnp.stack(mine, axis=1), where, send)
                if buffer.scheme.dense_gradient:
                    rows = update.of_all_rows(buffer, where, here)
                else:
                    rows = update.of_all_copies(buffer, update.touched(buffer, where, here), send)
                touched[buffer.name] = rows
                square = square + update.square_sum(buffer, rows)
            return touched, square

        everywhere = self._everywhere
        run = self._mapped(one_device, (everywhere, everywhere, PartitionSpec()), (everywhere, PartitionSpec()))
        return run(located.buffers, grads, key_bits(key))

    def update(
        self,
        state: TableState,
        found: Found,
        *,
        kept: jax.Array,
        factor: jax.Array,
        learning_rate: jax.Array,
        count: jax.Array,
    ) -> TableState:
        """The state after the update of the rows `found`, in place if it is donated; unchanged if not `kept`.

        Gradients are multiplied by `factor`. `learning_rate` is that of the run's optimizer, and `count` the number of
        updates of the run with this one.
        """

        def one_device(state: TableState, touched: Found, numbers: Any) -> TableState:
            kept, factor, rate, count = numbers
            after = {}
            for buffer in self.buffers:
                optimizer_state = dict(state[buffer.name])
                rows, optimizer_state = update.update_rows(
                    buffer, optimizer_state.pop(ROWS), optimizer_state, touched[buffer.name],
                    kept=kept, factor=factor, rate=rate[buffer.name], count=count,
                )  # fmt: skip
                after[buffer.name] = {ROWS: rows} | optimizer_state
            return after

        rate = {buffer.name: learning_rate * buffer.optimizer.rate_factor for buffer in self.buffers}
        specs = (self.specs, self._everywhere, PartitionSpec())
        return self._mapped(one_device, specs, self.specs)(state, found, (kept, factor, rate, count))

    @property
    def layout(self) -> tuple[Places, ...]:
        """Where all rows are."""
        return tuple(buffer.places for buffer in self.buffers)

    def shardings(self) -> dict[str, dict[str, NamedSharding]]:
        """The shardings of the state."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), self.specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )

    def _mapped(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        # Copies are equal because all devices compute the same from the same, which the types do not follow.
        function = jax.named_scope(TABLES)(function)
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
