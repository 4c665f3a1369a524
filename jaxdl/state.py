"""The train state: one pytree with all that a run carries from step to step, and its sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.exchange import Exchange, init_on_mesh, state_specs
from jaxdl.guard import Guard, GuardConfig
from jaxdl.models.network import ModelState, Network
from jaxdl.optim import EVERYTHING, Trainable, keeps_average
from jaxdl.precision import LossScale, Precision
from jaxdl.sharding import Layout, Params, Specs, grad_specs, is_spec, named, param_specs, update_specs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from one step to the next. A checkpoint is this and the resolved config."""

    step: Any
    """Steps completed, int32: the number of batches consumed, which is also the position in the data."""
    params: Params
    """Parameters, float32."""
    model_state: ModelState
    """What the network keeps besides parameters, such as the running statistics of batch normalization."""
    ema_params: Params
    """Average of the parameters: an exponential moving one, or the optimizer's own; empty when there is none."""
    opt_state: optax.OptState
    """The optimizer's state."""
    exchange_state: Any
    """The gradient exchange's state; the same tree with one replica as with several."""
    loss_scale: LossScale
    """The loss scale; empty without float16."""
    guard: Guard
    """Counters and statistics of the guard against bad numbers; empty when it is off."""
    key: Any
    """Data of the run's random key; a step's key is this folded with the step."""

    @property
    def eval_params(self) -> Params:
        """The parameters to evaluate: the moving average where there is one."""
        return self.ema_params or self.params

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class StateSpec:
    """Shapes and shardings of a train state on one mesh, known before anything is allocated."""

    init: Callable[[jax.Array], TrainState]
    """The fresh state from a random key, a pure function: run it under `jit` with `shardings`."""
    params: Specs
    """PartitionSpecs of the parameters."""
    grads: Specs
    """PartitionSpecs of the gradients while they are exchanged; None for frozen parameters."""
    update: Specs
    """PartitionSpecs of gradients, parameters and per-parameter optimizer state in the update; None for frozen ones."""
    shapes: TrainState
    """The state's shapes."""
    specs: TrainState
    """The state's PartitionSpecs."""
    shardings: TrainState
    """The state's shardings."""

    def abstract(self) -> TrainState:
        """The state as shape structs with shardings: what a checkpoint is restored into."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), self.shapes, self.shardings
        )


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
) -> StateSpec:
    """Infers shapes, then specs, then shardings of the whole state; nothing is allocated.

    The optimizer's state is sharded like the parameters in the update. Raises ConfigError when the mesh does not suit
    the model.
    """
    specs = param_specs(layout, network.axes, network.param_shapes)
    axes, trained = trainable.of(network.axes), trainable.of(network.param_shapes)
    gradient_specs, split_specs = grad_specs(layout, axes, trained), update_specs(layout, axes, trained)

    def init(key: jax.Array) -> TrainState:
        init_key, run_key = jax.random.split(key)
        params, model_state = network.init(init_key)
        opt_state = optimizer.init(trainable.of(params))
        return TrainState(
            step=jnp.int32(0),
            params=params,
            model_state=model_state,
            ema_params=jax.tree.map(jnp.copy, params) if use_ema or keeps_average(opt_state) else {},
            opt_state=opt_state,
            exchange_state=init_on_mesh(exchange, trained, gradient_specs, layout.mesh),
            loss_scale=precision.init_loss_scale(),
            guard=guard.init_guard(),
            key=jax.random.key_data(run_key),
        )

    shapes = jax.eval_shape(lambda: init(jax.random.key(0)))
    whole_specs = TrainState(
        step=PartitionSpec(),
        params=specs,
        model_state=_whole(shapes.model_state),
        ema_params=specs if shapes.ema_params else {},
        opt_state=_opt_specs(shapes.opt_state, trained, split_specs),
        exchange_state=state_specs(exchange, trained, gradient_specs, layout.mesh),
        loss_scale=_whole(shapes.loss_scale),
        guard=_whole(shapes.guard),
        key=PartitionSpec(),
    )
    return StateSpec(init, specs, gradient_specs, split_specs, shapes, whole_specs, named(layout.mesh, whole_specs))


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
