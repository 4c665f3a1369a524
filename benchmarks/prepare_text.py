"""The speed of `python -m jaxdl.data prepare`, beside the `tokenizers` library alone, in turns: MB of text a second.

The text is the source files of Python's standard library and this machine's /usr/share/doc, copied until it is enough;
in each copy another two letters are swapped, so that words differ. Each part of it is encoded by the library's own
parallel `encode_batch_fast`, the fastest that it has (no offsets), in as many threads as there are cores, from memory
to memory; and by jaxdl, which reads it from a file and writes shards, in as many processes, their start included.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import string
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdl.data.text.documents import EVERY_FILE, Reading, document_texts
from jaxdl.data.text.shards import ShardPlan, TokenStore
from jaxdl.data.text.token_windows import standard_library_files
from jaxdl.data.text.tokenizer import Train, train_tokenizer
from jaxdl.data.text.tokenizing import prepare
from jaxdl.performance.bench.shared import make_table, median_ratio, parse_bench, run_module, write_json

_BATCH_BYTES = 16 << 20


@dataclass(frozen=True)
class TextBench:
    """Options of the measurement."""

    megabytes: int = 200
    """Size of the text, in MB."""
    num_parts: int = 4
    """Parts of the text, which both sides take in turns; medians are reported."""
    vocab_size: int = 32_000
    """Tokens of the byte-level BPE that is trained for it, on the first 10 MB."""
    json: Path | None = None
    """A file for the results."""


def main(args: list[str]) -> None:
    """Makes the text, times both sides in turns, and prints the medians."""
    command = parse_bench(TextBench, args, __name__, megabytes=1, num_parts=1)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="jaxdl-tokenize-") as name:
        folder = Path(name)
        texts = list(_texts(command.megabytes * 1_000_000))
        parts = [texts[number :: command.num_parts] for number in range(command.num_parts)]
        for number, part in enumerate(parts):
            with (folder / f"{number}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in part)
        tokenizer = folder / "tokenizer.json"
        train = Train(out=tokenizer, vocab_size=command.vocab_size, max_bytes=10_000_000)
        console.print(train_tokenizer([str(folder / "0.jsonl")], train, console), soft_wrap=True)
        speeds: dict[str, list[float]] = {"tokenizers alone": [], "jaxdl": []}
        for number, part in enumerate(parts):
            num_bytes = sum(len(text.encode()) for text in part)
            seconds, alone = _library(tokenizer, part)
            speeds["tokenizers alone"].append(num_bytes / 1e6 / seconds)
            seconds, tokens = _jaxdl(folder, tokenizer, number, console)
            speeds["jaxdl"].append(num_bytes / 1e6 / seconds)
            assert tokens == alone, "both sides have the same tokens"
    cores = len(os.sched_getaffinity(0))
    table = make_table(
        f"{command.megabytes} MB of text, {len(texts):,} documents, {command.num_parts} parts, {cores} cores: MB/s",
        ("", "median", "min", "max"),
    )
    for side, rates in speeds.items():
        table.add_row(side, *(f"{value:.2f}" for value in (statistics.median(rates), min(rates), max(rates))))
    console.print(table)
    ratio = median_ratio(speeds["jaxdl"], speeds["tokenizers alone"])
    console.print(f"jaxdl over tokenizers alone: {ratio:.2f} (the median of the parts' ratios)")
    write_json(command.json, {"megabytes": command.megabytes, "cores": cores, "mb_per_sec": speeds, "ratio": ratio})


def _texts(num_bytes: int) -> Iterator[str]:
    """Documents of so many bytes in all, of files at hand; each copy of a file with other letters swapped."""
    paths = [*standard_library_files(), *sorted(map(str, Path("/usr/share/doc").rglob("*")))]
    files: list[str] = []
    for path in map(Path, paths):
        if path.is_file() and path.suffix not in (".gz", ".png"):
            content = path.read_bytes()
            if b"\0" not in content:
                files.append(content.decode(errors="replace"))
    taken = 0
    for first, second in itertools.chain(
        [("", "")], itertools.cycle(itertools.combinations(string.ascii_lowercase, 2))
    ):
        swapped = str.maketrans(first + second, second + first)
        for text in files:
            if taken >= num_bytes:
                return
            taken += len(text.encode())
            yield text.translate(swapped)


def _library(tokenizer: Path, texts: list[str]) -> tuple[float, int]:
    """(seconds, tokens) of the library's own parallel encoding."""
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    start, tokens, batch, size = time.perf_counter(), 0, [], 0
    for text in (*texts, None):
        if text is not None:
            batch.append(text)
            size += len(text)
        if text is None or size >= _BATCH_BYTES:
            tokens += sum(len(encoding) for encoding in encoder.encode_batch_fast(batch, add_special_tokens=False))
            batch, size = [], 0
    return time.perf_counter() - start, tokens


def _jaxdl(folder: Path, tokenizer: Path, number: int, console: Console) -> tuple[float, int]:
    """(seconds, tokens) of preparing shards; without the tokens that end documents."""
    (texts,) = document_texts([[str(folder / f"{number}.jsonl")]], EVERY_FILE, Reading())
    plan = ShardPlan(texts, str(tokenizer), str(folder / "shards"))
    start = time.perf_counter()
    prepare(plan, console)
    seconds = time.perf_counter() - start
    store = TokenStore(plan.folder)
    return seconds, int(store.num_tokens.sum()) - len(store) * len(plan.codec.separator)


if __name__ == "__main__":
    run_module(main)
