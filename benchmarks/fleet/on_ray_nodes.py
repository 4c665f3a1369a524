"""A fleet of ten runs on a Ray cluster of several nodes, two of which are killed, and the server too: is anything lost?

python -m benchmarks.fleet.on_ray_nodes --out runs/fleet_on_ray_nodes

Each node of the cluster is a network namespace of this machine with an address of its own, in which `ray start` runs
(it needs root and `pip install 'jaxdl[ray]'`): a head without CPUs, which also has the server of the fleet, and three
nodes. The runs are ten on digits (demo_config.py), of which every third keeps its nodes. Twice all processes of a node
that trains are killed, and it joins again later, as a new node of Ray; twice the server is killed. Each run is made
once more, on as many devices as its first attempt had, in one process that nothing harms, to compare with. Ends with
code 1 if a run was lost, an attempt was started twice, a step is missing or there twice, or a result differs; prints a
table, and writes fleet_on_ray_nodes.json. Steps are paced (paced_train.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.fleet.demo import Harm, Played, compiled_once, new_folder
from benchmarks.fleet.demo_report import Asked, check, names_of, print_compared, read_attempts
from benchmarks.fleet.on_ray import train_whole
from jaxdl.platform.launch.netns import Network

NODES = 3
HARMS = (Harm(60, "node", 40), Harm(90, "server", 3), Harm(150, "node", 40), Harm(190, "server", 3))
STORE_BYTES = 80_000_000
PORT = 6379
_AGENTS = ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
_NODES = "import json, ray; ray.init('auto', log_to_driver=False); print('NODES', json.dumps(ray.nodes()))"


def made_up(seed: int, steps: int, runs: int) -> list[Asked]:
    """Runs: when they come, how long they are, and what they may have. Every third keeps one or two nodes."""
    draw, asked, at = random.Random(seed), [], 0.0
    for number in range(runs):
        sizes = (1 + number // 3 % 2,) if number % 3 == 2 else draw.choice([(1, 2), (1, 2, 3)])
        asked.append(Asked(f"run{number}", number, at, draw.randrange(steps // 2, 2 * steps, 10), sizes))
        at += draw.expovariate(1 / 10)
    return asked


class Cluster:
    """Context: a Ray cluster whose nodes are the hosts of an emulated network; host 0 is its head."""

    def __init__(self, out: Path) -> None:
        self._out, self._network = out, Network(NODES + 1)
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        self._network.__enter__()
        try:
            for index in range(NODES + 1):
                self.start(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started.values():
            process.terminate()
        self._network.__exit__()  # Kills what is left.
        for process in self._started.values():
            process.wait()

    @property
    def address(self) -> str:
        """Where the head is."""
        return f"{self._network.hosts[0].address}:{PORT}"

    def on_host(self, index: int, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on a host."""
        return [*self._network.hosts[index].prefix, *words]

    def start(self, index: int) -> None:
        """Starts Ray on a host, and waits until the cluster has it."""
        for _ in range(3):  # On a busy machine Ray gives up sometimes.
            self._begin(index)
            end = time.monotonic() + 120
            while self._started[index].poll() is None and time.monotonic() < end:
                time.sleep(1)
                if index in self.nodes().values():
                    return
        raise RuntimeError(f"Ray does not start on a node: see host{index}.txt")

    def _begin(self, index: int) -> None:
        host = self._network.hosts[index]
        words = [str(Path(sys.executable).parent / "ray"), "start", "--block", f"--node-ip-address={host.address}"]
        words += [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", f"--node-name={host.name}"]
        # With ports that it chooses itself a node waits for its agents to say them, and on a busy machine gives up.
        words += [f"--{name}-port={PORT + 1 + number}" for number, name in enumerate(_AGENTS)]
        if index == 0:
            words += ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
        else:
            words += [f"--address={self.address}", "--num-cpus=1"]
        with (self._out / f"{host.name}.txt").open("ab") as log:
            self._started[index] = subprocess.Popen(
                self.on_host(index, words), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def kill(self, index: int) -> None:
        """Kills every process of a host."""
        self._network.kill_host(index)
        self._started[index].wait()

    def runs(self, index: int) -> bool:
        """Whether Ray runs on a host."""
        return self._started[index].poll() is None

    def nodes(self) -> dict[str, int]:
        """Ray's id of each node that it takes for alive -> number of the host; none where there is no cluster."""
        words = self.on_host(0, [sys.executable, "-W", "ignore", "-c", _NODES])
        done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", check=False)
        known = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("NODES ")]
        alive = [node for nodes in known for node in nodes if node["Alive"]]
        return {node["NodeID"]: int(node["NodeName"].removeprefix("host")) for node in alive}


class OnCluster(Played):
    """The play on a Ray cluster; its server is on the head."""

    def __init__(self, folder: Path, asked: list[Asked], args: argparse.Namespace, cluster: Cluster) -> None:
        super().__init__(folder, asked, args, harms=HARMS)
        self._cluster = cluster

    def serve_command(self) -> list[str]:
        """The command of the fleet's server."""
        words = ["serve", "--state", str(self.store.folder), "--nodes", str(NODES), "--poll-sec", "0.25"]
        words += ["--engine", "ray", "--address", self._cluster.address]
        words += ["--between-sec", str(self._args.between_sec), "--resized", "0.5", "--fairness", "0.5"]
        return self._cluster.on_host(0, [sys.executable, "-m", "jaxdl.fleet", *words])

    def kill(self, harm: Harm, nodes: Sequence[str], index: int, folder: Path) -> bool:
        """Kills the whole node; it joins the cluster again later."""
        host = self._cluster.nodes().get(nodes[index])
        if host is None or not self._cluster.runs(host):  # Ray does not know yet that it is lost.
            return False
        self._cluster.kill(host)
        self.later(harm.down_sec, lambda: self._cluster.start(host))
        return True


def main() -> None:
    """Plays, checks and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--runs", type=int, default=10, help="how many runs there are")
    parser.add_argument("--steps", type=int, default=60, help="the runs have half to twice as many")
    parser.add_argument("--step-sec", type=float, default=1.0, help="what a step takes on one node")
    parser.add_argument("--between-sec", type=float, default=40.0, help="the least time between two changes of a run")
    parser.add_argument("--limit-sec", type=float, default=1800.0, help="when the play is given up")
    args = parser.parse_args()
    out = new_folder(parser, args.out)
    os.environ |= {**compiled_once(out), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    began, asked, folder = time.monotonic(), made_up(args.seed, args.steps, args.runs), out / "ray"
    with Cluster(out) as cluster:
        play = OnCluster(folder, asked, args, cluster)
        play.began = time.time()
        play.play()
        took_sec = time.time() - play.began
    attempts = read_attempts(folder, names_of(asked, folder))
    first = {attempt.run: len(attempt.nodes) for attempt in reversed(attempts)}
    asked = [replace(run, whole_nodes=first[run.name]) for run in asked]
    for run in asked:
        train_whole(run, out / "whole")
    problems, compared = check(out, asked, ["ray"])
    problems += [f"{len(play.harmed)} of {len(HARMS)} kills met something"] * (len(play.harmed) < len(HARMS))
    harmed = [{**harm, "at": harm["at"] - play.began} for harm in play.harmed]
    lost = [attempt.run for attempt in attempts if attempt.why in ("failed", "moved")]
    console = Console(width=150)
    print_compared(console, compared, problems)
    for harm in harmed:
        console.print(f"after {harm['at']:.0f} s: {harm['what']} killed, {harm.get('run', '')}", highlight=False)
    console.print(f"{len(attempts)} attempts, {len(lost)} of them after a kill; {took_sec:.0f} s on the cluster")
    content: dict[str, Any] = {"problems": problems, "compared": compared, "harmed": harmed, "took_sec": took_sec}
    content |= {"attempts": len(attempts), "after_kills": lost, "with_check_sec": time.monotonic() - began}
    (out / "fleet_on_ray_nodes.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
