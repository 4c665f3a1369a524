"""Prepares data before training: `python -m jaxdl.data prepare --config configs/....py`, and trains tokenizers.

`tokenizer FILES... --out FILE --vocab-size N` trains a tokenizer on text files (.txt, .jsonl, .csv, .parquet, .tsv,
also compressed, and folders of them); `tokenizer --help` has its options.

`prepare` tokenizes documents, conversations and pairs of texts (data of the kinds documents, mixture, conversations,
pairs and tfds_pairs) into shards on disk (`--data.shards`). Of photographs it reads every image once into the disk
cache (`--data.photos.cache.disk`), so that the first epoch is as fast as the others. What is done already is only
checked, so a stopped `prepare` resumes where it was. Options after the config change it, as in training.

`show --config configs/....py [--rows 3]` prints a few rows of texts as training reads them; the tokens that are learned
are in colour.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxdl.core.errors import ConfigError, command_line, print_out
from jaxdl.core.modules import load_file
from jaxdl.core.options import parse, parse_options, split_words
from jaxdl.core.paths import expand_home
from jaxdl.core.runs import find_option
from jaxdl.core.startup import no_config, split_options
from jaxdl.data.images.photos import ImagePipeline, PhotoSource
from jaxdl.data.images.store import num_records
from jaxdl.data.text.shown import show
from jaxdl.data.text.tokenizer import Train, train_tokenizer
from jaxdl.parallel.cluster import BROKEN, ClusterError

_ROWS = 3
"""Rows that are shown."""
_PIECE = 64
"""Images per piece of work."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line."""
    line = sys.argv[1:] if args is None else args
    if not line or line[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if line else 2)
    with command_line():
        if line[0] not in _COMMANDS:
            raise ConfigError(f"{line[0]}: there is no such command. Commands: {', '.join(_COMMANDS)}.")
        try:
            _COMMANDS[line[0]](line[1:])
        except ClusterError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(BROKEN) from None


def _tokenizer(args: list[str]) -> None:
    files, options = split_words(args)
    command = parse_options(Train, options, prog="python -m jaxdl.data tokenizer FILES...")
    print_out(train_tokenizer(files, command, Console(stderr=True)))


def _experiment(args: list[str]) -> tuple[Any, str]:
    """(data config with the options applied, file of the experiment)."""
    values, others = split_options(args, ("config",))
    if "config" not in values and {"-h", "--help"} & set(args):
        print(__doc__)
        raise SystemExit(0)
    if "config" not in values:
        raise ConfigError(no_config("python -m jaxdl.data"))
    experiment: Any = load_file(values["config"])
    if not hasattr(experiment, "data"):
        raise ConfigError(
            f"--config {values['config']}: config() returned {type(experiment).__name__}, which has no data."
        )
    changed: Any = parse(experiment, others)
    return changed.data, values["config"]


def prepare(data: Any, file: str) -> None:
    """Tokenizes texts, or fills the disk cache of a data set of photographs, and prints a summary.

    Raises ConfigError for other data, and photographs without a cache.
    """
    done = data.prepare(Console())
    if done is not None:
        print_out(done)
        return
    splits = data.build()
    source = splits.train
    if not isinstance(source, PhotoSource) or source.pipeline.config.cache.disk is None:
        raise ConfigError(
            f"{file}: its data has no disk cache to fill. Set --data.photos.cache.disk to a folder on a local disk "
            "(only data sets of photographs have one)."
        )
    config = source.pipeline.config
    on_disk = config.replaced({"cache.memory_bytes": 0})  # The memory cache ends with this process.
    pipeline = ImagePipeline(on_disk, source.pipeline.records, source.pipeline.name)
    console = Console()
    pipeline.warn = lambda text: console.print(text, style="yellow")
    try:
        tiers = _fill(pipeline, console)
    finally:
        pipeline.close()
    folder = expand_home(config.cache.disk or "") / pipeline.cache_key()
    size = sum(path.stat().st_size for path in folder.glob("*/segment-*"))
    console.print(f"{tiers['origin']:,} images read, {tiers['disk']:,} already cached; {size / 1e9:.2f} GB in {folder}")
    seen, kept = tiers["origin"] + tiers["disk"], 0
    for split, records in enumerate(pipeline.records):
        index = folder / str(split) / "index"
        kept += num_records(index, records.mark) if index.is_file() else 0
    if kept < seen:
        console.print(
            f"warning: {seen - kept:,} images did not fit and will be read from the data set in every epoch. All take "
            f"about {size / max(kept, 1) * seen / 1e6:,.1f} MB; cache.disk_bytes = {config.cache.disk_bytes:,}.",
            style="yellow",
        )


def _fill(pipeline: ImagePipeline, console: Console) -> Counter[str]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for split, records in enumerate(pipeline.records):
            task = progress.add_task(("train", "test")[split], total=len(records))
            pending: deque[tuple[int, Any]] = deque()
            for start in range(0, len(records), _PIECE):
                indices = np.arange(start, min(start + _PIECE, len(records)))
                pending.append((len(indices), pipeline.keep(split, indices)))
                while len(pending) > 4 * max(1, len(pipeline.pool().worker_ids())):
                    progress.advance(task, _settle(pipeline, pending))
            while pending:
                progress.advance(task, _settle(pipeline, pending))
    return pipeline.so_far().tiers


def _settle(pipeline: ImagePipeline, pending: deque[tuple[int, Any]]) -> int:
    """Waits for the oldest piece, accounts for it, and returns its number of images."""
    count, future = pending.popleft()
    pipeline.account(future.result())
    return count


def _show(args: list[str]) -> None:
    """Prints rows of texts; see `jaxdl.data.text.shown.show`."""
    words, rest = list(args), list[str]()
    given = find_option(args, "--rows", "a whole number")
    while words:
        word = words.pop(0)
        if word == "--rows":
            words = words[1:]
        elif not word.startswith("--rows="):
            rest.append(word)
    if given is not None and not (given.isdecimal() and 0 < int(given) < 1 << 31):
        raise ConfigError(f"--rows {given}: give a whole number, 1 or more.")
    data, _ = _experiment(rest)
    codec = data.codec()
    source = data.build().train
    try:
        show(source, codec, int(given or _ROWS), Console())
    finally:
        source.close()


_COMMANDS = {"prepare": lambda args: prepare(*_experiment(args)), "show": _show, "tokenizer": _tokenizer}

if __name__ == "__main__":
    main()
