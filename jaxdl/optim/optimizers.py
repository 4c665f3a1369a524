"""The choice of an optimizer: each config chains a few optax transformations.

Their state is float32 arrays shaped like the parameters, so it is sharded like them, and step counts. Any subclass of
`Optimizer` is one more choice, see `jaxdl.core.kinds`.
"""

from __future__ import annotations

import abc
import inspect
from typing import Annotated, Any

import jax
import optax
import optax.contrib
import pydantic

from jaxdl.core.kinds import Choice
from jaxdl.core.user_code import parameters
from jaxdl.optim.layerwise import add_weight_decay, scale_by_lamb_trust_ratio, scale_by_lars_trust_ratio
from jaxdl.optim.masks import Mask, decay_mask, stacked_dims
from jaxdl.optim.rates import changing_momentum, scale_by_learning_rate
from jaxdl.parallel.sharding import LogicalAxes


class Optimizer(Choice):
    """What all optimizers share."""

    learning_rate: float = pydantic.Field(default=0.1, gt=0, allow_inf_nan=False)
    """The peak learning rate; the schedule decides its course."""
    rate_factors: dict[str, Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]] = pydantic.Field(
        default={}, exclude_if=lambda value: not value
    )
    """Factors of the learning rate by patterns of parameter names, `head=10 stem*=0.1`; the first match counts."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"optimizer {self.kind}"

    @property
    def checked(self) -> bool:
        """Whether it is tried on shapes before it is used; jaxdl's own ones need not be."""
        return self.users_name is not None

    @classmethod
    def instead_of(cls, value: Any) -> str:
        """How an optimizer of optax is given."""
        if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
            return (
                ' an optax transformation cannot be written to config.json. Write Optax("adam", learning_rate=1e-3) '
                "for optax.adam(1e-3), or Optax(make) with a function make(learning_rate) that returns it"
            )
        for prefix, module in (("", optax), ("contrib.", optax.contrib)):
            function = getattr(module, value, None) if isinstance(value, str) else None
            if inspect.isfunction(function) and "learning_rate" in parameters(function):
                name = prefix + value
                command = f"python -m jaxdl.train --optimizer optax --optimizer.transformation {name}"
                return f' {name} is an optimizer of optax: Optax("{name}"), or {command}.'
        return ""

    def momentum_at(self, cycle: jax.Array) -> jax.Array | None:
        """The momentum of an update, where it changes over the run; `cycle` is the value of `Schedule.cycle`."""
        del cycle
        return None

    @abc.abstractmethod
    def build(self, axes: LogicalAxes) -> optax.GradientTransformationExtraArgs:
        """The optimizer of parameters with these logical axes; its `update` needs the extra argument `rates`."""


class MomentumOptimizer(Optimizer, kind=None):
    """What `SGD` and `LARS` share: the momentum."""

    momentum: float = pydantic.Field(default=0.9, ge=0, lt=1)
    """How much of the last update stays; 0 is plain gradient descent."""
    momentum_at_peak: float | None = pydantic.Field(default=None, ge=0, lt=1)
    """Cycle the momentum against the learning rate: it moves linearly from `momentum` to this value at the end of the
    warm-up, and back by the end of the run. None keeps it constant."""
    nesterov: bool = False
    """Nesterov's momentum."""

    @pydantic.model_validator(mode="after")
    def _momentum_takes_effect(self) -> MomentumOptimizer:
        if self.momentum_at_peak == self.momentum:
            raise ValueError(
                f"momentum_at_peak = {self.momentum_at_peak}: the same as momentum, so nothing would change. "
                "Give another value, or None."
            )
        if self.nesterov and not (self.momentum or self.momentum_at_peak):
            raise ValueError(
                "nesterov = True has no effect at momentum = 0. Set a momentum such as 0.9, or nesterov to False."
            )
        return self

    def momentum_at(self, cycle: jax.Array) -> jax.Array | None:
        """`momentum` where `cycle` is 0, `momentum_at_peak` where it is 1, linear in between."""
        if self.momentum_at_peak is None:
            return None
        return self.momentum + (self.momentum_at_peak - self.momentum) * cycle

    def _trace(self) -> optax.GradientTransformation:
        """The momentum buffer; none at momentum 0."""
        if self.momentum_at_peak is not None:
            return changing_momentum(self.nesterov)
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()


