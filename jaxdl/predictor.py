"""A trained network, restored from a workdir, that predicts."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdl.checkpoint import Checkpoints, restore_mean
from jaxdl.cluster import start_devices
from jaxdl.config import ConfigError
from jaxdl.data import Codec, Data, DataSpec, Source, Splits, TextSpec, spec_from_json
from jaxdl.errors import without_frames
from jaxdl.exchange import Dense
from jaxdl.experiment import Experiment, read_experiment
from jaxdl.files import DATA_FILE, EXAMPLES_FILE, step_folder
from jaxdl.mesh import MeshConfig, make_mesh
from jaxdl.phases import make_timeline
from jaxdl.run.build import make_parts
from jaxdl.run.inference import Inference, held_out, of_phase
from jaxdl.runs import Which, check_run, check_which
from jaxdl.sharding import Params
from jaxdl.state import ModelState
from jaxdl.step import Parts


class Predictor(Inference):
    """A trained network, restored from a checkpoint.

    Attributes:
      experiment: the config that it was trained with.
      step: how many steps it was trained for.
      workdir: the folder of the run.
      params, model_state: its parameters and batch statistics, see `jaxdl.run.inference.Inference`.
    """

    def __init__(
        self, experiment: Experiment, parts: Parts, params: Params, model_state: ModelState, step: int, workdir: Path
    ) -> None:
        super().__init__(parts, params, model_state)
        self.experiment, self.step, self.workdir = experiment, step, workdir
        self._next_token = jax.jit(self._sampled_token)

    def merged(self) -> Predictor:
        """The same network without adapters, which are added to its matrices; itself if it has none."""
        model, params = self.experiment.model.merged(self.params)
        if model is self.experiment.model:
            return self
        experiment = self.experiment.replaced({"model": model})
        parts = _parts(experiment, self.parts.data_spec, self.parts.layout.mesh)
        return Predictor(experiment, parts, params, self.model_state, self.step, self.workdir)

    def evaluate(
        self, data: Data | Splits | Source | None = None, *, batch_size: int | None = None
    ) -> dict[str, float]:
        """The metrics of the task over held-out examples, each counted once; by default those of the run.

        On the mesh and with the batch size of the run, the default, they are the numbers that the run itself measured
        at this step, bit by bit. For other `data` images are normalized as in the training. Raises ConfigError for data
        that cannot be read or that the network does not read.
        """
        size = batch_size or self.experiment.evaluation.batch_size or self.experiment.batch_size
        with held_out(self.experiment.data if data is None else data, self.parts.data_spec) as source:
            return self.evaluate_source(self._as_in_the_run(source), size)

    def _as_in_the_run(self, source: Source) -> Source:
        """The source with images of the size that the run's phase evaluated at this step."""
        if not self.experiment.phases:
            return source
        counts = json.loads((self.workdir / EXAMPLES_FILE).read_text())
        timeline = make_timeline(
            counts["train"]["examples"],
            self.experiment.batch_size,
            epochs=None,
            steps=None,
            phases=self.experiment.phases,
        )
        return of_phase(source, timeline.segment(max(0, self.step - 1)).phase)

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
            state = (self.params, self.model_state)
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
        logits = jnp.log(self.probabilities(params, model_state, batch)[0, last])
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits))


@without_frames
def restore(
    workdir: str | Path,
    *,
    step: Which = "newest",
    average: int = 1,
    mesh: MeshConfig | None = None,
) -> Predictor:
    """The network of a checkpoint in a workdir, on one device or, with `mesh`, on any mesh.

    `step` is "newest"; "best", the checkpoint with the best evaluation (by the task's own metric, such as accuracy) of
    those that are kept, see `--checkpoint.keep-best`; or the number of a step. The one device is of the platform that
    the run was on, unless JAX has been started on another already. A run may be writing there: nothing is changed.
    With `average` the parameters are the mean of those of the last so many checkpoints that are kept, up to `step`.

    A damaged checkpoint is skipped with a warning, and the next newest (or best) one is used. Raises ConfigError
    when there is no run, no checkpoint, no undamaged one, none of that step, none that was evaluated or too few;
    `jaxdl.checkpoint.Unreadable`, an OSError, when a checkpoint cannot be read now.
    """
    which = check_which(step)
    folder = check_run(workdir)
    # No gradients are exchanged in prediction, so what they would be exchanged by plays no part.
    experiment = read_experiment(folder).replaced({"exchange": Dense()})
    spec = spec_from_json((folder / DATA_FILE).read_text())
    with contextlib.suppress(ConfigError):  # JAX may run on other devices already, and those will do.
        start_devices(mesh or experiment.mesh)
    found = make_mesh(mesh) if mesh is not None else make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    parts = _parts(experiment, spec, found)
    checkpoints = Checkpoints(
        folder,
        experiment.checkpoint,
        best_metric=parts.task.best_metric,
        best_mode=parts.task.best_mode,
        read_only=True,
    )
    with contextlib.closing(checkpoints):
        abstract = parts.state_spec.abstract()
        if average != 1 and checkpoints.steps:
            restored = restore_mean(checkpoints, abstract, average, which)
        else:
            restored = checkpoints.restore(abstract, items=("model",), which=which)
    if restored is None:
        raise ConfigError(f"{workdir}: the run has no checkpoint yet.")
    for damaged in restored.damaged:
        warnings.warn(f"{damaged}; {step_folder(restored.step)} is used", stacklevel=2)
    state = restored.state
    return Predictor(experiment, parts, state.eval_params, state.model_state, restored.step, folder)


def _parts(experiment: Experiment, spec: DataSpec, mesh: Mesh) -> Parts:
    """The parts of a network that only predicts."""
    # How long the run was plays no part in prediction; no schedule's warm-up is longer than this.
    return make_parts(experiment, spec, mesh, make_timeline(1, 1, epochs=None, steps=2**31 - 1))
