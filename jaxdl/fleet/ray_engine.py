"""Runs on the nodes of a Ray cluster. The folder of the fleet, and those of the runs, must be the same on all nodes.

Each attempt has a keeper, an actor that outlives the server. It reserves its nodes in a placement group, which cannot
be resized (a run that gets other nodes is another attempt, with another group), runs one process on each, and writes
the exit code. Its name is that of the run, so that a run has one attempt at a time; what it has started ends with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.cluster import exits
from jaxdl.cluster.token import VARIABLE, make_token
from jaxdl.errors import ConfigError
from jaxdl.fleet.engine import LOST, Engine
from jaxdl.fleet.keeper import EXIT_FILE, OUTPUT_FILE
from jaxdl.fleet.store import Store, Submission
from jaxdl.launch import die_with_parent
from jaxdl.writing import replace_file

RESERVE_SEC = 600.0
"""How long an attempt waits for its nodes, if others than the fleet use them."""
_OTHERS_SEC, _CALL_SEC, _LEAVE_SEC, _POLL_SEC = 30.0, 60.0, 30.0, 0.5
_NODE_LABEL = "ray.io/node-id"


class OnRay(Engine):
    """A run on n nodes is one process on each, with all CPUs and GPUs of the node."""

    name = "ray"
    options = ("address",)

    def __init__(self, store: Store, num_nodes: int, address: str | None = None) -> None:
        super().__init__(store, num_nodes)
        self._chosen: list[str] = []
        try:
            self._ray = importlib.import_module("ray")
        except ImportError:
            raise ConfigError("--engine ray: Ray is not installed. Install it: pip install 'jaxdl[ray]'.") from None
        folder = str(store.folder.absolute())
        self._namespace = f"jaxdl-fleet-{hashlib.sha256(folder.encode()).hexdigest()[:12]}"
        if self._ray.is_initialized():
            return
        try:
            with warnings.catch_warnings():  # It starts its processes by fork, which does nothing of JAX there.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                self._ray.init(address or "auto", log_to_driver=False)
        except (ConnectionError, ValueError, OSError) as error:
            raise ConfigError(f"--address {address or 'auto'}: {error}. Give that of a Ray cluster.") from None

    def nodes(self) -> list[str]:
        """As many of the cluster's nodes that have CPUs, but for those taken out of service."""
        known = set(self._resources())
        # Those that it had stay, so that a node that joins the cluster takes nobody's place.
        self._chosen = [name for name in self._chosen if name in known]
        self._chosen += sorted(known - set(self._chosen))[: self.num_nodes - len(self._chosen)]
        return [name for name in self._chosen if name not in self.store.lost_nodes()]

    def start(self, run: Submission, attempt: int, nodes: Sequence[str]) -> bool:
        """See `Engine.start`. An attempt whose nodes are gone by now waits for them, see `RESERVE_SEC`."""
        if self._keeper(run) is not None:
            return False
        folder = self.store.run_folder(run.name).absolute() / "attempts" / str(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        known = self._resources()
        bundles = {name: known.get(name, {"CPU": 1.0}) for name in nodes}
        actor = self._ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(Keeper)
        named = {"name": run.name, "namespace": self._namespace, "lifetime": "detached"}
        with contextlib.suppress(ValueError):  # Another server was faster.
            environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
            actor.options(**named).remote(str(folder), run.folder, run.words(len(nodes)), bundles, environment)
            return True
        return False

    def stop(self, run: Submission, attempt: int) -> None:
        """The keeper sends SIGTERM to the process of each node."""
        if (keeper := self._keeper(run)) is not None:
            keeper.stop.remote(attempt)

    def kill(self, run: Submission, attempt: int) -> None:
        """Ends the keeper, with what it has started."""
        if self.poll(run, attempt) is None and (keeper := self._keeper(run)) is not None:
            self._ray.kill(keeper)

    def poll(self, run: Submission, attempt: int) -> int | None:
        """See `Engine.poll`."""
        if self._keeper(run) is not None:
            return None
        try:
            path = self.store.run_folder(run.name) / "attempts" / str(attempt) / EXIT_FILE
            return int(json.loads(path.read_text())["code"])
        except FileNotFoundError:
            return LOST

    def _keeper(self, run: Submission) -> Any:
        """The keeper of the run's attempt; None if there is none."""
        try:
            return self._ray.get_actor(run.name, namespace=self._namespace)
        except ValueError:
            return None

    def _resources(self) -> dict[str, dict[str, float]]:
        """Node -> the CPUs and GPUs of it."""
        found = {}
        for node in self._ray.nodes():
            total = {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")}
            if node["Alive"] and total["CPU"]:
                found[node["NodeID"]] = {name: number for name, number in total.items() if number}
        return found


class Keeper:
    """The actor of an attempt. It begins when it is made, so that a server that is killed then need not call it."""

    def __init__(
        self,
        folder: str,
        directory: str,
        command: Sequence[str],
        nodes: Mapping[str, Mapping[str, float]],
        environment: Mapping[str, str],
    ) -> None:
        self._ray = importlib.import_module("ray")
        self._folder, self._directory, self._command = Path(folder), directory, list(command)
        self._nodes, self._environment = dict(nodes), dict(environment)
        self._stop = threading.Event()
        threading.Thread(target=self._keep, name="jaxdl-fleet-keeper", daemon=True).start()

    def stop(self, attempt: int) -> None:
        """Asks the processes of this attempt to save and end."""
        if self._folder.name == str(attempt):
            self._stop.set()

    def leave(self) -> None:
        """Ends the actor."""
        self._ray.actor.exit_actor()

    def _keep(self) -> None:
        """Runs the attempt, writes its exit code, and ends the actor."""
        said = ""
        try:
            code = self._run()
        except self._ray.exceptions.RayTaskError as error:  # The command cannot be started, say.
            code, said = 1, str(error)
        except self._ray.exceptions.RayError as error:
            code, said = exits.BROKEN, f"a node was lost: {error}"
        except Exception as error:  # The actor must end, and say why, whatever happens.
            code, said = 1, repr(error)
        try:
            if said:
                with (self._folder / OUTPUT_FILE).open("a") as output:
                    output.write(f"fleet: {said}\n")
            replace_file(self._folder / EXIT_FILE, json.dumps({"code": code, "at": time.time()}).encode())
        finally:  # Without its file the attempt counts as lost.
            # An actor may end itself in one of its calls only. Its end would free what it has reserved, too.
            self._ray.get_runtime_context().current_actor.leave.remote()
            time.sleep(_LEAVE_SEC)
            os._exit(0)

    def _run(self) -> int:
        placing = importlib.import_module("ray.util.placement_group")
        where = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        group = placing.placement_group(
            list(self._nodes.values()),
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{_NODE_LABEL: name} for name in self._nodes],
        )
        actors: list[Any] = []
        try:
            end = time.monotonic() + RESERVE_SEC
            while not group.wait(1):
                if self._stop.is_set():
                    return 128 + signal.SIGTERM
                if time.monotonic() > end:
                    raise TimeoutError(f"the nodes were not free within {RESERVE_SEC:g} s")
            for index, resources in enumerate(self._nodes.values()):
                kind = self._ray.remote(
                    num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), max_restarts=0
                )(Node)
                actors.append(
                    kind.options(scheduling_strategy=where(group, placement_group_bundle_index=index)).remote()
                )
            self._begin(actors)
            return self._watch(actors)
        finally:
            for actor in actors:
                self._ray.kill(actor)
            placing.remove_placement_group(group)

    def _begin(self, actors: Sequence[Any]) -> None:
        places = self._ray.get([actor.place.remote() for actor in actors], timeout=RESERVE_SEC)
        address, port = places[0]
        shared = {
            **self._environment,
            "JAX_COORDINATOR_ADDRESS": f"{address}:{port}",
            "JAX_NUM_PROCESSES": str(len(actors)),
            VARIABLE: make_token(),
            "PYTHONUNBUFFERED": "1",
        }
        starting = []
        for index, (actor, resources) in enumerate(zip(actors, self._nodes.values(), strict=True)):
            output = OUTPUT_FILE if index == 0 else f"{index}.{OUTPUT_FILE}"
            own = {"JAX_PROCESS_ID": str(index), "JAXDL_HOST": list(self._nodes)[index], **_devices(resources)}
            starting.append(
                actor.start.remote(self._command, self._directory, {**shared, **own}, str(self._folder / output))
            )
        self._ray.get(starting, timeout=_CALL_SEC)

    def _watch(self, actors: Sequence[Any]) -> int:
        """Waits for all processes; after the first failure the others are killed in the end. Returns its exit code."""
        asked, first, deadline = False, 0, float("inf")
        while True:
            if self._stop.is_set() and not asked:
                asked = True
                self._ray.get([actor.send.remote(int(signal.SIGTERM)) for actor in actors], timeout=_CALL_SEC)
            codes = self._ray.get([actor.code.remote() for actor in actors], timeout=_CALL_SEC)
            failed = [code for code in codes if code]
            if failed and not first:
                first, deadline = failed[0], time.monotonic() + (float("inf") if asked else _OTHERS_SEC)
            if first == exits.BROKEN:  # That process says that another one failed.
                first = next((code for code in failed if code != exits.BROKEN), first)
            if None not in codes or time.monotonic() > deadline:
                return first
            time.sleep(_POLL_SEC)


class Node:
    """The process of one node; it ends with this actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int]:
        """The address of the node, and a port on which nothing listens."""
        with socket.socket() as one:
            one.bind(("", 0))
            return importlib.import_module("ray").util.get_node_ip_address(), one.getsockname()[1]

    def start(self, command: Sequence[str], directory: str, environment: Mapping[str, str], output: str) -> None:
        """Starts the command; `python` at its start is the Python of this node's workers."""
        words = [sys.executable, *command[1:]] if command[0] in ("python", "python3") else list(command)
        with Path(output).open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, die_with_parent.__file__, str(os.getpid()), *words],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def code(self) -> int | None:
        """None while the process runs; then its exit code, 128 + N after signal N."""
        code = None if self._process is None else self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Sends the process a signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _devices(resources: Mapping[str, float]) -> dict[str, str]:
    """Which devices of its node a process has. With all variables set JAX does not look for a cluster."""
    if gpus := int(resources.get("GPU", 0)):
        return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(gpus)))}
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JAX_LOCAL_DEVICE_IDS": "0"}
