"""A trained network, restored from a workdir, that predicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.checkpoint import Checkpoints
from jaxdl.config import ConfigError
from jaxdl.experiment import Experiment, Plan, make_plan
from jaxdl.mesh import MeshConfig, batch_sharding, batch_ways
from jaxdl.state import TrainState
from jaxdl.step import apply_network


class Predictor:
    """A trained network. `step` is how many steps it was trained for, `experiment` the config it was trained with."""

    def __init__(self, plan: Plan, state: TrainState, step: int) -> None:
        self.experiment, self.plan, self.step = plan.experiment, plan, step
        self._params, self._model_state = state.eval_params, state.model_state
        self._predict = jax.jit(self._probabilities)

    def _probabilities(self, params: Any, model_state: Any, batch: dict[str, jax.Array]) -> jax.Array:
        parts = self.plan.parts
        outputs, _ = apply_network(parts, parts.layout, params, model_state, batch, train=False)
        return parts.task.predictions(outputs)

    def predict(self, images: Any) -> np.ndarray:
        """The probability of each class, `[batch, num_classes]`, of images `[batch, height, width, channel]`.

        Images are uint8 with grey levels from 0 to 255, of the size that the network was trained on. Raises ConfigError
        for another shape or type, and for a network that does not read images.
        """
        spec = self.plan.parts.data_spec
        if spec.modality != "images":
            raise ConfigError("predict: this network reads text; use generate(prompt).")
        images, wanted = np.asarray(images), (spec.height, spec.width, spec.channels)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != wanted:
            raise ConfigError(
                f"predict: got {images.dtype} {list(images.shape)}; this network reads uint8 "
                f"[batch, {', '.join(map(str, wanted))}], grey levels from 0 to 255."
            )
        mesh = self.plan.parts.layout.mesh
        padding = -len(images) % batch_ways(mesh)
        padded = np.concatenate([images, np.zeros((padding, *wanted), np.uint8)])
        batch = {"image": jax.device_put(padded, batch_sharding(mesh))}
        return np.asarray(self._predict(self._params, self._model_state, batch))[: len(images)]

    def generate(
        self, prompt: str = "", *, num_tokens: int = 256, temperature: float = 0.8, seed: int = 0
    ) -> Iterator[str]:
        """Text that continues the prompt, piece by piece as it is sampled; `temperature` 0 takes the likeliest token.

        The network sees as many of the last tokens as it was trained on. Raises ConfigError for a network that does not
        read text, and for a negative temperature.
        """
        spec = self.plan.parts.data_spec
        if spec.modality != "text":
            raise ConfigError("generate: this network reads images; use predict(images).")
        if temperature < 0 or num_tokens < 0:
            raise ConfigError(f"generate: temperature {temperature} and num_tokens {num_tokens} must not be negative.")
        return self._sampled(self.plan.splits.train.encode(prompt) or [0], num_tokens, temperature, seed)

    def _sampled(self, tokens: list[int], num_tokens: int, temperature: float, seed: int) -> Iterator[str]:
        source, length = self.plan.splits.train, self.plan.parts.data_spec.length
        key, tokens = jax.random.key(seed), list(tokens)
        start, shown = len(tokens), ""
        for index in range(num_tokens):
            window = tokens[-length:]
            padded = np.zeros((1, length), np.int32)
            padded[0, : len(window)] = window
            token = self._next(padded, len(window) - 1, temperature, jax.random.fold_in(key, index))
            tokens.append(int(token))
            # A character may take several tokens: what is not one yet decodes to U+FFFD and waits.
            text = source.decode(tokens[start:])
            whole = text.rstrip("\ufffd")
            if len(whole) > len(shown):
                yield whole[len(shown) :]
                shown = whole

    def _next(self, tokens: np.ndarray, last: int, temperature: float, key: jax.Array) -> jax.Array:
        # One more column: a text batch holds inputs and, one place on, their targets.
        batch = {"tokens": np.pad(tokens, ((0, 0), (0, 1)))}
        probabilities = self._predict(self._params, self._model_state, batch)[0, last]
        if temperature == 0:
            return jnp.argmax(probabilities)
        return jax.random.categorical(key, jnp.log(probabilities) / temperature)


def restore(workdir: str | Path, *, mesh: MeshConfig | None = None) -> Predictor:
    """The network of the newest whole checkpoint in a workdir, on one device or any other mesh.

    Raises ConfigError when there is no run, no checkpoint or no undamaged one.
    """
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{workdir}: there is no run in this folder (no config.json). Give the --workdir of a run.")
    experiment = Experiment.from_json(path.read_text())
    # The batch size of the training need not fit this mesh.
    asked = {"mesh": mesh or MeshConfig(fsdp=1), "step.microbatches": 1}
    devices = None if mesh is not None else jax.devices()[:1]
    ways = (mesh or MeshConfig(fsdp=1)).sizes(len(devices or jax.devices()))
    size = ways["replica"] * ways["fsdp"]
    plan = make_plan(experiment.replaced(asked | {"batch_size": size, "evaluation.batch_size": size}), devices)
    task = plan.parts.task
    checkpoints = Checkpoints(
        Path(workdir), experiment.checkpoint, best_metric=task.best_metric, best_mode=task.best_mode
    )
    restored = checkpoints.restore(plan.parts.state_spec.abstract(), items=("model",))
    checkpoints.close()
    if restored is None:
        raise ConfigError(f"{workdir}: the run has no checkpoint yet.")
    return Predictor(plan, restored.state, restored.step)
