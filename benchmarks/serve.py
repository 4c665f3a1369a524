"""Requests to `jaxdl.serve`: 8 at once, 8 one after another, and the same texts by `generate` in one process.

The server is a process of its own, and the sides take turns. Tokens a second, and the ratios of each round.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdl.core.runs import check_checkpoint, check_run
from jaxdl.inference.predictor import Predictor, restore
from jaxdl.performance.bench.shared import make_table, median_ratio, parse_bench, run_module, time_in_turns, write_json

AT_ONCE, ALONE, GENERATE = "at once", "one after another", "generate, one after another"


@dataclass(frozen=True)
class ServeBench:
    """Options of the measurement."""

    workdir: Path
    """The folder of a run."""
    num_tokens: int = 100
    """Tokens of each text."""
    num_requests: int = 8
    """Requests of a round; the server has as many slots."""
    num_repeats: int = 5
    """Rounds; medians are reported."""
    exact: bool = False
    """Start the server with --exact."""
    json: Path | None = None
    """A file for the results."""


def main(args: list[str]) -> None:
    """Measures the sides in turns and prints tokens a second."""
    command = parse_bench(ServeBench, args, __name__, num_tokens=1, num_requests=1, num_repeats=1)
    check_checkpoint(check_run(command.workdir, "--workdir"))
    with serving(command) as (host, name):
        times = time_in_turns(make_sides(restore(command.workdir), host, name, command), command.num_repeats)
    total = command.num_requests * command.num_tokens
    title = f"{command.workdir}: tokens/s, {command.num_requests} texts of {command.num_tokens} tokens"
    table = make_table(title, ("", "median", "min", "max"))
    rates = {side: [total / seconds for seconds in each] for side, each in times.items()}
    for side, each in rates.items():
        table.add_row(side, *(f"{value:,.0f}" for value in (statistics.median(each), min(each), max(each))))
    console = Console()
    console.print(table)
    ratios = {side: median_ratio(rates[AT_ONCE if side == ALONE else ALONE], rates[side]) for side in (ALONE, GENERATE)}
    console.print(f"{AT_ONCE} / {ALONE}: {ratios[ALONE]:.2f}; {ALONE} / {GENERATE}: {ratios[GENERATE]:.2f}")
    write_json(command.json, {"tokens_per_sec": rates, "ratios": ratios})


@contextlib.contextmanager
def serving(command: ServeBench) -> Iterator[tuple[str, str]]:
    """Context: a server as a process; yields its host and port, and the name of its model."""
    options = ["--workdir", str(command.workdir), "--port", "0", "--slots", str(command.num_requests)]
    options += ["--exact"] if command.exact else []
    with subprocess.Popen(
        [sys.executable, "-m", "jaxdl.serve", *options], stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            yield words[-1].removeprefix("http://").removesuffix("/v1"), words[1]
        finally:
            process.terminate()


def make_sides(predictor: Predictor, host: str, name: str, command: ServeBench) -> dict[str, Callable[[], None]]:
    """Name -> what writes the texts; each of a round has a seed of its own."""
    prompt = predictor.codec.decode(predictor.codec.separator) * 4

    def ask(seed: int) -> None:
        body = {"model": name, "prompt": prompt, "max_tokens": command.num_tokens, "seed": seed, "ignore_eos": True}
        connection = http.client.HTTPConnection(host, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["usage"]["completion_tokens"] == command.num_tokens, answer

    def at_once() -> None:
        with ThreadPoolExecutor(command.num_requests) as pool:
            list(pool.map(ask, range(command.num_requests)))

    def alone() -> None:
        for seed in range(command.num_requests):
            ask(seed)

    def generate() -> None:
        for seed in range(command.num_requests):
            for _ in predictor.generate(
                prompt, num_tokens=command.num_tokens, temperature=1, seed=seed, stop_at_end=False
            ):
                pass

    return {AT_ONCE: at_once, ALONE: alone, GENERATE: generate}


if __name__ == "__main__":
    run_module(main)
