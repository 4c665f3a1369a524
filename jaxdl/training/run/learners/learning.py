"""A run as a learner: at equal distances its change is sent to the syncer, which returns the next anchor.

The state is that of replicas with parameters of their own, with one replica: its parameters are in
`TrainState.agreement_state`, and `TrainState.params` is the anchor, which is evaluated, saved and exported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.phases import Segment
from jaxdl.exchange import by_name
from jaxdl.parallel.asynchrony.learner import Given, Learner
from jaxdl.parallel.asynchrony.outer import Vector
from jaxdl.parallel.asynchrony.service import Address, find_syncer
from jaxdl.parallel.cluster import heartbeat
from jaxdl.parallel.cluster.address import SYNCER_VARIABLE
from jaxdl.training.run.compile import Programs, StepFunctions, Steps, programs, shared_programs
from jaxdl.training.run.hooks import Callbacks, StepInfo
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.run.signals import StopSignals
from jaxdl.training.state import TrainState
from jaxdl.training.step import Batch, Metrics, Parts, ema_decay


@contextlib.contextmanager
def as_learner(plan: Plan, stop: StopSignals, callbacks: Callbacks) -> Iterator[Callbacks]:
    """Context of a run: between its steps it exchanges with its syncer, if it is a learner. Gives the run's hooks.

    Raises ConfigError where the agreement does not fit the environment.
    """
    learning = _find_learning(plan, stop)
    if learning is None:
        yield callbacks
        return
    with contextlib.closing(learning), shared_programs(learning.programs(programs())):
        yield callbacks._replace(own_on_step=(*callbacks.own_on_step, learning.stepped))


def _find_learning(plan: Plan, stop: StopSignals) -> Learning | None:
    """The learner that this run is; None for a run without a syncer."""
    address, agreement = find_syncer(), plan.experiment.agreement
    if address is None and not agreement.needs_syncer:
        return None
    if address is None:
        raise ConfigError(
            f"--agreement {agreement.kind}: there is no syncer ({SYNCER_VARIABLE} is not set). Start the learners by "
            "`python -m jaxdl.launch async`."
        )
    if not agreement.needs_syncer:
        raise ConfigError(
            f"--agreement {agreement.kind}: this run was started as a learner ({SYNCER_VARIABLE} is set). Give "
            "--agreement async."
        )
    if jax.process_count() > 1:
        raise ConfigError("--agreement async: a learner is one process; it may have several devices.")
    return Learning(plan, stop, address)


class Flat:
    """The trained parameters as one row of float32 values, in the order of their names."""

    def __init__(self, parts: Parts) -> None:
        self._shapes = {name: x.shape for name, x in by_name(parts.trainable.of(parts.network.param_shapes)).items()}
        self.size = sum(int(np.prod(shape)) for shape in self._shapes.values())
        """Number of values."""
        self.layout = hashlib.sha256(json.dumps(list(self._shapes.items())).encode()).hexdigest()
        """Hash of the names and shapes."""

    def row(self, leaves: dict[str, Any]) -> Vector:
        """The row of arrays of these names; each may have a leading dimension of 1."""
        return np.concatenate([np.asarray(leaves[name], np.float32).ravel() for name in self._shapes])

    def leaves(self, row: Vector) -> dict[str, np.ndarray]:
        """The arrays of a row."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes.values()])
        pieces = np.split(row, ends[:-1])
        return {name: piece.reshape(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}


class Since(NamedTuple):
    """What a learner has trained on since the last anchor."""

    weight: float
    """Examples or tokens in good steps; at least a tiny number."""
    loss: float
    """The mean loss of these; NaN without any."""


def as_delta(parts: Parts, flat: Flat, anchor: Vector, state: TrainState) -> tuple[Vector, Since]:
    """What the syncer is sent: the anchor less the learner's parameters. Waits for the devices."""
    mine, since = jax.device_get((by_name(state.own.params), state.own.since))
    weight, loss = (float(since["sums"][name][0]) for name in ("weight", "loss"))
    return anchor - flat.row(mine), Since(max(weight, 1e-9), loss / weight if weight else math.nan)


def make_adopt(parts: Parts) -> jax.stages.Wrapped:
    """The jitted function `(state, anchor, num_steps) -> state`; the state is donated.

    The learner goes on from the anchor, arrays by name; `num_steps` after the one before. The optimizer's state stays.
    """
    spec = parts.state_spec.shardings
    shardings = by_name(parts.trainable.of(spec.params))

    def adopt(state: TrainState, anchor: dict[str, Any], num_steps: Any) -> TrainState:
        old = parts.trainable.of(state.params)
        trained = jax.tree.unflatten(jax.tree.structure(old), [anchor[name] for name in by_name(old)])
        average = state.ema_params
        if parts.config.ema_decay is not None:
            decay = ema_decay(parts.config.ema_decay, state.step) ** num_steps
            moved = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, parts.trainable.of(average), trained)
            average = parts.trainable.merged(moved, average)
        mine = jax.tree.map(lambda x: x[None], trained)
        replicas = dataclasses.replace(state.own, params=mine, since=jax.tree.map(jnp.zeros_like, state.own.since))
        model_state = jax.tree.map(lambda x: x[0], replicas.model_state)
        params = parts.trainable.merged(trained, state.params)
        return state.replace(params=params, model_state=model_state, ema_params=average).with_own(replicas)

    return jax.jit(adopt, donate_argnums=0, in_shardings=(spec, shardings, None), out_shardings=spec)


