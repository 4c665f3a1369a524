"""DAWNBench's ImageNet training entries: the published ones, writing one, and checking one by the benchmark's rules.

python -m benchmarks.dawnbench.entry ENTRY.json    (checks an entry and its .tsv; exit code 2 if it is refused)

The rules are those of stanford-futuredata/dawn-bench-entries: README.md (fields, columns, "the first entry in the TSV
with a top-5 validation accuracy of at least 93 %"), tests/test_submissions.py, and the answers in issues 9 and 21: the
time to read the data and to make the model counts; that to evaluate and to write checkpoints does not have to.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jaxdl.core.errors import ConfigError, fail
from jaxdl.report import replace_file

TARGET = 93.0
"""Top-5 accuracy on the validation images, in percent."""
COLUMNS = ("epoch", "hours", "top1Accuracy", "top5Accuracy")
_REQUIRED = ("version", "author", "authorEmail", "framework", "model", "hardware", "timestamp")


class Published(NamedTuple):
    """A published time to the target."""

    date: str
    team: str
    hardware: str
    seconds: float


PUBLISHED = (
    Published("2020-08", "Tencent (not on the list)", "16 x 8 V100, 25 Gb/s", 151.0),
    Published("2020-03-17", "Alibaba Cloud", "16 x 8 V100, 32 Gb/s", 157.6),
    Published("2019-05-08", "Huawei Cloud", "16 x 8 V100, InfiniBand", 162.3),
    Published("2018-09-06", "fast.ai and DIUx", "16 x 8 V100", 1085.2),
    Published("2020-03-10", "Alibaba Cloud", "8 V100", 1297.7),
    Published("2018-09-07", "fast.ai", "32 V100", 1782.3),
    Published("2018-04-20", "fast.ai", "8 V100", 10647.1),
)
"""Entries of ResNet-50 in stanford-futuredata/dawn-bench-entries, ImageNet/train, at commit fb27b82; and Tencent's run
of 2020, which came after the list was closed."""

ALIBABA_IMAGES_PER_SEC = {96: 328_700, 128: 245_700, 224: 123_500, 288: 71_100}
"""Of the 128 V100 of Alibaba's entry, evaluations included: worked out from the hours in its .tsv file."""


class Epoch(NamedTuple):
    """A line of an entry: accuracies in percent."""

    epoch: int
    hours: float
    top1: float
    top5: float


def reached(rows: Sequence[Epoch]) -> Epoch | None:
    """The first epoch that counts, or None when the target was not reached."""
    return next((row for row in rows if row.top5 >= TARGET), None)


def write_entry(folder: Path, name: str, record: Mapping[str, Any], rows: Sequence[Epoch]) -> tuple[Path, Path]:
    """Writes `name`.json and `name`.tsv, and checks them. Raises ConfigError when the benchmark would refuse them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.json", folder / f"{name}.tsv"
    lines = ["\t".join(COLUMNS)]
    lines += [f"{row.epoch}\t{row.hours:.9f}\t{row.top1:.3f}\t{row.top5:.3f}" for row in rows]
    replace_file(paths[0], (json.dumps(record, indent=4) + "\n").encode())
    replace_file(paths[1], ("\n".join(lines) + "\n").encode())
    check_entry(paths[0])
    return paths


def check_entry(path: Path) -> list[Epoch]:
    """The epochs of an entry, `path` its .json file. Raises ConfigError for what the benchmark would refuse."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no JSON can be read: {error}") from None
    check_record(record, path)
    return _check_rows(path.with_suffix(".tsv"))


def check_record(record: Any, path: Path) -> None:
    """Checks the content of the .json file `path`. Raises ConfigError for what the benchmark would refuse."""
    missing = [name for name in _REQUIRED if not isinstance(record, dict) or not str(record.get(name, "")).strip()]
    if missing:
        raise ConfigError(f"{path}: {', '.join(missing)} missing or empty; every entry needs them.")
    try:
        datetime.strptime(record["timestamp"], "%Y-%m-%d")
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: timestamp {record['timestamp']!r} is not written as 2020-03-17.") from None
    cost = record.get("costPerHour", 0.0)
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
        raise ConfigError(f"{path}: costPerHour {cost!r} is not a number of dollars.")
    if len(path.name.removesuffix(".json").split("_")) < 4:
        raise ConfigError(f"{path}: the name is not [author]_[model]_[hardware]_[framework].json.")


def _check_rows(path: Path) -> list[Epoch]:
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines(), delimiter="\t"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the table of epochs cannot be read: {error}") from None
    if not lines or sorted(lines[0]) != sorted(COLUMNS):
        raise ConfigError(
            f"{path}: its columns are {lines[0] if lines else []}, not {list(COLUMNS)}, separated by tabs."
        )
    if len(lines) == 1:
        raise ConfigError(f"{path}: it has no epoch.")
    rows: list[Epoch] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            values = dict(zip(lines[0], line, strict=True))
            row = Epoch(int(values["epoch"]), *(float(values[name]) for name in COLUMNS[1:]))
        except ValueError:
            raise ConfigError(f"{path}, line {number}: {line} are not the numbers of {lines[0]}.") from None
        if not (row.hours >= 0 and 0 <= row.top1 <= row.top5 <= 100):
            raise ConfigError(f"{path}, line {number}: {line}: accuracies are in percent, top-1 at most top-5.")
        if rows and not (row.epoch > rows[-1].epoch and row.hours > rows[-1].hours):
            raise ConfigError(f"{path}, line {number}: epochs and hours must grow from line to line.")
        rows.append(row)
    return rows


def main(args: list[str]) -> None:
    """Checks the entries that are named."""
    if not args or args[0] in ("-h", "--help"):
        print(__doc__)
        return
    for name in args:
        try:
            row = reached(check_entry(Path(name).with_suffix(".json")))
        except ConfigError as error:
            fail(str(error))
        outcome = (
            f"{TARGET:g} % top-5 after epoch {row.epoch}, {3600 * row.hours:.1f} s" if row else "target not reached"
        )
        print(f"{name}: a valid entry; {outcome}")


if __name__ == "__main__":
    main(sys.argv[1:])
