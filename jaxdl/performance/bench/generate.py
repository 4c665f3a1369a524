"""Tokens a second that a trained language model writes: with its key-value cache, and reading the whole text each time.

The sides take turns, each round with compiled programs alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdl.core.runs import check_checkpoint, check_run
from jaxdl.inference.generation import Decoder, Sampling, Writing
from jaxdl.inference.predictor import Predictor, restore
from jaxdl.performance.bench.shared import bench, make_table, parse_bench, time_in_turns, write_json


@dataclass(frozen=True)
class GenerateBench:
    """Options of the measurement."""

    workdir: Path
    """The folder of a run."""
    num_tokens: int = 200
    """Tokens that each prompt is continued with."""
    batch_size: int = 8
    """Prompts side by side, in the third side."""
    num_repeats: int = 5
    """Rounds; medians are reported."""
    json: Path | None = None
    """A file for the results."""


@bench("generate", "tokens a second that a language model writes, with and without its key-value cache")
def main(args: list[str]) -> None:
    """Measures the sides in turns and prints the medians."""
    command = parse_bench(GenerateBench, args, __name__, num_tokens=1, batch_size=1, num_repeats=1)
    check_checkpoint(check_run(command.workdir, "--workdir"))
    sides = make_sides(restore(command.workdir), command)
    times = time_in_turns({name: run for name, (run, _) in sides.items()}, command.num_repeats)
    table = make_table(f"{command.workdir}: tokens/s, {command.num_tokens} tokens", ("", "median", "min", "max"))
    rates = {name: [sides[name][1] / seconds for seconds in each] for name, each in times.items()}
    for name, each in rates.items():
        table.add_row(name, *(f"{value:,.0f}" for value in (statistics.median(each), min(each), max(each))))
    Console().print(table)
    write_json(command.json, rates)


def make_sides(predictor: Predictor, command: GenerateBench) -> dict[str, tuple[Callable[[], None], int]]:
    """Name -> (what writes the tokens, how many these are)."""
    cached, whole = predictor.decoder, Decoder(predictor, predictor.decoder.context, predictor.codec.vocab_size,
                                               cached=False)  # fmt: skip

    def side(decoder: Decoder, rows: int) -> tuple[Callable[[], None], int]:
        def run() -> None:
            writing = Writing(decoder, [predictor.codec.separator] * rows, Sampling(num_tokens=command.num_tokens))
            while not writing.done.all():
                writing.more()

        return run, rows * command.num_tokens

    return {
        "cache, 1 prompt": side(cached, 1),
        "whole text, 1 prompt": side(whole, 1),
        f"cache, {command.batch_size} prompts": side(cached, command.batch_size),
    }
