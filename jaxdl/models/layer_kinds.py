"""What differs between the layers of a stack: which have a window, and which rotate by which angles.

Their parameters are alike, so they run in one loop: what differs is chosen by the number of the layer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.models.rotary import Angles


class Place(NamedTuple):
    """What a layer knows of where tokens are, and of which others they see."""

    angles: Angles | None = None
    """Those of rotary positions; None rotates nothing."""
    limited: jax.Array | None = None
    """Whether this layer has the window, bool; None: as all layers."""


UNPLACED = Place()
"""Where positions do not matter."""


class Places:
    """The `Place` of every layer.

    Attributes:
      angles: of the layers, but of those with a window where `windowed` has theirs; None: nothing is rotated.
    """

    def __init__(self, config: Any, angles: Angles | None, windowed: Angles | None = None) -> None:
        """`config` is a `jaxdl.models.Transformer`."""
        self._config, self.angles, self._windowed = config, angles, windowed

    def of(self, index: jax.Array | int) -> Place:
        """That of layer number `index`."""
        config, angles = self._config, self.angles
        limited = ~_is_in(config.full_layers, config.num_layers, index) if config.full_layers else None
        if angles is not None and self._windowed is not None and limited is not None:
            pairs = zip(self._windowed, angles, strict=True)
            angles = Angles(*(jnp.where(limited, windowed, other) for windowed, other in pairs))
        if angles is not None and config.unrotated_layers:
            still = _is_in(config.unrotated_layers, config.num_layers, index)
            angles = Angles(jnp.where(still, 1, angles.cos), jnp.where(still, 0, angles.sin))
        return Place(angles, limited)


def _is_in(layers: Collection[int], num_layers: int, index: jax.Array | int) -> jax.Array:
    """Whether the number of a layer is one of these."""
    return jnp.asarray(np.isin(np.arange(num_layers), list(layers)))[index]
