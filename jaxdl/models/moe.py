"""A decoder whose MLPs are mixtures of experts: a router sends each token to a few of many MLPs.

The block is that of `jaxdl.models.block`; the experts are in `jaxdl.models.experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax

from jaxdl.models.block import Block
from jaxdl.models.blocks import Init
from jaxdl.models.decoder import TransformerModule
from jaxdl.models.dropout import fold
from jaxdl.models.experts import LARGEST, LOAD, LOST, Experts, Seen
from jaxdl.models.layer_kinds import UNPLACED, Place
from jaxdl.models.logits import PENALTY
from jaxdl.models.transformer import Transformer
from jaxdl.parallel import sharding
from jaxdl.parallel.collectives.experts import Dispatch
from jaxdl.parallel.collectives.primitive import alike
from jaxdl.parallel.zigzag import Zigzag


class MixtureOfExperts(Transformer, kind="moe"):
    """A decoder-only transformer whose MLPs are mixtures of experts; `mlp_dim` is the hidden size of one expert."""

    may_change: ClassVar[tuple[str, ...]] = (
        *Transformer.may_change, "dispatch", "row_buffer", "max_lost", "lost_grace_steps",
    )  # fmt: skip

    num_experts: int = pydantic.Field(default=8, ge=2)
    """Experts of each block."""
    experts_per_token: int = pydantic.Field(default=2, ge=1)
    """How many of them compute each token: those with the highest scores."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits: `softmax` over all experts, or `sigmoid` of each."""
    normalized: bool = True
    """Divide the scores of a token's experts by their sum, so that its weights are 1 together."""
    routed_scale: float = pydantic.Field(default=1.0, gt=0)
    """A factor of the weights."""
    shared_dim: int | None = pydantic.Field(default=None, ge=1)
    """Hidden size of an expert that computes every token; None: there is none."""
    balance: Literal["bias", "loss", "none"] = "bias"
    """What keeps the load of experts even: `bias`, added to the scores when experts are chosen, which moves up for
    experts with less than the mean load and down for others after each micro-batch (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2); a `loss` (Fedus et al., arXiv 2101.03961, equation 4); or nothing."""
    balance_rate: float | None = pydantic.Field(default=None, gt=0)
    """By how much a bias moves, or the weight of the loss; None takes 0.001 and 0.01."""
    router_z_loss: float = pydantic.Field(default=0.0, ge=0)
    """Weight of the mean of log(Z)^2 in the training loss, Z the sum of the exponentiated logits of the router (Zoph et
    al., arXiv 2202.08906, equation 5: 0.001)."""
    dispatch: Dispatch = "auto"
    """How tokens are brought to experts that are spread over `fsdp`: `gather`, all tokens to all devices, and the
    results are summed on the way back; `all_to_all`, each token to the devices of its experts; `auto` takes the one
    that sends fewer bytes."""
    row_buffer: float = pydantic.Field(default=2.0, ge=1)
    """Where experts are spread over `fsdp`: rows of tokens for which a device has room in training, in multiples of
    those that it has if all experts have the same load. Tokens beyond lose an expert; how many is reported."""
    max_lost: float = pydantic.Field(default=0.01, ge=0, le=1)
    """The run ends when a larger share of the tokens' choices of experts had no room, over the steps of a report."""
    lost_grace_steps: int = pydantic.Field(default=500, ge=0)
    """Not in the first steps, nor in the first half of a run of fewer than two times as many: routers that have learnt
    little send most tokens to a few experts."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> MixtureOfExperts:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token}: there are num_experts = {self.num_experts}. Take fewer."
            )
        if self.mlp != "swiglu" or self.biases == "all":
            given = f"mlp = {self.mlp}" if self.mlp != "swiglu" else "biases = all"
            raise ValueError(f"{given}: experts are `swiglu`, and have no biases. Leave it out.")
        for name in ("norm_place", "parallel_residual"):
            if (value := getattr(self, name)) != Transformer.model_fields[name].default:
                raise ValueError(
                    f"{name} = {value}: a mixture's blocks have norms before their branches. Leave it out."
                )
        if not self.scan_layers:
            raise ValueError("scan_layers = False: a mixture's layers are stacked. Leave it out.")
        if self.balance_rate is not None and self.balance == "none":
            raise ValueError(f"balance_rate = {self.balance_rate} has no effect with balance = none. Leave it out.")
        return self

    def reason_to_end(self, metrics: Mapping[str, float], step: int, total_steps: int) -> str | None:
        """Where more choices of experts had no room than `max_lost` allows."""
        lost = metrics.get(LOST, 0.0)
        if not lost > self.max_lost or step <= min(self.lost_grace_steps, total_steps // 2):
            return None
        return (
            f"{LOST} = {lost:.3g}: of the choices that tokens made of experts since the last report {lost:.1%} had no "
            f"row on a device, which has --model.row-buffer {self.row_buffer:g} times as many as with even load. More "
            f"than --model.max-lost {self.max_lost:g} is an error. Take a larger --model.row-buffer (one of the size "
            "of fsdp has room for all), balance the load (--model.balance), or allow more"
        )

    @property
    def rate(self) -> float:
        """`balance_rate`, resolved."""
        usual = {"bias": 1e-3, "loss": 1e-2, "none": 0.0}
        return usual[self.balance] if self.balance_rate is None else self.balance_rate

    @property
    def mlp_weights(self) -> int:
        """Weights of the router, the chosen experts and the shared one."""
        hidden = self.experts_per_token * self.hidden_dim + (self.shared_dim or 0)
        return self.embed_dim * (self.num_experts + 3 * hidden)

    @property
    def adds_to_loss(self) -> bool:
        """With a loss for balance, or for the router's logits."""
        return self.balance == "loss" or self.router_z_loss > 0

    @property
    def has_fp8(self) -> bool:
        """Not yet."""
        return False

    @property
    def module(self) -> type[MoEModule]:
        """The class of the network."""
        return MoEModule

    def make_mlp(self, rngs: nnx.Rngs, init: Init) -> Experts:
        """The experts of a block."""
        return Experts(self, rngs, init)


