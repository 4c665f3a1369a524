"""`python -m jaxdl.launch skypilot`: a SkyPilot task for clouds, spot machines among them."""

from __future__ import annotations

from typing import Annotated

import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.token import VARIABLE
from jaxdl.platform.launch.jobs.description import (
    COORDINATOR_PORT,
    IMAGE,
    NEVER_RESTARTED,
    VOLUME,
    WORD,
    Command,
    Job,
    comment,
    export,
    exports,
    matches,
    wrap_command,
)
from jaxdl.platform.launch.jobs.yaml_text import block, quote


class SkyPilotJob(Job):
    """Prints a SkyPilot task for sky jobs launch."""

    gpu: Annotated[str | None, WORD] = None
    """The kind of GPU as `sky show-gpus` names it, for example H100."""
    spot: bool = False
    """Use spot machines; when they are preempted, SkyPilot replaces them and the run resumes."""
    infra: Annotated[str | None, matches(r"[A-Za-z0-9*._/@-]+", "a place, for example gcp/us-central1")] = None
    """Where to run, for example aws, gcp/us-central1 or kubernetes; the cheapest place otherwise."""
    image: Annotated[str | None, IMAGE] = None
    """A container image, as docker:NAME, or a machine image of the cloud."""
    volume: Annotated[str | None, VOLUME] = None
    """NAME:/PATH, a volume of SkyPilot that all nodes mount there: for the workdir and the data."""
    directory: str = "."
    """The folder of this machine that is copied to every node and that the command runs in."""

    @pydantic.model_validator(mode="after")
    def _kind_of_gpu(self) -> SkyPilotJob:
        if self.gpus_per_node and self.gpu is None:
            raise ValueError("which GPUs? Give --gpu NAME, as `sky show-gpus` lists them, for example --gpu H100.")
        if not self.gpus_per_node and self.gpu is not None:
            raise ValueError(f"--gpu {self.gpu} with --gpus-per-node 0: leave out one of them.")
        return self


def task(job: SkyPilotJob, command: Command) -> str:
    """The text of the YAML file. Raises ConfigError when the workdir would be lost with the machines."""
    lost = command.workdir is not None and not command.workdir.is_absolute()
    if (job.restarts or job.spot) and lost:
        raise ConfigError(
            f"--workdir {command.workdir}: a folder of each machine, and lost with it. Give the command a workdir on "
            "storage that all nodes mount (--volume NAME:/PATH, or file_mounts in the printed file)."
        )
    about = [
        f'Start it:  export {VARIABLE}="$(openssl rand -hex 16)"',
        f"           sky jobs launch -n {job.name} --secret {VARIABLE} FILE",
        f"Follow it:  sky jobs logs -n {job.name}    Stop it:  sky jobs cancel -n {job.name}",
        *command.notes,
        "The workdir must be on storage that all nodes mount and that outlives them. A checkpoint is finished by",
        "renaming its folder: a bucket that is mounted as a folder must be able to do that.",
    ]
    text = comment(about) + f"name: {quote(job.name)}\nnum_nodes: {job.nodes}\nworkdir: {quote(job.directory)}\n"
    text += f"secrets:\n  {VARIABLE}: null  # Only this job's processes know it: they admit no others.\n"
    text += _resources(job)
    if job.volume is not None:
        claim, mount = job.volume.split(":", 1)
        text += f"volumes:\n  {quote(mount)}: {quote(claim)}\n"
    return text + block("run", _run(job, command))


def _resources(job: SkyPilotJob) -> str:
    lines = []
    if job.gpus_per_node:
        lines.append(f"  accelerators: {quote(f'{job.gpu}:{job.gpus_per_node}')}\n")
    if job.cpus_per_node is not None:
        lines.append(f'  cpus: "{job.cpus_per_node}+"\n')
    if job.infra is not None:
        lines.append(f"  infra: {quote(job.infra)}\n")
    if job.image is not None:
        lines.append(f"  image_id: {quote(job.image)}\n")
    if job.spot:
        lines.append("  use_spot: true\n")
    never = ", ".join(str(code) for code in NEVER_RESTARTED)
    lines.append("  job_recovery:  # Preempted machines are replaced without limit; failures of the run:\n")
    lines.append(f"    max_restarts_on_errors: {job.restarts}  # Also after {never}, where a restart does not help.\n")
    return "resources:\n" + "".join(lines)


def _run(job: SkyPilotJob, command: Command) -> str:
    text = job.preparation()
    text += f'export JAX_COORDINATOR_ADDRESS="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{COORDINATOR_PORT}"\n'
    text += 'export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES"\n'
    text += 'export JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"\n'
    text += 'export JAXDL_HOST="node$SKYPILOT_NODE_RANK"\n'
    text += exports(job.environment()) + comment(job.network_hints(export))
    return text + f"exec {wrap_command(command.words, indent='    ')}\n"
