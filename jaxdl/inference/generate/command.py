"""The options of `python -m jaxdl.generate`; `jaxdl.inference.generate.__main__` checks the workdir before."""

from __future__ import annotations

import contextlib
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
from jaxdl.core.runs import check_writable, read_lines
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
  python -m jaxdl.generate --workdir runs/python_lm --prompts prompts.txt --batch-size 32 --to written.jsonl"""


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
        many = command.prompts is not None or len(command.prompt) > 1
        check(command, many=many)
        rows = _rows(command) if command.chat else []
        prompts = read_prompts(command.prompts) if command.prompts is not None and not command.chat else command.prompt
        predictor = restore_network(command, args)
        start = time.perf_counter()
        if command.chat:
            _chat(command, predictor, rows, many=many)
        elif many:
            completions = predictor.complete(prompts, batch_size=command.batch_size, **_options(command))
            _write_many(command, completions, [{"prompt": prompt} for prompt in prompts])
        else:
            _stream(command, predictor, prompts[0] if prompts else "")
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
    Sampling(
        command.num_tokens, command.temperature, command.top_k, command.top_p, command.seed
    )  # It checks its values.


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


def _stream(command: Generate, predictor: Predictor, prompt: str) -> None:
    """Prints the prompt and its continuation as it is written."""
    pieces = predictor.generate(prompt, **_options(command))
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


def _chat(command: Generate, predictor: Predictor, rows: Sequence[dict[str, Any]], *, many: bool) -> None:
    """Answers conversations, or holds one."""
    chat, options = Chat(predictor), _options(command)
    if not predictor.has_chat_template and jax.process_index() == 0:
        print(f"note: the run has no chat template; {PLAIN_ORIGIN} is used", file=sys.stderr)
    if many:
        fitting = [chat.fitting(row["messages"], command.num_tokens, row.get("tools")) for row in rows]
        prompts = [prompt for prompt, _ in fitting]
        if (cut := sum(left_out > 0 for _, left_out in fitting)) and jax.process_index() == 0:
            print(
                f"note: of {cut:,} conversations the first messages are not read, so that the rest fits",
                file=sys.stderr,
            )
        _write_many(command, chat.answers(prompts, batch_size=command.batch_size, **options), rows)
    elif rows:
        say(chat, rows[0]["messages"], options)
    else:
        hold(chat, command.system, options)


def _write_many(command: Generate, completions: Iterator[Completion], rows: Sequence[dict[str, Any]]) -> None:
    """Writes a JSON line for each row: with what it is continued with, or its messages with the answer."""
    first = jax.process_index() == 0
    shown = command.to is not None or not sys.stdout.isatty()  # No lines are printed into it.
    file_of = open_output(command.to, "--to") if command.to is not None and first else contextlib.nullcontext()
    with file_of as file, progress("prompts", len(rows), shown=shown) as advance:
        for row, completion in zip(rows, completions, strict=True):
            advance(1)
            said = {"text": completion.text}
            if "messages" in row:
                said = {"messages": [*row["messages"], {"role": "assistant", "content": completion.text}]}
            line = row | said | {"tokens": completion.num_tokens, "ended": completion.ended}
            text = json.dumps(line, ensure_ascii=False)
            if file is not None:
                print(text, file=file, flush=True)
            elif first:
                print_out(text)


def _options(command: Generate) -> dict[str, Any]:
    names = ("num_tokens", "temperature", "top_k", "top_p", "stop", "stop_at_end", "stop_tokens", "seed")
    return {name: getattr(command, name) for name in names}


def speed(predictor: Predictor, seconds: float) -> str:
    """The line about the time: of programs that were compiled before, if there are some."""
    decoder, count = predictor.decoder, predictor.decoder.num_written
    if decoder.steady_sec:
        rate = f"{decoder.num_steady / decoder.steady_sec:,.0f} tokens/s, after compiling"
    else:
        rate = f"{count / max(seconds, 1e-9):,.0f} tokens/s, with compiling"
    return f"{count:,} tokens in {seconds:.1f} s: {rate}"
