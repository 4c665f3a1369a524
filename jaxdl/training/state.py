"""The train state: one pytree with all that a run carries from step to step, and its sharding."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.exchange import PER_REPLICA, Exchange, by_name, init_on_mesh, state_specs
from jaxdl.exchange.agreement import Agreement, EveryStep, Fragments
from jaxdl.models.network import ModelState, Network
from jaxdl.optim import EVERYTHING, Trainable, keeps_average
from jaxdl.parallel.embedding import ROWS, Tables, TableState
from jaxdl.parallel.mesh import Axis
from jaxdl.parallel.precision import LossScale, Precision
from jaxdl.parallel.sharding import Layout, Params, Specs, grad_specs, is_spec, named, param_specs, update_specs
from jaxdl.training.guard import Guard, GuardConfig

EVERY_STEP = EveryStep()
OUTER = "outer"
"""The part of an agreement's state that merges keep beside the anchor."""
PAST = "past"
"""The part of an agreement's state with earlier versions of the parameters."""
TABLES = "tables"
"""The part of `TrainState.eval_state` with the rows of embedding tables."""
REFERENCE = "reference"
"""The part of `TrainState.eval_state` with the trained parameters of the beginning."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from one step to the next. A checkpoint is this and the resolved config."""

    step: Any
    """Steps completed, int32: the number of batches consumed, which is also the position in the data."""
    params: Params
    """Parameters, float32. Of replicas with parameters of their own, the anchor: what they have agreed on."""
    model_state: ModelState
    """What the network keeps besides parameters, such as the running statistics of batch normalization."""
    ema_params: Params
    """Average of the parameters: an exponential moving one, or the optimizer's own; empty when there is none."""
    opt_state: optax.OptState
    """The optimizer's state; empty if each replica has one of its own."""
    exchange_state: Any
    """The gradient exchange's state; the same tree with one replica as with several."""
    loss_scale: LossScale
    """The loss scale; empty without float16."""
    guard: Guard
    """Counters and statistics of the guard against bad numbers; empty when it is off."""
    key: Any
    """Data of the run's random key; a step's key is this folded with the step."""
    agreement_state: Any = dataclasses.field(default_factory=dict)
    """What replicas have of their own, and what their merges keep, or earlier versions of the parameters; most often
    empty. See `init_agreement`."""

    tables: TableState = dataclasses.field(default_factory=dict)
    """Embedding tables, and what their optimizers keep of each row; empty for most networks. They are updated in place,
    and have no part in the moving average, the dense exchange and the guard's choice between old and new."""

    reference: Params = dataclasses.field(default_factory=dict)
    """The trained parameters as they were when the run began, for tasks that need them (`Task.needs_reference`); else
    empty. They never change, and a workdir has them once, not in each checkpoint."""

    @property
    def eval_state(self) -> ModelState:
        """`model_state` to evaluate with: of a network with embedding tables it has their rows."""
        if self.reference:
            return self.model_state | {REFERENCE: self.reference}
        if not self.tables:
            return self.model_state
        return self.model_state | {TABLES: {name: table[ROWS] for name, table in self.tables.items()}}

    @property
    def eval_params(self) -> Params:
        """The parameters to evaluate: the moving average where there is one."""
        return self.ema_params or self.params

    @property
    def own(self) -> Own:
        """What each replica has of its own."""
        return self.agreement_state[PER_REPLICA]

    @property
    def past(self) -> Past:
        """The earlier versions of the parameters."""
        return self.agreement_state[PAST]

    def with_own(self, replicas: Own) -> TrainState:
        """A copy with other replicas."""
        return self.replace(agreement_state=self.agreement_state | {PER_REPLICA: replicas})

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class StateSpec:
    """Shapes and shardings of a train state on one mesh, known before anything is allocated."""

    init: Callable[[jax.Array], TrainState]
    """The fresh state from a random key, a pure function: run it under `jit` with `shardings`."""
    init_exchange: Callable[[], Any]
    """The fresh state of the exchange alone."""
    params: Specs
    """PartitionSpecs of the parameters."""
    grads: Specs
    """PartitionSpecs of the gradients while they are exchanged; None for frozen parameters."""
    update: Specs
    """PartitionSpecs of gradients, parameters and per-parameter optimizer state in the update; None for frozen ones."""
    opt_shapes: optax.OptState
    """The shapes of the optimizer's state, of one replica if each has its own."""
    shapes: TrainState
    """The state's shapes."""
    specs: TrainState
    """The state's PartitionSpecs."""
    shardings: TrainState
    """The state's shardings."""
    filled_shapes: Mapping[str, tuple[int, ...]]
    """For stages of which the last has fewer layers: the shapes, by path in the state, of those arrays that have empty
    layers, without these. So checkpoints describe them, and other meshes read them."""

    def make(self, seed: int) -> TrainState:
        """The fresh state, allocated already sharded; equal on every mesh."""
        return self.initializer()(seed)

    def initializer(self) -> Callable[[int], TrainState]:
        """`make`, which is compiled once for all seeds."""
        # It runs once: on a CPU, compiling it with all optimizations takes many times longer than running it without.
        flag, given = "xla_backend_optimization_level", os.environ.get("XLA_FLAGS", "")
        options = {flag: 1} if jax.default_backend() == "cpu" and flag not in given else None
        init = jax.jit(
            lambda seed: self.init(jax.random.key(seed)), out_shardings=self.shardings, compiler_options=options
        )
        return lambda seed: init(np.uint32(seed).astype(np.int32))  # The key of a seed is that of its 32 bits.

    def abstract(self) -> TrainState:
        """The state as shape structs with shardings: what a checkpoint is restored into."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), self.shapes, self.shardings
        )

    def with_reference(self, trainable: Trainable, mesh: Mesh) -> StateSpec:
        """That of states with the trained parameters of the beginning."""

        def init(key: jax.Array) -> TrainState:
            state = self.init(key)
            return state.replace(reference=jax.tree.map(jnp.copy, trainable.of(state.params)))

        specs = self.specs.replace(reference=trainable.of(self.params))
        shapes = self.shapes.replace(reference=trainable.of(self.shapes.params))
        return dataclasses.replace(self, init=init, shapes=shapes, specs=specs, shardings=named(mesh, specs))

    def filled(self) -> TrainState:
        """The state as shape structs without shardings and empty layers, as checkpoints describe it."""

        def one(path: Any, x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(self.filled_shapes.get(_path(path), x.shape), x.dtype)

        return TrainState(**jax.tree_util.tree_map_with_path(one, vars(self.shapes)))


def _path(path: Any) -> str:
    """The path of an array in a train state, as checkpoints name it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def make_state_spec(
    layout: Layout,
    network: Network,
    optimizer: optax.GradientTransformation,
    exchange: Exchange,
    precision: Precision,
    guard: GuardConfig,
    *,
    use_ema: bool,
    trainable: Trainable = EVERYTHING,
    agreement: Agreement = EVERY_STEP,
    fragments: Fragments | None = None,
    sums: Sequence[str] = (),
    tables: Tables | None = None,
) -> StateSpec:
    """Infers shapes, then specs, then shardings of the whole state; nothing is allocated.

    The optimizer's state is sharded like the parameters in the update. If the `agreement` lets replicas differ, theirs
    is in `agreement_state`, the exchange is of the `fragments`, and merges join the task's `sums` of these names.
    Raises ConfigError when the mesh does not suit the model.
    """
    specs, axes = param_specs(layout, network.axes, network.param_shapes), trainable.of(network.axes)
    trained = trainable.of(network.param_shapes)
    gradient_specs, split_specs = grad_specs(layout, axes, trained), update_specs(layout, axes, trained)
    exchanged = _exchange_shapes(fragments, trained, gradient_specs)
    init_exchange = functools.partial(init_on_mesh, exchange, *exchanged, layout.mesh)

    def init(key: jax.Array, network: Network = network) -> TrainState:
        init_key, run_key = jax.random.split(key)
        params, model_state = network.init(init_key)
        mine = trainable.of(params)
        start = Own(mine, model_state, optimizer.init(mine), precision.init_loss_scale(), guard.init_guard())
        return TrainState(
            step=jnp.int32(0),
            params=params,
            model_state=model_state,
            ema_params=jax.tree.map(jnp.copy, params) if use_ema or keeps_average(start.opt_state) else {},
            opt_state=() if agreement.keeps_replicas else start.opt_state,
            exchange_state=init_exchange(),
            loss_scale={} if agreement.keeps_replicas else start.loss_scale,
            guard={} if agreement.keeps_replicas else start.guard,
            key=jax.random.key_data(run_key),
            agreement_state=init_agreement(agreement, start, layout.mesh.shape[Axis.REPLICA], sums),
            tables={} if tables is None else tables.init(key),
        )

    shapes, opt_shapes = jax.eval_shape(lambda: init(jax.random.key(0))), jax.eval_shape(optimizer.init, trained)
    opt_specs = _opt_specs(opt_shapes, trained, split_specs)
    whole_specs = _whole(shapes).replace(
        params=specs,
        ema_params=specs if shapes.ema_params else {},
        opt_state=() if agreement.keeps_replicas else opt_specs,
        exchange_state=state_specs(exchange, *exchanged, layout.mesh),
        agreement_state=_agreement_specs(shapes.agreement_state, trainable.of(specs), opt_specs),
        tables={} if tables is None else tables.specs,
    )
    filled = _filled_shapes(shapes, init, network, trainable) if network.empty_layers else {}
    names, places = (specs, gradient_specs, split_specs), (whole_specs, named(layout.mesh, whole_specs))
    return StateSpec(init, init_exchange, *names, opt_shapes, shapes, *places, filled)


