"""Merges of replicas that have parameters of their own, by the exchange or by messages between neighbours."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.exchange import by_name, exchanged_on_mesh
from jaxdl.parallel.mesh import Axis
from jaxdl.parallel.sharding import named
from jaxdl.training.rounds.local import JOINED, begin_anew, joinable
from jaxdl.training.rounds.replicas import TINY, copies_of, finite_replicas, least_scale, parts_in_mean, where, wide
from jaxdl.training.state import OUTER, Own, TrainState, replicated
from jaxdl.training.step import Metrics, Parts, ema_decay

Pieces = dict[str, jax.Array]
"""Those of some fragments, by their names."""
_REPLICA = Axis.REPLICA.value
_KEY = 3
"""Folded with the key of the step before it this gives that of a merge; 0 to 2 are the step's own."""


def make_merge(parts: Parts, number: int) -> jax.stages.Wrapped:
    """The jitted merge `state -> (state, metrics)` of this number; the state is donated.

    Metrics are float32 scalars, the same on all devices: `joined/sums/NAME`, the total over all replicas of a sum of
    the task since the last merge, over good steps, and `joined/seen`, the weight of all steps; `agreement/distance`,
    the root mean square of the replicas' distances from what they agree on; `agreement/bad_replicas`, how many had bad
    numbers and were left out; `bad_steps`, skipped ones of all replicas; and those of the exchange.
    """
    merge, num_replicas = Merge(parts), parts.layout.mesh.shape[_REPLICA]

    def merged(state: TrainState) -> tuple[TrainState, Metrics]:
        return parts.agreement.merge(merge, state, number, num_replicas)

    shardings = parts.state_spec.shardings
    return jax.jit(
        merged,
        donate_argnums=0,
        in_shardings=(shardings,),
        out_shardings=(shardings, replicated(parts.layout)),
    )


