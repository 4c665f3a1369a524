"""The options of `python -m jaxdl.generate`; `jaxdl.inference.generate.__main__` checks the workdir before."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import print_out
from jaxdl.core.runs import check_checkpoint, check_run, check_writable, read_lines
from jaxdl.data.text.chat_template import PLAIN_ORIGIN
from jaxdl.inference.chatting import Chat
from jaxdl.inference.decoding.text import Completion
from jaxdl.inference.generate.chat import hold, read_conversations, say
from jaxdl.inference.generation import Sampling
from jaxdl.inference.predictor import Predictor
from jaxdl.inference.trained import (
    RunCommand,
    check_positive,
    check_text,
    open_output,
    parse_command,
    progress,
    restore_network,
)
from jaxdl.parallel.cluster import end_together
from jaxdl.training.run.result import exit_codes

ABOUT = """Continues texts by a trained language model. One prompt is continued on the screen, many become JSON lines.
With --chat prompts are questions, which it answers.

  python -m jaxdl.generate --workdir runs/python_lm --prompt "def main(" --temperature 0.5
  python -m jaxdl.generate --workdir runs/tuned --chat
  python -m jaxdl.generate --workdir runs/python_lm --prompts prompts.txt --batch-size 32 --to written.jsonl
  python -m jaxdl.generate --workdir runs/python_lm --prompt "def main(" --beams 4 --samples 4"""


@dataclass(frozen=True, kw_only=True)
class Generate(RunCommand):
    """The options of the command."""

    chat: bool = False
    """Answer by the chat template of the run, or of its checkpoint: a conversation in the terminal, or the answers to
    --prompt or --prompts, whose lines are questions or JSON objects with "messages"."""
    system: str | None = None
    """With --chat: the message of the system, which comes first."""
    prompt: tuple[str, ...] = ()
    """The texts to continue; an empty one, the default, begins a new document."""
    prompts: Path | None = None
    """A file of prompts: one on each line, or with the ending .jsonl JSON objects with "prompt" (or "text")."""
    to: Path | None = None
    """With several prompts: the file for the JSON lines; None prints them."""
    num_tokens: int = 400
    """The most tokens (bytes, for a model of bytes) for each prompt."""
    temperature: float = 0.7
    """1 is the model's own distribution, lower is less random, 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw only from this many of the likeliest tokens."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Draw from tokens alone that are at least this many times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that are in the prompt or in the text so far become less likely."""
    samples: int = 1
    """Continuations of each prompt; with --beams the best so many."""
    beams: int = 1
    """2 or more: search the likeliest text, with so many hypotheses at a time, instead of drawing."""
    length_penalty: float = 1.0
    """With --beams: hypotheses are compared by log P / length^this; above 0 longer ones gain."""
    draft: Path | None = None
    """The workdir of a smaller network with the same tokenizer, which drafts tokens that this one checks together."""
    draft_tokens: int = 4
    """Tokens that are drafted at a time."""
    stop: tuple[str, ...] = ()
    """Texts at which a continuation ends; they are left out."""
    stop_tokens: tuple[int, ...] = ()
    """Numbers of tokens at which a continuation ends."""
    stop_at_end: bool = True
    """End at the tokenizer's end of text (byte 0, for a model of bytes); a converted network ends where its checkpoint
    says."""
    seed: int = 0
    """Seed of the random draws."""
    batch_size: int = 8
    """Prompts that are continued side by side, over all devices."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. Exits as `exit_codes` says."""
    with end_together(), exit_codes():
        command = parse_command(Generate, args, prog, ABOUT)
        many = command.prompts is not None or len(command.prompt) > 1 or command.samples > 1
        check(command, many=many)
        rows = _rows(command) if command.chat else []
        prompts = read_prompts(command.prompts) if command.prompts is not None and not command.chat else command.prompt
        predictor, draft = restore_network(command, args), None
        if command.draft is not None:
            draft = restore_network(dataclasses.replace(command, workdir=command.draft, step="newest", average=1), args)
        options = _options(command) | {"draft": draft}
        start = time.perf_counter()
        if command.chat:
            _chat(command, predictor, rows, options, many=many)
        elif many:
            prompts = prompts or ("",)
            completions = predictor.complete(prompts, **options, **_several(command))
            _write_many(command, completions, [{"prompt": prompt} for prompt in prompts])
        else:
            _stream(predictor, prompts[0] if prompts else "", options)
        if jax.process_index() == 0:
            print(speed(predictor, time.perf_counter() - start), file=sys.stderr)


