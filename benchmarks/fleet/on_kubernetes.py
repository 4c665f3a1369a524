"""A fleet of real runs on a stand-in for Kubernetes, harmed: are their metrics those of runs that never were?

python -m benchmarks.fleet.on_kubernetes --out runs/fleet_on_kubernetes --crds FOLDER

Starts an API server of this repository (api_server.py) and a cluster of two nodes whose pods are processes here
(controllers.py). If --crds names a folder with the schemas of the real definitions, objects are checked by them.
The client is the real one (`pip install 'jaxdl[kubernetes]'`). A fleet has a run on digits (demo_config.py) that may
have 1 or 2 nodes, in a queue. It gets both. A second run, for 1 node, comes when it has made some steps: the first one
is shrunk, and gets its node back when the second one has ended. Meanwhile a pod of the second run and the fleet's
server are killed, and the API server is away for --away-sec. Both runs are made once more by `python -m jaxdl.train`
alone, to compare with. Ends with code 1 if a run was lost, an attempt was started twice, a step is missing or there
twice, or a result differs; prints a table, and writes fleet_on_kubernetes.json. It says nothing of a real cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import ROOT
from benchmarks.fleet.api_server import ApiServer
from benchmarks.fleet.controllers import Cluster
from benchmarks.fleet.crds import load_schemas
from benchmarks.fleet.demo import compiled_once, new_folder, train_command
from benchmarks.fleet.demo_report import Asked, check, lines, names_of, print_compared, read_attempts
from benchmarks.fleet.on_ray import train_whole
from jaxdl.platform.fleet.kubernetes_engine import RUN
from jaxdl.platform.fleet.store import Store

NODES = 2
SECOND_AT_STEP, KILLED_AT_STEP = 10, 5
"""The second run is submitted when the first one has made so many steps; its pod is killed at its own step."""


def play(out: Path, asked: list[Asked], server: ApiServer, cluster: Cluster, args: argparse.Namespace) -> None:
    """Serves both runs until they have ended. Raises RuntimeError if that takes too long."""
    folder = out / "kubernetes"
    store, end = Store(folder / "fleet"), time.monotonic() + args.limit_sec
    store.folder.mkdir(parents=True)
    (folder / "steps").mkdir()
    words = [sys.executable, "-m", "jaxdl.fleet", "serve", "--state", str(store.folder), "--nodes", str(NODES)]
    words += ["--engine", "kubernetes", "--image", "jaxdl:here", "--gpus-per-node", "0", "--volume", f"files:{out}"]
    words += ["--queue", "team", "--api", args.api, "--between-sec", "0", "--fairness", "1", "--resized", "1"]
    words += ["--poll-sec", "0.25", "--until-idle"]

    def serve() -> subprocess.Popen[bytes]:
        with (folder / "server.txt").open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait_for(condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"{what}: not after {args.limit_sec:g} s. See server.txt and output.txt in {folder}")
            if fleet.poll() or (fleet.poll() == 0 and what != "both runs end"):
                raise RuntimeError(f"the server ended with code {fleet.returncode}: see {folder / 'server.txt'}")
            time.sleep(0.2)

    def made(run: Asked) -> int:
        path = folder / "steps" / f"{run.name}.jsonl"
        return len(lines(path)) if path.exists() else 0

    fleet = serve()
    try:
        store.submit(train_command(asked[0], folder, args.step_sec), asked[0].sizes)
        wait_for(lambda: made(asked[0]) >= SECOND_AT_STEP, "the first run makes steps")
        second = store.submit(train_command(asked[1], folder, args.step_sec), asked[1].sizes)
        wait_for(lambda: made(asked[1]) >= KILLED_AT_STEP, "the second run makes steps")
        (pod,) = [one for one in cluster.pods() if one["metadata"]["labels"].get(RUN) == second.name]
        cluster.kill(pod)
        fleet.kill()
        fleet.wait()
        fleet = serve()
        before = made(asked[1])
        wait_for(lambda: made(asked[1]) > before, "the second run goes on")
        server.outage = True
        time.sleep(args.away_sec)
        server.outage = False
        wait_for(lambda: fleet.poll() == 0, "both runs end")
    finally:
        if fleet.poll() is None:
            fleet.kill()  # The runs end with the cluster.
            fleet.wait()


def wrong_attempts(folder: Path, asked: list[Asked]) -> list[str]:
    """What was not as it should be: the first run is shrunk, and one attempt of the second is killed."""
    attempts = read_attempts(folder, names_of(asked, folder))
    found = {run.name: [(len(one.nodes), one.code) for one in attempts if one.run == run.name] for run in asked}
    # Whether the first run lasts long enough to grow again depends on how long processes take to start.
    expected = {asked[0].name: [[(2, 143), (1, 143), (2, 0)], [(2, 143), (1, 0)]], asked[1].name: [[(1, 137), (1, 0)]]}
    return [
        f"{name}: the nodes and exit codes of its attempts were {found[name]}, not {expected[name][0]}"
        for name in found
        if found[name] not in expected[name]
    ]


def main() -> None:
    """Plays, checks and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--crds", type=Path, help="a folder with the definitions of JobSet, TrainJob and Kueue")
    parser.add_argument("--api", choices=("jobset", "trainjob"), default="jobset")
    parser.add_argument("--steps", type=int, default=120, help="of the first run; the second has a third of them")
    parser.add_argument("--step-sec", type=float, default=0.5, help="what a step takes on one node")
    parser.add_argument("--away-sec", type=float, default=10.0, help="how long the API server does not answer")
    parser.add_argument("--limit-sec", type=float, default=600.0, help="when the play is given up")
    args = parser.parse_args()
    out = new_folder(parser, args.out)
    schemas = load_schemas(args.crds) if args.crds else None
    (out / "logs").mkdir()
    os.chdir(out)  # Runs are submitted from a folder that their pods see.
    os.environ |= {**compiled_once(out), "KUBECONFIG": str(out / "kubeconfig")}
    began = time.monotonic()
    asked = [Asked("run0", 0, 0.0, args.steps, (1, 2)), Asked("run1", 1, 0.0, args.steps // 3, (1,), whole_nodes=1)]
    for run in asked:
        train_whole(run, out / "whole")
    server = ApiServer(schemas)
    server.write_config(out / "kubeconfig")
    cluster = Cluster(server, NODES, out / "logs", {**compiled_once(out), "PYTHONPATH": str(ROOT)})
    cluster.make_queue(NODES)
    try:
        play(out, asked, server, cluster, args)
    finally:
        cluster.close()
        server.close()
    problems, compared = check(out, asked, ["kubernetes"])
    if compared:
        problems += wrong_attempts(out / "kubernetes", asked)
    took = time.monotonic() - began
    content: dict[str, Any] = {"problems": problems, "compared": compared, "took_sec": took}
    console = Console(width=150)
    print_compared(console, compared, problems)
    console.print(f"{took:.0f} s in all")
    (out / "fleet_on_kubernetes.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
