"""Draws BLEU over the training time of a run that translates, from the checkpoints that it kept.

python -m benchmarks.studies.bleu_over_time --workdir runs/translation --output bleu.png

The held-out pairs, every third of them, are translated with one beam.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jaxdl
from jaxdl.core.files import METRICS_FILE
from jaxdl.core.options import parse_options
from jaxdl.core.runs import check_checkpoint, check_run, check_writable
from jaxdl.data import PairData
from jaxdl.inference.translation import quality
from jaxdl.report.style import dress, new_figure, png
from jaxdl.training.run.result import exit_codes


@dataclass(frozen=True)
class Draw:
    """Draws BLEU over the training time."""

    workdir: Path
    """The folder of the run; --checkpoint.keep N of the run says how many checkpoints there are."""
    output: Path = Path("bleu.png")
    """The picture."""


def measured(workdir: Path) -> list[tuple[float, float]]:
    """(minutes of the run, BLEU) of each checkpoint that was evaluated."""
    steps = check_checkpoint(check_run(workdir, "--workdir"), option="--workdir")
    rows = [json.loads(line) for line in (workdir / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    evaluated = {row["step"]: row for row in rows if "eval/loss" in row}
    scores = []
    for step in [step for step in steps if step in evaluated]:
        predictor = jaxdl.restore(workdir, step=step)
        data = predictor.experiment.data
        if not isinstance(data, PairData):
            raise jaxdl.ConfigError(f"{workdir}: data {data.kind} has no pairs of texts. Give a run that translates.")
        pairs = list(data.pairs("valid"))[::3]
        texts = predictor.translate([source for source, _ in pairs], beams=1, batch_size=128)
        bleu = quality(texts, [target for _, target in pairs])["BLEU"][0]
        seconds = sum(value for name, value in evaluated[step].items() if name.startswith("seconds/"))
        scores.append((seconds / 60, bleu))
        print(f"step {step}: {seconds / 60:.1f} minutes, BLEU {bleu:.1f}", flush=True)
    return scores


def draw(points: list[tuple[float, float]]) -> bytes:
    """The picture."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), marker="o")
    axes.set_ylim(bottom=0)
    dress(axes, "BLEU on held-out pairs, one beam", x="minutes of training", y="BLEU")
    return png(figure)


if __name__ == "__main__":
    with exit_codes():
        command = parse_options(Draw, sys.argv[1:], prog="python -m benchmarks.studies.bleu_over_time")
        check_writable(command.output, "--output")
        if not (points := measured(command.workdir)):
            raise jaxdl.ConfigError(f"--workdir {command.workdir}: no checkpoint of a step that was evaluated is kept.")
        command.output.write_bytes(draw(points))
