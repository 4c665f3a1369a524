"""Learning from preferences: of two answers to a prompt the chosen one becomes likelier than the rejected one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from jaxdl.data import DataSpec, PreferenceSpec
from jaxdl.models.experts import LOAD, load_metrics
from jaxdl.models.logits import PENALTY, Logits, add_remarks, log_likelihoods
from jaxdl.training.tasks.base import Task, counted_weight

REFERENCE = "reference"
"""In a batch: the log-probabilities of the answers by the reference, float32 [batch, 2]."""
METRICS = (
    "loss", "accuracy", "margin", "reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected"
)  # fmt: skip
"""Those of pairs, in this order."""
_BETA = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0}
_GAMMA = 1.0


class Preferences(Task, kind="preferences"):
    """Tunes a language model on pairs of answers, without a model of rewards.

    The reward of an answer is beta times how much likelier it has become than by the reference, the network as it was
    when the run began; the adapters of one that has some (`--model.lora.rank`) are what changes. With `simpo` there is
    no reference: it is beta times the mean log-probability of the answer's tokens.

    Batches are those of `jaxdl.data.PreferenceSpec`, and perhaps "mask", bool [batch].
    """

    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    """`dpo`: -log sigmoid(margin), the margin being the difference of the two rewards (Rafailov et al. 2023, arXiv
    2305.18290). `ipo`: (margin of mean log-probabilities / beta - 1 / (2 beta))^2 (Azar et al. 2023, arXiv 2310.12036).
    `simpo`: -log sigmoid(margin - gamma), without a reference (Meng et al. 2024, arXiv 2405.14734)."""
    beta: float | None = pydantic.Field(default=None, gt=0)
    """How closely the network stays to the reference, more with a larger one; of `simpo` the scale of the rewards. None
    takes 0.1, and of `simpo` 2."""
    gamma: float | None = pydantic.Field(default=None, ge=0)
    """With `simpo`: the margin that is aimed at. None takes 1."""
    label_smoothing: float = pydantic.Field(default=0.0, ge=0, lt=0.5)
    """How often the preference is expected to be wrong, with `dpo` and `simpo` (cDPO, Mitchell 2023)."""

    modality: ClassVar[str] = "preferences"
    network_modality: ClassVar[str] = "text"
    best_metric: ClassVar[str] = "loss"
    best_mode: ClassVar[Literal["max", "min"]] = "min"
    unit: ClassVar[str] = "pairs"

    @pydantic.model_validator(mode="after")
    def _effect(self) -> Preferences:
        if self.gamma is not None and self.loss != "simpo":
            raise ValueError(f"gamma = {self.gamma:g} has no effect with loss = {self.loss}. Leave it out.")
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError(f"label_smoothing = {self.label_smoothing:g} has no effect with loss = ipo. Leave it out.")
        return self

    @property
    def takes_arrays(self) -> bool:
        """Whether `sums` needs the logits: that of a user's class may look at them."""
        return self.has_user_code

    @property
    def needs_reference(self) -> bool:
        """Whether the network as it was when the run began says how likely the answers are: not with `simpo`."""
        return self.loss != "simpo"

    def reference(self, outputs: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The log-probabilities of the answers by the reference, from its outputs, as `sums` finds them in a batch."""
        return {REFERENCE: _log_probs(outputs, batch)}

    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Number of pairs that count: float32 scalar."""
        return jnp.sum(_counted(batch), dtype=jnp.float32)

    def sums(self, outputs: Any, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """Sums over the pairs that count, from the outputs for both texts of each pair: float32 scalars.

        "loss"; "weight", the number of pairs; "correct", of those whose chosen answer has the higher reward; "margin",
        "reward_chosen" and "reward_rejected"; "log_prob_chosen" and "log_prob_rejected", of `simpo` means over the
        tokens. With them come the `Logits.remarks` of the network.
        """
        log_probs = _log_probs(outputs, batch)
        sizes = jnp.maximum(_sizes(batch), 1).astype(jnp.float32)
        beta = _BETA[self.loss] if self.beta is None else self.beta
        if self.loss == "simpo":
            log_probs = log_probs / sizes
        ratios = log_probs if self.loss == "simpo" else log_probs - jax.lax.stop_gradient(batch[REFERENCE])
        rewards = beta * ratios
        losses = self._losses(rewards, ratios / sizes, beta)
        counted = _counted(batch)

        def total(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(counted, x, 0))

        margin = rewards[:, 0] - rewards[:, 1]
        values = {"margin": margin, "reward_chosen": rewards[:, 0], "reward_rejected": rewards[:, 1]}
        values |= {"log_prob_chosen": log_probs[:, 0], "log_prob_rejected": log_probs[:, 1]}
        weight = self.weight(batch)
        sums = {"loss": total(losses), "weight": weight, "correct": total((margin > 0).astype(jnp.float32))}
        sums |= {name: total(jax.lax.stop_gradient(x)) for name, x in values.items()}
        if isinstance(outputs, Logits) and outputs.remarks:
            remarks = dict(outputs.remarks)
            if PENALTY in remarks:
                # A sum over tokens, whose mean is added to the mean loss of a pair: that of the tokens of this replica
                # and micro-batch, so padding plays no part.
                num_tokens = jnp.sum(jnp.minimum(batch["answers"][..., 1], outputs.shape[1]), dtype=jnp.float32)
                remarks[PENALTY] = remarks[PENALTY] * weight / jnp.maximum(num_tokens, 1)
            sums = add_remarks(sums, remarks, weight, train=train)
        return sums

    def _losses(self, rewards: jax.Array, mean_ratios: jax.Array, beta: float) -> jax.Array:
        """The loss of each pair, [batch], from the rewards of both answers and the ratios of a token, [batch, 2]."""
        if self.loss == "ipo":
            return jnp.square(mean_ratios[:, 0] - mean_ratios[:, 1] - 1 / (2 * beta))
        margin = rewards[:, 0] - rewards[:, 1]
        if self.loss == "simpo":
            margin = margin - (_GAMMA if self.gamma is None else self.gamma)
        losses = -jax.nn.log_sigmoid(margin)
        if self.label_smoothing:
            losses = (1 - self.label_smoothing) * losses - self.label_smoothing * jax.nn.log_sigmoid(-margin)
        return losses

    def metrics(self, sums: Mapping[str, Any], spec: DataSpec) -> dict[str, float]:
        """Means over the pairs: "loss", "accuracy" from 0 to 1, and the others of `sums`.

        Raises ConfigError when there was no pair.
        """
        del spec
        weight = counted_weight(sums)
        means = {name: float(x) / weight for name, x in sums.items() if name not in ("weight", LOAD)}
        means["accuracy"] = means.pop("correct")
        load = load_metrics(np.asarray(sums[LOAD])) if LOAD in sums else {}
        return {name: means[name] for name in METRICS} | means | load

    def predictions(self, outputs: jax.Array) -> jax.Array:
        """Probability of each next token, float32 [batch, length, vocab]."""
        return jax.nn.softmax(outputs.astype(jnp.float32), axis=-1)

    def output_shape(self, spec: DataSpec) -> tuple[int, ...] | None:
        """None: a pair has two rows of outputs."""
        assert isinstance(spec, PreferenceSpec)
        return None


def _counted(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Which pairs count: bool [batch]."""
    return batch["mask"].astype(bool) if "mask" in batch else jnp.ones(len(batch["tokens"]), bool)


def _sizes(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Tokens of each answer, int32 [batch, 2]."""
    return batch["answers"][..., 1] - batch["answers"][..., 0]


def _log_probs(outputs: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The log-probability of each answer, given what is before it: float32 [batch, 2].

    `outputs` are [2 batch, length, vocab], for the texts of each pair after each other.
    """
    tokens, answers = batch["tokens"], batch["answers"].reshape(-1, 2)
    target = tokens.reshape(-1, tokens.shape[-1])[:, 1:]
    if isinstance(outputs, Logits):
        outputs = dataclasses.replace(outputs, remarks={})
    places = jnp.arange(1, tokens.shape[-1])
    inside = (places >= answers[:, :1]) & (places < answers[:, 1:])
    each = jnp.where(inside, log_likelihoods(outputs, target), 0)
    return jnp.sum(each, axis=1).reshape(-1, 2)
