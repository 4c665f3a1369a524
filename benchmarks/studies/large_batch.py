"""The cost of a large batch in accuracy: SGD at a small batch against SGD and LARS at large ones, at equal epochs.

TFDS_DATA_DIR=... python -m benchmarks.studies.large_batch --config configs/fashion_mnist.py --workdir runs/large_batch

Each variant is one optimizer at one batch size; its learning rate is tuned, at one seed, over the same factors of the
same reference: 0.2 x batch / 256 (linear scaling, Goyal et al. 2017, section 2.1). Tuning trains on 90 % of the
training split and tests on the other 10 %; then each variant trains on all of it with its best rate, once a seed, and
is tested on the test split. All variants share schedule, momentum and weight decay, and batch norm takes its statistics
over as many images as the small batch has in each. LARS has a trust coefficient of 0.01, so that its best rates are
near those of SGD, which its biases and normalization are trained with; "LARS no masks", only at the first large batch,
has weight decay and trust ratios on those too.

The tuning of a variant is a search over a grid (`jaxdl.search`) in a folder of its own. Each run at the best rate is
trained by this script, in a folder of its own too. A run that finished or diverged is not repeated, a stopped one
resumes.
Prints a table and writes `large_batch.json` and `large_batch.png`. Everything after `--` changes the config of all
runs: `-- --epochs 3`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import jaxdl
from benchmarks.studies.trials import parse, same_request
from jaxdl.core.errors import ConfigError, fail
from jaxdl.optim import LARS, SGD, Cosine
from jaxdl.platform.search.command import run as search
from jaxdl.report import Diverged, style
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.result import exit_codes

REFERENCE = 0.2 / 256
"""The learning rate an image of the batch that the factors multiply."""

MOMENTUM, WEIGHT_DECAY, WARMUP = 0.9, 5e-4, 0.2
"""Of all variants; the warm-up is a share of the run."""

TRUST_COEFFICIENT = 0.01
"""Of LARS. The published 0.001 needs 10 times the rate, which is far too large for parameters without a trust ratio."""

_OWN = ("optimizer", "schedule", "batch-size", "evaluation", "seed", "model.norm-span", "data.t", "phases")
"""The fields that the script sets."""


class Variant(NamedTuple):
    """An optimizer at a batch size."""

    optimizer: str
    batch_size: int

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.optimizer}, {self.batch_size:,}"

    @property
    def folder(self) -> str:
        """The beginning of its runs' folders."""
        return self.name.replace(" ", "_").replace(",", "")

    def changes(self, factor: float, small: int) -> dict[str, Any]:
        """The fields of an experiment at a factor of the reference, with batch norm over `small` images."""
        shared: dict[str, Any] = {
            "learning_rate": factor * REFERENCE * self.batch_size,
            "momentum": MOMENTUM,
            "weight_decay": WEIGHT_DECAY,
        }
        if self.optimizer == "SGD":
            optimizer = SGD(**shared)
        else:
            masked = self.optimizer != "LARS no masks"
            optimizer = LARS(**shared, trust_coefficient=TRUST_COEFFICIENT, exclude_vectors=masked)
        return {"batch_size": self.batch_size, "optimizer": optimizer, "model.norm_span": small}


