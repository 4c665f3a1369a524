"""`python -m jaxdl.launch ray`: a Python script for `ray job submit` that runs one process on each node."""

from __future__ import annotations

import json
from pathlib import Path
from pprint import pformat

import pydantic

from jaxdl.platform.launch.jobs.description import NEVER_RESTARTED, STOPPED, Command, Job, comment


class RayJob(Job):
    """Prints a Python script for ray job submit."""

    wait_sec: int = pydantic.Field(default=600, ge=1)
    """Seconds to wait for free nodes."""


def script(job: RayJob, command: Command) -> str:
    """The text of the Python script: `ray_program.py` with the settings of the job. It imports nothing of jaxdl."""
    values = {
        "NODES": job.nodes,
        "RESOURCES": {"CPU": job.cpus_per_node or 1} | ({"GPU": job.gpus_per_node} if job.gpus_per_node else {}),
        "SETUP": job.preparation(),
        "COMMAND": list(command.words),
        "ENVIRONMENT": job.environment(),
        "RESTARTS": job.restarts,
        "ALONE": command.has_learners,
        "NOT_RESTARTED": sorted((*NEVER_RESTARTED, *STOPPED)),
        "SAVE_SEC": job.save_sec,
        "WAIT_SEC": job.wait_sec,
    }
    settings = "".join(
        f"{name} = {pformat(value, width=100, compact=True, sort_dicts=False)}\n" for name, value in values.items()
    )
    settings += comment(job.network_hints(lambda name, value: f"ENVIRONMENT[{json.dumps(name)}] = {json.dumps(value)}"))
    environment = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(job.save_sec + 30), "RAY_DEDUP_LOGS": "0"}})
    about = [
        f"Start it from the folder of the command, with this file in it:  ray job submit --submission-id {job.name} \\",
        f"    --working-dir . --runtime-env-json '{environment}' -- python FILE",
        f"Stop it:  ray job stop {job.name}    (The runtime environment gives it time to save; Ray's default is 3 s.)",
        *command.notes,
    ]
    program = Path(__file__).with_name("ray_program.py").read_text(encoding="utf-8")
    before, _, after = program[program.index('"""') :].partition("# BEGIN SETTINGS")
    return comment(about) + before + settings + after.partition("# END SETTINGS\n")[2]
