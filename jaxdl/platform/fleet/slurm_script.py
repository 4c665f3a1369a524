"""The script of a job of Slurm that runs an attempt of a fleet, and says in files which job it is and how it ended."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

from jaxdl.platform.fleet.keeper import EXIT_FILE
from jaxdl.platform.fleet.store import Submission
from jaxdl.platform.launch.jobs import slurm

JOB_FILE = "job"
"""The number of the job."""
LIMIT, PREEMPTED = "limit", "preempted"
"""Why an attempt has ended, in its file: its time was over, or Slurm took its nodes for another job."""
ASKED_TO_END = 128 + signal.SIGTERM


def script_of(job: slurm.SlurmJob, run: Submission, attempt: int, folder: Path) -> str:
    """The script of the job of an attempt, for any number of nodes: it may change while the job waits."""
    python, *rest = run.command
    # Of the server, as its other files: the nodes share them.
    words = [sys.executable if python in ("python", "python3") else python, *rest]
    variables = {} if job.gpus_per_node else {"JAX_NUM_CPU_DEVICES": "1"}
    environment = slurm.environment_text(job) + slurm.exports(variables)
    return f"""\
#!/bin/bash
# Attempt {attempt} of run {run.name} of the fleet in {folder.parents[3].as_posix()!r}.
set -uo pipefail
folder={shlex.quote(str(folder))}
echo "$SLURM_JOB_ID" > "$folder/{JOB_FILE}"
rm -f "$folder/{EXIT_FILE}"
finish() {{
    printf '{{"code": %d, "at": %d, "why": "%s"}}' "$1" "$(date +%s)" "$2" > "$folder/{EXIT_FILE}.new"
    mv "$folder/{EXIT_FILE}.new" "$folder/{EXIT_FILE}"
    exit "$1"
}}
{slurm.SIGNALS}
{environment}
words=(
{"".join(f"    {shlex.quote(word)}{chr(10)}" for word in words)})
words=("${{words[@]//\\{{nodes\\}}/$SLURM_JOB_NUM_NODES}}")
export JAXDL_RESTART={attempt - 1} JAXDL_RESTART_REASON=""
if [[ $ending ]]; then finish {ASKED_TO_END} "$ending"; fi
srun {slurm.step_options(job.save_sec)} --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\
    bash -c {shlex.quote(slurm.TASK + 'exec "$@"')} task "${{words[@]}}" &
await_step
if [[ ! $ending ]] && preempted; then ending={PREEMPTED}; fi
finish "$code" "$ending"
"""
