"""The options of `python -m jaxdl.score`; `jaxdl.inference.score.__main__` checks the workdir before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import print_out
from jaxdl.core.runs import check_writable, read_lines
from jaxdl.data.text.documents import EVERY_FILE, Reading, document_texts
from jaxdl.inference.predictor import Predictor
from jaxdl.inference.score.tables import columns_spec, score_table, table_lines, write_predictions
from jaxdl.inference.scoring import Question, Scorer, score_choices, score_documents
from jaxdl.inference.trained import RunCommand, check_text, open_output, parse_command, progress, restore_network
from jaxdl.parallel.cluster import end_together
from jaxdl.training.run.result import exit_codes

CONTEXTS, CHOICES, LABELS = ("context", "ctx", "query"), ("choices", "endings"), ("label", "gold", "answer")
"""Names that fields of questions have; those of HellaSwag are ctx, endings and label."""

ABOUT = """Judges a trained language model: perplexity of texts, accuracy on multiple-choice questions. Of a network
that was trained on a table it judges, and writes, the predictions of the rows of a file.

  python -m jaxdl.score --workdir runs/lm --text book.txt articles.jsonl
  python -m jaxdl.score --workdir runs/lm --choices hellaswag.jsonl --to scores.json
  python -m jaxdl.score --workdir runs/penguins --table others.csv --predictions predictions.csv"""


@dataclass(frozen=True, kw_only=True)
class Score(RunCommand):
    """The options of the command."""

    text: tuple[str, ...] = ()
    """Files of documents: plain text, or JSON lines or Parquet with a column "text"."""
    column: str = "text"
    """The column with the text."""
    document: Literal["file", "line"] = "file"
    """What a document of plain text is."""
    stride: int | None = None
    """By how many tokens the window slides over a document that is longer than the network's context; None: half of
    the context. Less takes longer, and more tokens are read before each that is scored."""
    choices: tuple[Path, ...] = ()
    """Files of multiple-choice questions: JSON lines with a context ("context", "ctx" or "query"), the texts that may
    follow ("choices" or "endings") and the number of the right one, from 0 ("label", "gold" or "answer")."""
    delimiter: str = " "
    """What stands between a context and a choice."""
    table: tuple[str, ...] = ()
    """CSV or Parquet files with the columns of the training; with the label too they are judged."""
    predictions: Path | None = None
    """A CSV file for the predictions of the rows of --table, one line each; None writes none."""
    to: Path | None = None
    """A JSON file for the result, with the score of each choice; None writes none."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. Exits as `exit_codes` says."""
    with end_together(), exit_codes():
        command = parse_command(Score, args, prog, ABOUT)
        if not command.text and not command.choices and not command.table:
            raise ConfigError("nothing to score: give --text FILE, --choices FILE or --table FILE.")
        for option, of in (("column", "text"), ("document", "text"), ("stride", "text"), ("delimiter", "choices")):
            if not getattr(command, of) and getattr(command, option) != getattr(Score, option):
                raise ConfigError(f"--{option}: it has no effect without --{of}. Leave it out.")
        check_text("--delimiter", (command.delimiter,))
        if command.predictions is not None and len(command.table) != 1:
            raise ConfigError("--predictions: it is for the rows of one file. Give one --table FILE.")
        for option, file in (("--to", command.to), ("--predictions", command.predictions)):
            if file is not None:
                check_writable(file, option)
        questions = {path: read_questions(path) for path in command.choices}
        result = scores(command, restore_network(command, args), questions)
        if jax.process_index() == 0:
            print_out(report(result))
            if command.to is not None:
                with open_output(command.to, "--to") as file:
                    print(json.dumps(result, indent=1), file=file)


