"""Tokenizes texts into shards, in several processes, with progress; what was done before stays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxdl.core.config import ConfigError
from jaxdl.data.copies import TRIES, Removed
from jaxdl.data.locks import locked, say_waiting
from jaxdl.data.text.shards import MANIFEST, Shard, ShardPlan, TokenStore, read_shard, write_manifest, write_shard

SMALL_BYTES = 256 << 20
"""Training begins by tokenizing so much text without being asked."""
_ALONE_BYTES = 4 << 20
"""So much is tokenized without other processes, whose start takes longer."""
_LINES_EVERY_SEC = 5.0

Told = Callable[[int, int, int], None]
"""Called with bytes done, tokens done, and bytes done before this start."""


def ready(plan: ShardPlan) -> bool:
    """Whether all shards are there."""
    return (plan.folder / MANIFEST).is_file()


def prepare(plan: ShardPlan, console: Console) -> str:
    """Tokenizes what is missing, with progress; returns a summary. Raises ConfigError for what cannot be read."""
    if ready(plan):
        store = TokenStore(plan.folder)
        prepared = f"{_contents(plan, store)} of {store.num_tokens.sum():,} tokens were prepared already"
        return "\n".join((f"{prepared}, in {plan.folder}", *_told(plan, store)))
    began, total = time.perf_counter(), plan.num_bytes
    columns = (TextColumn("tokenizing"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total, rate="")

        def told(done: int, tokens: int, before: int) -> None:
            progress.update(bar, completed=done, rate=_rate(done, total, tokens, before, began))

        _tokenize(plan, told if console.is_terminal else _Lines(total, began, console))
    store = TokenStore(plan.folder)
    spent = time.perf_counter() - began
    made = (
        f"{_contents(plan, store)}, {store.num_tokens.sum():,} tokens of {store.num_bytes.sum() / 1e6:,.1f} MB of text "
        f"in {spent:,.1f} s, in {plan.folder}"
    )
    return "\n".join((made, *_told(plan, store)))


def _told(plan: ShardPlan, store: TokenStore) -> list[str]:
    """What else there is to say of the texts."""
    told = plan.texts.told(store.notes)
    return [told] if told else []


def _contents(plan: ShardPlan, store: TokenStore) -> str:
    """How many documents there are, and how many nulls there were."""
    left_out = f" ({store.nulls:,} that are null were left out)" if store.nulls else ""
    return f"{len(store) // plan.texts.texts_each:,} {plan.texts.noun}{left_out}"


def load_tokens(plan: ShardPlan, what: str) -> TokenStore:
    """The shards of a plan. Those that are missing are made if that is quick, with lines of progress on stderr.

    Raises ConfigError, which names `what`, if it is not, and for what cannot be read.
    """
    for _ in range(TRIES):
        with contextlib.suppress(Removed):
            return _load_tokens(plan, what)
        plan = dataclasses.replace(plan)  # It looks for its folder again.
    return _load_tokens(plan, what)


def _load_tokens(plan: ShardPlan, what: str) -> TokenStore:
    if not ready(plan):
        if plan.num_bytes > SMALL_BYTES:
            raise ConfigError(
                f"{what}: {plan.num_bytes / 1e9:,.1f} GB of files are not tokenized yet. Do it once, before training: "
                "python -m jaxdl.data prepare --config FILE (with the same options; if it is stopped, the same command "
                f"goes on). The shards are kept in {plan.root}."
            )
        _tokenize(plan, _Lines(plan.num_bytes, time.perf_counter(), Console(stderr=True)))
        store = TokenStore(plan.folder)
        for told in (*([_contents(plan, store)] if store.nulls else []), *_told(plan, store)):
            print(f"{what}: {told}", file=sys.stderr, flush=True)
        return store
    return TokenStore(plan.folder)


class _Lines:
    """Progress as lines, some seconds apart."""

    def __init__(self, total: int, began: float, console: Console) -> None:
        self._total, self._began, self._console, self._last = total, began, console, began

    def __call__(self, done: int, tokens: int, before: int) -> None:
        now = time.perf_counter()
        if now - self._last >= _LINES_EVERY_SEC:
            self._last = now
            text = _rate(done, self._total, tokens, before, self._began)
            print(f"tokenizing: {text}", file=self._console.file, flush=True)


def _rate(done: int, total: int, tokens: int, before: int, began: float) -> str:
    spent = max(time.perf_counter() - began, 1e-9)
    return (
        f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {(done - before) / spent / 1e6:,.1f} MB/s, "
        f"{tokens / spent:,.0f} tokens/s"
    )


def _tokenize(plan: ShardPlan, told: Told) -> None:
    """Writes the shards that are missing, and the manifest. Another process that does the same is waited for."""
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        with locked(plan.folder / "lock", say_waiting(f"tokenizes into {plan.folder}")) as alone:
            if ready(plan):
                return
            if alone:  # What a killed process left half-written.
                for partial in plan.folder.glob(".*.????????????????????????????????"):
                    partial.unlink(missing_ok=True)
            sizes = [sum(part.num_bytes for part in piece) for piece in plan.pieces]
            missing = [number for number in range(len(sizes)) if read_shard(plan, number) is None]
            before = sum(sizes) - sum(sizes[number] for number in missing)
            done, tokens = before, 0
            for number, shard in _write_missing(plan, missing, sum(sizes[number] for number in missing)):
                done, tokens = done + sizes[number], tokens + shard.tokens
                told(done, tokens, before)
            write_manifest(plan)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or plan.folder}: the shards of tokens cannot be written ({error.strerror}). Set "
            "--data.shards to a folder with room that this user may write."
        ) from None


def _write_missing(plan: ShardPlan, missing: list[int], num_bytes: int) -> Iterator[tuple[int, Shard]]:
    """Writes these shards; each with its number, as they are done."""
    num_workers = min(len(os.sched_getaffinity(0)), len(missing))
    if num_workers < 2 or num_bytes <= _ALONE_BYTES:
        yield from ((number, write_shard(plan, number)) for number in missing)
        return
    workers = [_Worker(plan) for _ in range(num_workers)]
    free, threads = list(workers), ThreadPoolExecutor(num_workers)
    lock = threading.Lock()

    def write(number: int) -> tuple[int, Shard]:
        with lock:
            worker = free.pop()
        try:
            return number, worker.write(number)
        finally:
            with lock:
                free.append(worker)

    try:
        # Large pieces first: one of them at the end would leave the other processes idle.
        order = sorted(missing, key=lambda number: -sum(part.num_bytes for part in plan.pieces[number]))
        yield from (future.result() for future in as_completed([threads.submit(write, number) for number in order]))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()


class _Worker:
    """A process that writes shards."""

    def __init__(self, plan: ShardPlan) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
        one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxdl.data.text.shard_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **one_thread, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        pickle.dump(plan, self._input)

    def write(self, number: int) -> Shard:
        """Writes a shard. Raises ConfigError for what the process cannot read, and if it dies."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(f"{number}\n".encode())
            self._input.flush()
        line = self._output.readline()
        if not line:
            raise ConfigError(
                f"a process that tokenizes ended (code {self._process.wait()}); see the output above. If memory ran "
                "out, give the command fewer cores (taskset -c 0); it goes on where it was."
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ConfigError(answer["error"])
        return Shard(**answer)

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
