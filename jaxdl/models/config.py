"""The base of the configs of all models."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import Choice
from jaxdl.core.user_code import select_arguments, user_code
from jaxdl.models.network import Network
from jaxdl.parallel.embedding import Table
from jaxdl.parallel.sharding import Params


class Model(Choice):
    """The architecture of a network. Any subclass is one more choice, see `jaxdl.core.kinds`."""

    modality: ClassVar[str | None] = None
    """What the network reads, "images" or "text"; the task and the data must have the same. None reads anything."""
    position_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that decide how positions are known, and how far; none where the model does not say."""
    may_change: ClassVar[tuple[str, ...]] = ()
    """The fields that may be others when a run resumes: they decide how the network is computed, not what it is."""
    splits_layers: ClassVar[bool] = False
    """Whether its layers can be spread over the mesh axes that split layers (`jaxdl.parallel.mesh.Axis`)."""
    splits_length: ClassVar[bool] = False
    """Whether it can read texts whose length is split over mesh axes."""

    @classmethod
    def instead_of(cls, value: Any) -> str:
        """A sentence on how a flax module is given."""
        made = value if isinstance(value, type) else type(value)
        if not issubclass(made, nnx.Module | linen.Module):
            return ""
        return f" {made.__name__} is a flax module. Write FromModule({made.__name__}, ...), with its arguments by name"

    def network(self, inputs: Sequence[jax.ShapeDtypeStruct], **sizes: Any) -> Network:
        """The network for inputs like these, [batch, ...] each; `sizes` are the arguments of `build`.

        Raises ConfigError for a model of a user that fails, or that does not take the dtype of the computation.
        """
        del inputs
        if "dtype" not in select_arguments(self.build, sizes):
            check_dtype(self.users_name, sizes, "its build()")
        with user_code(self.users_name, of=self.build):
            make = self.make(**sizes)
        return Network(make, self.users_name)

    def make(self, **sizes: Any) -> Callable[[nnx.Rngs], nnx.Module]:
        """`build` with those of these arguments that it takes."""
        return self.build(**select_arguments(self.build, sizes))

    def tables(self, features: Sequence[Any]) -> tuple[Table, ...]:
        """The embedding tables for features of the data, each with `name`, `rows` and `num_ids`; by default none.

        A network with tables has, as its last input, the pooled vectors of all features: {name: [batch, columns]}.
        """
        del features
        return ()

    def context(self, length: int) -> int | None:
        """How many tokens a network that was trained on texts of `length` reads at a time: those; None: any number."""
        return length

    def reads_as(self, other: Model) -> bool:
        """Whether a network of this model knows positions as one of the other, whose parameters it begins with.

        Then it reads texts as long as that one did.
        """
        same = type(self) is type(other) and bool(self.position_fields)
        return same and all(getattr(self, name) == getattr(other, name) for name in self.position_fields)

    def remarks(self, mesh: Mesh, dtype: DTypeLike) -> tuple[str, ...]:
        """Lines for the user about how the network is computed on this mesh in this dtype: none."""
        del mesh, dtype
        return ()

    def reason_to_end(self, metrics: Mapping[str, float], step: int, total_steps: int) -> str | None:
        """Why a run must end after `step` steps, and what to change, by the metrics of a report; None: it goes on."""
        del metrics, step, total_steps
        return None

    @property
    def num_stacked_layers(self) -> int | None:
        """The number of layers whose parameters are stacked in one array each; None where they are not."""
        return None

    def output_layers(self, **sizes: Any) -> float:
        """The work of the output layer on an example, in that of one stacked layer; `sizes` are those of `network`."""
        del sizes
        return 0.0

    @property
    def adds_to_loss(self) -> bool:
        """Whether the network has a loss of its own, which a task has to add (`jaxdl.models.logits.PENALTY`)."""
        return False

    @property
    def trained_members(self) -> int | None:
        """How many outputs of each example the network has in training, [batch, member, ...]; None: one, [batch, ...].

        Each is trained for itself. In evaluation there is one, of all members together.
        """
        return None

    @property
    def has_fp8(self) -> bool:
        """Whether large products of its blocks can be in FP8."""
        return False

    @property
    def trained(self) -> tuple[str, ...]:
        """Patterns of the parameters that are trained, the others being frozen; none means all."""
        return ()

    @property
    def needs_base(self) -> bool:
        """Whether the parameters that are not trained must come from another run: random ones would be a mistake."""
        return False

    def merged(self, params: Params) -> tuple[Self, Params]:
        """The model, and its parameters, without what is only of use in training; it computes the same."""
        return self, params

    @abc.abstractmethod
    def build(self, *args: Any, **sizes: Any) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the network from random keys; the network is called as `network(*inputs, train=...)`.

        Its arguments are those of these that it declares: `dtype`, in which to compute, and the sizes of the data:
        `num_classes` and `channels` of images, `vocab_size` of text.
        """


def check_dtype(what: str | None, sizes: dict[str, Any], taker: str) -> None:
    """Raises ConfigError where `sizes` has a 16-bit dtype, for a network whose maker does not take it."""
    dtype = jnp.dtype(sizes.get("dtype", "float32"))
    if dtype != jnp.float32:
        raise ConfigError(
            f"--precision {dtype}: {what or 'the model'} would compute in float32 all the same, since {taker} takes no "
            "argument dtype. Add one and give it to its layers, or take --precision float32."
        )
