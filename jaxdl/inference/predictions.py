"""What a trained network predicts for what a user gives; texts are tokenized."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from jaxdl.data import Codec
from jaxdl.data.text.labelled_spec import is_text
from jaxdl.inference.classified_texts import as_texts, outputs_of_texts, shown
from jaxdl.training.run.inference import Inference


class Predictions(Inference, abc.ABC):
    """A trained network with the tokenizer of its run."""

    @property
    @abc.abstractmethod
    def codec(self) -> Codec:
        """Between text and tokens."""

    def predict(self, inputs: Any) -> Any:
        """The prediction of the task for each input, see `jaxdl.training.run.inference.Inference.predict`.

        Of a network that classifies texts, a `Prediction` of a text, or a list of them for a list of texts; pairs of
        texts are tuples. `predict("a text").name` is its class.
        """
        given = as_texts(inputs)
        if given is None or (outputs := self._of_texts(super().predict, "predict", given)) is None:
            return super().predict(inputs)
        named = self.parts.task.named(outputs, [shown(text) for text in given], self.parts.data_spec)
        values = outputs if named is None else named
        return values[0] if is_text(inputs) else values

    def logits(self, inputs: Any) -> Any:
        """The outputs of the network before they become probabilities, float32; inputs are as in `predict`."""
        given = as_texts(inputs)
        outputs = None if given is None else self._of_texts(super().logits, "logits", given)
        return super().logits(inputs) if outputs is None else outputs

    def _of_texts(self, function: Callable[[Any], Any], what: str, texts: Sequence[Any]) -> Any:
        """The outputs of a function of batches of texts; None for a network that does not classify texts."""
        of_texts = getattr(self.parts.data_spec, "of_texts", None)
        return of_texts and outputs_of_texts(function, lambda part: of_texts(part, what, self.codec), texts)
