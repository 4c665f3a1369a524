"""Conversations and completions as data: whole ones in rows, of which the answers are learned."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any, Literal

import numpy as np
import pydantic
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.draws import example_seeds
from jaxdl.data.source import Splits, num_held_out
from jaxdl.data.spec import TextSpec
from jaxdl.data.staging import Stage
from jaxdl.data.text.chat_rows import ChatRows, Fitting, fit
from jaxdl.data.text.chat_template import ChatTemplate, template_of
from jaxdl.data.text.chat_texts import ChatTexts, Learned
from jaxdl.data.text.forms import EVERY_FILE
from jaxdl.data.text.row_files import find_rows
from jaxdl.data.text.shards import SHARDS, ShardPlan, TokenStore, staged_shards
from jaxdl.data.text.tokenized import Measured, TokenizedText
from jaxdl.data.text.tokenizing import load_tokens, prepare
from jaxdl.data.text.turns import Columns


class Conversations(TokenizedText, kind="conversations"):
    """Conversations and completions in JSON, CSV, Parquet, and folders of `datasets`; their answers are learned.

    What a row is, its columns say: `messages` with roles (or ShareGPT's `conversations`), `prompt` and `completion`, or
    `instruction`, `input` and `output`. All but prompts and completions that are texts go through the chat template of
    the tokenizer. They are tokenized once, into shards on disk (`python -m jaxdl.data prepare`).
    """

    paths: tuple[str, ...] = ()
    """Files, folders of files, or folders that `datasets.Dataset.save_to_disk` wrote."""
    test_paths: tuple[str, ...] = ()
    """The held-out rows, likewise; without any, a part of `paths` is held out."""
    glob: str = EVERY_FILE
    """Which files of a folder are read."""
    columns: dict[str, str] = {}
    """Columns that have other names: `messages=dialog`, `instruction=question output=answer`. Known are messages,
    prompt, completion, instruction, input, output, system and tools."""
    learn: Learned = "answers"
    """Which tokens count: every answer of the assistant, with the token that ends it; the last answer of a conversation
    alone; or all tokens."""
    template: str | None = None
    """A file with a chat template, or the folder of a tokenizer that has one; None takes that of `tokenizer`, and where
    it has none a plain one."""
    date: str = "2026-01-01"
    """The day that templates are told it is, so that the same texts come out on every day."""
    tokenizer: str | None = None
    """A folder with tokenizer.json (and tokenizer_config.json, which mostly has the chat template), or a JSON file of
    the `tokenizers` library; None takes bytes, a vocabulary of 256."""
    length: int = pydantic.Field(default=1024, ge=1)
    """Targets of a row (it has one more token)."""
    too_long: Literal["cut", "drop"] = "cut"
    """What is done with a conversation that does not fit in a row: its end is cut off, or it is left out."""
    packing: bool = True
    """Rows hold several conversations, which do not see each other. Otherwise each has a row of its own."""
    test_fraction: float = pydantic.Field(default=0.05, gt=0, lt=1)
    """Part of the conversations that is held out, where `test_paths` names none."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Decides which conversations are held out, and which share a row."""
    shards: str = SHARDS
    """The folder where the tokens are kept."""

    @pydantic.model_validator(mode="after")
    def _effect(self) -> Conversations:
        if self.test_paths and self.test_fraction != type(self).model_fields["test_fraction"].default:
            raise ValueError(
                f"test_fraction = {self.test_fraction} has no effect: test_paths are held out. Leave one of them out."
            )
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise ValueError(f"date = {self.date!r}: write a day as 2026-01-31.") from None
        return self

    def measured(self) -> Measured:
        """Training and held-out rows. Raises ConfigError for what cannot be read, or takes long to tokenize."""
        codec, (store, *others) = self.codec(), [load_tokens(plan, self._what()) for plan in self.plans()]
        if others:
            parts = [(store, np.arange(len(store))), (others[0], np.arange(len(others[0])))]
        else:
            parts = [(store, documents) for documents in self._split(store)]
        fitting = [self._fit(store, documents, codec, split) for (store, documents), split in
                   zip(parts, ("training", "held-out"), strict=True)]  # fmt: skip
        held_out = fitting[1]
        spec = TextSpec(
            vocab_size=codec.vocab_size,
            length=self.length,
            bytes_per_token=float(held_out.num_bytes.sum() / held_out.num_learned.sum()),
            packed=True,
            masked=True,
        )
        texts = self.texts()
        notes = [f"They are texts by {texts.template.origin}. {texts.told(store.notes)}"]
        # What is held out of the same files has no notes of its own.
        notes.append(self._texts(self.test_paths).told(others[0].notes) if others else "")
        made = [
            ChatRows(store, fitted, spec, packing=self.packing, seed=self.split_seed, notes=told)
            for (store, _), fitted, told in zip(parts, fitting, notes, strict=True)
        ]
        mean = made[0].num_learned / len(made[0])
        for source in made:
            source.spec = dataclasses.replace(spec, mean_targets=mean)
        return Measured(Splits(*made), int(held_out.num_bytes.sum()), int(held_out.num_learned.sum()))

    def prepare(self, console: Console) -> str:
        """Tokenizes what is missing; see `Data.prepare`."""
        return "\n".join(prepare(plan, console) for plan in self.plans())

    def codec(self) -> Codec:
        """Between text and this data's tokens; texts without a template begin as completions do."""
        codec = Codec(self.tokenizer)
        return codec.for_documents((codec.packed_mark,))

    def chat_template(self) -> ChatTemplate:
        """The template that makes texts of conversations. Raises ConfigError for one that cannot be read."""
        return template_of(Codec(self.tokenizer), self.template)

    def chat(self) -> dict[str, Any]:
        """The content of a file for `ChatTemplate.from_json`."""
        return self.chat_template().to_json()

    def staged(self, stage: Stage) -> Conversations:
        """The config of copies of the tokens, which have been prepared."""
        return self.replaced({"shards": staged_shards(stage, self.shards, self.plans())})

    def plans(self) -> list[ShardPlan]:
        """What is tokenized, and where the tokens are kept. Raises ConfigError for what cannot be found."""
        Codec(self.tokenizer).with_offsets([])  # Raises for one that does not know which characters a token is.
        groups = [paths for paths in (self.paths, self.test_paths) if paths]
        return [ShardPlan(self._texts(paths), self.tokenizer, self.shards) for paths in groups or [()]]

    def texts(self) -> ChatTexts:
        """The rows of `paths` as texts. Raises ConfigError for what cannot be found."""
        return self._texts(self.paths)

    def _texts(self, paths: tuple[str, ...]) -> ChatTexts:
        if not paths:
            raise ConfigError("--data.paths: it is empty. Name files or folders of conversations.")
        Columns(self.columns)
        files, others = find_rows(paths, self.glob)
        columns = tuple(sorted(self.columns.items()))
        return ChatTexts(tuple(files), self.chat_template(), columns, self.learn, self.date, tuple(others))

    def _what(self) -> str:
        return f"data {', '.join(self.paths)}"

    def _split(self, store: TokenStore) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the conversations to train on, and of the held-out ones. Raises ConfigError for one alone."""
        every = np.arange(len(store))
        ranked = np.argsort(example_seeds(self.split_seed, np.zeros(len(store), np.int64), every), kind="stable")
        count = num_held_out(len(store), self.test_fraction)
        if count < 1:
            raise ConfigError(
                f"{', '.join(self.paths)}: there is one conversation, so none can be held out. Name test_paths."
            )
        return np.sort(ranked[count:]), np.sort(ranked[:count])

    def _fit(self, store: TokenStore, documents: np.ndarray, codec: Codec, split: str) -> Fitting:
        """The conversations that fit in rows. Raises ConfigError if nothing is left of a split."""
        fitting = fit(store, documents, self.length, codec, cut=self.too_long == "cut")
        if not fitting.num_learned.sum():
            longest = int(store.num_tokens[documents].max(initial=0))
            raise ConfigError(
                f"--data.length {self.length}: none of the {len(documents):,} {split} conversations has a token to "
                f"learn that fits in a row; the longest has {longest:,} tokens. Raise it."
            )
        return fitting
