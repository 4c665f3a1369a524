"""Tasks of lm-evaluation-harness in the evaluations of a run."""

from __future__ import annotations

from collections.abc import Callable

from jaxdl.core.errors import ConfigError
from jaxdl.data import TextSpec
from jaxdl.data.text.chat_template import ChatTemplate
from jaxdl.inference.generation import Decoder
from jaxdl.inference.lm_eval.model import HarnessParts, model_class
from jaxdl.inference.lm_eval.tasks import TaskOptions, evaluate_tasks, load_tasks, scores_of
from jaxdl.inference.scoring import Scorer
from jaxdl.parallel.sharding import Params
from jaxdl.training.experiment import Experiment
from jaxdl.training.measures import LmEval, Measurement
from jaxdl.training.run.inference import Inference
from jaxdl.training.run.workdir.tokenizer import chat_of_data
from jaxdl.training.state import ModelState
from jaxdl.training.step import Parts, num_stages


def measurement(config: LmEval, experiment: Experiment, parts: Parts) -> Measurement:
    """What runs the tasks of a config; see `Measure.build`."""
    if not isinstance(parts.data_spec, TextSpec):
        raise ConfigError(
            f"--evaluation.measures lm_eval: this network reads {parts.data_spec.modality}, and tasks are texts. Leave "
            "it out."
        )
    if num_stages(parts.layout) > 1:
        raise ConfigError(
            "--evaluation.measures lm_eval: layers in stages do not write texts. Leave it out, and run the tasks on "
            "checkpoints: python -m jaxdl.evaluate --tasks."
        )
    options = TaskOptions(
        config.tasks, config.include_path, config.num_fewshot, config.limit, config.apply_chat_template
    )
    return _TasksInTraining(config, experiment, parts, options)


class _TasksInTraining:
    """Runs the tasks; its programs are compiled once for all evaluations."""

    def __init__(self, config: LmEval, experiment: Experiment, parts: Parts, options: TaskOptions) -> None:
        self._config, self._experiment, self._parts, self._options = config, experiment, parts, options
        self._loaded = load_tasks(options)
        self._codec = experiment.data.codec()
        chat = chat_of_data(experiment.data, self._codec)
        self._template = None if chat is None else ChatTemplate.from_json(chat, "the chat template of the data")
        if config.apply_chat_template and self._template is None:
            raise ConfigError(
                "--evaluation.measures.lm-eval.apply-chat-template: the data have no chat template, nor has their "
                "tokenizer. Leave it out, or take --data conversations."
            )
        self._scorer: Scorer | None = None
        self._decoder: Decoder | None = None

    def __call__(self, params: Params, model_state: ModelState, poll: Callable[[], None]) -> dict[str, float]:
        # Adapters are added to their matrices while a text is written, as in training.
        network = Inference(self._parts, params, model_state)
        if self._scorer is None:
            self._scorer = Scorer(network)
        self._scorer.follow(network)
        used: list[Decoder] = []

        def decoder() -> Decoder:
            if not used:
                if self._decoder is None:
                    context = self._experiment.model.context(self._scorer_of().context)
                    self._decoder = Decoder(network, context, self._codec.vocab_size)
                self._decoder.follow(network)
                used.append(self._decoder)
            return used[0]

        try:
            parts = HarnessParts(self._scorer, decoder, self._codec, "a run that trains", lambda: self._template, poll)
            model = model_class()(parts=parts, batch_size=self._config.batch_size)
            return scores_of(evaluate_tasks(model, self._options, self._loaded))
        finally:  # The next step reuses the memory of the state.
            self._scorer.follow(None)
            for each in used:
                each.follow(None)

    def _scorer_of(self) -> Scorer:
        assert self._scorer is not None
        return self._scorer
