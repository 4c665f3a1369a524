"""Texts that a trained network finds likeliest: beam search over the continuations of prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.inference.decoding.padding import SHORTEST, power_of_two
from jaxdl.inference.decoding.row_sampling import mark_seen, penalize
from jaxdl.inference.decoding.settings import Sampling
from jaxdl.inference.decoding.text_beams import Beams, search_texts
from jaxdl.inference.generation import Decoder, Read, check_positions, seen_in_texts
from jaxdl.parallel.mesh import batch_ways
from jaxdl.training.state import replicated


class Searcher:
    """The compiled programs that search with the network of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        check_positions(decoder.parts, "--beams")
        self._decoder = decoder
        static = ("slots", "num_beams", "max_length")
        shown = replicated(decoder.parts.layout)  # Every process has the whole result.
        self._search = jax.jit(self._search_beams, static_argnames=static, out_shardings=shown)

    def room(self, prompt: Sequence[int], num_tokens: int) -> int:
        """How many tokens a search may write after a prompt: what it has written is not read again from its middle."""
        context = self._decoder.context
        return num_tokens if context is None else min(num_tokens, context + 1 - min(context, len(prompt)))

    def search(
        self, prompts: Sequence[Sequence[int]], how: Sampling, *, rows: int = 1
    ) -> list[list[tuple[list[int], float]]]:
        """`(tokens, score)` of the best `how.samples` continuations of each prompt, the best first.

        `rows` is the size of a batch. The score is log P / length^length_penalty.
        """
        decoder, ways = self._decoder, batch_ways(self._decoder.parts.layout.mesh)
        limit, num_rows = decoder.context, -(-max(rows, len(prompts)) // ways) * ways
        texts = [list(prompt)[-limit:] if limit else list(prompt) for prompt in prompts]
        texts += [[0]] * (num_rows - len(prompts))
        lengths = np.asarray(list(map(len, texts)), np.int32)
        padded = power_of_two(int(lengths.max()), SHORTEST)
        tokens = np.zeros((num_rows, min(limit, padded) if limit else padded), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        most = np.asarray([self.room(prompt, how.num_tokens) for prompt in prompts] + [0] * (num_rows - len(prompts)))
        slots = power_of_two(int(lengths.max()) + how.num_tokens, SHORTEST)
        if limit is not None:
            slots = min(limit, slots) if decoder.cached else limit
        found: Beams = self._search(
            *decoder.state, tokens, lengths, most.astype(np.int32), np.asarray(how.stop_tokens, np.int32),
            np.float32(how.length_penalty), np.full(num_rows * how.beams, how.repetition_penalty, np.float32),
            seen_in_texts(texts[: len(prompts)], num_rows, decoder.vocab_size) if how.repetition_penalty != 1 else None,
            slots=slots, num_beams=how.beams, max_length=how.num_tokens,
        )  # fmt: skip
        best = jax.device_get(found)
        results = [
            [
                ([token for token in best.tokens[row, beam].tolist() if token >= 0], float(best.scores[row, beam]))
                for beam in range(how.samples)
            ]
            for row in range(len(prompts))
        ]
        decoder.num_written += sum(len(tokens) for each in results for tokens, _ in each)
        return results

    def _search_beams(
        self, params: Any, model_state: Any, tokens: jax.Array, lengths: jax.Array, most: jax.Array, stop: jax.Array,
        length_penalty: jax.Array, penalty: jax.Array, seen: jax.Array | None, *, slots: int, num_beams: int,
        max_length: int,
    ) -> Beams:  # fmt: skip
        decoder = self._decoder
        cache, _ = decoder.read_texts(params, model_state, tokens, lengths, slots)
        read = functools.partial(decoder.read_token, params, model_state)
        # The last token of a prompt is read again, so that the search begins with a step like all others.
        last, first = lengths - 1, jnp.repeat(lengths - 1, num_beams)

        def step(tokens: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
            inner = cache.cache if isinstance(cache, Read) else cache
            logits, inner = read(tokens, inner, first + position)
            log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
            if not isinstance(cache, Read):
                return log_probs, inner
            marked = mark_seen(cache.seen[0], tokens)
            return penalize(log_probs, penalty, marked), Read(inner, marked[None])

        return search_texts(
            step,
            cache if seen is None else Read(cache, seen[None]),
            start=jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0],
            stop=stop,
            lengths=most,
            num_beams=num_beams,
            max_length=max_length,
            length_penalty=length_penalty,
        )