def _filled_shapes(
    shapes: TrainState, init: Callable[..., TrainState], network: Network, trainable: Trainable
) -> dict[str, tuple[int, ...]]:
    """`StateSpec.filled_shapes` of a state; `init` makes one of a key and a network, but for the exchange's state.

    In that, arrays of replicas are `[replica, ...]` like the gradients.
    """
    without = jax.eval_shape(lambda: init(jax.random.key(0), network.filled))
    gradients = by_name(trainable.of(network.filled.param_shapes))

    def without_them(path: Any, x: Any) -> Any:
        if path[0].key != PER_REPLICA:
            return x
        return jax.ShapeDtypeStruct((*x.shape[:1], *gradients[path[-1].key].shape), x.dtype)

    exchange = jax.tree_util.tree_map_with_path(without_them, shapes.exchange_state)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(vars(shapes)),
        jax.tree.leaves(vars(without.replace(exchange_state=exchange))),
        strict=True,
    )
    differing = {_path(path): (filled.shape, x.shape) for (path, x), filled in pairs if filled.shape != x.shape}
    for path, (filled, whole) in differing.items():
        others = sum(size != other for size, other in zip(filled, whole, strict=False))
        assert (len(filled), others) == (len(whole), 1), f"{path}: only the layers may differ"
    return {path: filled for path, (filled, _) in differing.items()}


