"""A trained network, restored from a workdir, that predicts."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import without_frames
from jaxdl.core.files import DATA_FILE, EXAMPLES_FILE, step_folder
from jaxdl.core.runs import Which, check_run, check_which
from jaxdl.data import Codec, Data, DataSpec, Source, Splits, TextSpec, spec_from_json
from jaxdl.data.images.given import reader_for
from jaxdl.data.phases import Phase, make_timeline
from jaxdl.data.text.chat_template import ChatTemplate, plain_template
from jaxdl.exchange import Dense
from jaxdl.inference.continuations import Texts
from jaxdl.inference.decoding.settings import Sampling, texts_of
from jaxdl.inference.decoding.text import Completion, Prompt
from jaxdl.inference.drafting import Drafter
from jaxdl.inference.generation import Decoder
from jaxdl.inference.predictions import Predictions
from jaxdl.inference.translation import Translator
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.parallel.sharding import Params
from jaxdl.training.checkpoint import Checkpoints, read_reference, restore_mean
from jaxdl.training.experiment import Experiment, read_experiment
from jaxdl.training.run.inference import evaluated_size, held_out, of_phase
from jaxdl.training.run.plan.build import make_parts
from jaxdl.training.run.plan.init_from import reading_spec
from jaxdl.training.run.plan.validate import check_axes
from jaxdl.training.run.workdir.records import Workdir
from jaxdl.training.run.workdir.tokenizer import chat_of_run, check_data, codec_of_run
from jaxdl.training.state import REFERENCE, ModelState
from jaxdl.training.step import Parts


class Predictor(Predictions):
    """A trained network, restored from a checkpoint.

    Attributes:
      experiment: the config that it was trained with.
      step: how many steps it was trained for.
      workdir: the folder of the run.
      params, model_state: its parameters and batch statistics, see `jaxdl.training.run.inference.Inference`.
    """

    def __init__(
        self, experiment: Experiment, parts: Parts, params: Params, model_state: ModelState, step: int, workdir: Path
    ) -> None:
        self.experiment, self.step, self.workdir = experiment, step, workdir
        size = None
        with contextlib.suppress(OSError, ValueError):  # A workdir may lack the file that says how long it trains.
            size = evaluated_size(self._phase)
        super().__init__(parts, params, model_state, reader_for(experiment.data, parts.data_spec, size))
        self._translators: dict[tuple[int, float, int], Translator] = {}
        self._drafts: dict[Path, Predictor] = {}
        self._with_adapters: Predictor | None = None

    def merged(self) -> Predictor:
        """The same network without adapters, which are added to its matrices; itself if it has none.

        What the task compares it with is the network that the adapters began with, merged too.
        """
        model, params = self.experiment.model.merged(self.params)
        if model is self.experiment.model:
            return self
        experiment = self.experiment.replaced({"model": model})
        parts = parts_of(experiment, self.parts.data_spec, self.parts.layout.mesh, self.workdir)
        predictor = Predictor(experiment, parts, params, self.model_state, self.step, self.workdir)
        predictor._with_adapters = self
        return predictor

    @property
    def _first_params(self) -> Params:
        """The parameters that the run began with, those that were not trained too. Raises Unusable without them."""
        if self._with_adapters is not None:
            return self._with_adapters.experiment.model.merged(self._with_adapters._first_params)[1]
        wanted = self.parts.state_spec.abstract().reference
        return self.parts.trainable.merged(read_reference(self.workdir, wanted), self.params)

    def evaluate(self, data: Data | Splits | Source | Any = None, *, batch_size: int | None = None) -> dict[str, float]:
        """The metrics of the task over held-out examples, each counted once; by default those of the run.

        On the mesh and with the batch size of the run, the default, they are the numbers that the run itself measured
        at this step, bit by bit. For other `data` images are normalized as in the training. Raises ConfigError for data
        that cannot be read or that the network does not read.
        """
        size = batch_size or self.experiment.evaluation.batch_size or self.experiment.batch_size
        with self.held_out(self.experiment.data if data is None else data) as source:
            return self.evaluate_source(self._at_run_size(source), size)

    @functools.cached_property
    def eval_state(self) -> ModelState:
        """`model_state`, with the parameters that the task compares the network with, which nothing else reads."""
        if not self.parts.task.needs_reference:
            return self.model_state
        return self.model_state | {REFERENCE: self.parts.trainable.of(self._first_params)}

    @contextlib.contextmanager
    def held_out(self, data: Any) -> Iterator[Source]:
        """Context: the held-out examples of data, or the source itself; see `jaxdl.training.run.inference.held_out`.

        Raises ConfigError for data that cannot be read, or whose tokenizer is not that of the network.
        """
        if isinstance(data, Data):
            check_data(self.workdir, data)
        with held_out(data, self.parts.data_spec, self._recorded_examples(data)) as source:
            yield source.begun_by(self._mark) if isinstance(data, Data) and self._mark is not None else source

    def _recorded_examples(self, data: Any) -> Any:
        """The content of the run's examples, if these are its data: earlier versions may have read them otherwise."""
        if isinstance(data, Data) and data == self.experiment.data:
            with contextlib.suppress(OSError, ValueError):  # Of a workdir without the file, or with a damaged one.
                return json.loads((self.workdir / EXAMPLES_FILE).read_bytes())
        return None

    @functools.cached_property
    def _mark(self) -> int | None:
        """The token that begins a document in the training; None where that is not known."""
        try:
            return self.codec.beginning[-1] if isinstance(self.parts.data_spec, TextSpec) else None
        except ConfigError:  # The files of the tokenizer are not here, and evaluation does without.
            return None

    def _at_run_size(self, source: Source) -> Source:
        """The source with images of the size that the run's phase evaluated at this step."""
        return of_phase(source, self._phase)

    @property
    def _phase(self) -> Phase | None:
        """The phase of the run at this step; None where it has none."""
        if not self.experiment.phases:
            return None
        counts = json.loads((self.workdir / EXAMPLES_FILE).read_text(encoding="utf-8"))
        timeline = make_timeline(
            counts["train"]["examples"],
            self.experiment.batch_size,
            epochs=None,
            steps=None,
            phases=self.experiment.phases,
        )
        return timeline.segment(max(0, self.step - 1)).phase

    def generate(
        self,
        prompt: Prompt = "",
        *,
        num_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        stop_at_end: bool = True,
        stop_tokens: Sequence[int] = (),
        seed: int = 0,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        beams: int = 1,
        length_penalty: float = 1.0,
        draft: Predictor | str | Path | None = None,
        draft_tokens: int = 4,
    ) -> Iterator[str]:
        """Text that continues the prompt, piece by piece as it is written.

        The options are those of `complete`, which continues many prompts. Raises ConfigError for a network that does
        not read text, and for options that are out of range.
        """
        how = Sampling(
            num_tokens, temperature, top_k, top_p, seed, tuple(stop_tokens), min_p, repetition_penalty, texts_of(stop),
            beams=beams, length_penalty=length_penalty,
        )  # fmt: skip
        how = self.texts.resolved(how, stop_at_end=stop_at_end)
        return self.texts.pieces(prompt, how, self._drafter(draft, draft_tokens, how))

    def translate(
        self,
        texts: Sequence[str],
        *,
        beams: int = 4,
        length_penalty: float = 0.6,
        batch_size: int = 64,
        done: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """The translation of each text: the best of a beam search, whose scores are divided by
        ((5 + length) / 6)^length_penalty (Wu et al. 2016).

        `batch_size` texts are translated at once; `done(n)` is called after n more. Raises ConfigError for a network
        that was not trained to translate.
        """
        key = (beams, length_penalty, batch_size)
        if key not in self._translators:  # Each keeps its compiled programs.
            self._translators[key] = Translator(
                self, self.codec, beams=beams, length_penalty=length_penalty, batch_size=batch_size
            )
        return self._translators[key].translate(texts, done)

    def complete(
        self,
        prompts: Sequence[Prompt],
        *,
        num_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        stop_at_end: bool = True,
        stop_tokens: Sequence[int] = (),
        seed: int = 0,
        batch_size: int = 8,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        samples: int = 1,
        beams: int = 1,
        length_penalty: float = 1.0,
        draft: Predictor | str | Path | None = None,
        draft_tokens: int = 4,
    ) -> Iterator[Completion]:
        """The continuation of each prompt, in order, `batch_size` of them side by side.

        Args:
          prompts: texts, an empty one of which begins a new document; or tokens, which are read as they are.
          num_tokens: at most so many are written for each.
          temperature: 1 is the model's own distribution, lower is less random, 0 takes the likeliest token.
          top_k: draw from the k likeliest tokens alone.
          top_p: draw from the likeliest tokens that together have this probability.
          stop: texts at which a continuation ends; they are left out.
          stop_at_end: end at the tokenizer's end of text (byte 0, for bytes); a converted network ends where its
            checkpoint says, which may be at several tokens.
          stop_tokens: further tokens that end it.
          seed: of the draws. A prompt's text depends on it and on its number, not on the others in its batch.
          batch_size: prompts side by side, over all devices.
          min_p: of the tokens that top_k and top_p leave, draw from those alone that are at least so many times as
            likely as the likeliest.
          repetition_penalty: above 1, tokens that are in the prompt or in the text so far become less likely.
          samples: how many continuations each prompt has; with beams the best so many.
          beams: with 2 or more nothing is drawn: the likeliest text is searched, with so many hypotheses at a time.
          length_penalty: hypotheses are compared by log P / length^length_penalty.
          draft: a smaller network with the same tokenizer, or its workdir: it drafts tokens, which this one checks
            together. At temperature 0 the text stays the same, and above it its distribution, not what a seed draws.
          draft_tokens: how many are drafted at a time.

        Where the text is as long as the network was trained on, it goes on from its last half, unless attention has a
        window. Raises ConfigError for a network that does not read text, and for options that are out of range.
        """
        if isinstance(prompts, str):
            raise ConfigError("complete: give a list of prompts; generate(prompt) continues one.")
        if batch_size < 1:
            raise ConfigError(f"--batch-size {batch_size}: give a whole number, 1 or more.")
        how = Sampling(
            num_tokens, temperature, top_k, top_p, seed, tuple(stop_tokens), min_p, repetition_penalty, texts_of(stop),
            samples, beams, length_penalty,
        )  # fmt: skip
        how = self.texts.resolved(how, stop_at_end=stop_at_end)
        return self.texts.completions(list(prompts), how, batch_size, self._drafter(draft, draft_tokens, how))

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The programs that write text. Raises ConfigError for a network that does not read text."""
        context = self.experiment.model.context(self.check_text("generate").length)
        return Decoder(self.merged(), context, self.codec.vocab_size)

    @functools.cached_property
    def codec(self) -> Codec:
        """Between text and tokens, texts beginning as in the training. Raises ConfigError for a replaced tokenizer."""
        return codec_of_run(self.workdir, self.experiment.data)

    @property
    def chat_template(self) -> ChatTemplate:
        """What makes texts of conversations: of the run, or of its checkpoint's tokenizer, or else a plain one.

        Raises ConfigError for a damaged one, and for a network that reads no text.
        """
        return self._kept_template or plain_template(self.codec)

    @property
    def has_chat_template(self) -> bool:
        """Whether the run, or its checkpoint's tokenizer, has a chat template of its own."""
        return self._kept_template is not None

    @functools.cached_property
    def _kept_template(self) -> ChatTemplate | None:
        return chat_of_run(self.workdir, self.experiment.data)

    @functools.cached_property
    def texts(self) -> Texts:
        """What continues prompts. Raises ConfigError for a network that does not read text."""
        return Texts(self.decoder, self.codec)

    def _drafter(self, draft: Predictor | str | Path | None, num_tokens: int, how: Sampling) -> Drafter | None:
        """What drafts with another network. Raises ConfigError for one that does not fit."""
        if draft is None:
            return None
        if how.beams > 1:
            raise ConfigError(
                f"--draft: it has no effect with --beams {how.beams}, which draws nothing. Leave one out."
            )
        if not isinstance(draft, Predictor):
            folder = Path(draft).resolve()
            draft = self._drafts.get(folder) or self._drafts.setdefault(folder, restore(draft))
        if draft.codec.fingerprint() != self.codec.fingerprint():
            raise ConfigError(
                f"--draft {draft.workdir}: it has another tokenizer than {self.workdir}, so its tokens mean other "
                "texts. Train a draft with the same one."
            )
        if draft.parts.layout.mesh != self.parts.layout.mesh:
            raise ConfigError(f"--draft {draft.workdir}: restore it on the mesh of the network that it drafts for.")
        return self.texts.drafter(draft.decoder, num_tokens)

    def check_text(self, what: str) -> TextSpec:
        """The spec of the text that the network reads. Raises ConfigError, beginning with `what`, if it reads none."""
        spec = self.parts.data_spec
        if not isinstance(spec, TextSpec):
            advice = "; use predict(images)" if spec.modality == "images" else ", and no single text"
            raise ConfigError(f"{what}: this network reads {spec.modality}{advice}.")
        return spec


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
    `jaxdl.training.checkpoint.Unreadable`, an OSError, when a checkpoint cannot be read now.
    """
    which = check_which(step)
    folder = check_run(workdir)
    # No gradients are exchanged in prediction, so what they would be exchanged by plays no part.
    experiment = read_experiment(folder).replaced({"exchange": Dense()})
    if experiment.embedding.cache.fraction is not None:  # The devices hold whole tables.
        experiment = experiment.replaced({"embedding.cache": CacheConfig()})
    spec = reading_spec(folder)
    with contextlib.suppress(ConfigError):  # JAX may run on other devices already, and those will do.
        start_devices(mesh or experiment.mesh)
    device_mesh = make_mesh(mesh) if mesh is not None else make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    check_axes(experiment, device_mesh.shape)
    parts = parts_of(experiment, spec, device_mesh, folder)
    checkpoints = Checkpoints(
        folder,
        experiment.checkpoint,
        best_metric=parts.task.best_metric,
        best_mode=parts.task.resolved_mode,
        read_only=True,
        table_layout=() if parts.tables is None else parts.tables.layout,
        filled_shapes=parts.state_spec.filled_shapes,
    )
    with contextlib.closing(checkpoints):
        abstract = parts.state_spec.abstract()
        if average != 1 and checkpoints.steps:
            restored = restore_mean(checkpoints, abstract, average, which)
        else:
            restored = checkpoints.restore(abstract, items=("model", "tables"), which=which)
    if restored is None:
        raise ConfigError(f"{workdir}: the run has no checkpoint yet.")
    for damaged in restored.damaged:
        warnings.warn(f"{damaged}; {step_folder(restored.step)} is used", stacklevel=2)
    state = restored.state.replace(reference={})
    return Predictor(experiment, parts, state.eval_params, state.eval_state, restored.step, folder)


def data_spec_of(workdir: Path) -> DataSpec:
    """What the examples of the run in a workdir are like; no device is started to read it. Raises OSError."""
    return spec_from_json((workdir / DATA_FILE).read_text(encoding="utf-8"))


def parts_of(experiment: Experiment, spec: DataSpec, mesh: Mesh, workdir: Path) -> Parts:
    """The parts of a network that only predicts; its stacks are those of the run, which rounds weights by them."""
    # How long the run was plays no part in prediction; no schedule's warm-up is longer than this.
    return make_parts(
        experiment, spec, mesh, make_timeline(1, 1, epochs=None, steps=2**31 - 1), stacks=Workdir(workdir).read_stacks()
    )
