"""A trained network, restored from a workdir, that predicts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.checkpoint import Checkpoints
from jaxdl.cluster import start_devices
from jaxdl.config import ConfigError
from jaxdl.data import Codec, ImageSpec, TextSpec, spec_from_json
from jaxdl.exchange import Dense
from jaxdl.experiment import Experiment
from jaxdl.files import CONFIG_FILE, DATA_FILE, step_folder
from jaxdl.mesh import MeshConfig, batch_sharding, batch_ways, make_mesh
from jaxdl.phases import make_timeline
from jaxdl.run.build import make_parts
from jaxdl.state import TrainState
from jaxdl.step import Parts, apply_network


class Predictor:
    """A trained network. `step` is how many steps it was trained for, `experiment` the config it was trained with."""

    def __init__(self, experiment: Experiment, parts: Parts, state: TrainState, step: int) -> None:
        self.experiment, self.parts, self.step = experiment, parts, step
        self._params, self._model_state = state.eval_params, state.model_state
        self._predict = jax.jit(self._probabilities)
        self._next_token = jax.jit(self._sampled_token)

    def _probabilities(self, params: Any, model_state: Any, batch: dict[str, jax.Array]) -> jax.Array:
        parts = self.parts
        outputs, _ = apply_network(parts, parts.layout, params, model_state, batch, train=False)
        return parts.task.predictions(outputs)

    def predict(self, images: Any) -> np.ndarray:
        """The probability of each class, `[batch, num_classes]`, of images `[batch, height, width, channel]`.

        Images are uint8 with grey levels from 0 to 255, of the size that the network was trained on. Raises ConfigError
        for another shape or type, and for a network that does not read images.
        """
        spec = self.parts.data_spec
        if not isinstance(spec, ImageSpec):
            raise ConfigError("predict: this network reads text; use generate(prompt).")
        images, wanted = np.asarray(images), (spec.height, spec.width, spec.channels)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != wanted:
            raise ConfigError(
                f"predict: got {images.dtype} {list(images.shape)}; this network reads uint8 "
                f"[batch, {', '.join(map(str, wanted))}], grey levels from 0 to 255."
            )
        mesh = self.parts.layout.mesh
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
        spec = self.parts.data_spec
        if not isinstance(spec, TextSpec):
            raise ConfigError("generate: this network reads images; use predict(images).")
        if temperature < 0 or num_tokens < 0:
            raise ConfigError(f"generate: temperature {temperature} and num_tokens {num_tokens} must not be negative.")
        codec = self.experiment.data.codec()
        return self._continued(codec, codec.encode(prompt) or codec.separator, num_tokens, temperature, seed)

    def _continued(
        self, codec: Codec, tokens: list[int], num_tokens: int, temperature: float, seed: int
    ) -> Iterator[str]:
        assert isinstance(self.parts.data_spec, TextSpec)
        length, key, tokens = self.parts.data_spec.length, jax.random.key(seed), list(tokens)
        shown = len(codec.decode(tokens))
        for index in range(num_tokens):
            window = tokens[-length:]
            # One more column: a text batch holds inputs and, one place on, their targets.
            batch = {"tokens": np.zeros((1, length + 1), np.int32)}
            batch["tokens"][0, : len(window)] = window
            state = (self._params, self._model_state)
            token = self._next_token(*state, batch, len(window) - 1, temperature, jax.random.fold_in(key, index))
            tokens.append(int(token))
            # Decode all of it: some tokenizers drop the space before a first word. A character may take several
            # tokens; until it is whole it decodes to U+FFFD, and waits.
            text = codec.decode(tokens).rstrip("\ufffd")
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)

    def _sampled_token(
        self, params: Any, model_state: Any, batch: dict[str, jax.Array], last: Any, temperature: Any, key: jax.Array
    ) -> jax.Array:
        logits = jnp.log(self._probabilities(params, model_state, batch)[0, last])
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits))


def restore(
    workdir: str | Path,
    *,
    checkpoint: Literal["newest", "best"] | int = "newest",
    mesh: MeshConfig | None = None,
) -> Predictor:
    """The network of a checkpoint in a workdir, on one device or, with `mesh`, on any mesh.

    `checkpoint` is "newest"; "best", that with the best evaluation (by the task's own metric, such as accuracy) of
    those that are kept, see `--checkpoint.keep-best`; or the number of a step. The one device is of the platform that
    the run was on, unless JAX has been started on another already. A run may be writing there: nothing is changed.

    A damaged checkpoint is skipped with a warning, and the next newest (or best) one is used. Raises ConfigError
    when there is no run, no checkpoint, no undamaged one, none of that step or none that was evaluated;
    `jaxdl.checkpoint.Unreadable`, an OSError, when a checkpoint cannot be read now.
    """
    if not (checkpoint in ("newest", "best") or (type(checkpoint) is int and checkpoint >= 0)):
        raise ConfigError(f'checkpoint {checkpoint!r}: choose "newest", "best" or the number of a step.')
    for name in (CONFIG_FILE, DATA_FILE):
        if not (Path(workdir) / name).is_file():
            raise ConfigError(f"{workdir}: there is no run in this folder (no {name}). Give the --workdir of a run.")
    # No gradients are exchanged in prediction, so what they would be exchanged by plays no part.
    experiment = Experiment.from_json((Path(workdir) / CONFIG_FILE).read_text()).replaced({"exchange": Dense()})
    spec = spec_from_json((Path(workdir) / DATA_FILE).read_text())
    with contextlib.suppress(ConfigError):  # JAX may run on other devices already, and those will do.
        start_devices(mesh or experiment.mesh)
    found = make_mesh(mesh) if mesh is not None else make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    # How long the run was plays no part in prediction; no schedule's warm-up is longer than this.
    parts = make_parts(experiment, spec, found, make_timeline(1, 1, epochs=None, steps=2**31 - 1))
    checkpoints = Checkpoints(
        Path(workdir),
        experiment.checkpoint,
        best_metric=parts.task.best_metric,
        best_mode=parts.task.best_mode,
        read_only=True,
    )
    with contextlib.closing(checkpoints):
        restored = checkpoints.restore(parts.state_spec.abstract(), items=("model",), which=checkpoint)
    if restored is None:
        raise ConfigError(f"{workdir}: the run has no checkpoint yet.")
    for damaged in restored.damaged:
        warnings.warn(f"{damaged}; {step_folder(restored.step)} is used", stacklevel=2)
    return Predictor(experiment, parts, restored.state, restored.step)