def _exchange_shapes(fragments: Fragments | None, shapes: Params, specs: Specs) -> tuple[Any, Any]:
    """The shapes and PartitionSpecs of what the exchange is about: gradients, or fragments."""
    if not fragments:
        return shapes, specs
    return fragments.shapes(by_name(shapes)), fragments.each(by_name(specs))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Own:
    """What each replica has of its own in `TrainState.agreement_state`; its leaves are `[replica, ...]`.

    The fields are those of `TrainState`.
    """

    params: Params
    """The trained ones; None in place of frozen ones, which all replicas have in common."""
    model_state: ModelState
    opt_state: optax.OptState
    loss_scale: LossScale
    guard: Guard
    since: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What a replica has trained on: `sums`, those of the task over good steps, and `seen`, the weight of all steps,
    since a merge joined them with the other replicas'; and `merge_weight`, `[replica, fragment]`, the weight of good
    steps since the last merge of a fragment."""
    share: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The weights of push-sum; empty where merges move an anchor."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Past:
    """Earlier versions of the trained parameters in `TrainState.agreement_state`, all replicas' in common."""

    versions: Params
    """`[num_past, ...]`: number n of all versions is at place n modulo num_past; None in place of frozen parameters."""
    num_kept: Any
    """How many versions there have been, the present one not counted, int32. They are as many as steps have been taken:
    batches that are passed over after a rollback do not count."""


