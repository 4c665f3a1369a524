"""Draws the figures of docs/ from their data: `python -m benchmarks.figures.draw_docs`, or some by name.

docs/data/NAME.json holds what docs/NAME.png shows; its "source" says which measurement it comes from. The JSON files of
the measurements themselves have the same fields, so a new measurement is drawn by putting its file there, with a
"source" added:

    agreement_quality  benchmarks/studies/compare_exchanges.py writes WORKDIR/comparison.json
    cluster            python -m jaxdl.bench cluster --json docs/data/cluster.json
    elastic            benchmarks/studies/draw_elastic.py writes WORKDIR/elastic.json
    time_to_accuracy   benchmarks/studies/time_to_accuracy.py writes WORKDIR/times.json; agreement_times too
    schedule           python -m benchmarks.schedule --json FILE: the value of "found"
    asynchrony         benchmarks/studies/measure_async.py writes OUT/async.json
    large_batch        benchmarks/studies/large_batch.py writes WORKDIR/large_batch.json: the value of "found"

docs/data/which_axis.json describes a machine and a model; what its figure shows is predicted (draw_axes.py).
`floors` and `step`, the pictures of docs/architecture.md, are drawings without data (draw_architecture.py), as are
`context` and `stages`, those of docs/context.md (draw_context.py) and docs/stages.md (draw_stages.py), and
`experts_bytes` is drawn from a formula (draw_experts.py). docs/idea.png is drawn by draw_idea.py; docs/curves.png is
the curves.png of a run (RESULTS.md, Training), docs/experts.png the experts.png of 400 steps of
configs/moe_python_lm.py, and docs/search.png the slices.png of a search (RESULTS.md, Search).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import ROOT, schedule
from benchmarks.figures import draw_architecture, draw_axes, draw_context, draw_experts, draw_stages
from benchmarks.studies import compare_exchanges, draw_elastic, large_batch, measure_async, time_to_accuracy
from jaxdl.performance.bench.cluster import cluster_report

DOCS = ROOT / "docs"


def cluster(data: dict[str, Any]) -> bytes:
    """The figure of `python -m jaxdl.bench cluster`."""
    series = {name: cluster_report.Curves(**curve) for name, curve in data["series"].items()}
    return cluster_report.figure(data["dense_over_computation"], series, data["title"])


FIGURES: Mapping[str, Callable[[dict[str, Any]], bytes]] = {
    "agreement_quality": compare_exchanges.figure,
    "agreement_times": lambda data: time_to_accuracy.figure(data["runs"], data["target"]),
    "asynchrony": measure_async.figure,
    "cluster": cluster,
    "elastic": draw_elastic.figure,
    "large_batch": lambda data: large_batch.figure(data["found"]),
    "schedule": lambda data: schedule.figure(data["found"]),
    "time_to_accuracy": lambda data: time_to_accuracy.figure(data["runs"], data["target"]),
    "which_axis": draw_axes.figure,
}
DRAWINGS: Mapping[str, Callable[[], bytes]] = {
    "context": draw_context.context_png,
    "experts_bytes": draw_experts.experts_bytes,
    "floors": draw_architecture.floors,
    "stages": draw_stages.stages_png,
    "step": draw_architecture.step_png,
}
"""Pictures that show no measurement."""


def read(name: str) -> dict[str, Any]:
    """The data of a figure."""
    return json.loads((DOCS / "data" / f"{name}.json").read_text(encoding="utf-8"))


def main() -> None:
    """Draws the figures that are named, or all."""
    known = [*FIGURES, *DRAWINGS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; without names, all")
    names = parser.parse_args().names or known
    for name in names:
        if name not in known:
            parser.error(f"{name}: there is no figure of this name. Choose from {', '.join(known)}.")
    for name in names:
        content = DRAWINGS[name]() if name in DRAWINGS else FIGURES[name](read(name))
        (DOCS / f"{name}.png").write_bytes(content)
        print(DOCS / f"{name}.png")


if __name__ == "__main__":
    main()
