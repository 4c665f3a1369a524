"""All embedding tables of a run on its mesh: their state, lookups, and updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.collectives.primitive import key_bits
from jaxdl.embedding import lookup, update
from jaxdl.embedding.initial import initial_rows
from jaxdl.embedding.layout import Buffer, make_buffers
from jaxdl.embedding.places import Places
from jaxdl.embedding.table import EmbeddingConfig, Table, check_tables
from jaxdl.embedding.wire import make_wire

TableState = dict[str, dict[str, jax.Array]]
"""Buffer -> `rows`, float32 `[rows, columns]`, and what its optimizer keeps of each row."""
Found = dict[str, Any]
"""Buffer -> a value of each device, along the first dimension."""
ROWS = "rows"


class Tables:
    """The tables of a run: pure functions of their state, to be traced.

    Batches have ids int32 `[batch, ids]`: of each feature of the data, in their order, so many columns; -1 is no id.
    Pooled vectors are float32 `[batch, all columns]`, of the features in the same order.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        num_ids: Mapping[str, int],
        config: EmbeddingConfig,
        mesh: Mesh,
    ) -> None:
        """`num_ids` are the features of the data, in its order, and how many columns of ids each has.

        Raises ConfigError for tables that do not fit the features, or cannot be cut as they should.
        """
        check_tables(tables, list(num_ids), config)
        self.config, self.mesh, self.tables = config, mesh, tuple(tables)
        self.buffers: tuple[Buffer, ...] = make_buffers(tables, num_ids, config, dict(mesh.shape))
        columns = {feature: table.columns for table in tables for feature in table.features}
        self.columns: dict[str, int] = {feature: columns[feature] for feature in num_ids}
        """The columns of each feature's vector, in the order of the data."""
        self._everywhere = PartitionSpec(tuple(mesh.axis_names))

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
                name: buffer.number_spec if one else buffer.rows_spec
                for name, one in buffer.optimizer.row_numbers.items()
            }
            for buffer in self.buffers
        }

    def init(self, key: jax.Array) -> TableState:
        """The fresh state, equal on every mesh and under every scheme."""

        def one_device(words: jax.Array) -> TableState:
            found = {}
            for buffer in self.buffers:
                rows = initial_rows(buffer, words)
                found[buffer.name] = {ROWS: rows} | {
                    name: jnp.zeros(rows.shape[:1] if one else rows.shape, jnp.float32)
                    for name, one in buffer.optimizer.row_numbers.items()
                }
            return found

        # Folded with 2: a split of the key, for all else, has two folds with 0 and 1.
        words = jax.random.key_data(jax.random.fold_in(key, 2))
        return self._mapped(one_device, PartitionSpec(), self.specs)(words)

    def lookup(
        self, rows: Mapping[str, jax.Array], ids: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, Found]:
        """The pooled vectors of a batch, from the rows of each buffer; and where its ids are, for `gradients`.

        `key` is that of rounding at random, where vectors travel so; without one they are rounded to the nearest.
        """
        draws = key is not None

        def one_device(rows: dict[str, jax.Array], ids: jax.Array, words: jax.Array) -> tuple[jax.Array, Found]:
            parts, owned = {}, {}
            send = make_wire(self.config.forward_wire, words if draws else None, lax.axis_index(self.mesh.axis_names))
            for buffer in self.buffers:
                owned[buffer.name] = lookup.owned_ids(buffer, ids)
                sums = lookup.pooled(buffer, rows[buffer.name], owned[buffer.name], send)
                sums = sums * _mean_factors(buffer, ids)
                parts |= {slot.vector: sums[:, number] for number, slot in enumerate(buffer.slots)}
            return jnp.concatenate([parts[first] for first in sorted(parts)], axis=1), owned

        specs, everywhere = {name: one[ROWS] for name, one in self.specs.items()}, self._everywhere
        run = self._mapped(one_device, (specs, everywhere, PartitionSpec()), (everywhere, everywhere))
        return run(dict(rows), ids, key_bits(key))

    def by_feature(self, vectors: jax.Array) -> dict[str, jax.Array]:
        """Pooled vectors of the features, `[batch, columns]` each, from those that `lookup` returned."""
        ends = np.cumsum(list(self.columns.values()))[:-1].tolist()
        return dict(zip(self.columns, jnp.split(vectors, ends, axis=1), strict=True))

    def gradients(
        self, owned: Found, ids: jax.Array, grads: jax.Array, key: jax.Array | None = None
    ) -> tuple[Found, jax.Array]:
        """The touched rows with the sums of their gradients, for `updated`; and the sum of squares of all of these.

        `grads` are those of the batch's pooled vectors, `[batch, all columns]`; `key` is as in `lookup`, another one.
        """
        draws = key is not None

        def one_device(owned: Found, ids: jax.Array, grads: jax.Array, words: jax.Array) -> tuple[Found, jax.Array]:
            found, square = {}, jnp.float32(0)
            send = make_wire(self.config.backward_wire, words if draws else None, lax.axis_index(self.mesh.axis_names))
            for buffer in self.buffers:
                mine = [grads[:, slot.vector : slot.vector + buffer.columns] for slot in buffer.slots]
                sent = jnp.stack(mine, axis=1) * _mean_factors(buffer, ids)
                here = lookup.owned_grads(buffer, sent, send)
                if buffer.scheme.dense_gradient:
                    one = update.of_all_rows(buffer, owned[buffer.name], here)
                else:
                    one = update.of_all_copies(buffer, update.touched(buffer, owned[buffer.name], here), send)
                found[buffer.name] = one
                square = square + update.square_sum(buffer, one)
            return found, square

        everywhere = self._everywhere
        run = self._mapped(one_device, (everywhere,) * 3 + (PartitionSpec(),), (everywhere, PartitionSpec()))
        return run(owned, ids, grads, key_bits(key))

    def updated(
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

        def one_device(state: TableState, found: Found, numbers: Any) -> TableState:
            kept, factor, rate, count = numbers
            after = {}
            for buffer in self.buffers:
                own = dict(state[buffer.name])
                one = found[buffer.name]
                one = one._replace(grads=one.grads * factor)
                rows, own = update.updated(
                    buffer, own.pop(ROWS), own, one, kept=kept, rate=rate[buffer.name], count=count
                )
                after[buffer.name] = {ROWS: rows} | own
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
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _mean_factors(buffer: Buffer, ids: jax.Array) -> jax.Array:
    """By how much each sum is multiplied, `[local batch, slots, 1]`: for a mean one over the number of ids."""
    counts = lookup.num_ids(buffer.slots, ids)
    means = jnp.asarray([slot.pooling == "mean" for slot in buffer.slots])
    return jnp.where(means, 1 / jnp.maximum(counts, 1), 1)[..., None]
