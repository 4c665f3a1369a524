"""Which steps send the gradients of looped layers from inside the loop's backward pass; see `jaxdl.models.loop`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdl.exchange import ExchangeConfig
from jaxdl.models import Network
from jaxdl.parallel.mesh import Axis, platform
from jaxdl.parallel.sharding import STACKED, is_names
from jaxdl.training.experiment import Experiment


def loop_sum_dtype(experiment: Experiment, network: Network, mesh: Mesh) -> DTypeLike | None:
    """The dtype in which the loop over layers sums their gradients over replicas; None where the exchange does it all.

    On GPUs, since programs of other platforms do not overlap messages with compute, and where the exchange is a plain
    sum of each gradient as the backward pass yields it: not of micro-batches or of a scaled loss.
    """
    exchange, precision = experiment.exchange, experiment.precision
    assert isinstance(exchange, ExchangeConfig), "it has been chosen"
    pairs = zip(jax.tree.leaves(network.axes, is_leaf=is_names), jax.tree.leaves(network.param_shapes), strict=True)
    looped = max((x.shape[0] for names, x in pairs if STACKED in names), default=0) > 1
    plain = experiment.step.microbatches == 1 and network.what is None
    plain = (
        plain
        and not experiment.agreement.keeps_replicas
        and not experiment.agreement.num_past
        and not experiment.step.freeze
        and not experiment.model.trained
    )
    plain = plain and not precision.init_loss_scale() and precision.weight_dtype == jnp.float32
    several = mesh.shape[Axis.REPLICA] > 1 and platform(mesh) == "gpu"
    return exchange.sum_dtype if looped and plain and several and not experiment.task.has_user_code else None
