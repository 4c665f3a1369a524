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
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.parallel.cluster import exits
from jaxdl.parallel.cluster.token import VARIABLE, make_token
from jaxdl.platform.fleet.engine import Engine, exit_code
from jaxdl.platform.fleet.keeper import EXIT_FILE, OUTPUT_FILE
from jaxdl.platform.fleet.resources import Amounts
from jaxdl.platform.fleet.store import Store, Submission
from jaxdl.platform.launch import die_with_parent
from jaxdl.platform.launch.ray_cluster import connect
from jaxdl.platform.launch.reaper import Reaper, kill_session

RESERVE_SEC = 600.0
"""How long an attempt waits for its nodes, if others than the fleet use them."""
_OTHERS_SEC, _CALL_SEC, _LEAVE_SEC, _POLL_SEC = 30.0, 60.0, 30.0, 0.5
_NOTICED_SEC = 30.0
"""How long an attempt whose actor is gone waits for Ray to say that its node is lost."""
_NODE_LABEL = "ray.io/node-id"
_OF_RAY: Mapping[str, tuple[str, float]] = {"cpus": ("CPU", 1.0), "gpus": ("GPU", 1.0), "memory-gb": ("memory", 1e9)}
"""Resource of a fleet -> (that of Ray, how many of it are one); other resources have one name."""
_NO_RESOURCES = ("node:", "object_store_memory", "accelerator_type:")


