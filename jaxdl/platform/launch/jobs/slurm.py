"""`python -m jaxdl.launch slurm`: a batch script with one task per node."""

from __future__ import annotations

import shlex
from typing import Annotated

import pydantic

from jaxdl.parallel.cluster.token import VARIABLE
from jaxdl.platform.launch.jobs.description import (
    IMAGE,
    NEVER_RESTARTED,
    STOPPED,
    WORD,
    Command,
    Job,
    comment,
    export,
    exports,
    matches,
    wrap_command,
)


class SlurmJob(Job):
    """Prints a Slurm batch script for sbatch."""

    time: Annotated[str, matches(r"(\d+-)?\d+(:\d+){0,2}", "a time limit, HH:MM:SS or D-HH:MM:SS")] = "24:00:00"
    """The time limit as Slurm writes it: HH:MM:SS or D-HH:MM:SS."""
    partition: Annotated[str | None, WORD] = None
    """The partition (queue)."""
    account: Annotated[str | None, WORD] = None
    """The account that is charged."""
    qos: Annotated[str | None, WORD] = None
    """The quality of service."""
    constraint: Annotated[str | None, matches(r"[A-Za-z0-9._&|!*\[\]-]+", "features, for example a100&ib")] = None
    """Features that the nodes must have."""
    image: Annotated[str | None, IMAGE] = None
    """A container image; needs the Slurm plugin pyxis."""
    fewest_nodes: int | None = pydantic.Field(default=None, ge=1)
    """Start on as few nodes as this, if --nodes are not free: each start of the job then has what Slurm gives it, and
    resumes there. The mesh of the command must fit all sizes: --mesh.replica -1 --mesh.fsdp 8 with 8 GPUs a node."""
    requeue: bool = False
    """Requeue the job at its time limit; the run resumes from its last save."""

    @pydantic.model_validator(mode="after")
    def _fewest(self) -> SlurmJob:
        if self.fewest_nodes is not None and self.fewest_nodes > self.nodes:
            raise ValueError(f"fewest_nodes = {self.fewest_nodes}: it is more than nodes = {self.nodes}.")
        return self

    def sizes(self) -> range:
        """The numbers of nodes with which Slurm may start the job."""
        return range(self.fewest_nodes or self.nodes, self.nodes + 1)


def batch_script(job: SlurmJob, command: Command) -> str:
    """The text of the script. Resubmitted, or requeued by Slurm, it resumes the run of the same workdir."""
    return "\n".join(
        [_header(job, command), "set -euo pipefail\n", environment_text(job), SIGNALS, _loop(job, command)]
    )


def _header(job: SlurmJob, command: Command) -> str:
    chosen = {"partition": job.partition, "account": job.account, "qos": job.qos, "constraint": job.constraint}
    # One task per node for all its GPUs. With --gpus-per-task each task would see its own GPUs as number 0 only, and
    # Slurm would bind them, which breaks JAX and NCCL inside a node.
    options = {
        "job-name": job.name,
        "nodes": f"{job.fewest_nodes}-{job.nodes}" if job.fewest_nodes else str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.gpus_per_node) if job.gpus_per_node else None,
        "cpus-per-task": str(job.cpus_per_node) if job.cpus_per_node else None,
        "time": job.time,
        "signal": time_signal(job.save_sec),
        "output": f"{job.name}-%j.out",
        "open-mode": "append",
        **chosen,
    }
    flags = ["requeue" if command.workdir or job.requeue else "no-requeue"]
    if job.cpus_per_node is None:
        flags += ["exclusive", "mem=0"]
    lines = [f"#SBATCH --{name}={value}\n" for name, value in options.items() if value is not None]
    lines += [f"#SBATCH --{flag}\n" for flag in flags]
    about = [
        "Submit it from the folder in which the command runs:  sbatch FILE",
        "Follow it:  tail -f " + f"{job.name}-JOBID.out" + "   Stop it (it saves first):  scancel --signal=TERM JOBID",
        *command.notes,
        "",
        f"{time_signal(job.save_sec)}: so many seconds before the time limit, or up to a minute earlier, this shell",
        "gets a signal, at which it sends SIGTERM to every process; they save and exit.",
    ]
    if job.image is not None:
        about.append(
            "Only this folder is visible in the container: add the workdir and the data to --container-mounts."
        )
    if job.cpus_per_node is None:
        about.append("Whole nodes with all their memory: give --cpus-per-node to share nodes with other jobs.")
    return "#!/bin/bash\n" + "".join(lines) + comment(about)


def time_signal(save_sec: int) -> str:
    """The option --signal: to the shell of the script alone, which so knows a time limit from who stops the job."""
    return f"B:USR1@{save_sec}"


