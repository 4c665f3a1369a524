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
from jaxdl.mesh import Axis
from jaxdl.sharding import named
from jaxdl.state import OUTER, Own, TrainState, replicated
from jaxdl.step import Metrics, Parts, ema_decay

Pieces = dict[str, jax.Array]
"""Those of a fragment, by their names."""
_REPLICA = Axis.REPLICA.value
_KEY = 3
"""Folded with the key of the step before it this gives that of a merge; 0 to 2 are the step's own."""
_TINY = jnp.finfo(jnp.float32).tiny


def make_merge(parts: Parts, number: int) -> jax.stages.Wrapped:
    """The jitted merge `state -> (state, metrics)` of this number; the state is donated.

    Metrics are float32 scalars, the same on all devices: `agreement/loss`, the mean training loss of all replicas since
    the last merge; `agreement/distance`, the root mean square of the replicas' distances from what they agree on;
    `agreement/bad_replicas`, how many had bad numbers and were left out; `bad_steps`, skipped ones of all replicas; and
    those of the exchange.
    """
    merge, num_replicas = Merge(parts), parts.layout.mesh.shape[_REPLICA]

    def merged(state: TrainState) -> tuple[TrainState, Metrics]:
        return parts.agreement.merged(merge, state, number, num_replicas)

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
    called. Metrics: `replicas/distance`, the root mean square of the replicas' distances from the mean, and
    `replicas/bad`, how many have numbers that are not finite, and are left out.
    """
    merge, shardings = Merge(parts), parts.state_spec.shardings
    return jax.jit(
        merge.settled,
        donate_argnums=0,
        in_shardings=(shardings,),
        out_shardings=(shardings, replicated(parts.layout)),
    )


@dataclass(frozen=True)
class Begun:
    """A merge whose messages have travelled, and which has not changed the parameters yet."""

    mean: Pieces
    """The mean of the anchor less each replica's parameters."""
    healthy: jax.Array
    """Which replicas took part, bool `[replica]`."""
    factor: jax.Array
    """Each replica's part in the mean, float32 `[replica]`; the sum is 1, or 0 if no replica took part."""
    metrics: Metrics