class Learning:
    """The exchange of a run with its syncer. The trainer's steps are wrapped by `programs`."""

    def __init__(self, plan: Plan, stop: StopSignals, address: Address) -> None:
        self._plan, self._parts, self._stop, self._address = plan, plan.parts, stop, address
        self._flat = Flat(plan.parts)
        self._adopt = make_adopt(plan.parts)
        self._learner: Learner | None = None
        self._given: Given | None = None
        self._made = 0
        """Steps since the last anchor."""
        self._next_step = 0
        self._interrupted = False
        self._metrics: Metrics = {}

    def programs(self, inner: Programs) -> Programs:
        """Those that the trainer takes its steps from."""
        return _LearnerPrograms(inner, self)

    def stepped(self, info: StepInfo) -> None:
        """A hook: ends the run when the syncer says that it is over."""
        if self._given is not None and self._given.over:
            info.stop("the syncer", over=True)

    def close(self) -> None:
        """Says goodbye to the syncer: as one that has finished, unless the run was interrupted."""
        if self._learner is not None:
            over = self._given is not None and self._given.over
            finished = over or self._next_step >= self._plan.total_steps
            with contextlib.suppress(Exception):
                self._learner.close(finished=finished and not self._interrupted)

    def before(self, state: TrainState, step: int) -> TrainState:
        """The state that the next step begins with, after `step` steps."""
        if self._given is None:
            state = self._begin(state, step)
        elif step < self._next_step:  # Rolled back: what was learnt since the anchor is gone.
            state = self._adopt_state(state, self._given)
        else:
            state = self.settle(state)
        return state

    def made(self, step: int, num_steps: int, metrics: Sequence[Metrics]) -> list[Metrics]:
        """Counts steps; their metrics, with those of the last exchange."""
        self._next_step, self._made = step + num_steps, self._made + num_steps
        of_steps, self._metrics = self._metrics, {}
        return [*metrics[:-1], {**metrics[-1], **of_steps}]

    def settle(self, state: TrainState) -> TrainState:
        """The state after the exchange that is due, if one is."""
        given = self._given
        if given is None or given.over or self._stop.signum is not None or self._interrupted:
            return state
        assert self._learner is not None
        last = self._next_step >= self._plan.total_steps
        if not self._made or not (self._made >= given.steps or last or self._learner.is_over):
            return state
        delta, since = as_delta(self._parts, self._flat, given.anchor, state)
        learner, began, made = self._learner, time.monotonic(), self._made
        new = self._waiting(lambda: learner.exchange(delta, weight=since.weight, steps=made))
        self._metrics = {
            "agreement/loss": jnp.float32(since.loss),
            "agreement/distance": jnp.float32(np.linalg.norm(delta)),
            "agreement/merges": jnp.float32(new.version),
            "agreement/wait_sec": jnp.float32(time.monotonic() - began),
        }
        return self._adopt_state(state, new)

    def _begin(self, state: TrainState, step: int) -> TrainState:
        """Joins: with the state's parameters as the anchor, if the syncer has none."""
        host, port, number, num_learners, token = self._address
        self._learner = learner = Learner(
            (host, port),
            number,
            num_learners,
            token,
            size=self._flat.size,
            layout=self._flat.layout,
            resumes=f"step {step}" if step else "",
            stream=f"seed {self._plan.experiment.seed}",
            waiting=_Waiting(host, port),
        )
        initial = self._flat.row(jax.device_get(by_name(self._parts.trainable.of(state.params))))
        return self._adopt_state(state, self._waiting(lambda: learner.begin(lambda: initial)))

    def _waiting(self, ask: Callable[[], Given]) -> Given:
        """An answer of the syncer; a signal ends the wait, and leaves the state as it is."""
        try:
            return self._stop.run(ask)
        except BaseException:
            self._interrupted = True
            raise

    def _adopt_state(self, state: TrainState, given: Given) -> TrainState:
        state = self._adopt(state, self._flat.leaves(given.anchor), max(self._made, 1))
        self._given, self._made = given, 0
        return state