def init_agreement(agreement: Agreement, start: Own, num_replicas: int, sums: Sequence[str]) -> dict[str, Any]:
    """`TrainState.agreement_state` of replicas that all begin with `start`, which lacks the replicas' dimension.

    Each replica's is an `Own`, and counts the task's `sums` of these names; `outer` is what the agreement keeps beside
    the anchor (`Agreement.init_outer`). If the agreement keeps them equal it is empty, or a `Past`, without any version
    yet.
    """

    if agreement.num_past:
        blank = jax.tree.map(lambda x: jnp.zeros((agreement.num_past, *x.shape), x.dtype), start.params)
        return {PAST: Past(blank, jnp.int32(0))}
    if not agreement.keeps_replicas:
        return {}

    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[None], (num_replicas, *x.shape))

    # Each a buffer of its own: a state is donated, and a buffer can be donated once.
    since = {
        "sums": {name: jnp.float32(0) for name in sums},
        "seen": jnp.float32(0),
        "merge_weight": jnp.zeros(agreement.num_fragments, jnp.float32),
    }
    share = {} if agreement.has_anchor else {"weight": jnp.float32(1)}
    replicas = jax.tree.map(spread, dataclasses.replace(start, since=since, share=share))
    return {PER_REPLICA: replicas, OUTER: agreement.init_outer(start.params)}


def _agreement_specs(shapes: Any, params: Specs, opt_specs: Any) -> Any:
    """The PartitionSpecs of an agreement's state of these shapes."""
    if not shapes:
        return {}
    if PAST in shapes:
        versions = jax.tree.map(lambda spec: PartitionSpec(None, *spec), params, is_leaf=is_spec)
        return {PAST: Past(versions, PartitionSpec())}
    single = jax.tree.map(lambda _: PartitionSpec(), shapes[PER_REPLICA])
    single = dataclasses.replace(single, params=params, opt_state=opt_specs)
    replica_specs = jax.tree.map(lambda spec: PartitionSpec(Axis.REPLICA.value, *spec), single, is_leaf=is_spec)
    return {PER_REPLICA: replica_specs, OUTER: dict.fromkeys(shapes[OUTER], params)}


def _opt_specs(opt_state: optax.OptState, params: Params, specs: Specs) -> optax.OptState:
    """`specs` for what the optimizer keeps of each parameter in its shape; all else is replicated.

    An array belongs to the parameter whose path its own path ends with. All arguments but `specs` are shapes.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    known = {
        path: (x.shape, spec) for (path, x), spec in zip(flat, jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
    }

    def spec_of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        for start in range(len(path)):
            shape, spec = known.get(path[start:], (None, None))
            if shape == leaf.shape:
                return spec
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec_of, opt_state)


def _whole(tree: Any) -> Any:
    return jax.tree.map(lambda _: PartitionSpec(), tree)


def param_bytes_per_device(params: Params) -> int:
    """Bytes of the parameters on the first local device, by the arrays' own shards."""
    device = jax.local_devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


def replicated(layout: Layout) -> NamedSharding:
    """The sharding of a replicated value."""
    return NamedSharding(layout.mesh, PartitionSpec())
