"""One process of a run, for the tests of `jaxdl.parallel.cluster`: meets the others, sends heartbeats. No JAX.

Its options: {"address": "127.0.0.1:1234", "num_processes": 3, "process": 1, "at": 5, "do": "die", ...}.
"""

import atexit
import os
import resource
import signal
import sys
import threading
import time

from jaxdl.core.errors import ConfigError, fail
from jaxdl.parallel.cluster import ClusterError, Watchdog, end_together, heartbeat, leave_and_exit, membership
from jaxdl.parallel.cluster.address import ClusterSpec
from jaxdl.parallel.cluster.rendezvous import meet
from jaxdl.parallel.cluster.roles import begin
from jaxdl.training.run.signals import Stop, StopSignals


def stuck_for_good():
    threading.Event().wait()


def act(do):
    if do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif do == "crash":
        raise OSError(28, "No space left on device")
    elif do == "mistake":
        raise ConfigError("the data is not there.")
    elif do == "not saved":
        leave_and_exit(1)
    elif do in ("stuck", "wait"):
        heartbeat.enter("data" if do == "stuck" else "train")
        stuck_for_good()
    elif do == "compile":
        heartbeat.enter("compile")
        time.sleep(3)
        heartbeat.enter("train")
    elif do == "signal":
        os.kill(os.getpid(), signal.SIGTERM)


def loop(options):
    """Steps of any length that wait for nobody, so that the processes are far apart."""
    with StopSignals() as stop, Watchdog(options.get("hang_sec", 60), None):
        stop.share(every_polls=1)
        stop.run(lambda: time.sleep(options.get("setup_sec", 0)))
        print(f"{time.monotonic():.3f}", flush=True)
        for step in range(options.get("steps", 10**9)):
            try:
                stop.poll(step)
            except Stop as signal_:
                print(f"{signal_}: stopped at step {step}", flush=True)
                leave_and_exit(128 + signal_.signum)
            if step == options.get("at"):
                act(options.get("do"))
            time.sleep(options.get("step_sec", 0.02))


def main(options):
    spec = ClusterSpec(options["address"], options["num_processes"], options["process"])
    description = {"versions": {}, "files": {}, "config": {}, "devices": 2} | options.get("description", {})
    try:
        meeting = meet(spec, description, timeout_sec=options.get("timeout_sec", 30), token=options.get("token"))
        begin(spec.process, meeting, silence_sec=options.get("silence_sec", 30), heartbeat=heartbeat)
        print("together", meeting.hosts, flush=True)
        loop(options)
    except ConfigError as error:
        fail(str(error))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(75) from None


def enter(options, out, error):
    """Runs as a process forked from one that has imported everything, which takes milliseconds."""
    for name, number in ((out, 1), (error, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    os.environ["JAXDL_HOST"] = options["host"]
    if "open_files" in options:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options["open_files"], options["open_files"]))
    membership._SAME_END_SEC = 1.0
    try:
        with end_together():
            main(options)
    finally:
        atexit._run_exitfuncs()