class AdamOptimizer(Optimizer, kind=None):
    """What `AdamW` and `LAMB` share: the running means of Adam."""

    b1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of the gradients."""
    b2: float = pydantic.Field(default=0.999, ge=0, lt=1)
    """Decay of the mean of the squared gradients."""


def _exclusion_takes_effect(config: Any) -> Any:
    if not config.exclude_vectors and not config.weight_decay:
        raise ValueError(
            "exclude_vectors = False has no effect at weight_decay = 0. Set a weight decay, or leave it True."
        )
    return config


def _clip_is_a_range(config: Any) -> Any:
    clip = config.trust_ratio_clip
    if clip is not None and not (0 <= clip[0] <= clip[1] and clip[1] > 0):
        raise ValueError(
            f"trust_ratio_clip = {clip}: not a range of positive ratios. Give the least and the greatest, such as 0 10."
        )
    return config


class SGD(MomentumOptimizer, kind="sgd"):
    """Gradient descent with momentum, as in the ResNet recipes: weight decay is added to the gradient (L2).

        g += weight_decay w;  m = momentum m + g;  w -= learning_rate m
        (with Nesterov's momentum: w -= learning_rate (g + momentum m))

    The learning rate is outside the momentum m, so a change of the rate acts on all of m at once.
    """

    weight_decay: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay, added to the gradient."""
    exclude_vectors: bool = True
    """Exclude biases and normalization from weight decay."""

    _effects = pydantic.model_validator(mode="after")(_exclusion_takes_effect)

    def build(self, axes: LogicalAxes) -> optax.GradientTransformationExtraArgs:
        """The chain of optax transformations, for parameters with these logical axes."""
        return optax.chain(
            add_weight_decay(self.weight_decay, _mask(axes, self.exclude_vectors)),
            self._trace(),
            scale_by_learning_rate(),
        )


class AdamW(AdamOptimizer, kind="adamw"):
    """Adam with decoupled weight decay, times the learning rate (Loshchilov and Hutter, arXiv 1711.05101)."""

    learning_rate: float = pydantic.Field(default=1e-3, gt=0, allow_inf_nan=False)
    """The peak learning rate; the schedule decides its course."""
    epsilon: float = pydantic.Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the mean squared gradient."""
    weight_decay: float = pydantic.Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight decay, times the learning rate."""
    exclude_vectors: bool = True
    """Exclude biases and normalization from weight decay."""

    _effects = pydantic.model_validator(mode="after")(_exclusion_takes_effect)

    def build(self, axes: LogicalAxes) -> optax.GradientTransformationExtraArgs:
        """The chain of optax transformations, for parameters with these logical axes."""
        return optax.chain(
            optax.scale_by_adam(self.b1, self.b2, self.epsilon),
            add_weight_decay(self.weight_decay, _mask(axes, self.exclude_vectors)),
            scale_by_learning_rate(),
        )


class SignSGD(Optimizer, kind="sign_sgd"):
    """The sign of the gradient, or of its momentum (Signum), with decoupled weight decay (Bernstein et al., arXiv
    1802.04434).

        m = momentum m + g;  w -= learning_rate (sign(m) + weight_decay w)

    After the exchange demo, which has a momentum of its own, and without momentum here it is DeMo.
    """

    learning_rate: float = pydantic.Field(default=3e-4, gt=0, allow_inf_nan=False)
    """The peak learning rate, by which every weight moves; the schedule decides its course."""
    momentum: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """How much of the last gradients stays; 0 is the sign of the gradient."""
    weight_decay: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay, times the learning rate."""
    exclude_vectors: bool = True
    """Exclude biases and normalization from weight decay."""

    _effects = pydantic.model_validator(mode="after")(_exclusion_takes_effect)

    def build(self, axes: LogicalAxes) -> optax.GradientTransformationExtraArgs:
        """The chain of optax transformations, for parameters with these logical axes."""
        return optax.chain(
            optax.trace(self.momentum) if self.momentum else optax.identity(),
            optax.scale_by_sign(),
            add_weight_decay(self.weight_decay, _mask(axes, self.exclude_vectors)),
            scale_by_learning_rate(),
        )


class LARS(MomentumOptimizer, kind="lars"):
    """Momentum with a trust ratio for each layer (You et al., arXiv 1708.03888), as in MLPerf's ResNet-50 reference.

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + epsilon)
        m = momentum m - learning_rate ratio (g + weight_decay w);  w += m

    The learning rate is inside the momentum m. `optax.lars` has another ratio and masks nothing by default. The
    defaults are MLPerf's reference point for a batch of 4096 images; it warms up for 5 epochs.
    """

    learning_rate: float = pydantic.Field(default=10.0, gt=0, allow_inf_nan=False)
    """The peak learning rate; the schedule decides its course."""
    weight_decay: float = pydantic.Field(default=2e-4, ge=0, allow_inf_nan=False)
    """Weight decay, added to the gradient and part of the trust ratio."""
    trust_coefficient: float = pydantic.Field(default=0.001, gt=0, allow_inf_nan=False)
    """How far a layer moves at learning rate 1, relative to its norm (eeta in MLPerf)."""
    epsilon: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Added to the denominator of the trust ratio."""
    trust_ratio_clip: tuple[float, float] | None = None
    """Least and greatest trust ratio."""
    exclude_vectors: bool = True
    """Exclude biases and normalization from weight decay and trust ratios."""

    _clip = pydantic.model_validator(mode="after")(_clip_is_a_range)

    def build(self, axes: LogicalAxes) -> optax.GradientTransformationExtraArgs:
        """The chain of optax transformations, for parameters with these logical axes."""
        trust_ratio = scale_by_lars_trust_ratio(
            self.trust_coefficient,
            self.weight_decay,
            self.epsilon,
            mask=_mask(axes, self.exclude_vectors),
            stacked=stacked_dims(axes),
            clip=self.trust_ratio_clip,
        )
        return optax.chain(trust_ratio, scale_by_learning_rate(), self._trace())


