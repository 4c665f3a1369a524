"""Translation by a trained network: beam search over texts in batches of few shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import Codec, DataSpec, PairSpec
from jaxdl.data.codec import import_text
from jaxdl.inference.decoding.beam import beam_search, per_beam
from jaxdl.inference.decoding.padding import SHORTEST, power_of_two
from jaxdl.models.network import Call
from jaxdl.parallel.mesh import batch_sharding, batch_ways
from jaxdl.training.run.inference import Inference
from jaxdl.training.state import replicated
from jaxdl.training.step import run_network

_LONG = 128
"""Tokens of the longest sources of which a whole batch is translated at once."""
_MORE_TOKENS = 50
"""How many tokens a translation may have more than its source is padded to (Vaswani et al. 2017, section 6.1)."""


class Translator:
    """Translates texts with the network of an `Inference`, the likeliest hypothesis of a beam search.

    Texts of like lengths are translated together, with sources padded to 16, 32, 64... tokens, so that few programs are
    compiled. A translation does not depend on the others of its batch.
    """

    def __init__(
        self, network: Inference, codec: Codec, *, beams: int = 4, length_penalty: float = 0.6, batch_size: int = 64
    ) -> None:
        """`batch_size` texts of up to 128 tokens are translated at once, of longer ones fewer, on a mesh some for each
        device.

        Raises ConfigError for a network that does not translate, and for numbers out of range.
        """
        parts = network.parts
        spec = check_pairs(parts.data_spec, parts.network.has("next_logits"))
        if beams < 1 or batch_size < 1 or length_penalty < 0:
            raise ConfigError(
                f"translate: beams {beams} and batch_size {batch_size} must be 1 or more, and length_penalty "
                f"{length_penalty:g} not negative."
            )
        self._network, self._codec, self._spec, self._beams = network, codec, spec, beams
        self._length_penalty, self._batch_size = length_penalty, batch_size
        shown = replicated(parts.layout)  # Every process has the whole result.
        self._search = jax.jit(self._search_beams, static_argnames="length", out_shardings=shown)

    def translate(self, texts: Sequence[str], done: Callable[[int], None] = lambda _: None) -> list[str]:
        """The translation of each text; an empty text has an empty one. `done(n)` is called after n texts more."""
        translations = [""] * len(texts)
        sources = [[*tokens, self._spec.end] for tokens in self._codec.encode_many(list(texts))]
        order = [number for number in range(len(texts)) if texts[number].strip()]
        done(len(texts) - len(order))
        order.sort(key=lambda number: len(sources[number]))
        place = 0
        while place < len(order):
            length = power_of_two(len(sources[order[place]]), SHORTEST)
            rows = self._rows(length, len(order))
            chosen = [n for n in order[place : place + rows] if len(sources[n]) <= length]
            for number, tokens in zip(chosen, self._best([sources[n] for n in chosen], rows, length), strict=True):
                translations[number] = self._codec.decode(tokens)
            place += len(chosen)
            done(len(chosen))
        return translations

    def _rows(self, length: int, num_texts: int) -> int:
        """Rows of a batch of sources of `length` tokens: so many that memory does not grow with the length."""
        rows = min(self._batch_size, max(1, self._batch_size * _LONG // length), power_of_two(num_texts))
        ways = batch_ways(self._network.parts.layout.mesh)
        return -(-rows // ways) * ways

    def _best(self, sources: Sequence[Sequence[int]], num_rows: int, length: int) -> list[list[int]]:
        """The tokens of the translations of a batch, without their ends."""
        network = self._network
        rows, lengths = np.zeros((num_rows, length), np.int32), np.ones(num_rows, np.int32)
        for row, source in enumerate(sources):
            rows[row, : len(source)], lengths[row] = source, len(source)
        placed = jax.device_put((rows, lengths), batch_sharding(network.parts.layout.mesh))
        made = self._search(network.rounded_params, network.model_state, *placed, length=length + _MORE_TOKENS)
        cut = [row.tolist() for row in np.asarray(made)[: len(sources)]]
        return [row[: row.index(self._spec.end)] if self._spec.end in row else row for row in cut]

    def _search_beams(
        self, params: Any, model_state: Any, source: jax.Array, lengths: jax.Array, length: int
    ) -> jax.Array:
        """The best hypotheses of sources int32 [rows, source length], int32 [rows, length]; a function to trace."""
        parts, beams = self._network.parts, self._beams

        def call(method: str, *inputs: Any) -> Any:
            how = Call(train=False, method=method)
            return run_network(parts, parts.layout, params, model_state, how, *inputs)[0]

        keys, cache = call("begin", source, lengths, length)
        keys, of_beams = per_beam(keys, beams), jnp.repeat(lengths, beams)

        def step(tokens: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
            logits, cache = call("next_logits", tokens, cache, position, keys, of_beams)
            return logits[:, 0], cache

        tokens, _ = beam_search(
            step,
            cache,
            num_rows=len(source),
            num_beams=beams,
            start=self._spec.start,
            end=self._spec.end,
            max_length=length,
            length_penalty=self._length_penalty,
        )
        return tokens[:, 0]


def check_pairs(spec: DataSpec, can_write: bool = True) -> PairSpec:
    """The spec of a network's data. Raises ConfigError unless they are pairs, and the network `can_write`."""
    if not isinstance(spec, PairSpec) or not can_write:
        raise ConfigError(
            "translate: this network does not translate. Take one that was trained on pairs of texts, such as "
            "configs/software_translation.py."
        )
    return spec


def quality(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, tuple[float, str]]:
    """The name of each measure -> (its value from 0 to 100, the signature of sacrebleu): BLEU and chrF.

    Raises ConfigError when sacrebleu is not installed, or the texts are not as many as the references.
    """
    if len(hypotheses) != len(references):
        raise ConfigError(f"{len(hypotheses):,} translations and {len(references):,} references: give one for each.")
    sacrebleu = import_text("sacrebleu", "BLEU and chrF")
    measures = {}
    for measure in (sacrebleu.BLEU(), sacrebleu.CHRF()):
        score = measure.corpus_score(list(hypotheses), [list(references)])
        measures[score.name] = (score.score, str(measure.get_signature()))
    return measures
