"""Prepares the data of an experiment before it trains: `python -m jaxdl.data prepare --config configs/....py`.

`prepare` reads every image once and brings it into the disk cache (`--data.photos.cache.disk`), so that the first epoch
is as fast as the others. What is there already is only checked; one that was stopped goes on where it was. Options
after the config change it, as in training.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxdl.cluster import BROKEN, ClusterError
from jaxdl.config import load_file
from jaxdl.data.photos import ImagePipeline, PhotoSource
from jaxdl.data.store import num_records
from jaxdl.errors import ConfigError, end_interrupted, fail
from jaxdl.options import parse
from jaxdl.startup import no_config, own_options

_PIECE = 64
"""Images in a piece of work."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line."""
    line = sys.argv[1:] if args is None else args
    if not line or line[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if line else 2)
    try:
        if line[0] != "prepare":
            raise ConfigError(f"{line[0]}: there is no such command. Commands: prepare.")
        prepare(*_experiment(line[1:]))
    except ConfigError as error:
        fail(str(error))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BROKEN) from None
    except KeyboardInterrupt:
        end_interrupted()


def _experiment(args: list[str]) -> tuple[Any, str]:
    """The data config that the arguments mean, and its file."""
    own, others = own_options(args, ("config",))
    if "config" not in own:
        raise ConfigError(no_config("python -m jaxdl.data"))
    experiment: Any = load_file(own["config"])
    if not hasattr(experiment, "data"):
        raise ConfigError(
            f"--config {own['config']}: config() returned {type(experiment).__name__}, which has no data."
        )
    changed: Any = parse(experiment, others)
    return changed.data, own["config"]


def prepare(data: Any, file: str) -> None:
    """Fills the disk cache of a data set of photographs, and says what it did. Raises ConfigError if it has none."""
    splits = data.build()
    source = splits.train
    if not isinstance(source, PhotoSource) or source.pipeline.config.cache.disk is None:
        raise ConfigError(
            f"{file}: its data has no cache on a disk to fill. Set --data.photos.cache.disk to a folder on a local "
            "disk (of data with photos)."
        )
    config = source.pipeline.config
    on_disk = config.replaced({"cache.memory_bytes": 0})  # Memory would be gone with this process.
    pipeline = ImagePipeline(on_disk, source.pipeline.records, source.pipeline.name)
    console = Console()
    pipeline.warn = lambda text: console.print(text, style="yellow")
    try:
        tiers = _fill(pipeline, console)
    finally:
        pipeline.close()
    folder = Path(config.cache.disk or "").expanduser() / pipeline.cache_key()
    size = sum(path.stat().st_size for path in folder.glob("*/segment-*"))
    console.print(
        f"{tiers['origin']:,} images read, {tiers['disk']:,} were there already; {size / 1e9:.2f} GB in {folder}"
    )
    seen, kept = tiers["origin"] + tiers["disk"], sum(map(num_records, folder.glob("*/index")))
    if kept < seen:
        console.print(
            f"warning: {seen - kept:,} of them are not kept, and will be read from the data set in every epoch. All "
            f"take about {size / max(kept, 1) * seen / 1e6:,.1f} MB; cache.disk_bytes = {config.cache.disk_bytes:,}.",
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
    """Takes account of the oldest piece; returns how many images it was."""
    count, future = pending.popleft()
    pipeline.account(future.result())
    return count


if __name__ == "__main__":
    main()
