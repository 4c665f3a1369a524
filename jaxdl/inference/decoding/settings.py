"""How texts are drawn from a network: the settings of one request, and those of many as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.inference.decoding.padding import power_of_two


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a text are drawn, and when it ends.

    Attributes:
      num_tokens: the most for each prompt.
      temperature: 1 is the network's own distribution, lower is less random, 0 takes the likeliest token.
      top_k: only the k likeliest tokens are drawn, and what is as likely as the last of them.
      top_p: of these only the likeliest whose probabilities together reach p.
      seed: of the draws. A prompt's tokens depend on it and on the prompt's number alone, not on the other prompts.
      stop_tokens: a text ends with one of these.
      min_p: of the tokens that `top_k` and `top_p` leave only those that are at least so many times as likely as the
        likeliest.
      repetition_penalty: above 1, tokens that are in the prompt, as far as it is read, or in the text so far
        become less likely.
      stop: a text ends before one of these texts.
      samples: how many texts continue each prompt; with `beams` the best so many of the search.
      beams: hypotheses of a beam search; 1 draws instead.
      length_penalty: a hypothesis is judged by log P / length^length_penalty; above 0 longer ones gain.
    """

    num_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    samples: int = 1
    beams: int = 1
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"--temperature {self.temperature}: give a number, 0 or more; 0 takes the likeliest token."
            )
        if self.num_tokens < 0:
            raise ConfigError(f"--num-tokens {self.num_tokens}: it must not be negative.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k {self.top_k}: give a whole number, 1 or more, or leave it out.")
        for option, value in (("--top-p", self.top_p), ("--min-p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"{option} {value}: give a number above 0, at most 1, or leave it out.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ConfigError(
                f"--repetition-penalty {self.repetition_penalty}: give a number above 0; 1 changes nothing, and 1.2 "
                "makes repeated tokens less likely."
            )
        if not all(self.stop):
            raise ConfigError(f"--stop {self.stop!r}: give texts that are not empty.")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: it has more than 64 bits. Give a smaller number.")
        self._check_beams()
        self._check_effects()

    def _check_beams(self) -> None:
        for option, value in (("--samples", self.samples), ("--beams", self.beams)):
            if value < 1:
                raise ConfigError(f"{option} {value}: give a whole number, 1 or more.")
        if not math.isfinite(self.length_penalty):
            raise ConfigError(f"--length-penalty {self.length_penalty}: give a number; above 0 longer texts gain.")
        if self.beams > 1 and self.samples > self.beams:
            raise ConfigError(
                f"--samples {self.samples}: a search with --beams {self.beams} has no more than {self.beams} best "
                "texts. Give more beams, or ask for fewer."
            )
        if self.beams == 1 and self.length_penalty != 1:
            raise ConfigError(f"--length-penalty {self.length_penalty}: it has no effect without --beams.")

    def _check_effects(self) -> None:
        """Raises ConfigError for a setting that has no effect beside another."""
        given = (("--top-k", self.top_k), ("--top-p", self.top_p), ("--min-p", self.min_p))
        for option, value in given:
            if value is None:
                continue
            if self.beams > 1:
                raise ConfigError(
                    f"{option} {value}: it has no effect with --beams, which draws nothing. Leave one out."
                )
            if self.temperature == 0:
                raise ConfigError(
                    f"{option} {value}: it has no effect with --temperature 0, which takes the likeliest token. Leave "
                    "one out."
                )
        if self.temperature == 0 and self.beams == 1 and self.samples > 1:
            raise ConfigError(
                f"--samples {self.samples}: with --temperature 0 they would be equal. Give a temperature above 0, or "
                "--beams."
            )

    def with_stop_tokens(self, tokens: Sequence[int]) -> Sampling:
        """The same with more stop tokens."""
        return replace(self, stop_tokens=tuple(dict.fromkeys((*self.stop_tokens, *tokens))))

    @property
    def of_rows(self) -> bool:
        """Whether it needs `RowSettings`: `sample` knows only a temperature, `top_k` and `top_p`."""
        return self.min_p is not None or self.repetition_penalty != 1


def texts_of(stop: Sequence[str]) -> tuple[str, ...]:
    """Stop texts as `Sampling` has them. Raises ConfigError for a single text, whose letters would be taken."""
    if isinstance(stop, str):
        raise ConfigError(f"--stop {stop!r}: give a list of texts.")
    return tuple(stop)


class RowSettings(NamedTuple):
    """Settings of sequences that are drawn side by side, each with its own: arrays [rows].

    They are arguments of a compiled program, so that it serves all their values.
    """

    temperature: Any
    """float32; 0 takes the likeliest token."""
    top_k: Any
    """int32; 0 leaves none out."""
    top_p: Any
    """float32; 1 leaves none out."""
    min_p: Any
    """float32; 0 leaves none out."""
    repetition_penalty: Any
    """float32; 1 changes nothing."""


def row_settings(settings: Sequence[Sampling]) -> RowSettings:
    """Those of each row, on the host."""
    return RowSettings(
        temperature=np.asarray([one.temperature for one in settings], np.float32),
        top_k=np.asarray([one.top_k or 0 for one in settings], np.int32),
        top_p=np.asarray([1.0 if one.top_p is None else one.top_p for one in settings], np.float32),
        min_p=np.asarray([one.min_p or 0.0 for one in settings], np.float32),
        repetition_penalty=np.asarray([one.repetition_penalty for one in settings], np.float32),
    )


def num_sorted(settings: Sequence[Sampling], vocab_size: int) -> int:
    """How many of the largest logits must be sorted: a static argument of `draw_rows`, one of few values.

    0 where no row has `top_k` or `top_p`; the whole vocabulary where one has `top_p` alone.
    """
    if any(one.top_k is None and one.top_p is not None and one.top_p < 1 for one in settings):
        return vocab_size
    return min(vocab_size, max((power_of_two(one.top_k, 16) for one in settings if one.top_k), default=0))