def main() -> None:
    """Runs everything that is not finished, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--small", type=int, default=256, help="the batch size of the baseline")
    parser.add_argument("--large", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--factors", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=1, help="runs of the tuning at a time")
    args, changes = parse(parser)
    if any(size <= args.small or size % args.small for size in args.large):
        fail(f"--large {args.large}: they are multiples of --small {args.small}.")
    for change in changes:
        if change.lstrip("-").replace("_", "-").startswith(_OWN):
            fail(f"{change}: the script sets that itself, for every variant. Leave it out.")
    with exit_codes():
        base = common(args, jaxdl.load(args.config, changes))
        every = variants(args.small, args.large)
        tuned = {variant: tune(args, base, variant) for variant in every}  # First: later this process has the devices.
        report(args, {variant.name: measure(args, base, variant, tuned[variant]) for variant in every})


def variants(small: int, large: list[int]) -> list[Variant]:
    """The variants: SGD at the small batch, both optimizers at the large ones, without masks at the first one."""
    both = [Variant(name, size) for size in large for name in ("SGD", "LARS")]
    return [Variant("SGD", small), *both[:2], Variant("LARS no masks", large[0]), *both[2:]]


def common(args: argparse.Namespace, base: Experiment) -> Experiment:
    """The common part of all runs. Raises ConfigError for a config that does not allow the comparison."""
    if base.epochs is None or not hasattr(base.data, "train_split"):
        raise ConfigError(f"--config {args.config}: it needs a length in epochs and data with splits.")
    if getattr(base.model, "norm", None) != "batch":
        raise ConfigError(f"--config {args.config}: it needs a network with batch norm.")
    warmup = Cosine(warmup_epochs=WARMUP * base.epochs)
    evaluation = {"evaluation.batch_size": 4 * args.small, "evaluation.every_epochs": 1.0}
    return base.replaced({"schedule": warmup} | evaluation)


def measure(args: argparse.Namespace, base: Experiment, variant: Variant, tuned: dict[float, float]) -> dict[str, Any]:
    """The tuning of a variant and its runs at the best rate."""
    best = max(tuned, key=tuned.__getitem__)
    runs = [
        accuracy(
            args.workdir / f"{variant.folder}_x{best:g}_seed{seed}",
            base.replaced({"seed": seed, **variant.changes(best, args.small)}),
        )
        for seed in args.seeds
    ]
    rate = variant.changes(best, args.small)["optimizer"].learning_rate
    return {"variant": variant._asdict(), "tuned": tuned, "learning_rate": rate, "runs": runs}


def tune(args: argparse.Namespace, base: Experiment, variant: Variant) -> dict[float, float]:
    """Factor -> final accuracy on the held-out 10 %, 0 if it diverged: a grid search over the learning rate."""
    data = base.data.model_copy(update={"train_split": "train[:90%]", "test_split": "train[90%:]"})
    rates = {factor: variant.changes(factor, args.small)["optimizer"].learning_rate for factor in args.factors}
    experiment = base.replaced({"data": data, **variant.changes(args.factors[0], args.small)})
    folder = args.workdir / f"{variant.folder}_tuning"
    config = folder / "experiment.json"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(experiment.to_json() + "\n", encoding="utf-8")
    words = ["--config", str(config), "--workdir", str(folder), "--parallel", str(args.parallel)]
    words += ["--vary", f"optimizer.learning-rate={','.join(map(str, rates.values()))}", "--metric", "eval/accuracy"]
    if (signum := search([*words, "--sampler", "grid", "--scheduler", "none"], "large_batch.py")) is not None:
        raise SystemExit(128 + signum)
    trials = json.loads((folder / "result.json").read_text(encoding="utf-8"))["trials"]
    return {factor: outcome(folder, trial) for factor, trial in zip(rates, trials, strict=True)}


def outcome(folder: Path, trial: dict[str, Any]) -> float:
    """The final accuracy of a trial in result.json, 0 if it diverged. Raises ConfigError if it did not finish."""
    if trial["state"] == "finished":
        return trial["value"]
    if trial["state"] == "failed" and trial["reason"].startswith("diverged"):
        return 0.0
    advice = "" if trial["state"] == "failed" else "; the same command resumes it"
    raise ConfigError(f"{folder}: trial {trial['number']}: {trial['state']}: {trial['reason'].rstrip('.')}{advice}.")


def accuracy(workdir: Path, experiment: Experiment) -> dict[str, Any]:
    """The final test accuracy of a run and its course, (epoch, accuracy); 0 if it diverged."""
    same_request(workdir, experiment.model_dump(mode="json"))
    print(f"--- {workdir}", flush=True)
    diverged = workdir / "diverged.txt"
    try:
        if diverged.exists():
            raise Diverged(diverged.read_text(encoding="utf-8"))
        history = jaxdl.train(experiment, workdir, quiet=True).history
    except Diverged as error:
        print(error)
        diverged.write_text(str(error), encoding="utf-8")
        return {"final": 0.0, "course": []}
    rows = zip(history["epoch"], history["eval/accuracy"], strict=True)
    course = [(epoch, value) for epoch, value in rows if value is not None and value == value]
    return {"final": course[-1][1], "course": course}


def report(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Prints the table and writes both files."""
    (args.workdir / "large_batch.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    columns = ("optimizer, batch", *(f"x {factor:g}" for factor in args.factors), "rate", "mean", "lowest", "highest")
    table = Table(*columns, "difference", title=f"{args.config}: tuning (held out), then test accuracy")
    first = None
    for name, result in results.items():
        finals = [run["final"] for run in result["runs"]]
        mean = statistics.fmean(finals)
        first = mean if first is None else first
        tuned = (f"{value:.4f}" if value else "diverged" for value in result["tuned"].values())
        best = max(result["tuned"], key=result["tuned"].__getitem__)
        edge = " (edge)" if best in (min(result["tuned"]), max(result["tuned"])) else ""
        numbers = (f"{value:.4f}" for value in (mean, min(finals), max(finals)))
        table.add_row(
            name, *tuned, f"{result['learning_rate']:g}{edge}", *numbers, f"{100 * (mean - first):+.2f} points"
        )
    Console(width=160).print(table)
    (args.workdir / "large_batch.png").write_bytes(figure(results))
    print(f"written: {args.workdir / 'large_batch.json'}, {args.workdir / 'large_batch.png'}")


def figure(found: dict[str, Any]) -> bytes:
    """A PNG: the tuning, the course of one seed where there is one, and the final accuracies.

    Args:
      found: the content of large_batch.json.
    """
    chosen = style.looks(list(found), style.OPTIMIZER_COLORS)
    with_course = any(result["runs"][0]["course"] for result in found.values())
    height = max(4.3, 0.42 * len(found) + 1.5) + style.legend_inches(len(found))
    drawn = style.new_figure(16 if with_course else 12, height, "SGD and LARS at large batches, measured")
    panels = list(drawn.subplots(1, 2 + with_course))
    highest = max((value for result in found.values() for value in result["tuned"].values()), default=1.0)
    floor = highest - 0.15  # Values far below the best are cut off.
    left, right = panels[0], panels[-1]
    for name, result in found.items():
        look = chosen[name]
        points = [(float(factor), value) for factor, value in result["tuned"].items()]
        left.plot(*zip(*points, strict=True), color=look.color, marker=look.mark, **style.MEASURED)
        low = [factor for factor, value in points if value < floor]
        left.plot(low, [floor + 0.004] * len(low), "v", mfc="none", mec=look.color, ms=6)
        course = result["runs"][0]["course"]
        if course:
            panels[1].plot(*zip(*course, strict=True), color=look.color, marker=look.mark, **style.MEASURED)
    factors = [float(factor) for result in found.values() for factor in result["tuned"]]
    style.dress(left, "Tuning", x="learning rate / (0.2 x batch / 256)", y="accuracy on 10 % held out, one seed")
    style.log_axis(left, "x", factors, ticks_at_values=True)
    for axes in panels[:-1]:
        axes.set_ylim(floor, highest + 0.01)
    if with_course:
        style.dress(panels[1], "Course of the first seed", x="epoch", y="test accuracy")
    style.dress(right, "At the best rate", x="final test accuracy")
    style.seed_dots(right, {name: [run["final"] for run in result["runs"]] for name, result in found.items()}, chosen)
    right.locator_params(axis="x", nbins=6)
    names = [style.line_entry(name, look.color, look.mark, **style.MEASURED) for name, look in chosen.items()]
    below = style.line_entry("below the panel, or diverged", style.GREY, "v", ls="", mfc="none", ms=6)
    style.legend(drawn, [*names, below, style.mean_entry()])
    return style.png(drawn)


if __name__ == "__main__":
    main()
