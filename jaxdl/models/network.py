"""A network as pure functions on plain pytrees: the NNX graph is traversed here once, never in the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxdl.sharding import STACKED, LogicalAxes, Params


class Network:
    """An NNX module, split once: `init` and `apply` are pure and work on nested dictionaries of arrays.

    Attributes:
      axes: the logical axes of each parameter, a tuple of names each; see `jaxdl.sharding`.
      param_shapes: shape and dtype of each parameter.
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self._make = make
        abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        self._graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
        unknown = [type(leaf).__name__ for _, leaf in nnx.to_flat_state(rest) if not isinstance(leaf, nnx.BatchStat)]
        assert not unknown, f"a network holds only parameters and batch statistics, not {set(unknown)}"
        self.axes: LogicalAxes = nnx.to_pure_dict(
            jax.tree.map(_axes, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
        )
        self.param_shapes: Params = nnx.to_pure_dict(params)

    def init(self, key: jax.Array) -> tuple[Params, dict[str, Any]]:
        """Fresh `(params, model_state)` from a random key; equal on every mesh."""
        _, params, rest = nnx.split(self._make(nnx.Rngs(key)), nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def apply(
        self, params: Params, model_state: dict[str, Any], *inputs: jax.Array, train: bool, forget: bool = False
    ) -> tuple[jax.Array, dict[str, Any]]:
        """`(outputs, model_state)` of the module called on `inputs`; in training the state has new batch statistics.

        With `forget` they are those of these inputs alone, without the running ones.
        """
        module = nnx.merge(self._graphdef, nnx.State(params), nnx.State(model_state), copy=True)
        if forget:
            for _, part in nnx.iter_graph(module):
                if isinstance(part, nnx.BatchNorm):
                    part.momentum = 0.0
        outputs = module(*inputs, train=train)  # pyright: ignore[reportCallIssue]
        return outputs, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))


def _axes(variable: nnx.Variable) -> tuple[str, ...]:
    """The logical axes of a parameter, after `layers` when it is stacked."""
    axes, ndim = variable.get_metadata().get("axes"), len(variable.shape)
    assert axes is not None, f"a parameter of shape {variable.shape} has no logical axes"
    assert ndim - len(axes) in (0, 1), f"a parameter of shape {variable.shape} has axes {axes}"
    return (STACKED, *axes) if ndim > len(axes) else tuple(axes)