def check(command: Generate, *, many: bool) -> None:
    """Raises ConfigError for what can be seen before anything is read."""
    check_text("--prompt", command.prompt)
    check_text("--stop", command.stop)
    if command.system is not None:
        check_text("--system", (command.system,))
        if not command.chat:
            raise ConfigError("--system: it has no effect without --chat. Give both, or neither.")
    if command.chat and "" in command.prompt:
        raise ConfigError('--prompt "": a question is empty. Give one, or leave --prompt out to hold a conversation.')
    if command.prompt and command.prompts is not None:
        raise ConfigError("--prompt and --prompts: give one of them.")
    if command.to is not None and not many:
        raise ConfigError(f"--to {command.to}: it is for several prompts. Remove it, or give --prompts FILE.")
    if command.to is not None:
        check_writable(command.to, "--to")
    check_positive(command, "batch_size")
    if command.draft is None and command.draft_tokens != Generate.draft_tokens:
        raise ConfigError(f"--draft-tokens {command.draft_tokens}: it has no effect without --draft.")
    if command.draft is not None:
        check_checkpoint(check_run(command.draft, "--draft"))
        check_positive(command, "draft_tokens")
        if command.beams > 1:
            raise ConfigError(f"--draft: it has no effect with --beams {command.beams}. Leave one out.")
    if command.beams > 1 and command.temperature != Generate.temperature:
        raise ConfigError(f"--temperature {command.temperature}: it has no effect with --beams, which draws nothing.")
    names = {field.name for field in dataclasses.fields(Sampling)}
    Sampling(**{name: value for name, value in vars(command).items() if name in names})  # It checks its values.


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts in a file. Raises ConfigError for one that cannot be read or has none."""
    rows = [(number, line) for number, line in enumerate(read_lines(path, "--prompts"), 1) if line.strip()]
    as_json = path.suffix in (".jsonl", ".json")
    lines = [_in_json(path, number, line) if as_json else line for number, line in rows]
    if not lines:
        raise ConfigError(f"--prompts {path}: it has no prompts.")
    return tuple(lines)


def _in_json(path: Path, number: int, line: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--prompts {path}: line {number} is not JSON ({error}).") from None
    prompt = value.get("prompt", value.get("text")) if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(f'--prompts {path}: line {number} has no "prompt" that is a text: {line[:60]}')
    check_text(f"--prompts {path}: line {number}", (prompt,))
    return prompt


def _stream(predictor: Predictor, prompt: str, options: dict[str, Any]) -> None:
    """Prints the prompt and its continuation as it is written."""
    pieces = predictor.generate(prompt, **options)
    shown = print_out if jax.process_index() == 0 else lambda *_, **__: None
    shown(prompt, end="")
    try:
        for piece in pieces:
            shown(piece, end="")
    finally:
        shown("")


def _rows(command: Generate) -> list[dict[str, Any]]:
    """The conversations that are answered: of the file, or of the questions on the command line."""
    if command.prompts is not None:
        return read_conversations(command.prompts, command.system)
    start = [] if command.system is None else [{"role": "system", "content": command.system}]
    return [{"messages": [*start, {"role": "user", "content": text}]} for text in command.prompt]


def _chat(
    command: Generate, predictor: Predictor, rows: Sequence[dict[str, Any]], options: dict[str, Any], *, many: bool
) -> None:
    """Answers conversations, or holds one."""
    chat = Chat(predictor)
    if not predictor.has_chat_template and jax.process_index() == 0:
        print(f"note: the run has no chat template; {PLAIN_ORIGIN} is used", file=sys.stderr)
    if many and not rows:
        raise ConfigError(f"--samples {command.samples}: with --chat give a question, --prompt or --prompts.")
    if many:
        fitting = [chat.fitting(row["messages"], command.num_tokens, row.get("tools")) for row in rows]
        prompts = [prompt for prompt, _ in fitting]
        if (cut := sum(left_out > 0 for _, left_out in fitting)) and jax.process_index() == 0:
            print(
                f"note: of {cut:,} conversations the first messages are not read, so that the rest fits",
                file=sys.stderr,
            )
        _write_many(command, chat.answers(prompts, **options, **_several(command)), rows)
    elif rows:
        say(chat, rows[0]["messages"], options)
    else:
        hold(chat, command.system, options)


def _write_many(command: Generate, completions: Iterator[Completion], rows: Sequence[dict[str, Any]]) -> None:
    """Writes a JSON line for each sample of a row: with what continues it, or its messages with the answer."""
    first = jax.process_index() == 0
    shown = command.to is not None or not sys.stdout.isatty()  # No lines are printed into it.
    every = [row for row in rows for _ in range(command.samples)]
    file_of = open_output(command.to, "--to") if command.to is not None and first else contextlib.nullcontext()
    with file_of as file, progress("texts", len(every), shown=shown) as advance:
        for row, completion in zip(every, completions, strict=True):
            advance(1)
            said: dict[str, Any] = {"text": completion.text}
            if "messages" in row:
                said = {"messages": [*row["messages"], {"role": "assistant", "content": completion.text}]}
            line = row | said | {"tokens": completion.num_tokens, "ended": completion.ended}
            line |= {"sample": completion.sample} if command.samples > 1 else {}
            line |= {"score": completion.score} if completion.score is not None else {}
            text = json.dumps(line, ensure_ascii=False)
            if file is not None:
                print(text, file=file, flush=True)
            elif first:
                print_out(text)


def _several(command: Generate) -> dict[str, Any]:
    """The options of several texts."""
    return {"batch_size": command.batch_size, "samples": command.samples}


def _options(command: Generate) -> dict[str, Any]:
    names = (
        "num_tokens", "temperature", "top_k", "top_p", "stop", "stop_at_end", "stop_tokens", "seed", "min_p",
        "repetition_penalty", "beams", "length_penalty", "draft_tokens",
    )  # fmt: skip
    return {name: getattr(command, name) for name in names}


def speed(predictor: Predictor, seconds: float) -> str:
    """The line about the time: of programs that were compiled before, if there are some."""
    decoder, count = predictor.decoder, predictor.decoder.num_written
    if decoder.steady_sec:
        rate = f"{decoder.num_steady / decoder.steady_sec:,.0f} tokens/s, after compiling"
    else:
        rate = f"{count / max(seconds, 1e-9):,.0f} tokens/s, with compiling"
    line = f"{count:,} tokens in {seconds:.1f} s: {rate}"
    for drafter in predictor.texts.drafters.values():
        line += f"; {drafter.num_kept / max(1, drafter.num_checked):.0%} of the drafted tokens were kept"
    return line
