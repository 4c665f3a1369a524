"""Tokens that a trained network writes: prompts side by side, several tokens in one call of the device.

The prompts are read in one pass, padded to a power of two; then one program writes all tokens. A network with the
methods `prefill` and `decode` (see `jaxdl.models.transformer`) keeps what it has read in a key-value cache; any other
reads the whole text so far for each token.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import TextSpec
from jaxdl.data.spec import with_targets
from jaxdl.inference.decoding.loop import Rows, draw_next, row_keys, write_on
from jaxdl.inference.decoding.padding import SHORTEST, power_of_two
from jaxdl.inference.decoding.sampling import sample
from jaxdl.models.logits import of_tokens
from jaxdl.models.network import Call
from jaxdl.models.rotary import as_document
from jaxdl.parallel.mesh import batch_ways
from jaxdl.training.run.inference import Inference
from jaxdl.training.state import replicated
from jaxdl.training.step import apply_network, run_network

MOST = 32
"""Tokens of each row that one call writes at most."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when a text ends.

    Attributes:
      num_tokens: the most for each prompt.
      temperature, top_k, top_p: see `jaxdl.inference.decoding.sampling.sample`.
      seed: of the draws. A prompt's tokens depend on it and on the prompt's number alone, not on the other prompts.
      stop_tokens: a text ends with one of these.
    """

    num_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"--temperature {self.temperature}: give a number, 0 or more; 0 takes the likeliest token."
            )
        if self.num_tokens < 0:
            raise ConfigError(f"--num-tokens {self.num_tokens}: it must not be negative.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k {self.top_k}: give a whole number, 1 or more, or leave it out.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p}: give a number above 0, at most 1, or leave it out.")
        for option, value in (("--top-k", self.top_k), ("--top-p", self.top_p)):
            if value is not None and self.temperature == 0:
                raise ConfigError(
                    f"{option} {value}: it has no effect with --temperature 0, which takes the likeliest token. Leave "
                    "one out."
                )
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: it has more than 64 bits. Give a smaller number.")


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
        self._state = (inference.rounded_params, inference.model_state)
        shown = replicated(parts.layout)
        options = ("top_k", "top_p")
        self._read = jax.jit(self._read_prompts, static_argnames=("slots", *options), out_shardings=(None, shown))
        each: Any = [shown for _ in Rows._fields[1:]]
        of_rows = Rows(None, *each)
        self._write = jax.jit(
            self._write_tokens, static_argnames=options, donate_argnames="cache", out_shardings=(None, of_rows, shown)
        )
        self._programs: set[Any] = set()
        self.num_written, self.num_steady, self.steady_sec = 0, 0, 0.0

    def read(
        self, tokens: np.ndarray, lengths: np.ndarray, keys: Any, count: int, *, slots: int, how: Sampling
    ) -> tuple[Any, np.ndarray]:
        """`(cache, the token after each prompt)`; `count` tokens have been drawn before."""
        options = {"slots": slots, "top_k": how.top_k, "top_p": how.top_p}
        cache, drawn = self._read(*self._state, tokens, lengths, keys, count, how.temperature, **options)
        return cache, np.asarray(drawn)

    def write(self, rows: Rows, num_tokens: int, how: Sampling) -> tuple[Rows, np.ndarray]:
        """`(rows, the tokens written [rows, MOST], -1 where none was)`; the cache of `rows` is donated."""
        stop = np.asarray([-1, *how.stop_tokens], np.int32)
        program = (jax.tree.map(jnp.shape, rows), stop.shape, how.top_k, how.top_p)
        start = time.perf_counter()
        options = {"stop": stop, "temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
        others = rows._replace(cache=None)
        cache, others, written = self._write(
            *self._state, cache=rows.cache, rows=others, num_tokens=num_tokens, **options
        )
        # All but the cache lies on the host between the calls, so that each call has arguments of the same kind.
        host: Any = jax.device_get((written, others))
        tokens, rows = host[0], host[1]._replace(cache=cache)
        if str(program) in self._programs:
            self.num_steady += int(np.sum(tokens >= 0))
            self.steady_sec += time.perf_counter() - start
        self._programs.add(str(program))
        return rows, tokens

    def _read_prompts(
        self, params: Any, model_state: Any, tokens: Any, lengths: Any, keys: Any, count: Any, temperature: Any, *,
        slots: int, top_k: int | None, top_p: float | None,
    ) -> tuple[Any, jax.Array]:  # fmt: skip
        if self.cached:
            logits, cache = self._run(params, model_state, tokens, lengths, slots, method="prefill")
        else:
            cache = jnp.pad(tokens, ((0, 0), (0, slots - tokens.shape[1])))[None]
            logits = self._logits_of_texts(params, model_state, cache[0], lengths - 1)
        drawn = draw_next(
            lambda logits, keys: sample(logits, keys, temperature, top_k=top_k, top_p=top_p),
            logits[:, -1, : self.vocab_size],
            keys,
            jnp.broadcast_to(count, lengths.shape),
        )
        return cache, drawn

    def _write_tokens(
        self, params: Any, model_state: Any, cache: Any, rows: Rows, num_tokens: Any, stop: Any, temperature: Any, *,
        top_k: int | None, top_p: float | None,
    ) -> tuple[Any, Rows, jax.Array]:  # fmt: skip
        def step(tokens: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
            if self.cached:
                logits, cache = self._run(params, model_state, tokens, cache, position, method="decode")
            else:
                cache = cache.at[0, jnp.arange(tokens.shape[0]), position % cache.shape[2]].set(tokens)
                logits = self._logits_of_texts(params, model_state, cache[0], position % cache.shape[2])
            return logits[:, -1, : self.vocab_size], cache

        def draw(logits: jax.Array, keys: jax.Array) -> jax.Array:
            return sample(logits, keys, temperature, top_k=top_k, top_p=top_p)

        rows, written = write_on(step, draw, rows._replace(cache=cache), num_tokens, most=MOST, stop=stop)
        return rows.cache, rows._replace(cache=None), written

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


class Writing:
    """Prompts that a decoder continues side by side.

    When a text is as long as the network's context, the network goes on from its last half; of a longer prompt it reads
    the end.

    Attributes:
      done: which of the texts have ended, bool [prompts].
    """

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Sequence[int]], how: Sampling, *, first: int = 0, rows: int = 1
    ) -> None:
        """`prompts` are tokens, at least one each; `first` is the number of the first, `rows` the size of a batch."""
        self._decoder, self._how, self._count = decoder, how, 0
        ways = batch_ways(decoder.parts.layout.mesh)
        num_rows = -(-max(rows, len(prompts)) // ways) * ways
        limit = decoder.context
        self._texts = [list(prompt)[-limit:] if limit else list(prompt) for prompt in prompts]
        self._texts += [[0]] * (num_rows - len(prompts))
        self._num, self._done = len(prompts), np.arange(num_rows) >= len(prompts)
        # Arrays of the host, which every process of a mesh may give to a program.
        self._keys = np.asarray(row_keys(jax.random.key(how.seed), jnp.arange(first, first + num_rows)))
        needed = power_of_two(max(map(len, self._texts)) + how.num_tokens, SHORTEST)
        self._slots = needed if limit is None else min(limit, needed) if decoder.cached else limit
        self._rows: Rows | None = None

    @property
    def done(self) -> np.ndarray:
        """Which of the texts have ended, bool [prompts]."""
        return self._done[: self._num]

    def end(self, row: int) -> None:
        """Ends a text."""
        self._done[row] = True

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
        """The new tokens, [rows, any], added to the texts."""
        news: list[list[int]] = []
        for row, tokens in enumerate(written.tolist()):
            new = [] if self._done[row] else [token for token in tokens if token >= 0]
            self._texts[row] = self._texts[row] + new
            self._done[row] |= bool(new) and new[-1] in self._how.stop_tokens
            news.append(new)
        self._count += max(map(len, news))
        self._decoder.num_written += sum(map(len, news))
        return news[: self._num]

    def _read(self) -> np.ndarray:
        """Reads the texts, those that are too long from their middle, and draws the next token of each: [rows]."""
        limit = self._decoder.context
        if limit and self._rows is not None:
            self._texts = [text[-max(1, limit // 2) :] if len(text) > limit else text for text in self._texts]
        lengths = np.asarray(list(map(len, self._texts)), np.int32)
        padded = power_of_two(int(lengths.max()), SHORTEST)
        tokens = np.zeros((len(lengths), min(limit, padded) if limit else padded), np.int32)
        for row, text in enumerate(self._texts):
            tokens[row, : len(text)] = text
        self._rows = None  # Frees the cache.
        cache, drawn = self._decoder.read(
            tokens, lengths, self._keys, self._count, slots=self._slots, how=self._how
        )  # fmt: skip
        counts = np.full_like(lengths, self._count + 1)
        made: Any = (drawn, lengths, counts, self._done.copy(), self._keys)
        self._rows = Rows(cache, *made)
        return drawn