class _Waiting:
    """Says now and then that there is no syncer, and why; the learner is alive meanwhile."""

    def __init__(self, host: str, port: int) -> None:
        self._where, self._since, self._next = f"{host}:{port}", 0.0, 0.0

    def __call__(self, why: str) -> None:
        heartbeat.beat()
        now = time.monotonic()
        if not why:
            self._since = self._next = 0.0
            return
        self._since = self._since or now
        if now - self._since >= self._next:
            print(
                f"note: no connection to the syncer at {self._where}: {why}; trying again", file=sys.stderr, flush=True
            )
            self._next = max(2 * self._next, 15.0)


class _LearnerPrograms(Programs):
    """Programs whose steps exchange with the syncer."""

    def __init__(self, inner: Programs, learning: Learning) -> None:
        super().__init__()
        self._inner, self._learning = inner, learning

    def ready(self, plan: Plan, segment: Segment) -> bool:
        return self._inner.ready(plan, segment)

    def of(self, plan: Plan, segment: Segment, end: int = 0) -> StepFunctions:
        steps = self._inner.of(plan, segment, end)
        return steps._replace(train=_LearnerSteps(steps.train, self._learning))


class _LearnerSteps:
    """See `Steps`; between steps of its own the learner exchanges with the syncer."""

    def __init__(self, inner: Steps, learning: Learning) -> None:
        self._inner, self._learning = inner, learning

    def num_batches(self, step: int) -> int:
        return self._inner.num_batches(step)

    def restart(self) -> Steps:
        return _LearnerSteps(self._inner.restart(), self._learning)

    def __call__(self, state: TrainState, batches: Sequence[Batch], step: int) -> tuple[TrainState, Sequence[Metrics]]:
        state = self._learning.before(state, step)
        state, metrics = self._inner(state, batches, step)
        return state, self._learning.made(step, len(batches), metrics)

    def settle(self, state: TrainState) -> tuple[TrainState, Metrics]:
        state, metrics = self._inner.settle(state)
        return self._learning.settle(state), metrics

    def apart(self, step: int) -> bool:
        return self._inner.apart(step)
