"""A fleet of real runs on a local Ray cluster, one of which is resized: are its metrics those of one that never was?

python -m benchmarks.fleet.on_ray --out runs/fleet_on_ray

Starts a Ray cluster with two fake nodes here (it needs `pip install 'jaxdl[ray]'`), serves a fleet there, and submits a
run on digits (demo_config.py) that may have 1 or 2 nodes. It gets both. A second run, for 1 node, comes
when it has made some steps: the policy shrinks the first run, and gives it its node back when the second one has ended.
Both runs are made once more by `python -m jaxdl.train` without a fleet, on 2 devices and on 1, to compare with. Ends
with code 1 if a run was lost, an attempt was started twice, a step is missing or there twice, or a result differs;
prints a table, and writes fleet_on_ray.json. Steps are paced (benchmarks/fleet/paced_train.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.fleet.demo import CONFIG, compiled_once, new_folder, options_of, train_command
from benchmarks.fleet.demo_report import (
    Asked,
    Attempt,
    check,
    lines,
    names_of,
    pairs_of,
    print_compared,
    read_attempts,
)
from jaxdl.platform.fleet.store import Store

NODES = 2
SECOND_AT_STEP = 10
"""The second run is submitted when the first one has made so many steps."""
STORE_BYTES = 80_000_000


@contextlib.contextmanager
def local_cluster() -> Iterator[str]:
    """The address of a Ray cluster of processes here: a head without CPUs, and two nodes with one CPU each."""
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        yield cluster.address
    finally:
        cluster.shutdown()


def play(folder: Path, asked: list[Asked], address: str, args: argparse.Namespace) -> None:
    """Serves both runs until they have ended. Raises RuntimeError if that takes too long."""
    store = Store(folder / "fleet")
    store.folder.mkdir(parents=True)
    (folder / "steps").mkdir()
    end = time.monotonic() + args.limit_sec

    def submit(run: Asked) -> None:
        store.submit(train_command(run, folder, args.step_sec), run.sizes)

    def wait_for(condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"{what}: not after {args.limit_sec:g} s. See server.txt and output.txt in {folder}")
            if server.poll():
                raise RuntimeError(f"the server ended with code {server.returncode}: see {folder / 'server.txt'}")
            time.sleep(0.2)

    submit(asked[0])
    words = ["serve", "--state", str(store.folder), "--engine", "ray", "--address", address, "--nodes", str(NODES)]
    words += ["--between-sec", "0", "--fairness", "1", "--resized", "1", "--poll-sec", "0.25", "--until-idle"]
    with (folder / "server.txt").open("ab") as log:
        command = [sys.executable, "-m", "jaxdl.fleet", *words]
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    made = folder / "steps" / f"{asked[0].name}.jsonl"
    try:
        wait_for(lambda: made.exists() and len(lines(made)) >= SECOND_AT_STEP, "the first run makes steps")
        submit(asked[1])
        wait_for(lambda: server.poll() == 0, "both runs end")
    finally:
        if server.poll() is None:
            server.kill()  # The runs end with the cluster.
            server.wait()


def train_whole(run: Asked, folder: Path) -> None:
    """Makes the run on devices of one process, without fleet, launcher and pace."""
    options = {"--config": CONFIG, "--workdir": folder / run.name, **options_of(run)}
    options |= {"--mesh.replica": run.whole_nodes, "--mesh.cpu-devices": run.whole_nodes}
    words = [str(word) for pair in options.items() for word in pair]
    subprocess.run([sys.executable, "-m", "jaxdl.train", *words], check=True, capture_output=True)


def wrong_sizes(attempts: list[Attempt], asked: list[Asked]) -> list[str]:
    """What was not resized as it should be: the first run is shrunk once and grows again, the second keeps its node."""
    sizes = {run.name: [len(attempt.nodes) for attempt in attempts if attempt.run == run.name] for run in asked}
    expected = {asked[0].name: [2, 1, 2], asked[1].name: [1]}
    return [f"{name}: its attempts had {sizes[name]} nodes, not {expected[name]}"
            for name in sizes if sizes[name] != expected[name]]  # fmt: skip


def resize_seconds(attempts: list[Attempt], name: str) -> list[float]:
    """Seconds from the request to save and end to the first step of the next attempt, for each resize of a run."""
    pairs = [pair for pair in pairs_of(attempts) if pair[0].run == name]
    return [after.steps[0][1] - before.asked for before, after in pairs if before.asked is not None and after.steps]


def main() -> None:
    """Plays, checks and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--steps", type=int, default=120, help="of the first run; the second has a third of them")
    parser.add_argument("--step-sec", type=float, default=0.5, help="what a step takes on one node")
    parser.add_argument("--limit-sec", type=float, default=600.0, help="when the play is given up")
    args = parser.parse_args()
    out = new_folder(parser, args.out)
    os.environ |= {**compiled_once(out), "RAY_USAGE_STATS_ENABLED": "0"}
    began, folder = time.monotonic(), out / "ray"
    asked = [Asked("run0", 0, 0.0, args.steps, (1, 2)), Asked("run1", 1, 0.0, args.steps // 3, (1,), whole_nodes=1)]
    for run in asked:
        train_whole(run, out / "whole")
    with local_cluster() as address:
        play(folder, asked, address, args)
    problems, compared = check(out, asked, ["ray"])
    content: dict[str, Any] = {"problems": problems, "compared": compared}
    if compared:
        attempts = read_attempts(folder, names_of(asked, folder))
        problems += [f"ray, {problem}" for problem in wrong_sizes(attempts, asked)]
        content["resize_sec"] = resize_seconds(attempts, asked[0].name)
    content["took_sec"] = time.monotonic() - began
    console = Console(width=150)
    print_compared(console, compared, problems)
    console.print(
        f"seconds from a resize to the next step: {content.get('resize_sec')}; {content['took_sec']:.0f} s in all"
    )
    (out / "fleet_on_ray.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