class OnRay(Engine):
    """A run has one process for each host, with all CPUs and GPUs of its node, or with what it needs of it."""

    name = "ray"
    options = ("address",)

    def __init__(self, store: Store, num_nodes: int, address: str | None = None) -> None:
        super().__init__(store, num_nodes)
        self._chosen: list[str] = []
        self._ray = connect(address or "auto", "--address")
        folder = str(store.folder.absolute())
        self._namespace = f"jaxdl-fleet-{hashlib.sha256(folder.encode()).hexdigest()[:12]}"

    def nodes(self) -> list[str]:
        """As many of the cluster's nodes that have CPUs, but for those taken out of service."""
        return self._in_service(set(self._ray_nodes()))

    def _in_service(self, known: set[str]) -> list[str]:
        # Those that it had stay, so that a node that joins the cluster takes nobody's place.
        self._chosen = [name for name in self._chosen if name in known]
        self._chosen += sorted(known - set(self._chosen))[: self.num_nodes - len(self._chosen)]
        return [name for name in self._chosen if name not in self.store.lost_nodes()]

    def resources(self) -> Mapping[str, Amounts]:
        """What Ray says that the nodes have: cpus, gpus, memory-gb (1e9 bytes of it), and custom resources."""
        known = self._ray_nodes()
        return {node: _from_ray(known[node]) for node in self._in_service(set(known))}

    def start(self, run: Submission, attempt: int, nodes: Sequence[str]) -> bool:
        """Starts a run; False if something of it is still alive. An attempt waits for lost nodes, see `RESERVE_SEC`."""
        if self._keeper(run) is not None:
            return False
        folder = self.store.path_of(run.name).absolute() / "attempts" / str(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        known, mine = self._ray_nodes(), _to_ray(run.needs)
        bundles = [(node, mine or _whole(known.get(node, {"CPU": 1.0}))) for node in nodes]
        actor = self._ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(Keeper)
        # On the node of its first host, so that no other node than those of the run can end it. Ray keeps to the node
        # only with `soft=False`; if the node is lost, the attempt is lost too.
        beside = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        where = beside(node_id=nodes[0], soft=False)
        named = {"name": run.name, "namespace": self._namespace, "lifetime": "detached", "scheduling_strategy": where}
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
        """The exit code of an attempt, `LOST` without one; None while it lives."""
        if self._keeper(run) is not None:
            return None
        return exit_code(self.store.path_of(run.name) / "attempts" / str(attempt) / EXIT_FILE)

    def _keeper(self, run: Submission) -> Any:
        """The keeper of the run's attempt; None if there is none."""
        try:
            return self._ray.get_actor(run.name, namespace=self._namespace)
        except ValueError:
            return None

    def _ray_nodes(self) -> dict[str, dict[str, float]]:
        """Node -> what Ray says that it has, of those with CPUs."""
        return {
            node["NodeID"]: node["Resources"]
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU")
        }


def _from_ray(known: Amounts) -> dict[str, float]:
    """What a node has, by the names of a fleet."""
    ours = {theirs: (name, unit) for name, (theirs, unit) in _OF_RAY.items()}
    amounts = {}
    for theirs, amount in known.items():
        if not theirs.startswith(_NO_RESOURCES):
            name, unit = ours.get(theirs, (theirs, 1.0))
            amounts[name] = amount / unit
    return amounts


def _to_ray(needs: Amounts) -> dict[str, float]:
    """What a host needs, by the names of Ray."""
    return {_OF_RAY.get(name, (name,))[0]: amount * _OF_RAY.get(name, (name, 1.0))[1] for name, amount in needs.items()}


def _whole(known: Amounts) -> dict[str, float]:
    """What a host asks for that has a node alone."""
    return {name: known[name] for name in ("CPU", "GPU") if known.get(name)}


def _options(bundle: Amounts) -> dict[str, Any]:
    """What an actor asks for in this bundle."""
    arguments = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    asked: dict[str, Any] = {"num_cpus": 0, "resources": {}}
    for name, amount in bundle.items():
        if name in arguments:
            asked[arguments[name]] = int(amount) if name == "memory" else amount
        else:
            asked["resources"][name] = amount
    return asked


class Keeper:
    """The actor of an attempt. It begins when it is made, so that a server that is killed then need not call it."""

    def __init__(
        self,
        folder: str,
        directory: str,
        command: Sequence[str],
        hosts: Sequence[tuple[str, Mapping[str, float]]],
        environment: Mapping[str, str],
    ) -> None:
        """`hosts`: the node of each, and its bundle."""
        self._ray = importlib.import_module("ray")
        self._folder, self._directory, self._command = Path(folder), directory, list(command)
        self._nodes, self._bundles = [node for node, _ in hosts], [dict(bundle) for _, bundle in hosts]
        self._environment = dict(environment)
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
        except ConfigError as error:
            code, said = exits.MISTAKE, str(error)
        except self._ray.exceptions.RayTaskError as error:  # The command cannot be started, say.
            code, said = 1, str(error)
        except self._ray.exceptions.RayError as error:
            code, said = exits.BROKEN, f"a node was lost: {error}"
            self._await_loss()
        except Exception as error:  # The actor must end, and say why, whatever happens.
            code, said = 1, repr(error)
        try:
            if said:
                with (self._folder / OUTPUT_FILE).open("a", encoding="utf-8", errors="backslashreplace") as output:
                    output.write(f"fleet: {said}\n")
            replace_file(self._folder / EXIT_FILE, json.dumps({"code": code, "at": time.time()}).encode())
        finally:  # Without its file the attempt counts as lost.
            # An actor may end itself in one of its calls only. Its end would free what it has reserved, too.
            self._ray.get_runtime_context().current_actor.leave.remote()
            time.sleep(_LEAVE_SEC)
            os._exit(0)

    def _await_loss(self) -> None:
        """Waits until Ray says that a node is lost, as it does some seconds after it has lost the actors there.

        The server then knows why the attempt has ended: that counts as no failure, and the node gets no other run.
        """
        end = time.monotonic() + _NOTICED_SEC
        while time.monotonic() < end:
            if not set(self._nodes) <= {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}:
                return
            time.sleep(_POLL_SEC)

    def _run(self) -> int:
        for gpus in (bundle.get("GPU", 0.0) for bundle in self._bundles):
            if gpus > 1 and gpus % 1:
                raise ConfigError(f"needs gpus={gpus:g}: Ray gives a part of one GPU, or whole ones. Ask for such.")
        placing = importlib.import_module("ray.util.placement_group")
        where = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        group = placing.placement_group(
            self._bundles,
            # Each on a node of its own, but for hosts that share one.
            strategy="STRICT_SPREAD" if len(set(self._nodes)) == len(self._nodes) else "PACK",
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
            for index, bundle in enumerate(self._bundles):
                kind = self._ray.remote(max_restarts=0, **_options(bundle))(Node)
                place = where(group, placement_group_bundle_index=index)
                actors.append(kind.options(scheduling_strategy=place).remote())
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
        for index, (actor, node, bundle) in enumerate(zip(actors, self._nodes, self._bundles, strict=True)):
            output = OUTPUT_FILE if index == 0 else f"{index}.{OUTPUT_FILE}"
            name = node if self._nodes.count(node) == 1 else f"{node}/{index}"
            variables = {"JAX_PROCESS_ID": str(index), "JAXDL_HOST": name, **_devices(bundle)}
            starting.append(
                actor.start.remote(self._command, self._directory, {**shared, **variables}, str(self._folder / output))
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
    """The process of one host; it ends with this actor, and so does what it has started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper = Reaper(detached=True)

    def place(self) -> tuple[str, int]:
        """The address of the node, and a port on which nothing listens."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return importlib.import_module("ray").util.get_node_ip_address(), probe.getsockname()[1]

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
        self._reaper.watch(self._process.pid)

    def code(self) -> int | None:
        """None while the process runs; then its exit code, 128 + N after signal N."""
        if self._process is None:
            return None
        running, code = self._process.returncode is None, self._process.poll()
        if running and code is not None:  # Workers of a process that was killed.
            kill_session(self._process.pid)
            self._reaper.forget(self._process.pid)
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Sends the process a signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _devices(bundle: Amounts) -> dict[str, str]:
    """Which devices a process has. With all variables set JAX does not look for a cluster.

    Ray gives an actor its GPUs by CUDA_VISIBLE_DEVICES, which the process inherits; JAX counts those from 0.
    """
    if gpus := math.ceil(bundle.get("GPU", 0.0)):
        return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(gpus)))}
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JAX_LOCAL_DEVICE_IDS": "0"}