SIGNALS = """\
# USR1: Slurm says that the time is almost up. USR2 asks the same without a time limit. SIGTERM from Slurm, which the
# processes get too, is not for this shell: it stays, to read their exit codes.
ending="" step="" told=""
end_step() {
    ending="${ending:-$1}"
    if [[ $told || ! $step ]]; then return; fi
    told=1
    # srun itself would kill the processes at SIGTERM. What Slurm has not started yet gets no signal.
    until squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i 2>/dev/null | grep -qE '\\.[0-9]+ *$'; do
        kill -0 "$step" 2>/dev/null || return 0
        sleep 0.5
    done
    until scancel --signal=TERM "$SLURM_JOB_ID"; do
        kill -0 "$step" 2>/dev/null || return 0
        sleep 2
    done
}
# In the background, since bash acts on signals only between commands, and in `wait`.
await_step() {
    step=$!
    if [[ $ending ]]; then end_step "$ending"; fi
    while kill -0 "$step" 2>/dev/null; do
        wait "$step" || true
    done
    code=0
    wait "$step" || code=$?
    step=""
}
# Slurm takes the nodes for another job, and has asked the processes to end.
preempted() {
    scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep -qE 'PreemptTime=[0-9]'
}
trap 'end_step limit' USR1
trap 'end_step asked' USR2
trap : TERM
"""
"""Lines of bash: what the shell of a job does with signals while `await_step` waits for a job step, and reads its code
into `code`. `ending` is `limit` or `asked` then."""


def environment_text(job: Job) -> str:
    """Lines of bash that set what the processes have in common."""
    text = comment(
        [
            "The address at which the processes meet: that of the first node, as Slurm knows it. The port is the one",
            "that JAX would choose: outside the range of outgoing connections, and different for each job. The nodes",
            "must reach each other on it.",
        ]
    )
    text += 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")\n'
    text += 'address="$(scontrol show node "${hosts[0]}" | sed -n \'s/.*NodeAddr=\\([^ ]*\\).*/\\1/p\' || true)"\n'
    text += 'export JAX_COORDINATOR_ADDRESS="${address:-${hosts[0]}}:$((61440 + SLURM_JOB_ID % 4096))"\n'
    text += 'export JAX_NUM_PROCESSES="$SLURM_JOB_NUM_NODES"\n'
    text += comment(["A random secret of this job's processes: they admit no others. It is not printed."])
    text += f"{VARIABLE}=\"$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')\"\nexport {VARIABLE}\n"
    return text + exports(job.environment()) + comment(job.network_hints(export))


TASK = 'export JAX_PROCESS_ID="$SLURM_PROCID" JAXDL_HOST="$SLURMD_NODENAME"\n'
"""A line of bash of each task before its command: the number of the process, and the name of its node."""


_PREEMPTED = """\
    if preempted; then
        echo "Slurm takes the nodes for another job; this one is requeued." >&2
        scontrol requeue "$SLURM_JOB_ID"
        exit "$code"
    fi
"""


def _loop(job: SlurmJob, command: Command) -> str:
    # Each task prepares its node and sets the process number. `exec`, so that Slurm's signals reach Python itself.
    if job.preparation():
        # Files that a user's lines `source` would take the command's words for their own arguments.
        task = 'jaxdl_command=("$@")\nset --\n' + job.preparation() + TASK + 'exec "${jaxdl_command[@]}"'
    else:
        task = TASK + 'exec "$@"'
    again = (
        "The time limit is reached; the job is requeued."
        if job.requeue
        else "Saved; the same sbatch resumes from there."
    )
    requeue = '        scontrol requeue "$SLURM_JOB_ID"\n' if job.requeue else ""
    # Slurm would not queue a job again that has ended by itself in the time that it was given to save.
    after_preemption = _PREEMPTED if command.workdir or job.requeue else ""
    never = " | ".join(str(code) for code in NEVER_RESTARTED)
    return f"""\
num_restarts=0
export JAXDL_RESTART="${{SLURM_RESTART_COUNT:-0}}" JAXDL_RESTART_REASON=""
if ((JAXDL_RESTART > 0)); then
    JAXDL_RESTART_REASON="requeued by Slurm"
fi
while true; do
    srun {_srun_options(job, command)} \\
        bash -c {shlex.quote(task)} task \\
        {wrap_command(command.words, indent=" " * 8)} &
    await_step
    case $code in
    0) exit 0 ;;
    {never})
        echo "Ended with $code: a restart would end the same." >&2
        exit "$code"
        ;;
    esac
    case $ending in
    limit)
        echo "{again}" >&2
{requeue}        exit "$code"
        ;;
    asked) exit "$code" ;;
    esac
{after_preemption}\
    case $code in {" | ".join(str(code) for code in STOPPED)}) exit "$code" ;; esac
    if ((num_restarts >= {job.restarts})); then
        exit "$code"
    fi
    num_restarts=$((num_restarts + 1))
    JAXDL_RESTART=$((JAXDL_RESTART + 1))
    JAXDL_RESTART_REASON="srun ended with $code"
    echo "$JAXDL_RESTART_REASON: restart $num_restarts of {job.restarts}." >&2
done
"""


def _srun_options(job: SlurmJob, command: Command) -> str:
    # Learners do not need each other: the others are not killed.
    options = step_options(0 if command.has_learners else job.save_sec)
    if job.cpus_per_node is not None:
        options += f" --cpus-per-task={job.cpus_per_node}"  # srun does not inherit it from sbatch.
    if job.image is not None:
        options += f" \\\n        --container-image={shlex.quote(job.image)}"
        options += ' --container-mounts="$PWD:$PWD" --container-workdir="$PWD"'
    return options


def step_options(wait_sec: int) -> str:
    """Options of srun for one task on each node of the job.

    No kill-on-bad-exit: when a process fails, the others notice it and report the reason. They have `wait_sec` after
    the first exit, and are killed then; 0: never.
    """
    return f"--ntasks-per-node=1 --kill-on-bad-exit=0 --wait={wait_sec} --cpu-bind=none --label"
