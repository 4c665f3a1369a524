"""Texts that continue prompts, by the way of decoding that their settings ask for."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.data import Codec
from jaxdl.inference.decoding.settings import Sampling
from jaxdl.inference.decoding.text import Completion, Continued, Prompt, TextStream
from jaxdl.inference.drafting import DraftedWriting, Drafter
from jaxdl.inference.generation import Decoder, Writing
from jaxdl.inference.searching import Searcher

_STREAMED = 8
"""Tokens that are written before their text is shown."""
_WARNED_AT = 5
"""Calls between the user's and a warning."""


class Texts:
    """Continues prompts with the network of a decoder, and keeps the compiled programs.

    Attributes:
      decoder: the programs that write, with their counts of tokens.
      drafters: those of draft networks, by their decoders and the tokens of a draft.
    """

    def __init__(self, decoder: Decoder, codec: Codec) -> None:
        self.decoder, self._codec = decoder, codec
        self.drafters: dict[tuple[int, int], Drafter] = {}

    def drafter(self, draft: Decoder, num_drafted: int) -> Drafter:
        """The programs with which another network drafts; see `Drafter`."""
        key = (id(draft), num_drafted)
        if key not in self.drafters:
            self.drafters[key] = Drafter(self.decoder, draft, num_drafted)
        return self.drafters[key]

    @functools.cached_property
    def _searcher(self) -> Searcher:
        return Searcher(self.decoder)

    def resolved(self, how: Sampling, *, stop_at_end: bool) -> Sampling:
        """The settings with the tokens at which texts end. Raises ConfigError for a stop token that is none."""
        if wrong := [token for token in how.stop_tokens if not 0 <= token < self._codec.vocab_size]:
            last = self._codec.vocab_size - 1
            raise ConfigError(f"--stop-tokens {wrong[0]}: there is no such token; they are numbered from 0 to {last}.")
        return how.with_stop_tokens(self._codec.ends if stop_at_end else ())

    def pieces(self, prompt: Prompt, how: Sampling, drafter: Drafter | None = None) -> Iterator[str]:
        """The text that continues a prompt, piece by piece; that of a beam search is one piece."""
        if how.beams > 1:
            yield from (one.text for one in self.completions([prompt], how, 1) if one.text)
            return
        tokens = self._prompt(prompt)
        writing = self._writing([tokens], how, drafter)
        stream = TextStream(self._codec.decode, tokens, how.stop)
        while not writing.done[0]:
            for token in writing.more(_STREAMED)[0]:
                if token not in how.stop_tokens and (piece := stream.add(token)):
                    yield piece
            if stream.ended:
                return
        if piece := stream.rest():
            yield piece

    def completions(
        self, prompts: Sequence[Prompt], how: Sampling, batch_size: int, drafter: Drafter | None = None
    ) -> Iterator[Completion]:
        """The `how.samples` texts that continue each prompt, in order; `batch_size` of all texts side by side."""
        if how.beams > 1 and how.num_tokens:
            yield from self._searched(prompts, how, batch_size)
            return
        every = [(number, sample) for number in range(len(prompts)) for sample in range(how.samples)]
        for first in range(0, len(every), batch_size):
            places = every[first : first + batch_size]
            tokens = [self._prompt(prompts[number]) for number, _ in places]
            writing = self._writing(tokens, how, drafter, places=places, rows=min(batch_size, len(every)))
            texts = [Continued(TextStream(self._codec.decode, of_prompt, how.stop)) for of_prompt in tokens]
            while not writing.done.all():
                for row, (text, news) in enumerate(zip(texts, writing.more(), strict=True)):
                    if text.add(news, how.stop_tokens):
                        writing.end(row)
            for (number, sample), text in zip(places, texts, strict=True):
                yield text.completion(prompts[number], sample)

    def _writing(
        self, tokens: Sequence[Sequence[int]], how: Sampling, drafter: Drafter | None, **where: Any
    ) -> Writing | DraftedWriting:
        if drafter is None:
            return Writing(self.decoder, tokens, how, **where)
        return DraftedWriting(drafter, tokens, how, **where)

    def _searched(self, prompts: Sequence[Prompt], how: Sampling, batch_size: int) -> Iterator[Completion]:
        """As `completions`, by beam search; the hypotheses of a prompt count as one text of a batch."""
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            tokens = [self._prompt(text) for text in batch]
            for prompt, of_prompt in zip(batch, tokens, strict=True):
                if (room := self._searcher.room(of_prompt, how.num_tokens)) < how.num_tokens:
                    _warn(
                        f"beam search: the text after the prompt {prompt[:20]!r}... ends after {room:,} tokens, where "
                        "those that the network reads at a time are full"
                    )
            rows = min(batch_size, len(prompts))
            for prompt, of_prompt, found in zip(
                batch, tokens, self._searcher.search(tokens, how, rows=rows), strict=True
            ):
                for sample, (news, score) in enumerate(found):
                    text = Continued(TextStream(self._codec.decode, of_prompt, how.stop))
                    text.add(news, how.stop_tokens)
                    yield text.completion(prompt, sample, score)

    def _prompt(self, text: Prompt) -> list[int]:
        """The tokens of a prompt. Warns of one of which the network reads the end alone."""
        tokens = self._codec.prompt(text) if isinstance(text, str) else list(text) or self._codec.beginning
        limit = self.decoder.context
        if limit is not None and len(tokens) > limit:
            _warn(
                f"the prompt {text[:20]!r}... has {len(tokens):,} tokens; the network reads the last {limit:,}, as it "
                "was trained on so many"
            )
        return tokens


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=_WARNED_AT)