def scores(command: Score, predictor: Predictor, questions: dict[Path, list[Question]]) -> dict[str, Any]:
    """The result as it is written: "text" and "choices", each by file. Raises ConfigError for what cannot be read."""
    result: dict[str, Any] = {"workdir": str(command.workdir), "step": predictor.step, "text": {}, "choices": {}}
    if command.table:
        return result | {"table": score_tables(command, predictor)}
    predictor.check_text("score")
    scorer, codec = Scorer(predictor), predictor.codec
    stride = max(1, scorer.context // 2) if command.stride is None else command.stride
    if not 1 <= stride <= scorer.context:
        raise ConfigError(
            f"--stride {stride}: the network reads {scorer.context:,} tokens at a time; give 1 to as many."
        )
    reading, files = Reading(command.column, command.document), [[path] for path in command.text]
    for path, texts in zip(command.text, document_texts(files, EVERY_FILE, reading) if files else (), strict=True):
        documents = list(texts.every())
        if not any(documents):
            raise ConfigError(f"--text {path}: it is empty.")
        with progress(path) as advance:
            result["text"][path] = score_documents(scorer, codec, documents, stride, advance)
    for path, asked in questions.items():
        with progress(str(path)) as advance:
            accuracies, each = score_choices(scorer, codec, asked, command.delimiter, advance)
        rows = [
            {"label": question.label, "scores": log_likelihoods}
            for question, log_likelihoods in zip(asked, each, strict=True)
        ]
        result["choices"][str(path)] = accuracies | {"each": rows}
    return result


def score_tables(command: Score, predictor: Predictor) -> dict[str, Any]:
    """The result of each file of --table; writes --predictions. Raises ConfigError for what is no such table."""
    if command.text or command.choices:
        raise ConfigError("--table: it is for a network of tables, --text and --choices are for one of text. Give one.")
    spec, results = columns_spec(predictor), {}
    for path in command.table:
        with progress(path) as advance:
            results[path], predictions = score_table(predictor, path, advance)
        if command.predictions is not None and jax.process_index() == 0:
            with open_output(command.predictions, "--predictions") as file:
                write_predictions(file, spec, predictions)
    return results


def read_questions(path: Path) -> list[Question]:
    """The questions in a file. Raises ConfigError for one that cannot be read or has none."""
    lines = read_lines(path, "--choices")
    questions = [
        _question(f"--choices {path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not questions:
        raise ConfigError(f"--choices {path}: it has no questions.")
    return questions


def _question(where: str, line: str) -> Question:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}).") from None

    def field(names: Sequence[str]) -> Any:
        name = next((name for name in names if isinstance(row, dict) and name in row), None)
        if name is None:
            raise ConfigError(f"{where} has no field {' or '.join(names)}. Rename its fields.")
        return row[name]

    context, choices, label = field(CONTEXTS), field(CHOICES), field(LABELS)
    if not isinstance(context, str) or not isinstance(choices, list) or not choices:
        raise ConfigError(f"{where}: the context must be a text, and the choices a list of texts.")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ConfigError(f"{where}: each choice must be a text that is not empty.")
    check_text(where, (context, *choices))
    if not str(label).isdecimal() or not int(label) < len(choices):
        raise ConfigError(f"{where}: the label is {label!r}; it must be a number from 0 to {len(choices) - 1}.")
    return Question(context, tuple(choices), int(label))


def report(result: dict[str, Any]) -> str:
    """What the command prints."""
    lines = [f"{result['workdir']}, step {result['step']}"]
    for path, row in result["text"].items():
        size = f"{row['documents']:,} documents, {row['tokens']:,} tokens, {row['bytes']:,} bytes"
        lines.append(f"  {path}: perplexity {row['perplexity']:.5g}, {row['bits_per_byte']:.4f} bits per byte ({size})")
    for path, row in result["choices"].items():
        accuracies = ", ".join(f"{name} {row[name]:.4f}" for name in ("acc", "acc_norm", "acc_bytes"))
        lines.append(f"  {path}: {accuracies} ({row['questions']:,} questions)")
    for path, row in result.get("table", {}).items():
        lines += table_lines(path, row)
    return "\n".join(lines)