class LAMB(AdamOptimizer, kind="lamb"):
    """Adam with a trust ratio for each layer (You et al., arXiv 1904.00962, Algorithm 2).

    u = Adam's direction + weight_decay w;  w -= learning_rate |w| / |u| u
    """

    learning_rate: float = pydantic.Field(default=2e-3, gt=0, allow_inf_nan=False)
    """The peak learning rate; the schedule decides its course."""
    epsilon: float = pydantic.Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the root of the mean squared gradient."""
    weight_decay: float = pydantic.Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight decay, part of the update that the trust ratio scales."""
    trust_ratio_clip: tuple[float, float] | None = None
    """Least and greatest trust ratio."""
    exclude_vectors: bool = True
    """Exclude biases and normalization from weight decay and trust ratios."""

    _clip = pydantic.model_validator(mode="after")(_clip_is_a_range)

    def build(self, axes: LogicalAxes) -> optax.GradientTransformationExtraArgs:
        """The chain of optax transformations, for parameters with these logical axes."""
        mask = _mask(axes, self.exclude_vectors)
        return optax.chain(
            optax.scale_by_adam(self.b1, self.b2, self.epsilon),
            add_weight_decay(self.weight_decay, mask),
            scale_by_lamb_trust_ratio(mask, stacked_dims(axes), self.trust_ratio_clip),
            scale_by_learning_rate(),
        )


def _mask(axes: LogicalAxes, exclude_vectors: bool) -> Mask:
    """Which parameters take part in weight decay and trust ratios."""
    weights = decay_mask(axes)
    return weights if exclude_vectors else jax.tree.map(lambda _: True, weights)
