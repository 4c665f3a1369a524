"""Preferences: files with a prompt, an answer that was chosen and one that was rejected."""

from __future__ import annotations

import datetime
from typing import Any, Literal

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.codec import Codec
from jaxdl.data.draws import example_seeds
from jaxdl.data.source import Data, Splits, num_held_out
from jaxdl.data.staging import Stage
from jaxdl.data.text.chat_template import ChatTemplate, template_of
from jaxdl.data.text.forms import EVERY_FILE
from jaxdl.data.text.preference_rows import PreferenceRows, PreferenceSpec
from jaxdl.data.text.preference_texts import Columns
from jaxdl.data.text.preference_tokens import Reader, ReadPairs, Unused, read_pairs

_MOST, _UNIT = 1024, 32
"""Length that is taken at most where none is set, and of which it is a multiple."""


class PreferencePairs(Data, kind="preferences"):
    """Pairs of answers to prompts, of which one is preferred: JSON lines, JSON, CSV, Parquet, folders of `datasets`.

    Prompt and answers are texts, or lists of messages with "role" and "content", which the chat template of the
    tokenizer makes one text. Without a prompt it is the beginning that both answers have in common. Answers that are
    texts get the tokenizer's end of text.
    """

    paths: tuple[str, ...] = ()
    """Files, folders of files, or folders that `datasets.Dataset.save_to_disk` wrote."""
    test_paths: tuple[str, ...] = ()
    """The held-out pairs, likewise; without any, a part of `paths` is held out."""
    glob: str = EVERY_FILE
    """Which files of a folder are read."""
    prompt: str = "prompt"
    """The column of the prompt; rows may lack it."""
    chosen: str = "chosen"
    """The column of the answer that is preferred."""
    rejected: str = "rejected"
    """The column of the other answer."""
    tokenizer: str | None = None
    """A JSON file of the `tokenizers` library, a folder with tokenizer.json, or a .model file of sentencepiece: that of
    the network; None takes bytes."""
    template: str | None = None
    """For messages: a file with a chat template, or the folder of a tokenizer that has one. None takes that of the
    tokenizer; without any `User:` and `Assistant:` stand above the messages."""
    date: str = "2026-01-01"
    """The day that templates are told it is, so that the same texts come out on every day."""
    length: int | None = pydantic.Field(default=None, ge=2)
    """Tokens that the network reads of each text (it has one more). None takes those of the longest one, at most 1,024,
    rounded up to a multiple of 32."""
    too_long: Literal["cut", "drop"] = "cut"
    """What becomes of a pair with a longer text: it is cut at its end, unless nothing of an answer is left, or the pair
    is left out."""
    test_fraction: float = pydantic.Field(default=0.05, gt=0, lt=1)
    """Part of the pairs that is held out, where `test_paths` names none."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Decides which pairs are held out."""

    @pydantic.model_validator(mode="after")
    def _effect(self) -> PreferencePairs:
        for name in ("test_fraction", "split_seed") if self.test_paths else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {value} has no effect: test_paths are held out. Leave one of them out.")
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise ValueError(f"date = {self.date!r}: write a day as 2026-01-31.") from None
        return self

    def build(self) -> Splits:
        """The training pairs and the held-out ones. Raises ConfigError for what cannot be read or used."""
        if not self.paths:
            raise ConfigError("--data.paths: it is empty. Name files with the columns prompt, chosen and rejected.")
        codec = self.codec()
        groups = [self._read(paths, codec) for paths in (self.paths, self.test_paths) if paths]
        longest = max(int(group.pairs.lengths.max()) for group in groups) - 1
        length = self.length or min(_MOST, -(-longest // _UNIT) * _UNIT)
        spec = PreferenceSpec(vocab_size=codec.vocab_size, length=length, bytes_per_token=1.0)
        made = [_fitting(group, length, self.too_long) for group in groups]
        if len(groups) == 1:
            (numbers, remark), (group,) = made[0], groups
            drawn = example_seeds(self.split_seed, np.zeros(len(numbers), np.int64), numbers)
            ranked, count = np.argsort(drawn, kind="stable"), num_held_out(len(numbers), self.test_fraction)
            if count < 1:
                raise ConfigError(
                    f"{', '.join(self.paths)}: one pair can be used, so none can be held out. Name test_paths."
                )
            parts = numbers[np.sort(ranked[count:])], numbers[np.sort(ranked[:count])]
            return Splits(*(PreferenceRows(group.pairs, part, spec, remark) for part in parts))
        return Splits(
            *(
                PreferenceRows(group.pairs, numbers, spec, remark)
                for group, (numbers, remark) in zip(groups, made, strict=True)
            )
        )

    def staged(self, stage: Stage) -> PreferencePairs:
        """The config of copies of the files and folders."""

        def copied(path: str) -> str:
            return stage.folder(path) if expand_home(path).is_dir() else stage.files(path)

        return self.replaced({name: tuple(map(copied, getattr(self, name))) for name in ("paths", "test_paths")})

    def codec(self) -> Codec:
        """Between text and tokens; texts begin as the tokenizer has them begin, or as documents in packed rows do."""
        codec = Codec(self.tokenizer)
        return codec.for_documents(codec.opening or (codec.packed_mark,))

    def chat_template(self) -> ChatTemplate:
        """The template that makes texts of messages. Raises ConfigError for one that cannot be read."""
        return template_of(Codec(self.tokenizer), self.template)

    def chat(self) -> dict[str, Any]:
        """The content of a file for `ChatTemplate.from_json`."""
        return self.chat_template().to_json()

    def _read(self, paths: tuple[str, ...], codec: Codec) -> ReadPairs:
        columns, now = Columns(self.prompt, self.chosen, self.rejected), datetime.datetime.fromisoformat(self.date)
        return read_pairs(paths, self.glob, Reader(columns, codec, self.chat_template(), now))


def _fitting(read: ReadPairs, length: int, too_long: Literal["cut", "drop"]) -> tuple[np.ndarray, str]:
    """(the numbers of the pairs that are used, what to say of the others and of those that are cut)."""
    pairs, unused = read.pairs, Unused()
    unused.take(read.unused)
    longer = pairs.lengths.max(axis=1) > length + 1
    lost = pairs.answers.reshape(-1, 2).max(axis=1) > length
    reasons = np.zeros(len(pairs), np.int8)
    reasons[longer & (lost if too_long == "cut" else True)] = 1
    for number in np.flatnonzero(longer & (reasons == 0)).tolist():
        first, second = (pairs.text(2 * number + place)[: length + 1] for place in range(2))
        reasons[number] = 2 * np.array_equal(first, second)
    what = {1: f"with a {'prompt' if too_long == 'cut' else 'text'} of more than {length:,} tokens (--data.length)"}
    what[2] = f"whose answers differ behind {length:,} tokens alone (--data.length)"
    for number in np.flatnonzero(reasons).tolist():
        unused.add(what[int(reasons[number])], read.places[number])
    used = np.flatnonzero(reasons == 0)
    if not len(used):
        raise ConfigError(f"--data.length {length}: no pair is left. {unused.text(read.num_rows)}. Raise it.")
    remarks = [unused.text(read.num_rows)] if unused else []
    if cut := int(longer[used].sum()):
        remarks.append(f"{cut:,} of {len(used):,} pairs are cut after {length:,} tokens (--data.length)")
    if read.num_merged:
        remarks.append(
            f"of {read.num_merged:,} pairs the end of the prompt is learned with the answers: its tokens are others "
            "when they follow"
        )
    return used, "; ".join([*remarks, *read.not_used])
