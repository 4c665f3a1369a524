"""The listeners that other programs have in them, each by itself: `python -m benchmarks.fuzz.programs NAME`."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from pathlib import Path

from jaxdl.parallel.asynchrony.outer import Outer
from jaxdl.parallel.asynchrony.policy import Policy
from jaxdl.parallel.asynchrony.syncer import Syncer
from jaxdl.parallel.cluster.address import ClusterSpec
from jaxdl.parallel.cluster.consistency import describe_process
from jaxdl.parallel.cluster.rendezvous import meet

TOKEN = "f5c1a2be9d0347e6a81b5c2d3e4f6071"
DESCRIPTION = describe_process({"batch_size": 8}, 1)


def rendezvous() -> None:
    """Process 0 of one start after the other, on one port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    print(f"port {port}", flush=True)
    while True:
        spec = ClusterSpec(f"127.0.0.1:{port}", 2, 0)
        meeting = meet(spec, DESCRIPTION, timeout_sec=300, token=TOKEN)
        assert meeting.hosts[1].startswith("legit"), meeting.hosts
        print(f"met {meeting.hosts[1]}", flush=True)
        for line in meeting.lines.values():
            line.close()


def syncer() -> None:
    """A syncer of two learners."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"port {listener.getsockname()[1]}", flush=True)
    policy = Policy(learners=2, every_steps=1, quorum=1, return_sec=0.5)
    said = Syncer(policy, Outer(), listener, TOKEN, Path("syncer"), silence_sec=5.0, say=lambda text: None).run()
    print(f"merged {said.version} {said.steps}", flush=True)


def spark() -> None:
    """The driver's side of a job of Spark."""
    from jaxdl.platform.spark.stream import Stream

    with Stream(2, "127.0.0.1", TOKEN) as stream:
        print(f"port {stream.address.rpartition(':')[2]}", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    logging.disable()
    os.environ["JAXDL_HOST"] = "first"
    {"rendezvous": rendezvous, "syncer": syncer, "spark": spark}[sys.argv[1]]()
