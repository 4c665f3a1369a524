"""The compiled programs of a server: a prompt is read into a slot of the cache, and the slots write side by side."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdl.data.spec import with_targets
from jaxdl.inference.decoding.padding import SHORTEST, power_of_two
from jaxdl.inference.decoding.row_sampling import seen_in_rows
from jaxdl.inference.decoding.settings import Sampling, row_settings
from jaxdl.inference.generation import check_positions, seen_in_texts
from jaxdl.inference.serve.drawing import Drawn, Had, Penalties, Settings, draw
from jaxdl.models.cache import reads_slots
from jaxdl.models.logits import of_tokens
from jaxdl.models.network import Call
from jaxdl.parallel.mesh import batch_ways
from jaxdl.training.run.inference import Inference
from jaxdl.training.state import replicated
from jaxdl.training.step import apply_network, run_network

MOST = 32
"""Tokens of each row that one call writes at most."""
PIECE = 512
"""Tokens of a prompt that one call reads at most, where the network can go on from a part of it: so the texts that are
being written do not wait for a long prompt."""
NUM_STOP = 16
"""Tokens that may end a text."""
_LEAST_READ = 128
"""The tokens of the cache that the smallest program reads; the next one reads twice as many. Attention to a cache takes
as long however much of it is filled, on CPUs most of the time of a small network."""
_COMPILERS = 8
"""Programs that are compiled at once at most."""


class Rows(NamedTuple):
    """The texts that are being written, [rows] each, as arrays of the host."""

    tokens: Any
    """The newest token of each, which the network has not read yet, int32."""
    positions: Any
    """Its position, int32."""
    counts: Any
    """How many tokens have been drawn, int32."""
    left: Any
    """How many more may be, int32; 0 for a row without a text."""
    stop: Any
    """Tokens that end it, int32 [rows, NUM_STOP]; -1 is none."""
    settings: Settings


class State(NamedTuple):
    """What the device keeps of the texts of all slots. Leaves are [..., slots, ...], slots second."""

    cache: Any
    """What the network has read of each."""
    had: Had
    """The tokens of each text so far, [1, slots, vocab] each."""


class Programs:
    """The programs, compiled when they are first called, and the cache that they write to.

    The cache has a row for each slot. The texts that are being written are in its first rows, so that a program for
    fewer rows serves when few are: there is one for each power of two, and for each of a few lengths of which the
    longest text has no more. `exact` takes the largest alone: then no text depends, by its rounding, on the others.

    Attributes:
      num_slots: texts that are written side by side: at least what was asked for, and what the mesh divides.
      sizes, reads: numbers of rows, and of tokens of each, for which there are programs.
      cache_bytes: of the whole cache, over all devices.
    """

    def __init__(
        self, inference: Inference, *, num_slots: int, context: int, vocab_size: int, exact: bool = False,
        same_rows: bool = False, cached: bool = True,
    ) -> None:  # fmt: skip
        """`same_rows`: the network has a `decode` of its own, which takes no cache with more rows than tokens. Without
        `cached` no key-value cache is used, as if the network had none."""
        self._parts, self._inference = inference.parts, inference
        check_positions(inference.parts, "serve")
        self._vocab_size, self.context = vocab_size, context
        self._ways = batch_ways(self._parts.layout.mesh)
        self.num_slots = -(-num_slots // self._ways) * self._ways
        self._cached = cached and self._parts.network.has("decode")
        powers = {min(2**power, self.num_slots) for power in range(self.num_slots.bit_length() + 1)}
        whole = exact or same_rows or self._ways > 1 or not self._cached
        self.sizes = [self.num_slots] if whole else sorted(powers)
        lengths = [_LEAST_READ * 2**power for power in range(24)]
        self.reads = [context] if exact or not self._cached else [x for x in lengths if x < context] + [context]
        self._network = (inference.rounded_params, inference.model_state)
        self._shapes = jax.eval_shape(self._empty, *self._network)
        self.cache_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self._shapes))
        caches = jax.tree.leaves(self._shapes.cache)
        splits = self._cached and self._ways == 1 and self._parts.network.has("extend")
        # Attention with a window has fewer slots, of which several tokens at once would replace some that are read.
        self._piece = PIECE if splits and all(x.shape[2] >= context > PIECE for x in caches) else context
        self._texts: Any = None
        self._shardings: Any = None
        self._abstract: Any = None
        self._compiled: dict[Any, Any] = {}
        self._tracing = threading.Lock()
        self._shown = replicated(self._parts.layout)

    @property
    def devices(self) -> list[Any]:
        """Those of the mesh."""
        return list(self._parts.layout.mesh.devices.flat)

    def allocate(self) -> None:
        """Makes the cache."""
        self._texts = jax.jit(self._empty)(*self._network)
        # What each program takes and returns in its place, so that they follow each other without copies.
        self._shardings = jax.tree.map(lambda x: x.sharding, self._texts)
        self._abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._texts
        )

    def pieces(self, num_tokens: int) -> list[int]:
        """Where the pieces of a prompt begin that are read one after another; the last may begin before another ends.

        All but a shorter prompt's have the same size.
        """
        last = max(0, num_tokens - self._piece)
        return [*range(0, last, self._piece), last]

    def read(self, prompt: list[int], row: int, settings: Settings, start: int = 0) -> tuple[int, Drawn]:
        """`(how many tokens of a prompt have been read into a row, the token after these)`: the piece from `start` on.

        What is drawn are arrays of the host, [1, ...]; before the last piece they have no meaning.
        """
        piece = prompt[start : start + self._piece]
        if start == 0:
            return len(piece), self._begin(piece, row, settings)
        assert len(piece) == self._piece, "the last piece begins early enough"
        tokens, seen = np.asarray([piece], np.int32), seen_in_texts([prompt], 1, self._vocab_size)
        program = self._piece_program()
        places = (np.int32(start), np.int32(row))
        self._texts, drawn = program(*self._network, self._texts, tokens, *places, seen, settings)
        return start + len(piece), self._fetched(drawn, settings)

    def _begin(self, prompt: list[int], row: int, settings: Settings) -> Drawn:
        """Reads a prompt, or its beginning, into a row, and draws the token after it."""
        length = self._padded(len(prompt))
        tokens = np.zeros((self._ways, length), np.int32)
        tokens[:, : len(prompt)] = prompt
        lengths = np.full(self._ways, len(prompt), np.int32)
        program = self._read_program(length)
        self._texts, drawn = program(*self._network, self._texts, tokens, lengths, np.int32(row), settings)
        return self._fetched(drawn, settings)

    def write(self, rows: Rows, num_tokens: int) -> Drawn:
        """The next tokens of each row, at most `num_tokens` and `MOST`: arrays of the host, [rows, MOST, ...].

        The number of rows is one of `sizes`. Token -1 says that there was none: the text had ended.
        """
        longest = min(int(np.max(rows.positions)) + num_tokens, self.context)
        read = next(length for length in self.reads if length >= longest)
        program = self._write_program(len(rows.tokens), read)
        self._texts, written = program(*self._network, self._texts, rows, np.int32(num_tokens))
        return self._fetched(written, rows.settings)

    def move(self, source: int, target: int) -> None:
        """Moves a text to another row."""
        self._texts = self._moving(self._texts, np.int32(source), np.int32(target))

    def warm_up(self) -> int:
        """Compiles all programs, several at once, and returns how many these are; no text may be in a slot."""
        longest = self._piece.bit_length() + 1
        prompts = sorted({self._padded(min(2**power, self._piece)) for power in range(longest)})
        tasks = [functools.partial(self._read_program, length) for length in prompts]
        tasks += [functools.partial(self._write_program, size, read) for size in self.sizes for read in self.reads]
        tasks += [self._piece_program] if self._piece < self.context else []
        with concurrent.futures.ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda task: task(), tasks))
        if len(self.sizes) > 1:
            self.move(1, 0)
        return len(self._compiled) + (len(self.sizes) > 1)

    def _padded(self, length: int) -> int:
        return min(power_of_two(length, SHORTEST), self.context)

    def _read_program(self, length: int) -> Any:
        tokens, lengths = np.zeros((self._ways, length), np.int32), np.zeros(self._ways, np.int32)
        return self._program(("read", length), self._reading, tokens, lengths, np.int32(0), blank_settings(1))

    def _piece_program(self) -> Any:
        tokens, seen = np.zeros((1, self._piece), np.int32), np.zeros((1, self._vocab_size), bool)
        zero = np.int32(0)
        return self._program("piece", self._reading_on, tokens, zero, zero, seen, blank_settings(1))

    def _write_program(self, size: int, read: int) -> Any:
        return self._program(("write", size, read), self._writing, blank_rows(size), np.int32(0), read=read)

    def _program(self, key: Any, function: Any, *inputs: Any, **options: Any) -> Any:
        """A compiled function of the network, the texts and inputs such as these."""
        if key not in self._compiled:
            with self._tracing:  # Flax does not promise that several threads may trace.
                lowered = function.lower(*self._network, self._abstract, *inputs, **options)
            self._compiled[key] = lowered.compile()
        return self._compiled[key]

    def _fetched(self, drawn: Drawn, settings: Settings) -> Drawn:
        """On the host; of the log-probabilities only those that are asked for."""
        if np.any(settings.wants_top):
            return jax.device_get(drawn)
        return drawn._replace(token=np.asarray(drawn.token))

    def _empty(self, params: Any, model_state: Any) -> Any:
        """Slots with nothing in them; a function to trace."""
        shape = (1, self.num_slots, self._vocab_size)
        had = Had(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))
        if not self._cached:
            return State(jnp.zeros((1, self.num_slots, self.context), jnp.int32), had)
        tokens, lengths = jnp.zeros((self.num_slots, SHORTEST), jnp.int32), jnp.ones(self.num_slots, jnp.int32)
        tokens = tokens[:, : self.context]
        return State(self._run(params, model_state, tokens, lengths, self.context, method="prefill")[1], had)

    @functools.cached_property
    def _reading(self) -> Any:
        return jax.jit(self._read_prompt, donate_argnums=2, out_shardings=(self._shardings, self._shown))

    @functools.cached_property
    def _reading_on(self) -> Any:
        return jax.jit(self._read_piece, donate_argnums=2, out_shardings=(self._shardings, self._shown))

    @functools.cached_property
    def _writing(self) -> Any:
        return jax.jit(
            self._write_tokens, donate_argnums=2, static_argnames="read", out_shardings=(self._shardings, self._shown)
        )

    @functools.cached_property
    def _moving(self) -> Any:
        def moved(cache: Any, source: jax.Array, target: jax.Array) -> Any:
            def one(x: jax.Array) -> jax.Array:
                row = lax.dynamic_slice_in_dim(x, source, 1, axis=1)
                return lax.dynamic_update_slice_in_dim(x, row, target, axis=1)

            return jax.tree.map(one, cache)

        return jax.jit(moved, donate_argnums=0, out_shardings=self._shardings)

    def _read_prompt(
        self, params: Any, model_state: Any, texts: State, tokens: jax.Array, lengths: jax.Array, row: jax.Array,
        settings: Settings,
    ) -> tuple[State, Drawn]:  # fmt: skip
        if self._cached:
            logits, new = self._run(params, model_state, tokens, lengths, self.context, method="prefill")
        else:
            new = jnp.pad(tokens, ((0, 0), (0, self.context - tokens.shape[1])))[None]
            logits = self._logits_of_texts(params, model_state, new[0], lengths - 1)

        seen = seen_in_rows(tokens[:1], lengths[:1], self._vocab_size)
        return self._begun(texts, new, logits, row, seen, settings)

    def _read_piece(
        self, params: Any, model_state: Any, texts: State, tokens: jax.Array, start: jax.Array, row: jax.Array,
        seen: jax.Array, settings: Settings,
    ) -> tuple[State, Drawn]:  # fmt: skip
        cache = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1, axis=1), texts.cache)
        call = Call(train=False, method="extend", materialize_logits=False)
        inputs = (tokens, cache, start[None])
        (outputs, new), _ = run_network(self._parts, self._parts.layout, params, model_state, call, *inputs)
        logits = of_tokens(outputs, jnp.full(1, self._piece - 1))
        return self._begun(texts, new, logits, row, seen, settings)

    def _begun(
        self, texts: State, cache: Any, logits: jax.Array, row: jax.Array, seen: jax.Array, settings: Settings
    ) -> tuple[State, Drawn]:
        """`(texts with another one in a row, the token after that)`: its cache, logits [.., 1, vocab], tokens."""

        def inserted(whole: jax.Array, x: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(whole, x[:, :1].astype(whole.dtype), row, axis=1)

        had = Had(seen, jnp.zeros_like(seen, jnp.int32))
        drawn = draw(logits[:1, -1, : self._vocab_size], settings, jnp.zeros(1, jnp.int32), had)
        had = jax.tree.map(lambda x: x[None], had.after(drawn.token))
        return jax.tree.map(inserted, texts, State(cache, had)), drawn

    def _write_tokens(
        self, params: Any, model_state: Any, texts: State, rows: Rows, num_tokens: jax.Array, *, read: int
    ) -> tuple[State, Drawn]:
        num_rows = rows.tokens.shape[0]
        had = jax.tree.map(lambda x: x[0, :num_rows], texts.had)
        logits = jax.ShapeDtypeStruct(had.seen.shape, jnp.float32)
        blank = jax.eval_shape(draw, logits, rows.settings, rows.counts, had)
        written = jax.tree.map(lambda x: jnp.zeros((num_rows, MOST, *x.shape[1:]), x.dtype), blank)
        written = written._replace(token=written.token - 1)

        def step(carry: Any) -> Any:
            index, cache, had, rows, written = carry
            logits, cache = self._next_logits(params, model_state, cache, rows, read)
            drawn, going = draw(logits, rows.settings, rows.counts, had), rows.left > 0
            drawn = drawn._replace(token=jnp.where(going, drawn.token, -1))
            written = jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, index, 1), written, drawn)
            ended = jnp.any(drawn.token[:, None] == rows.stop, axis=1)
            one = going.astype(jnp.int32)
            after = rows._replace(
                tokens=jnp.where(going, drawn.token, rows.tokens),
                positions=rows.positions + one,
                counts=rows.counts + one,
                left=jnp.where(ended, 0, rows.left - one),
            )
            return index + 1, cache, had.after(drawn.token), after, written

        def goes_on(carry: Any) -> jax.Array:
            return (carry[0] < jnp.minimum(num_tokens, MOST)) & jnp.any(carry[3].left > 0)

        start = (jnp.int32(0), texts.cache, had, rows, written)
        _, cache, had, _, written = lax.while_loop(goes_on, step, start)
        had = jax.tree.map(lambda whole, x: lax.dynamic_update_slice(whole, x[None], (0, 0, 0)), texts.had, had)
        return State(cache, had), written

    def _next_logits(self, params: Any, model_state: Any, cache: Any, rows: Rows, read: int) -> tuple[jax.Array, Any]:
        """(the logits of each row's next token, [rows, vocab]; the cache)."""
        # A row without a text may stand at the end: what it writes there is never read.
        positions = jnp.minimum(rows.positions, self.context - 1)
        if self._cached:
            with reads_slots(read):
                logits, cache = self._run(params, model_state, rows.tokens, cache, positions, method="decode")
        else:
            cache = cache.at[0, jnp.arange(rows.tokens.shape[0]), positions].set(rows.tokens)
            logits = self._logits_of_texts(params, model_state, cache[0], positions)
        return logits[:, -1, : self._vocab_size], cache

    def _run(self, params: Any, model_state: Any, *inputs: Any, method: str) -> Any:
        call = Call(train=False, method=method)
        return run_network(self._parts, self._parts.layout, params, model_state, call, *inputs)[0]

    def _logits_of_texts(self, params: Any, model_state: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """The logits after the tokens at these positions, [rows, 1, vocab], from the whole texts."""
        call = Call(train=False, materialize_logits=False)
        batch = {"tokens": with_targets(tokens, jnp)}
        outputs, _ = apply_network(self._parts, self._parts.layout, params, model_state, batch, call)
        return of_tokens(outputs, positions)


def blank_settings(num_rows: int) -> Settings:
    """Those of rows without a text."""
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    sampling = row_settings([Sampling(temperature=0)] * num_rows)
    none = np.zeros(num_rows, np.float32)
    return Settings(np.tile(key, (num_rows, 1)), sampling, Penalties(none, none.copy()), np.zeros(num_rows, bool))


def blank_rows(num_rows: int) -> Rows:
    """Rows without a text."""
    zeros, stop = np.zeros(num_rows, np.int32), np.full((num_rows, NUM_STOP), -1, np.int32)
    return Rows(zeros, zeros.copy(), zeros.copy(), zeros.copy(), stop, blank_settings(num_rows))