class MoEBlock(Block):
    """A block that also says what its router did."""

    mlp: Experts

    def __call__(
        self,
        x: Any,
        place: Place = UNPLACED,
        segments: jax.Array | None = None,
        keys: jax.Array | None = None,
        order: Zigzag | None = None,
    ) -> Any:
        """([batch, length, embed], what the routers before have done) -> the same after this layer."""
        x, seen = x
        hidden = self.attention_norm(x)
        mixed = self.attention(hidden, **place._asdict(), segments=segments, keys=fold(keys, 0), order=order)
        x = self.plus(x, mixed, fold(keys, 1), order)
        counted = None if segments is None else segments > 0
        counted = counted if counted is None or order is None else order.stored_whole(counted)
        hidden, of_layer = self.mlp.routed(self.mlp_norm(x), counted, train=seen.train)
        return self.plus(x, hidden, fold(keys, 2), order), seen.after(of_layer)


class MoEModule(TransformerModule):
    """The network of a `MixtureOfExperts` config."""

    block: ClassVar[type[Block]] = MoEBlock
    reads_padding: ClassVar[bool] = True  # Padding would take part in the load of experts.

    def blocks(
        self, block: Callable[[Any, Block, jax.Array | int], Any], x: jax.Array, *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array | None]:
        """The same as of a `TransformerModule`; its remarks say what the routers did."""
        config = self.config
        assert isinstance(config, MixtureOfExperts)
        num_layers = self.layers.mlp.router[...].shape[0]  # Of one stage, where there are several.
        leaves, treedef = jax.tree.flatten(Seen.nothing(num_layers, config.num_experts, train=train))
        nothing = jax.tree.unflatten(treedef, alike((), x, *leaves)[1:])
        (x, seen), head = self.through_layers(block, (x, nothing))
        # The load is that of the whole mesh.
        axis = sharding.statistics_axis()
        load = seen.load if axis is None else lax.psum(seen.load, axis)
        mean = load.mean(axis=1, keepdims=True)
        if train and config.balance == "bias":
            bias = self.layers.mlp.bias
            bias[...] += config.rate * jnp.sign(mean - load)
        share = num_layers / config.num_layers
        remarks = {LARGEST: share * jnp.mean(load.max(axis=1) / jnp.maximum(mean[:, 0], 1))}
        if train:
            of_all = jnp.zeros((config.num_layers, config.num_experts), jnp.float32)
            of_all = lax.dynamic_update_slice(of_all, seen.load, (sharding.first_layer(num_layers), 0))
            remarks |= {LOST: share * seen.lost / jnp.maximum(seen.load.sum(), 1), LOAD: of_all}
        rate = config.rate if config.balance == "loss" else 0.0
        if rate or config.router_z_loss:
            # Sums over the tokens of this replica, with shares of the load of the whole mesh: so the sum over replicas
            # is the same however tokens are spread.
            even = config.num_experts * jnp.sum(load / jnp.maximum(load.sum(axis=1, keepdims=True), 1) * seen.chances)
            remarks[PENALTY] = (rate * even + config.router_z_loss * seen.z) / config.num_layers
        return x, remarks, head
