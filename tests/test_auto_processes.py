"""The exchange `auto` in two processes: both choose alike, by the network that is really between them."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
from runs import ROOT

from jaxdl.core.config import ConfigError
from jaxdl.platform.launch.netns import Network, check_possible

CODE = """
import json
from jaxdl.parallel.cluster import start_devices
from jaxdl.exchange import Auto, GradientLayout
from jaxdl.parallel.mesh import Axis, MeshConfig, make_mesh
start_devices(MeshConfig())
mesh = make_mesh(MeshConfig(replica=2, fsdp=2))
import jax
layout = GradientLayout(specs={"kernel": jax.P(Axis.FSDP.value)}, inner={Axis.FSDP.value: 2})
choice = Auto(candidates=("topk",)).choose({"kernel": (256, 1024)}, layout, mesh)
print("\\nCHOICE", json.dumps([choice.best.model_dump(), choice.reasons]), flush=True)
"""


def choices(address, prefixes):
    """What each of two processes chooses, and why."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_COORDINATOR_ADDRESS": f"{address}:{port}", "JAX_NUM_PROCESSES": "2"}
    environment |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", CODE],
            cwd=ROOT,
            env=environment | {"JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, prefix in enumerate(prefixes)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [re.findall(r"^CHOICE (.*)$", stdout, re.MULTILINE) for stdout, _ in outputs]
    return [json.loads(line) for [line] in lines]


@pytest.mark.slow
def test_both_compress_on_a_slow_network():
    try:
        check_possible()
    except ConfigError as error:
        pytest.skip(f"needs network namespaces: {error}")
    with Network(2, "20mbit") as network:
        first, second = choices(network.hosts[0].address, [host.prefix for host in network.hosts])
    assert first == second
    config, lines = first
    assert config["kind"] == "topk"
    # Two devices share 20 Mbit/s; headers and stalls cost a part of it, and after a pause a burst passes at full speed.
    [gbps] = re.findall(r"a device sends ([\d.e-]+) Gb/s", "\n".join(lines))
    assert 0.003 < float(gbps) < 0.0125
