"""How likely a trained language model finds texts: sums of log-probabilities of tokens, given those before them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.data import Codec, TextSpec
from jaxdl.inference.decoding.padding import SHORTEST, power_of_two
from jaxdl.models.logits import are_likeliest, log_likelihoods
from jaxdl.models.network import Call
from jaxdl.models.rotary import as_document
from jaxdl.parallel.mesh import batch_ways
from jaxdl.training.run.inference import Inference
from jaxdl.training.state import replicated
from jaxdl.training.step import apply_network

_MOST_LOGITS = 2**27
"""Of one device at a time; 512 MiB in float32."""
_MOST_ROWS, _MOST_TOKENS = 64, 2**14
"""Of one batch; the tokens are those of one device."""


@dataclass(frozen=True)
class ScoredText:
    """Tokens of which those from `start` on, at least 1, are scored."""

    tokens: Sequence[int]
    start: int


class Scorer:
    """The compiled program that scores tokens; `context` is how many the network reads at a time."""

    def __init__(self, inference: Inference, *, most_logits: int = _MOST_LOGITS) -> None:
        """`most_logits` are made at a time on one device."""
        assert isinstance(inference.parts.data_spec, TextSpec)
        self._most_logits = most_logits
        self._inference: Inference | None = inference
        self._parts = inference.parts
        self.context = inference.parts.data_spec.length
        shown = replicated(inference.parts.layout)
        self._score = jax.jit(self._sums, static_argnames="likeliest", out_shardings=shown)

    def log_likelihoods(
        self, texts: Sequence[ScoredText], *, advance: Callable[[int], None] = lambda _: None
    ) -> np.ndarray:
        """The sum of the natural log-probabilities of each text's scored tokens, float64 [texts].

        Of a text that is longer than the context (and one more) the end is read. Texts of similar lengths are scored
        side by side, in rows of few lengths; `advance` is called with the number of texts that were.
        """
        return self._scores(texts, advance, likeliest=False)

    def are_likeliest(
        self, texts: Sequence[ScoredText], *, advance: Callable[[int], None] = lambda _: None
    ) -> tuple[np.ndarray, np.ndarray]:
        """`(log_likelihoods, whether all scored tokens of a text are those of greedy decoding, bool [texts])`."""
        scores = self._scores(texts, advance, likeliest=True)
        return scores[:, 0], scores[:, 1] == 0

    def follow(self, inference: Inference | None) -> None:
        """Scores with another state of the same network from now on; with None nothing is held."""
        self._inference = inference

    def _scores(self, texts: Sequence[ScoredText], advance: Callable[[int], None], *, likeliest: bool) -> np.ndarray:
        """The sums of each text, float64 [texts]; with `likeliest` [texts, 2], and how many tokens are not."""
        texts = [self._end_of(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
        ways = batch_ways(self._parts.layout.mesh)
        sums_of_texts = np.zeros((len(texts), 2) if likeliest else len(texts))
        while order:
            # The longest first: memory does not grow later.
            length = self._padded_length(len(texts[order[-1]].tokens) - 1)
            rows = max(1, min(_MOST_ROWS, ways * _MOST_TOKENS // length))
            rows = -(-rows // ways) * ways
            batch, order = order[-rows:], order[:-rows]
            tokens, scored = np.zeros((rows, length + 1), np.int32), np.zeros((rows, length), bool)
            for row, index in enumerate(batch):
                text = texts[index]
                tokens[row, : len(text.tokens)] = text.tokens
                scored[row, text.start - 1 : len(text.tokens) - 1] = True
            assert self._inference is not None
            state = (self._inference.params, self._inference.model_state)
            sums = self._score(*state, tokens, scored, likeliest=likeliest)
            sums_of_texts[batch] = np.asarray(sums, np.float64)[: len(batch)]
            advance(len(batch))
        return sums_of_texts

    def _end_of(self, text: ScoredText) -> ScoredText:
        cut = max(0, len(text.tokens) - self.context - 1)
        return ScoredText(text.tokens[cut:], max(1, text.start - cut))

    def _padded_length(self, length: int) -> int:
        """A power of two, at most the context."""
        return min(self.context, power_of_two(max(length, 1), SHORTEST))

    def _sums(
        self, params: Any, model_state: Any, tokens: jax.Array, scored: jax.Array, *, likeliest: bool
    ) -> jax.Array:
        batch = {"tokens": tokens}
        if self._parts.network.next_change(0) is not None:  # The tokens that fill up rows are not the text's.
            sizes = jnp.max(jnp.where(scored, jnp.arange(1, tokens.shape[1]), 0), axis=1)
            batch["segments"] = as_document(tokens.shape, sizes)
        parts, most = self._parts, self._most_logits * batch_ways(self._parts.layout.mesh)
        call = Call(train=False, materialize_logits=False)
        outputs, _ = apply_network(parts, parts.layout, params, model_state, batch, call)
        sums = jnp.sum(jnp.where(scored, log_likelihoods(outputs, tokens[:, 1:], most), 0), axis=1)
        if not likeliest:
            return sums
        others = scored & ~are_likeliest(outputs, tokens[:, 1:], most)
        return jnp.stack([sums, jnp.sum(others, axis=1, dtype=sums.dtype)], axis=1)


def windows(num_tokens: int, context: int, stride: int, before: int = 1) -> Iterator[tuple[int, int, int]]:
    """`(begin, first, end)`: tokens[begin:end] are read to score tokens[first:end]; all from `before` on, once each.

    A window has at most `context` tokens before its last one. Each after the first scores the next `stride` tokens.
    """
    end = max(min(context + 1, num_tokens), before)
    if end > before:
        yield 0, before, end
    while end < num_tokens:
        first, end = end, min(end + stride, num_tokens)
        yield max(0, end - context - 1), first, end


def score_documents(
    scorer: Scorer, codec: Codec, documents: Sequence[str], stride: int, advance: Callable[[int], None] = lambda _: None
) -> dict[str, float]:
    """The mean loss of every token of the documents, each read by itself, as perplexity and in bits per byte.

    A document begins as in the training: after the mark that begins packed documents, in a converted network after what
    its tokenizer puts before every text, or else after what separates two documents; so its first token is scored too.
    Where it is longer than the context, a window slides over it by `stride` tokens, and each token is scored with at
    least context - stride before it.
    """
    texts: list[ScoredText] = []
    before = codec.beginning[-scorer.context :]
    for tokens in codec.encode_many(list(documents)):
        tokens = [*before, *tokens]
        for begin, first, end in windows(len(tokens), scorer.context, stride, len(before)):
            texts.append(ScoredText(tokens[begin:end], first - begin))
    nats = -float(np.sum(scorer.log_likelihoods(texts, advance=advance)))
    num_tokens = sum(len(text.tokens) - text.start for text in texts)
    num_bytes = sum(len(document.encode()) for document in documents)
    loss = nats / num_tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "documents": len(documents),
        "tokens": num_tokens,
        "bytes": num_bytes,
    }


@dataclass(frozen=True)
class Question:
    """A context, texts that may follow, and the number of the right one."""

    context: str
    choices: tuple[str, ...]
    label: int


def choice_tokens(codec: Codec, context: str, continuation: str) -> ScoredText:
    """The tokens of a context and what follows; the latter are scored.

    As lm-evaluation-harness has it: spaces at the end of the context belong to the continuation, both are encoded as
    one text, and the context's own tokens are counted off. Before them is what every text begins with; where that is
    nothing, an empty context is what separates two documents.
    """
    before = list(codec.opening) if context.rstrip() else codec.beginning
    whole = [*before, *codec.encode(context + continuation)]
    start = len(before) + len(codec.encode(context.rstrip()))
    return ScoredText(whole, max(1, min(start, len(whole) - 1)))


def score_choices(
    scorer: Scorer,
    codec: Codec,
    questions: Sequence[Question],
    delimiter: str = " ",
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, float], list[list[float]]]:
    """(the accuracies, the log-likelihood of each choice of each question).

    The chosen one is that whose tokens have the largest sum of log-probabilities after the context and `delimiter`
    ("acc"), or the largest sum divided by the choice's characters ("acc_norm", as lm-evaluation-harness computes it) or
    its bytes of UTF-8 ("acc_bytes"); of equal ones the first. The means over the questions, from 0 to 1.
    """
    texts = [
        choice_tokens(codec, question.context, delimiter + choice)
        for question in questions
        for choice in question.choices
    ]
    scores = iter(scorer.log_likelihoods(texts, advance=advance).tolist())
    log_likelihoods = [[next(scores) for _ in question.choices] for question in questions]

    def accuracy(size: Callable[[str], int]) -> float:
        right = []
        for question, scores in zip(questions, log_likelihoods, strict=True):
            sizes = [max(1, size(choice)) for choice in question.choices]
            right.append(int(np.argmax(np.divide(scores, sizes))) == question.label)
        return float(np.mean(right))

    sizes: dict[str, Callable[[str], int]] = {
        "acc": lambda _: 1,
        "acc_norm": len,
        "acc_bytes": lambda choice: len(choice.encode()),
    }
    return {name: accuracy(size) for name, size in sizes.items()} | {"questions": len(questions)}, log_likelihoods
