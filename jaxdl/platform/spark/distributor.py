"""`JaxDistributor`: many processes of a script or function, one for each task of a barrier job, as one run of JAX."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import concurrent.futures
import functools
import os
import pickle
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

from pyspark import BarrierTaskContext, cloudpickle
from pyspark.sql import SparkSession

from jaxdl.core.errors import ConfigError, without_frames
from jaxdl.parallel.cluster.token import make_token
from jaxdl.parallel.mesh import gpus_visible
from jaxdl.platform.launch.processes import free_port
from jaxdl.platform.spark.processes import Job, Outcome, Place, failure_message, main_arguments, reason_of, run_process
from jaxdl.platform.spark.stream import Stream

IGNORE_SSL = "spark.jaxdl.distributor.ignoreSsl"
"""Spark's setting that allows lines to come to the driver without encryption although the cluster has it."""
GRACE_SEC = 120.0
"""Seconds that a process may take to save after SIGTERM."""


class ProcessFailed(RuntimeError):
    """A process of a job failed. Its message is the end of what the process printed.

    Attributes:
      process, code: the first process that failed, and its exit code.
    """

    def __init__(self, outcome: Outcome, num_processes: int) -> None:
        super().__init__(failure_message(outcome, num_processes))
        self.process, self.code = outcome.process, outcome.code