class Merge:
    """See `jaxdl.agreement.Merges`."""

    def __init__(self, parts: Parts) -> None:
        assert parts.fragments is not None, "replicas that agree in every step never merge"
        self._parts, self._mesh, self._fragments = parts, parts.layout.mesh, parts.fragments
        self._num_replicas = self._mesh.shape[_REPLICA]

    def by_exchange(self, state: TrainState, fragment: int) -> tuple[TrainState, Metrics]:
        """See `Merges.by_exchange`."""
        state, begun = self.begun(state, fragment)
        return self.arrived(state, begun, fragment)

    def begun(self, state: TrainState, fragment: int) -> tuple[TrainState, Begun]:
        """Sends what each replica has changed of a fragment, and receives the mean. What is counted begins anew."""
        parts, own = self._parts, state.own
        anchor, mine = self._anchor(state, fragment), self._mine(own, fragment)
        delta = {name: anchor[name][None] - x for name, x in mine.items()}
        finite = _finite(delta)
        healthy, factor = _parts_in_mean(finite, own.since["merge_weight"][:, fragment])
        # The exchange takes the plain mean over the replicas.
        shares = {name: _where(healthy, x * _wide(factor * self._num_replicas, x), 0) for name, x in delta.items()}
        specs, wanted = self._specs(parts.state_spec.grads, fragment), self._specs(parts.state_spec.update, fragment)
        stacked = {name: PartitionSpec(_REPLICA, *spec) for name, spec in specs.items()}
        shares = lax.with_sharding_constraint(shares, named(self._mesh, stacked))
        places = self._of_fragment(parts.state_spec.specs.exchange_state, fragment)
        exchange = exchanged_on_mesh(parts.exchange, specs, places, self._mesh, wanted=wanted)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step - 1), _KEY)
        sums = {name: own.since[name] for name in ("loss", "weight")}
        sums |= {"bad_replicas": 1.0 - finite} | {name: own.guard[name] for name in ("bad_steps",) if own.guard}
        mean, new, found = exchange(shares, self._of_fragment(state.exchange_state, fragment), key, sums)
        totals = {name: found.pop(f"sums/{name}") for name in sums}
        metrics = {f"exchange/{name}": value for name, value in found.items()}
        metrics |= {"agreement/loss": totals["loss"] / totals["weight"]}
        metrics |= {"agreement/bad_replicas": totals["bad_replicas"]}
        metrics |= {name: totals[name] for name in ("bad_steps",) if own.guard}
        since = jax.tree.map(jnp.zeros_like, own.since)
        since["merge_weight"] = own.since["merge_weight"].at[:, fragment].set(0)
        state = state.replace(
            exchange_state=self._with_fragment(state.exchange_state, new, fragment),
        ).with_own(dataclasses.replace(own, since=since))
        return state, Begun(mean, healthy, factor, metrics)

    def arrived(self, state: TrainState, begun: Begun, fragment: int) -> tuple[TrainState, Metrics]:
        """Moves the anchor and the replicas; the merge may have begun some steps before this state."""
        agreement = self._parts.agreement
        own, outer = state.own, state.agreement_state[OUTER]
        before, mine = self._anchor(state, fragment), self._mine(own, fragment)
        # Since it began, the steps beside it may have ended badly.
        leaves = {"params": by_name(own.params), "state": by_name(own.model_state)}
        sound = begun.healthy & _finite({f"{part}/{name}": x for part, xs in leaves.items() for name, x in xs.items()})
        kept = {name: self._of(tree, fragment) for name, tree in outer.items()}
        moved = agreement.moved(before, kept, begun.mean)
        after, new_outer = jax.tree.map(
            lambda new, old: jnp.where(jnp.any(begun.healthy), new, old), moved, (before, kept)
        )
        specs = self._specs(self._parts.state_spec.params, fragment)
        after = lax.with_sharding_constraint(after, named(self._mesh, specs))
        adopted = {
            name: _where(sound, agreement.adopted(x, before[name], after[name], self._num_replicas), after[name])
            for name, x in mine.items()
        }
        own, model_state = self._shared(self._with_mine(own, adopted, fragment), sound, begun.factor)
        state = self._with_anchor(state, after, fragment).replace(
            model_state=model_state,
            ema_params=self._averaged(state, after, fragment),
            agreement_state={OUTER: {name: self._put(tree, new_outer[name], fragment) for name, tree in outer.items()}},
        )
        state = state.with_own(own)
        distance = self._distance({name: before[name] - x for name, x in begun.mean.items()}, mine, begun.factor)
        return state, begun.metrics | {"agreement/distance": distance}

    def by_messages(
        self, state: TrainState, hops: Sequence[int], fractions: Sequence[float]
    ) -> tuple[TrainState, Metrics]:
        """See `Merges.by_messages`; by push-sum, so that a replica with bad numbers has no part in the averages."""
        own = state.own
        mine = self._mine(own, 0)
        finite = _finite(mine)
        weight = jnp.where(finite, own.share["weight"], 0)
        sent = {name: _where(finite, x * _wide(weight, x), 0) for name, x in mine.items()}
        received = [self._shifted(sent, weight, distance) for distance in hops]
        parts = [(1 - sum(fractions), (sent, weight)), *zip(fractions, received, strict=True)]
        total, new_weight = jax.tree.map(
            lambda *xs: functools.reduce(jnp.add, xs), *[jax.tree.map(lambda x, c=c: c * x, one) for c, one in parts]
        )
        lonely = new_weight == 0
        mixed = {
            name: _where(lonely, mine[name], x / _wide(jnp.where(lonely, 1, new_weight), x))
            for name, x in total.items()
        }
        new = self._with_mine(dataclasses.replace(own, share={"weight": new_weight}), mixed, 0)
        fresh = jax.tree.map(lambda x, common: _where(finite, x, common), own.model_state, state.model_state)
        new = self._with_fresh_optimizer(dataclasses.replace(new, model_state=fresh), finite)
        specs = self._specs(self._parts.state_spec.params, 0)
        sizes = [math.prod(NamedSharding(self._mesh, specs[name]).shard_shape(x.shape[1:])) for name, x in mine.items()]
        sent = jnp.float32(4 * (sum(sizes) + 1) * len(hops))
        return state.with_own(new), {f"exchange/bytes_sent/{_REPLICA}": sent}

    def settled(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """See `make_settle`."""
        own = state.own
        mine = self._mine(own, 0)
        leaves = {"params": mine, "state": by_name(own.model_state)}
        finite = _finite({f"{part}/{name}": x for part, xs in leaves.items() for name, x in xs.items()})
        weight = jnp.where(finite, own.share["weight"], 0)
        factor = weight / jnp.maximum(weight.sum(), _TINY)

        def mean(x: jax.Array) -> jax.Array:
            total = jnp.sum(_where(finite, x * _wide(factor, x), 0), axis=0)
            return jnp.where(jnp.any(finite), total, jnp.nan)

        averaged = {name: mean(x) for name, x in mine.items()}
        distance = self._distance(averaged, mine, factor)
        state = self._with_anchor(state, averaged, 0).replace(model_state=jax.tree.map(mean, own.model_state))
        return state, {"replicas/distance": distance, "replicas/bad": jnp.sum(1.0 - finite)}

    def _shared(self, own: Own, sound: jax.Array, factor: jax.Array) -> tuple[Own, Any]:
        """The replicas, with the mean of their model states, which is also returned; and the least loss scale.

        A replica that is not `sound` gets a new optimizer state, but for its counts.
        """
        part = jnp.where(sound, factor, 0)
        part = part / jnp.maximum(part.sum(), _TINY)

        def mean(x: jax.Array) -> jax.Array:
            total = jnp.sum(_where(sound, x * _wide(part, x), 0), axis=0)
            return jnp.where(jnp.any(sound), total, x[0])

        model_state = jax.tree.map(mean, own.model_state)
        changes: dict[str, Any] = {
            "model_state": jax.tree.map(lambda x, m: jnp.broadcast_to(m[None], x.shape), own.model_state, model_state)
        }
        if own.loss_scale:
            scale = own.loss_scale["scale"]
            least = jnp.min(jnp.where(sound | ~jnp.any(sound), scale, jnp.inf))
            changes["loss_scale"] = own.loss_scale | {"scale": jnp.broadcast_to(least, scale.shape)}
        return self._with_fresh_optimizer(dataclasses.replace(own, **changes), sound), model_state

    def _with_fresh_optimizer(self, own: Own, sound: jax.Array) -> Own:
        """The replicas; one that is not `sound` has a fresh optimizer state, but for its counts."""
        if own.guard:  # With the guard a bad step changes nothing.
            return own
        fresh = self._parts.optimizer.init(jax.tree.map(lambda x: x[0], own.params))
        opt_state = jax.tree.map(
            lambda x, new: _where(sound, x, new) if jnp.issubdtype(x.dtype, jnp.floating) else x, own.opt_state, fresh
        )
        return dataclasses.replace(own, opt_state=opt_state)

    def _averaged(self, state: TrainState, after: Pieces, fragment: int) -> Any:
        """The moving average of the anchor, if there is one, with the decay of as many steps as lie between merges."""
        if self._parts.config.ema_decay is None:
            return state.ema_params
        decay = ema_decay(self._parts.config.ema_decay, state.step) ** self._parts.agreement.merge_steps
        old = self._of(self._parts.trainable.of(state.ema_params), fragment)
        moved = {name: decay * old[name] + (1 - decay) * x for name, x in after.items()}
        trained = self._put(self._parts.trainable.of(state.ema_params), moved, fragment)
        return self._parts.trainable.merged(trained, state.ema_params)

    def _distance(self, center: Pieces, mine: Pieces, factor: jax.Array) -> jax.Array:
        """The root mean square over replicas of their distance from `center`."""
        squares = [jnp.sum((x - center[name][None]) ** 2, axis=tuple(range(1, x.ndim))) for name, x in mine.items()]
        total = functools.reduce(jnp.add, squares)
        return jnp.sqrt(jnp.sum(jnp.where(factor > 0, total * factor, 0)))

    def _shifted(self, pieces: Pieces, weight: jax.Array, hops: int) -> tuple[Pieces, jax.Array]:
        """For each replica what the one `hops` before it has, leaves `[replica, ...]`, in one message a device."""
        stacked = PartitionSpec(_REPLICA)
        specs = {
            name: PartitionSpec(_REPLICA, *spec) for name, spec in self._specs(self._parts.state_spec.params, 0).items()
        }
        pairs = [(source, (source + hops) % self._num_replicas) for source in range(self._num_replicas)]

        def one_device(pieces: Pieces, weight: jax.Array) -> tuple[Pieces, jax.Array]:
            flat, as_tree = ravel_pytree((pieces, weight))
            return as_tree(lax.ppermute(flat, _REPLICA, pairs))

        region = jax.shard_map(
            one_device, mesh=self._mesh, in_specs=(specs, stacked), out_specs=(specs, stacked), check_vma=False
        )
        return region(pieces, weight)

    def _anchor(self, state: TrainState, fragment: int) -> Pieces:
        return self._of(self._parts.trainable.of(state.params), fragment)

    def _mine(self, own: Own, fragment: int) -> Pieces:
        return self._of(own.params, fragment, lead=1)

    def _of(self, tree: Any, fragment: int, lead: int = 0) -> Pieces:
        return self._fragments.of(by_name(tree), fragment, lead)

    def _put(self, tree: Any, values: Pieces, fragment: int, lead: int = 0) -> Any:
        """A tree like the trained parameters with a fragment's pieces replaced."""
        leaves = self._fragments.put(by_name(tree), fragment, values, lead)
        return jax.tree.unflatten(jax.tree.structure(tree), list(leaves.values()))

    def _with_anchor(self, state: TrainState, values: Pieces, fragment: int) -> TrainState:
        trained = self._put(self._parts.trainable.of(state.params), values, fragment)
        return state.replace(params=self._parts.trainable.merged(trained, state.params))

    def _with_mine(self, own: Own, values: Pieces, fragment: int) -> Own:
        return dataclasses.replace(own, params=self._put(own.params, values, fragment, lead=1))

    def _specs(self, specs: Any, fragment: int) -> dict[str, PartitionSpec]:
        found = self._fragments.each(by_name(self._parts.trainable.of(specs)))
        return {name: found[name] for name in found if name in self._fragments.keys(fragment)}

    def _of_fragment(self, exchange_state: Any, fragment: int) -> Any:
        """The part of an exchange's state, or of its PartitionSpecs, that belongs to a fragment."""
        keys = self._fragments.keys(fragment)
        return {
            where: entries
            if where == "common"
            else {name: {key: x for key, x in entry.items() if key in keys} for name, entry in entries.items()}
            for where, entries in exchange_state.items()
        }

    def _with_fragment(self, exchange_state: Any, new: Any, fragment: int) -> Any:
        """The exchange's state with that part replaced; its counters count the merges of the last fragment."""
        last = fragment == len(self._fragments.pieces) - 1
        return {
            where: (new[where] if last else entries)
            if where == "common"
            else {name: entry | new[where][name] for name, entry in entries.items()}
            for where, entries in exchange_state.items()
        }


def _parts_in_mean(finite: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(`healthy`, `factor`) of `Begun`: parts in proportion to the weight (of examples, or tokens) trained on."""
    healthy = finite & (weight > 0)
    share = jnp.where(healthy, weight, 0)
    return healthy, share / jnp.maximum(share.sum(), _TINY)


def _finite(pieces: Mapping[str, jax.Array]) -> jax.Array:
    """Whether all numbers of a replica are finite, bool `[replica]`."""
    each = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in pieces.values()]
    return functools.reduce(jnp.logical_and, each)


def _wide(factor: jax.Array, x: jax.Array) -> jax.Array:
    """`[replica]` shaped to broadcast against `x`, `[replica, ...]`."""
    return factor.reshape(-1, *[1] * (x.ndim - 1))


def _where(condition: jax.Array, x: jax.Array, other: Any) -> jax.Array:
    """`x` for the replicas of which the condition holds, else `other`; nothing of one gets into the other."""
    return jnp.where(_wide(condition, x), x, other)