def make_settle(parts: Parts) -> jax.stages.Wrapped:
    """The jitted function `state -> (state, metrics)` that makes the anchor the mean of the replicas.

    The state is donated. It changes nothing that a later step reads, so it does not matter when, and how often, it is
    called. Metrics: `joined/...` as of `make_merge`, since the last call; `replicas/distance`, the root mean
    square of the replicas' distances from the mean, and `replicas/bad`, how many have numbers that are not finite, and
    are left out.
    """
    merge, shardings = Merge(parts), parts.state_spec.shardings
    return jax.jit(
        merge.settle,
        donate_argnums=0,
        in_shardings=(shardings,),
        out_shardings=(shardings, replicated(parts.layout)),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Begun:
    """A merge whose messages have been sent, and which has not changed the parameters yet."""

    mean: Pieces
    """The mean of the anchor less each replica's parameters."""
    healthy: jax.Array
    """Which replicas have no bad numbers, and steps that were not bad or none at all, bool `[fragment, replica]`."""
    factor: jax.Array
    """Each replica's part in the mean, float32 `[fragment, replica]`; they sum to 1, or to 0 if none took part."""
    metrics: Metrics


class Merge:
    """Merges of replicas, as the kinds of agreement call for them (`jaxdl.exchange.agreement.Merges`); traced."""

    def __init__(self, parts: Parts) -> None:
        assert parts.fragments is not None, "replicas that agree in every step never merge"
        self._parts, self._mesh, self._fragments = parts, parts.layout.mesh, parts.fragments
        self._num_replicas = self._mesh.shape[_REPLICA]

    def by_exchange(self, state: TrainState, fragments: Sequence[int]) -> tuple[TrainState, Metrics]:
        """The state after the replicas have exchanged what they changed, and what the exchange measured."""
        state, begun = self.begin(state, fragments)
        return self.finish(state, begun, fragments)

    def begin(self, state: TrainState, fragments: Sequence[int]) -> tuple[TrainState, Begun]:
        """Sends what each replica has changed of fragments, and receives the mean. What is counted begins anew."""
        parts, own = self._parts, state.own
        anchor, mine = self._anchor(state, fragments), self._mine(own, fragments)
        delta = {name: anchor[name][None] - x for name, x in mine.items()}
        specs, wanted = self._specs(parts.state_spec.grads, fragments), self._specs(parts.state_spec.update, fragments)
        sums = joinable(own) | {name: own.guard[name] for name in ("bad_steps",) if own.guard}
        weights = {str(fragment): own.since["merge_weight"][:, fragment] for fragment in fragments}
        finite, told = self._told(delta, specs, sums | weights)
        each = [parts_in_mean(finite, told[str(fragment)], told[f"{JOINED}seen"]) for fragment in fragments]
        # All devices know these already: without this XLA divides them, and sums them by messages.
        same = NamedSharding(self._mesh, PartitionSpec())
        healthy, factor = (lax.with_sharding_constraint(jnp.stack(x), same) for x in zip(*each, strict=True))
        place = self._places(fragments)
        # The exchange takes the plain mean over the replicas.
        shares = {
            name: where(healthy[place[name]], x * wide(factor[place[name]] * self._num_replicas, x), 0)
            for name, x in delta.items()
        }
        stacked = {name: PartitionSpec(_REPLICA, *spec) for name, spec in specs.items()}
        shares = lax.with_sharding_constraint(shares, named(self._mesh, stacked))
        # XLA fuses what reads the same parameters: without this, the messages with the end of the steps beside them.
        shares, state = lax.optimization_barrier((shares, state))
        own = state.own
        places = self._of_fragments(parts.state_spec.specs.exchange_state, fragments)
        exchange = exchanged_on_mesh(parts.exchange, specs, places, self._mesh, wanted=wanted)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step - 1), _KEY)
        mean, new, of_exchange = exchange(shares, self._of_fragments(state.exchange_state, fragments), key)
        metrics = {f"exchange/{name}": value for name, value in of_exchange.items()}
        metrics |= {"agreement/bad_replicas": jnp.sum(1.0 - finite)}
        metrics |= {name: told[name].sum() for name in sums}
        since = begin_anew(own) | {"merge_weight": own.since["merge_weight"].at[:, jnp.array(fragments)].set(0)}
        state = state.replace(
            exchange_state=self._with_fragments(state.exchange_state, new, fragments),
        ).with_own(dataclasses.replace(own, since=since))
        return state, Begun(mean, healthy, factor, metrics)

    def finish(self, state: TrainState, begun: Begun, fragments: Sequence[int]) -> tuple[TrainState, Metrics]:
        """Moves the anchor and the replicas; the merge may have begun some steps before this state."""
        agreement, place = self._parts.agreement, self._places(fragments)
        replicas, outer = state.own, state.agreement_state[OUTER]
        before, mine = self._anchor(state, fragments), self._mine(replicas, fragments)
        kept = {name: self._of(tree, fragments) for name, tree in outer.items()}
        moved, new_outer = agreement.move_anchor(before, kept, begun.mean)
        taken = jnp.any(begun.factor > 0, axis=1)

        def chosen(new: Pieces, old: Pieces) -> Pieces:
            return {name: jnp.where(taken[place[name]], x, old[name]) for name, x in new.items()}

        after, new_outer = chosen(moved, before), {name: chosen(tree, kept[name]) for name, tree in new_outer.items()}
        specs = self._specs(self._parts.state_spec.params, fragments)
        after = lax.with_sharding_constraint(after, named(self._mesh, specs))
        sound, changes, model_state, distance = self._shared(state, before, mine, begun, fragments)
        adopted = {
            name: where(sound, agreement.adopt(x, before[name], after[name], self._num_replicas), after[name])
            for name, x in mine.items()
        }
        replicas = dataclasses.replace(self._with_mine(replicas, adopted, fragments), **changes)
        state = self._with_anchor(state, after, fragments).replace(
            model_state=model_state,
            ema_params=self._average(state, after, fragments),
            agreement_state={
                OUTER: {name: self._put(tree, new_outer[name], fragments) for name, tree in outer.items()}
            },
        )
        state = state.with_own(self._with_fresh_optimizer(replicas, sound))
        return state, begun.metrics | {"agreement/distance": distance}

    def by_messages(
        self, state: TrainState, hops: Sequence[int], fractions: Sequence[float]
    ) -> tuple[TrainState, Metrics]:
        """The state after replicas have averaged with others, by push-sum: one with bad numbers has no part in it."""
        replicas = state.own
        mine = self._mine(replicas, (0,))
        finite = finite_replicas(mine)
        weight = jnp.where(finite, replicas.share["weight"], 0)
        sent = {name: where(finite, x * wide(weight, x), 0) for name, x in mine.items()}
        received = [self._shift(sent, weight, distance) for distance in hops]
        parts = [(1 - sum(fractions), (sent, weight)), *zip(fractions, received, strict=True)]
        total, new_weight = jax.tree.map(
            lambda *xs: functools.reduce(jnp.add, xs), *[jax.tree.map(lambda x, c=c: c * x, tree) for c, tree in parts]
        )
        lonely = new_weight == 0
        mixed = {
            name: where(lonely, mine[name], x / wide(jnp.where(lonely, 1, new_weight), x)) for name, x in total.items()
        }
        new = self._with_mine(dataclasses.replace(replicas, share={"weight": new_weight}), mixed, (0,))
        fresh = jax.tree.map(lambda x, common: where(finite, x, common), replicas.model_state, state.model_state)
        new = self._with_fresh_optimizer(dataclasses.replace(new, model_state=fresh), finite)
        specs = self._specs(self._parts.state_spec.params, (0,))
        sizes = [math.prod(NamedSharding(self._mesh, specs[name]).shard_shape(x.shape[1:])) for name, x in mine.items()]
        sent = jnp.float32(4 * (sum(sizes) + 1) * len(hops))
        return state.with_own(new), {f"exchange/bytes_sent/{_REPLICA}": sent}

    def settle(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """The state with the mean of the replicas as its parameters, and what was seen of them."""
        replicas = state.own
        mine = self._mine(replicas, (0,))
        leaves = {"params": mine, "state": by_name(replicas.model_state)}
        finite = finite_replicas({f"{part}/{name}": x for part, xs in leaves.items() for name, x in xs.items()})
        weight = jnp.where(finite, replicas.share["weight"], 0)
        factor = weight / jnp.maximum(weight.sum(), TINY)

        def mean(x: jax.Array) -> jax.Array:
            total = jnp.sum(where(finite, x * wide(factor, x), 0), axis=0)
            return jnp.where(jnp.any(finite), total, jnp.nan)

        averaged = {name: mean(x) for name, x in mine.items()}
        distance = self._distance(averaged, mine, factor)
        state = self._with_anchor(state, averaged, (0,)).replace(model_state=jax.tree.map(mean, replicas.model_state))
        totals = {name: jnp.sum(x) for name, x in joinable(replicas).items()}
        state = state.with_own(dataclasses.replace(replicas, since=replicas.since | begin_anew(replicas)))
        return state, totals | {"replicas/distance": distance, "replicas/bad": jnp.sum(1.0 - finite)}

    def _told(
        self, pieces: Pieces, specs: Mapping[str, PartitionSpec], numbers: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Whether a replica's pieces are finite, and its `numbers`; `[replica]`, which all get in one all-reduce."""
        axes, numbers = tuple(self._mesh.axis_names), dict(sorted(numbers.items()))  # As JAX hands on a dictionary.

        def one_device(pieces: Pieces, numbers: Mapping[str, jax.Array]) -> jax.Array:
            row = jnp.stack([jnp.float32(0), *[x[0].astype(jnp.float32) for x in numbers.values()]])
            row = jnp.where(self._first(), row, 0).at[0].set(jnp.where(finite_replicas(pieces)[0], 0.0, 1.0))
            table = jnp.zeros((self._num_replicas, row.size)).at[lax.axis_index(_REPLICA)].set(row)
            return lax.psum(table, axes)

        stacked = {name: PartitionSpec(_REPLICA, *spec) for name, spec in specs.items()}
        table = jax.shard_map(
            one_device,
            mesh=self._mesh,
            in_specs=(stacked, PartitionSpec(_REPLICA)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(pieces, dict(numbers))
        table = lax.with_sharding_constraint(table, NamedSharding(self._mesh, PartitionSpec()))
        return table[:, 0] == 0, dict(zip(numbers, table[:, 1:].T, strict=True))

    def _first(self) -> jax.Array:
        """In a manual region: whether a device is the first of its replica."""
        return lax.axis_index(tuple(axis for axis in self._mesh.axis_names if axis != _REPLICA)) == 0

    def _shared(
        self, state: TrainState, before: Pieces, mine: Pieces, begun: Begun, fragments: Sequence[int]
    ) -> tuple[jax.Array, dict[str, Any], Any, jax.Array]:
        """What else replicas tell each other when a merge arrives, in one all-reduce:

        - which replicas' numbers are finite and took part in the merge, `[replica]`: the steps beside it may have ended
          badly;
        - what changes in `Own`: the mean of their model states, and the least loss scale;
        - that mean;
        - the root mean square over replicas of their distances from what they agree on.
        """
        own, place, axes = state.own, self._places(fragments), tuple(self._mesh.axis_names)
        inner = tuple(axis for axis in axes if axis != _REPLICA)
        healthy, factor = jnp.all(begun.healthy, axis=0), jnp.mean(begun.factor, axis=0)
        specs = self._specs(self._parts.state_spec.params, fragments)
        stacked = {name: PartitionSpec(_REPLICA, *spec) for name, spec in specs.items()}
        center = {name: before[name] - x for name, x in begun.mean.items()}
        copies = {name: copies_of(spec, self._mesh) for name, spec in specs.items()}
        scale = {"scale": own.loss_scale["scale"]} if own.loss_scale else {}

        def one_device(params: Pieces, own_state: Any, mine: Pieces, center: Pieces, told: Pieces, parts: Any) -> Any:
            leaves = params | {f"state/{name}": x for name, x in by_name(own_state).items()}
            unsound = lax.psum(jnp.where(finite_replicas(leaves)[0] & (told["healthy"][0] > 0), 0.0, 1.0), inner)
            sound = unsound == 0
            part = jnp.where(sound, told["factor"][0], 0)
            flat, as_tree = ravel_pytree((jax.tree.map(lambda x: x[0], own_state), jnp.float32(1)))
            scales = {
                name: jnp.zeros(self._num_replicas).at[lax.axis_index(_REPLICA)].set(jnp.where(sound, x[0], jnp.inf))
                for name, x in told.items()
                if name in scale
            }
            sums = jax.tree.map(
                lambda x: jnp.where(self._first(), x, 0), (jnp.where(sound, flat * part.astype(flat.dtype), 0), scales)
            )
            squares = jnp.float32(0)
            for name, x in mine.items():
                share = parts[place[name]][0]
                square = share * jnp.sum((x[0] - center[name]) ** 2) / copies[name]
                squares += jnp.where(share > 0, square, 0)
            joined, split = ravel_pytree((*sums, squares))
            flat, scales, squares = split(lax.psum(joined, axes))
            total, weight = as_tree(flat)
            return sound[None], jax.tree.map(lambda x: x / jnp.maximum(weight, TINY), total), weight, scales, squares

        told = {"healthy": healthy.astype(jnp.float32), "factor": factor} | scale
        each, same = PartitionSpec(_REPLICA), PartitionSpec()
        sound, mean, weight, scales, squares = jax.shard_map(
            one_device,
            mesh=self._mesh,
            in_specs=(self._own_specs(), each, stacked, specs, each, PartitionSpec(None, _REPLICA)),
            out_specs=(each, same, same, same, same),
            check_vma=False,
        )(by_name(own.params), own.model_state, mine, center, told, begun.factor)
        mean = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), mean, state.model_state)
        spread = jax.tree.map(lambda x, m: jnp.broadcast_to(m[None], x.shape), own.model_state, mean)
        changes: dict[str, Any] = {"model_state": spread}
        if own.loss_scale:
            changes["loss_scale"] = own.loss_scale | {"scale": least_scale(scales["scale"], own.loss_scale["scale"])}
        return sound, changes, mean, jnp.sqrt(squares)

    def _own_specs(self) -> dict[str, PartitionSpec]:
        trained = by_name(self._parts.trainable.of(self._parts.state_spec.params))
        return {name: PartitionSpec(_REPLICA, *spec) for name, spec in trained.items()}

    def _with_fresh_optimizer(self, own: Own, sound: jax.Array) -> Own:
        """The replicas; one that is not `sound` has a fresh optimizer state, but for its counts."""
        if own.guard:  # With the guard a bad step changes nothing.
            return own
        fresh = self._parts.optimizer.init(jax.tree.map(lambda x: x[0], own.params))
        opt_state = jax.tree.map(
            lambda x, new: where(sound, x, new) if jnp.issubdtype(x.dtype, jnp.floating) else x, own.opt_state, fresh
        )
        return dataclasses.replace(own, opt_state=opt_state)

    def _average(self, state: TrainState, after: Pieces, fragments: Sequence[int]) -> Any:
        """The moving average of the anchor, if there is one, with the decay of as many steps as lie between merges."""
        if self._parts.config.ema_decay is None:
            return state.ema_params
        decay = ema_decay(self._parts.config.ema_decay, state.step) ** self._parts.agreement.merge_steps
        old = self._of(self._parts.trainable.of(state.ema_params), fragments)
        moved = {name: decay * old[name] + (1 - decay) * x for name, x in after.items()}
        trained = self._put(self._parts.trainable.of(state.ema_params), moved, fragments)
        return self._parts.trainable.merged(trained, state.ema_params)

    def _distance(self, center: Pieces, mine: Pieces, factor: jax.Array) -> jax.Array:
        """The root mean square over replicas of their distance from `center`."""
        squares = [jnp.sum((x - center[name][None]) ** 2, axis=tuple(range(1, x.ndim))) for name, x in mine.items()]
        total = functools.reduce(jnp.add, squares)
        return jnp.sqrt(jnp.sum(jnp.where(factor > 0, total * factor, 0)))

    def _shift(self, pieces: Pieces, weight: jax.Array, hops: int) -> tuple[Pieces, jax.Array]:
        """For each replica what the one `hops` before it has, leaves `[replica, ...]`, in one message a device."""
        stacked = PartitionSpec(_REPLICA)
        specs = {
            name: PartitionSpec(_REPLICA, *spec)
            for name, spec in self._specs(self._parts.state_spec.params, (0,)).items()
        }
        pairs = [(source, (source + hops) % self._num_replicas) for source in range(self._num_replicas)]

        def one_device(pieces: Pieces, weight: jax.Array) -> tuple[Pieces, jax.Array]:
            flat, as_tree = ravel_pytree((pieces, weight))
            return as_tree(lax.ppermute(flat, _REPLICA, pairs))

        region = jax.shard_map(
            one_device, mesh=self._mesh, in_specs=(specs, stacked), out_specs=(specs, stacked), check_vma=False
        )
        return region(pieces, weight)

    def _anchor(self, state: TrainState, fragments: Sequence[int]) -> Pieces:
        return self._of(self._parts.trainable.of(state.params), fragments)

    def _mine(self, replicas: Own, fragments: Sequence[int]) -> Pieces:
        return self._of(replicas.params, fragments, lead=1)

    def _of(self, tree: Any, fragments: Sequence[int], lead: int = 0) -> Pieces:
        leaves = by_name(tree)
        return {name: x for fragment in fragments for name, x in self._fragments.of(leaves, fragment, lead).items()}

    def _put(self, tree: Any, values: Pieces, fragments: Sequence[int], lead: int = 0) -> Any:
        """A tree like the trained parameters with the pieces of fragments replaced."""
        leaves = by_name(tree)
        for fragment in fragments:
            leaves = self._fragments.put(leaves, fragment, values, lead)
        return jax.tree.unflatten(jax.tree.structure(tree), list(leaves.values()))

    def _with_anchor(self, state: TrainState, values: Pieces, fragments: Sequence[int]) -> TrainState:
        trained = self._put(self._parts.trainable.of(state.params), values, fragments)
        return state.replace(params=self._parts.trainable.merged(trained, state.params))

    def _with_mine(self, replicas: Own, values: Pieces, fragments: Sequence[int]) -> Own:
        return dataclasses.replace(replicas, params=self._put(replicas.params, values, fragments, lead=1))

    def _specs(self, specs: Any, fragments: Sequence[int]) -> dict[str, PartitionSpec]:
        pieces, place = self._fragments.each(by_name(self._parts.trainable.of(specs))), self._places(fragments)
        return {name: spec for name, spec in pieces.items() if name in place}

    def _places(self, fragments: Sequence[int]) -> dict[str, int]:
        """For each piece of the fragments, the place of its fragment among them."""
        return {name: place for place, fragment in enumerate(fragments) for name in self._fragments.keys(fragment)}

    def _of_fragments(self, exchange_state: Any, fragments: Sequence[int]) -> Any:
        """The part of an exchange's state, or of its PartitionSpecs, that belongs to fragments."""
        keys = self._places(fragments)
        return {
            where: entries
            if where == "common"
            else {name: {key: x for key, x in entry.items() if key in keys} for name, entry in entries.items()}
            for where, entries in exchange_state.items()
        }

    def _with_fragments(self, exchange_state: Any, new: Any, fragments: Sequence[int]) -> Any:
        """The exchange's state with that part replaced; its counters count the merges of the last fragment."""
        last = len(self._fragments.pieces) - 1 in fragments
        return {
            where: (new[where] if last else entries)
            if where == "common"
            else {name: entry | new[where][name] for name, entry in entries.items()}
            for where, entries in exchange_state.items()
        }
