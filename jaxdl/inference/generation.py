"""Tokens that a trained network writes: prompts side by side, several tokens in one call of the device.

The prompts are read in one pass, padded to a power of two; then one program writes all tokens. A network with the
methods `prefill` and `decode` (see `jaxdl.models.transformer`) keeps what it has read in a key-value cache; any other
reads the whole text so far for each token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import TextSpec
from jaxdl.data.spec import with_targets
from jaxdl.inference.decoding.loop import Draw, Place, Rows, draw_next, text_keys, write_on
from jaxdl.inference.decoding.padding import SHORTEST, power_of_two
from jaxdl.inference.decoding.row_sampling import draw_rows, mark_seen, penalize
from jaxdl.inference.decoding.sampling import sample
from jaxdl.inference.decoding.settings import RowSettings, Sampling, num_sorted, row_settings
from jaxdl.models.logits import of_tokens
from jaxdl.models.network import Call
from jaxdl.models.rotary import as_document
from jaxdl.parallel.mesh import batch_ways
from jaxdl.training.run.inference import Inference
from jaxdl.training.state import replicated
from jaxdl.training.step import Parts, apply_network, run_network

MOST = 32
"""Tokens of each row that one call writes at most."""
_STATIC = ("top_k", "top_p", "num_sorted")
"""Arguments of the programs that are compiled into them."""


class Read(NamedTuple):
    """What has been read of texts with a repetition penalty: a cache of `Rows`."""

    cache: Any
    seen: jax.Array
    """The tokens of each row so far, bool [1, rows, vocab]."""


def check_positions(parts: Parts, what: str) -> None:
    """Raises ConfigError, beginning with `what`, for a network that reads a token otherwise in a longer text."""
    if parts.network.next_change(0) is not None:
        raise ConfigError(
            f"{what}: the rotary positions of this network depend on the length of the text (rope_scaling dynamic or "
            "longrope), so what was read before has to be read again. Generate without it: python -m jaxdl.generate."
        )


class Decoder:
    """The compiled programs with which a network writes.

    Attributes:
      context: how many tokens the network reads at a time; None any number.
      num_written: tokens written so far.
      num_steady, steady_sec: tokens written, and the seconds for them, by programs that were compiled before.
    """

    def __init__(self, inference: Inference, context: int | None, vocab_size: int, *, cached: bool = True) -> None:
        """`vocab_size` is that of the tokenizer; without `cached` no key-value cache is used, which is slower."""
        parts = inference.parts
        assert isinstance(parts.data_spec, TextSpec)
        self.parts, self.vocab_size = parts, vocab_size
        self.cached = cached and parts.network.has("decode")
        self.context = context if self.cached else context or parts.data_spec.length
        self.state: Any = (inference.rounded_params, inference.model_state)
        shown = replicated(parts.layout)
        self._read = jax.jit(self._read_prompts, static_argnames=("slots", *_STATIC), out_shardings=(None, shown))
        each: Any = [shown for _ in Rows._fields[1:]]
        of_rows = Rows(None, *each)
        self._write = jax.jit(
            self._write_tokens, static_argnames=_STATIC, donate_argnames="cache", out_shardings=(None, of_rows, shown)
        )
        self._programs: set[Any] = set()
        self.num_written, self.num_steady, self.steady_sec = 0, 0, 0.0

    def follow(self, inference: Inference | None) -> None:
        """Writes with another state of the same network from now on; with None nothing is held."""
        self.state = None if inference is None else (inference.rounded_params, inference.model_state)

    def read(
        self, tokens: np.ndarray, lengths: np.ndarray, keys: Any, count: Any, *, slots: int, how: Sampling,
        seen: np.ndarray | None = None,
    ) -> tuple[Any, np.ndarray]:  # fmt: skip
        """`(cache, the token after each prompt)`; `count` tokens, int or [rows], have been drawn before.

        `seen`, bool [rows, vocab], are the tokens of each text, for a repetition penalty.
        """
        options = self._options(how, len(lengths)) | {"slots": slots, "seen": seen}
        cache, drawn = self._read(*self.state, tokens, lengths, keys, count, how.temperature, **options)
        return cache, np.asarray(drawn)

    def write(self, rows: Rows, num_tokens: int, how: Sampling) -> tuple[Rows, np.ndarray]:
        """`(rows, the tokens written [rows, MOST], -1 where none was)`; the cache of `rows` is donated."""
        stop = np.asarray([-1, *how.stop_tokens], np.int32)
        options = self._options(how, len(rows.tokens))
        program = (jax.tree.map(jnp.shape, rows), stop.shape, [options[name] for name in _STATIC], how.of_rows)
        start = time.perf_counter()
        options |= {"stop": stop, "temperature": how.temperature}
        others = rows._replace(cache=None)
        cache, others, written = self._write(
            *self.state, cache=rows.cache, rows=others, num_tokens=num_tokens, **options
        )
        # All but the cache lies on the host between the calls, so that each call has arguments of the same kind.
        host: Any = jax.device_get((written, others))
        tokens, rows = host[0], host[1]._replace(cache=cache)
        if str(program) in self._programs:
            self.num_steady += int(np.sum(tokens >= 0))
            self.steady_sec += time.perf_counter() - start
        self._programs.add(str(program))
        return rows, tokens

    def _options(self, how: Sampling, rows: int) -> dict[str, Any]:
        """How tokens are drawn, as arguments of the programs.

        What `sample` knows is compiled into a program that does no more; all else is in arrays.
        """
        if not how.of_rows:
            return {"top_k": how.top_k, "top_p": how.top_p, "num_sorted": 0, "settings": None}
        settings = row_settings([how] * rows)
        return {"top_k": None, "top_p": None, "num_sorted": num_sorted([how], self.vocab_size), "settings": settings}

    def _read_prompts(
        self, params: Any, model_state: Any, tokens: Any, lengths: Any, keys: Any, count: Any, temperature: Any, *,
        slots: int, settings: RowSettings | None, seen: Any, **static: Any,
    ) -> tuple[Any, jax.Array]:  # fmt: skip
        cache, logits = self.read_texts(params, model_state, tokens, lengths, slots)
        if seen is not None:
            assert settings is not None
            cache = Read(cache, seen[None])
            logits = penalize(logits.astype(jnp.float32), settings.repetition_penalty, seen)
        draw, counts = _draw(temperature, settings, **static), jnp.broadcast_to(count, lengths.shape)
        return cache, draw_next(draw, logits, keys, counts)

    def read_texts(
        self, params: Any, model_state: Any, tokens: jax.Array, lengths: jax.Array, slots: int
    ) -> tuple[Any, jax.Array]:
        """`(cache, the logits of the token after each text [rows, vocab])`."""
        if self.cached:
            logits, cache = self._run(params, model_state, tokens, lengths, slots, method="prefill")
        else:
            cache = jnp.pad(tokens, ((0, 0), (0, slots - tokens.shape[1])))[None]
            logits = self._logits_of_texts(params, model_state, cache[0], lengths - 1)
        return cache, logits[:, -1, : self.vocab_size]

    def _write_tokens(
        self, params: Any, model_state: Any, cache: Any, rows: Rows, num_tokens: Any, stop: Any, temperature: Any, *,
        settings: RowSettings | None, **static: Any,
    ) -> tuple[Any, Rows, jax.Array]:  # fmt: skip
        def step(tokens: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
            if not isinstance(cache, Read):
                return self.read_token(params, model_state, tokens, cache, position)
            assert settings is not None
            logits, inner = self.read_token(params, model_state, tokens, cache.cache, position)
            seen = mark_seen(cache.seen[0], tokens)
            return penalize(logits.astype(jnp.float32), settings.repetition_penalty, seen), Read(inner, seen[None])

        draw, rows = _draw(temperature, settings, **static), rows._replace(cache=cache)
        rows, written = write_on(step, draw, rows, num_tokens, most=MOST, stop=stop)
        return rows.cache, rows._replace(cache=None), written

    def read_token(
        self, params: Any, model_state: Any, tokens: jax.Array, cache: Any, position: jax.Array
    ) -> tuple[jax.Array, Any]:
        """`(the logits of the next token of each row [rows, vocab], cache)` after one more."""
        if self.cached:
            logits, cache = self._run(params, model_state, tokens, cache, position, method="decode")
        else:
            cache = cache.at[0, jnp.arange(tokens.shape[0]), position % cache.shape[2]].set(tokens)
            logits = self._logits_of_texts(params, model_state, cache[0], position % cache.shape[2])
        return logits[:, -1, : self.vocab_size], cache

    def read_tokens(
        self, params: Any, model_state: Any, tokens: jax.Array, cache: Any, position: jax.Array
    ) -> tuple[jax.Array, Any]:
        """`(the logits after each token [rows, num, vocab], cache)` of several more; see `TransformerModule.extend`."""
        logits, cache = self._run(params, model_state, tokens, cache, position, method="extend")
        return logits[:, :, : self.vocab_size], cache

    def _run(self, params: Any, model_state: Any, *inputs: Any, method: str) -> Any:
        call = Call(train=False, method=method)
        return run_network(self.parts, self.parts.layout, params, model_state, call, *inputs)[0]

    def _logits_of_texts(self, params: Any, model_state: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """The logits after the tokens at these positions, [rows, 1, vocab], from the whole texts."""
        batch = {"tokens": with_targets(tokens, jnp)}
        if self.parts.network.next_change(0) is not None:
            batch["segments"] = as_document(batch["tokens"].shape, positions + 1)
        call = Call(train=False, materialize_logits=False)
        outputs, _ = apply_network(self.parts, self.parts.layout, params, model_state, batch, call)
        return of_tokens(outputs, positions)


def _draw(temperature: Any, settings: RowSettings | None, *, num_sorted: int, **static: Any) -> Draw:
    """What draws tokens from logits and keys."""
    if settings is None:
        return lambda logits, keys: sample(logits, keys, temperature, **static)
    return lambda logits, keys: draw_rows(logits, keys, settings, num_sorted=num_sorted)


class TextRows:
    """Texts that a decoder continues side by side.

    Attributes:
      done: which of the texts have ended, bool [prompts].
    """

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Sequence[int]], how: Sampling, *,
        places: Sequence[Place] | None = None, rows: int = 1,
    ) -> None:  # fmt: skip
        """`prompts` are tokens, at least one each; `rows` is the size of a batch, and `places` says which texts of
        which prompts these are: by default the first of each.
        """
        self._decoder, self._how = decoder, how
        ways = batch_ways(decoder.parts.layout.mesh)
        num_rows = -(-max(rows, len(prompts)) // ways) * ways
        limit = decoder.context
        self._texts = [list(prompt)[-limit:] if limit else list(prompt) for prompt in prompts]
        self._seen = seen_in_texts(self._texts, num_rows, decoder.vocab_size) if how.repetition_penalty != 1 else None
        self._texts += [[0]] * (num_rows - len(prompts))
        self._num, self._done = len(prompts), np.arange(num_rows) >= len(prompts)
        # Arrays of the host, which every process of a mesh may give to a program.
        self._keys = np.asarray(text_keys(how.seed, places or range(len(prompts)), num_rows))
        self._needed_slots = power_of_two(max(map(len, self._texts)) + how.num_tokens, SHORTEST)

    @property
    def done(self) -> np.ndarray:
        """Which of the texts have ended, bool [prompts]."""
        return self._done[: self._num]

    def end(self, row: int) -> None:
        """Ends a text."""
        self._done[row] = True

    def _append(self, written: np.ndarray) -> list[list[int]]:
        """The new tokens of every row, [rows, any], added to the texts."""
        news: list[list[int]] = []
        for row, tokens in enumerate(written.tolist()):
            new = [] if self._done[row] else [token for token in tokens if token >= 0]
            self._texts[row] = self._texts[row] + new
            if self._seen is not None:
                self._seen[row, new] = True
            self._done[row] |= bool(new) and new[-1] in self._how.stop_tokens
            news.append(new)
        self._decoder.num_written += sum(map(len, news))
        return news

    def _padded_texts(self, *, halve: bool) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [rows, length], lengths int32 [rows]) of the texts; with `halve` of those that are longer than
        the context the last half, from then on."""
        limit = self._decoder.context
        if limit and halve:
            self._texts = [text[-max(1, limit // 2) :] if len(text) > limit else text for text in self._texts]
        lengths = np.asarray(list(map(len, self._texts)), np.int32)
        padded = power_of_two(int(lengths.max()), SHORTEST)
        tokens = np.zeros((len(lengths), min(limit, padded) if limit else padded), np.int32)
        for row, text in enumerate(self._texts):
            tokens[row, : len(text)] = text
        return tokens, lengths


class Writing(TextRows):
    """Prompts that a decoder continues side by side, a token of each in a step.

    When a text is as long as the network's context, the network goes on from its last half; of a longer prompt it reads
    the end.
    """

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], how: Sampling, **where: Any) -> None:
        """The arguments are those of `TextRows`."""
        super().__init__(decoder, prompts, how, **where)
        self._count, limit, needed = 0, decoder.context, self._needed_slots
        self._slots = needed if limit is None else min(limit, needed) if decoder.cached else limit
        self._rows: Rows | None = None

    def more(self, most: int = MOST) -> list[list[int]]:
        """The next tokens of each text, at most `most`; none of those that have ended. All are done at the end."""
        left = self._how.num_tokens - self._count
        if left < 1:
            self._done[:] = True
        if self._done.all():
            return [[] for _ in range(self._num)]
        limit, sizes = self._decoder.context, [len(x) for x, done in zip(self._texts, self._done, strict=True)
                                               if not done]  # fmt: skip
        room = left if limit is None else limit - max(sizes) + 1
        # The cache has all tokens but the last, which a network may read otherwise in a longer text.
        changes = [(self._decoder.parts.network.next_change(size - 1), size) for size in sizes]
        room = min([room, *(change - size for change, size in changes if change is not None)])
        if self._rows is None or room < 1:
            written = self._read()[:, None]
        else:
            num = min(most, MOST, left, room)
            rows = self._rows._replace(done=self._done.copy())
            self._rows, written = self._decoder.write(rows, num, self._how)
        return self._append(written)

    def _append(self, written: np.ndarray) -> list[list[int]]:
        """The new tokens of each text, added to it."""
        news = super()._append(written)
        self._count += max(map(len, news))
        return news[: self._num]

    def _read(self) -> np.ndarray:
        """Reads the texts, those that are too long from their middle, and draws the next token of each: [rows]."""
        tokens, lengths = self._padded_texts(halve=self._rows is not None)
        self._rows = None  # Frees the cache.
        cache, drawn = self._decoder.read(
            tokens, lengths, self._keys, self._count, slots=self._slots, how=self._how, seen=self._seen
        )
        counts = np.full_like(lengths, self._count + 1)
        made: Any = (drawn, lengths, counts, self._done.copy(), self._keys)
        self._rows = Rows(cache, *made)
        return drawn


def seen_in_texts(texts: Sequence[Sequence[int]], num_rows: int, vocab_size: int) -> np.ndarray:
    """Which tokens are in each text, bool [rows, vocab]."""
    seen = np.zeros((num_rows, vocab_size), bool)
    for row, text in enumerate(texts):
        seen[row, list(text)] = True
    return seen