class JaxDistributor:
    """Runs a script, a module or a function in several processes that JAX takes for one run.

    As `pyspark.ml.torch.distributor.TorchDistributor`, with the same arguments, for JAX.

    Args:
      num_processes: how many. Each is a process of JAX with all GPUs of its task.
      local_mode: on the driver's machine, without Spark's executors; else one barrier task for each process.
      use_gpu: on GPUs; else on CPUs, virtual ones as the config of the run says (`mesh.cpu_devices`).
      grace_sec: how long a process may take to save after SIGTERM.
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        *,
        grace_sec: float = GRACE_SEC,
    ) -> None:
        """Raises ConfigError for arguments that have no effect here."""
        if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
            raise ConfigError(f"num_processes={num_processes!r}: give a whole number, 1 or more.")
        if local_mode and use_gpu and not gpus_visible():
            raise ConfigError("use_gpu=True: this machine has no GPU that JAX can use. Give use_gpu=False.")
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu
        self.grace_sec = grace_sec

    def check(self, gpus: int | None = None) -> None:
        """Raises ConfigError when the session cannot run such a job, or gives a task another number of GPUs."""
        if self.local_mode:
            return
        session = _session(self.num_processes, use_gpu=self.use_gpu)
        given = session.conf.get("spark.task.resource.gpu.amount", "") or ""
        if gpus is not None and given != str(gpus):
            raise ConfigError(
                f"{gpus} GPUs of a process: spark.task.resource.gpu.amount is {given}. Give equal numbers."
            )

    @without_frames
    def run(self, main: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """What the function returned in process 0; None for a script (`train.py`) or a module (`jaxdl.train`).

        The output of all processes is printed here as it comes. When Spark kills a task, its process gets SIGTERM, so
        that a run saves. Spark starts the whole job again after other failures than exit codes 2 (user error),
        3 (diverged) and 4 (halted); a run of jaxdl then resumes.

        Raises:
          ConfigError: for a session that cannot run the job.
          ProcessFailed: when a process failed.
        """
        session = None if self.local_mode else _session(self.num_processes, use_gpu=self.use_gpu)
        host = "127.0.0.1" if session is None else session.conf.get("spark.driver.host", "127.0.0.1")
        secret, call, arguments = secrets.token_hex(16), b"", ()
        if callable(main):
            call = cloudpickle.dumps((main, args, kwargs))
        elif kwargs:
            raise ConfigError(f"run: {', '.join(kwargs)}: a script takes no arguments by name. Give '--name=value'.")
        else:
            arguments = main_arguments(main, args)
        with Stream(self.num_processes, host or "127.0.0.1", secret) as stream:
            job = Job(arguments, call, self.num_processes, self.use_gpu, stream.address, secret, make_token(),
                      self.grace_sec)  # fmt: skip
            outcomes = _run_here(job, stream) if session is None else _run_on(session, job, stream)
        return pickle.loads(outcomes[0].result) if outcomes[0].result else None


def _run_here(job: Job, stream: Stream) -> list[Outcome]:
    """Runs all processes on this machine, sharing its GPUs. Raises ProcessFailed."""
    coordinator, gpus = f"127.0.0.1:{free_port()}", _shares(job)
    host = socket.gethostname()

    def run(process: int) -> Outcome:
        outcome = run_process(job, Place(process, host, job.num_processes, coordinator, gpus=gpus[process]))
        if outcome.code:
            stream.stop()
        return outcome

    with concurrent.futures.ThreadPoolExecutor(job.num_processes) as threads:
        futures = [threads.submit(run, process) for process in range(job.num_processes)]
        try:
            outcomes = [future.result() for future in futures]
        except BaseException:
            stream.stop()
            raise
    return _check_outcomes(outcomes, stream, job)


def _shares(job: Job) -> list[tuple[str, ...] | None]:
    """The GPUs of each process on this machine; None leaves all to each of them."""
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if not job.use_gpu or job.num_processes == 1:
        return [None] * job.num_processes
    if not visible:
        from jaxdl.platform.search.engines import visible_gpus

        visible = visible_gpus()
    each = len(visible) // job.num_processes
    if not each:
        raise ConfigError(f"num_processes={job.num_processes}: this machine has {len(visible)} GPUs. Give fewer.")
    return [tuple(visible[place * each : (place + 1) * each]) for place in range(job.num_processes)]


def _session(num_processes: int, *, use_gpu: bool) -> SparkSession:
    """The active session. Raises ConfigError when it cannot run a barrier job of `num_processes` tasks."""
    session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()

    def setting(name: str) -> str:
        return session.conf.get(name, "") or ""

    if setting("spark.ssl.enabled") == "true" and setting(IGNORE_SSL) != "true":
        raise ConfigError(
            f"spark.ssl.enabled: what the processes print would come to the driver without encryption. Set "
            f"{IGNORE_SSL} to true if that may be."
        )
    master = setting("spark.master")
    slots = master[len("local[") : -1].partition(",")[0] if master.startswith("local[") else ""
    if master == "local" or slots.isdecimal():
        available = int(slots or 1) // int(setting("spark.task.cpus") or 1)
        if available < num_processes:
            raise ConfigError(
                f"{num_processes} processes: master {master} runs {available} tasks at a time, and all tasks of a "
                f"barrier job run at once. Give fewer, or local[{num_processes}]."
            )
    if use_gpu and not setting("spark.task.resource.gpu.amount"):
        raise ConfigError(
            "GPUs: spark.task.resource.gpu.amount is not set, so tasks get none. Set it to the GPUs of a process, or "
            "train on CPUs (use_gpu=False, gpusPerProcess=0)."
        )
    return session


def _run_on(session: SparkSession, job: Job, stream: Stream) -> list[Outcome]:
    """Runs a barrier job. Raises ProcessFailed, or what Spark raises when no process failed."""
    rows = session.range(0, job.num_processes, 1, job.num_processes)
    try:
        rows_of_outcomes = rows.mapInArrow(functools.partial(_task, job), "outcome binary", barrier=True).collect()
    except Exception as error:
        stream.wait_until_ended(job.grace_sec)
        if (failed := stream.failure) is not None:
            raise ProcessFailed(
                Outcome(failed.process, failed.code, failed.told, failed.end), job.num_processes
            ) from None
        killed = [f"process {ended.process} ended with exit code {ended.code}" for ended in stream.stopped]
        if killed:
            raise RuntimeError(
                f"Spark ended the job: {reason_of(str(error))}. Its processes were told to save: {', '.join(killed)}."
            ) from None
        raise
    outcomes = [pickle.loads(row.outcome) for row in rows_of_outcomes]
    return _check_outcomes(sorted(outcomes, key=lambda outcome: outcome.process), stream, job)


def _check_outcomes(outcomes: list[Outcome], stream: Stream, job: Job) -> list[Outcome]:
    failed = stream.failure
    if failed is not None and any(outcome.code for outcome in outcomes):
        raise ProcessFailed(Outcome(failed.process, failed.code, failed.told, failed.end), job.num_processes)
    for outcome in sorted(outcomes, key=lambda outcome: outcome.told):
        if outcome.code:
            raise ProcessFailed(outcome, job.num_processes)
    return outcomes


def _task(job: Job, batches: Iterator[Any]) -> Iterator[Any]:
    """A task of the barrier job. Raises RuntimeError for a failure after which Spark may start the job again."""
    import pyarrow

    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    assert context is not None
    infos, number = context.getTaskInfos(), context.partitionId()
    hosts = [info.address.rpartition(":")[0] or info.address for info in infos]
    told = context.allGather(f"{hosts[0]}:{free_port()}" if number == 0 else "")
    gpus = context.resources().get("gpu") if job.use_gpu else None
    place = Place(
        process=number,
        host=hosts[number],
        num_here=hosts.count(hosts[number]),
        coordinator=told[0],
        gpus=None if gpus is None else tuple(gpus.addresses),
    )
    outcome = run_process(job, place)
    if not outcome.is_final:
        raise RuntimeError(failure_message(outcome, job.num_processes))
    yield pyarrow.RecordBatch.from_pydict({"outcome": pyarrow.array([pickle.dumps(outcome)], pyarrow.binary())})
