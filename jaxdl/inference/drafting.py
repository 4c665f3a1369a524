"""Texts of a trained network that a smaller one drafts: speculative decoding of prompts side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.inference.decoding.settings import RowSettings, Sampling, num_sorted, row_settings
from jaxdl.inference.decoding.speculation import Drafted, speculate
from jaxdl.inference.generation import MOST, Decoder, TextRows, check_positions
from jaxdl.training.state import replicated

_GREEDY = Sampling(temperature=0.0)


class Drafter:
    """The compiled programs with which one network drafts what another writes.

    Attributes:
      num_drafted: tokens of a draft.
      num_checked, num_kept: drafted tokens that were checked so far, and those that were kept.
    """

    def __init__(self, decoder: Decoder, draft: Decoder, num_drafted: int) -> None:
        """Raises ConfigError for networks that do not fit together."""
        if num_drafted < 1:
            raise ConfigError(f"--draft-tokens {num_drafted}: give a whole number, 1 or more.")
        for what, each in (("network", decoder), ("draft", draft)):
            check_positions(each.parts, f"--draft: the {what}")
            if not each.cached or not each.parts.network.has("extend"):
                raise ConfigError(
                    f"--draft: the {what} has no key-value cache that several tokens are added to at once (methods "
                    "`prefill`, `decode` and `extend`). Generate without a draft."
                )
        if draft.context is not None and (decoder.context is None or draft.context < decoder.context):
            reads = "any number" if decoder.context is None else f"{decoder.context:,}"
            raise ConfigError(
                f"--draft: the draft reads {draft.context:,} tokens at a time, and the network {reads}. "
                "Train a draft on texts as long (--data.length)."
            )
        self.decoder, self.draft, self.num_drafted = decoder, draft, num_drafted
        self.num_checked, self.num_kept = 0, 0
        shown = replicated(decoder.parts.layout)
        each: Any = [shown for _ in Drafted._fields[2:]]
        static = ("rounds", "num_sorted")
        self._write = jax.jit(
            self._write_tokens, static_argnames=static, donate_argnames=("cache", "draft_cache"),
            out_shardings=(None, None, Drafted(None, None, *each), shown, shown),
        )  # fmt: skip
        self._programs: set[Any] = set()

    def write(self, rows: Drafted, how: Sampling, rounds: int) -> tuple[Drafted, np.ndarray]:
        """`(rows, the tokens written [rows, any], -1 where none was)`; the caches of `rows` are donated."""
        settings, sort = row_settings([how] * len(rows.tokens)), num_sorted([how], self.decoder.vocab_size)
        stop = np.asarray([-1, *how.stop_tokens], np.int32)
        program = str((jax.tree.map(jnp.shape, rows), stop.shape, sort, rounds))
        start = time.perf_counter()
        cache, draft_cache, others, written, accepted = self._write(
            self.decoder.state, self.draft.state, cache=rows.cache, draft_cache=rows.draft_cache,
            rows=rows._replace(cache=None, draft_cache=None), settings=settings, stop=stop, rounds=rounds,
            num_sorted=sort,
        )  # fmt: skip
        host: Any = jax.device_get((written, others, accepted))
        tokens, after = host[0], host[1]._replace(cache=cache, draft_cache=draft_cache)
        is_token = tokens.reshape(len(tokens), rounds, -1) >= 0
        count = int(np.sum(is_token))
        self.num_checked += int(np.sum(np.any(is_token, axis=2))) * self.num_drafted
        self.num_kept += int(np.sum(host[2]))
        if program in self._programs:
            self.decoder.num_steady += count
            self.decoder.steady_sec += time.perf_counter() - start
        self._programs.add(program)
        return after, tokens

    def _write_tokens(
        self, state: Any, draft_state: Any, cache: Any, draft_cache: Any, rows: Drafted, settings: RowSettings,
        stop: jax.Array, *, rounds: int, num_sorted: int,
    ) -> Any:  # fmt: skip
        def check(tokens: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
            return self.decoder.read_tokens(state[0], state[1], tokens, cache, position)

        def draft(tokens: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
            return self.draft.read_token(draft_state[0], draft_state[1], tokens, cache, position)

        rows, written, accepted = speculate(
            check, draft, rows._replace(cache=cache, draft_cache=draft_cache), settings, stop,
            num_drafted=self.num_drafted, rounds=rounds, num_sorted=num_sorted,
        )  # fmt: skip
        return rows.cache, rows.draft_cache, rows._replace(cache=None, draft_cache=None), written, accepted


class DraftedWriting(TextRows):
    """As `jaxdl.inference.generation.Writing`, with a drafter; the texts advance by different numbers of tokens."""

    def __init__(self, drafter: Drafter, prompts: Sequence[Sequence[int]], how: Sampling, **where: Any) -> None:
        """The other arguments are those of `jaxdl.inference.generation.TextRows`."""
        super().__init__(drafter.decoder, prompts, how, **where)
        self._drafter, limit, needed = drafter, drafter.decoder.context, self._needed_slots
        self._counts = np.zeros(len(self._texts), np.int32)
        # A draft may go beyond the end of a text, and what it writes there must not replace what is still read.
        self._slots = (needed if limit is None else min(limit, needed)) + drafter.num_drafted + 1
        self._rows: Drafted | None = None

    def more(self, most: int = MOST) -> list[list[int]]:
        """The next tokens of each text, about `most`; none of those that have ended. All are done at the end."""
        left = self._how.num_tokens - self._counts
        self._done |= left < 1
        if self._done.all():
            return [[] for _ in range(self._num)]
        limit, lengths = self._decoder.context, np.asarray(list(map(len, self._texts)))
        room = left if limit is None else np.minimum(left, limit + 1 - lengths)
        if self._rows is None or np.any(room[~self._done] < 1):
            written = self._read()[:, None]
        else:
            rounds = max(1, min(most, MOST) // (self._drafter.num_drafted + 1))
            rows = self._rows._replace(left=np.where(self._done, 0, room).astype(np.int32))
            self._rows, written = self._drafter.write(rows, self._how, rounds)
        return self._append(written)

    def _append(self, written: np.ndarray) -> list[list[int]]:
        """The new tokens of each text, added to it."""
        news = super()._append(written)
        self._counts += np.asarray(list(map(len, news)), np.int32)
        return news[: self._num]

    def _read(self) -> np.ndarray:
        """Reads the texts, those that are too long from their middle, and draws the next token of each: [rows]."""
        decoder, draft = self._decoder, self._drafter.draft
        tokens, lengths = self._padded_texts(halve=self._rows is not None)
        self._rows = None  # Frees the caches.
        seen, inputs = self._seen, (tokens, lengths, self._keys, self._counts)
        cache, drawn = decoder.read(*inputs, how=self._how, seen=seen, slots=self._slots)
        draft_cache, _ = draft.read(*inputs, how=_GREEDY, slots=self._slots)
        cache = cache if seen is None else cache.cache
        self._check_slots(cache, draft_cache)
        made: Any = (drawn, lengths, self._counts + 1, np.zeros_like(lengths), self._keys, seen)
        self._rows = Drafted(cache, draft_cache, *made)
        return drawn

    def _check_slots(self, *caches: Any) -> None:
        """Raises ConfigError where attention with a window reuses slots that a checked token must still see."""
        fewest = min(leaf.shape[2] for leaf in jax.tree.leaves(caches))
        if fewest < self._slots:
            raise ConfigError(
                f"--draft: attention sees the last {fewest:,} tokens alone (--model.window), fewer than prompt and "
                "text together, and drafted tokens cannot be checked there. Generate without a draft, or shorter texts "
                "(--num-tokens)."
            )
