"""What `python -m jaxdl.train` prints before JAX is imported: its help without a config, and its first line."""

from __future__ import annotations

from collections.abc import Mapping

from jaxdl import __version__
from jaxdl.core.startup import example_config, find_config, shipped_configs


def first_line(values: Mapping[str, str]) -> str:
    """The config and the workdir of a run whose options are `values`."""
    where = f" -> {values['workdir']}" if "workdir" in values else ""
    return f"jaxdl {__version__}: {find_config(values['config'])[0]}{where}, loading JAX"


def overview(prog: str) -> str:
    """The text of `--help` without a config: usage, the usual options, and the configs that come with jaxdl."""
    width = max(map(len, shipped_configs()), default=0)
    configs = "\n".join(f"  {name:{width}}  {about}" for name, about in shipped_configs().items())
    return f"""usage: {prog} --config FILE [--workdir FOLDER] [OPTIONS]

Trains an experiment: a Python file with a function config(), the name of a config that comes with jaxdl, or the
config.json of a run. The same command with the same --workdir resumes the run.

  {prog} --config {example_config()} --workdir runs/digits

Usual options:
  --workdir FOLDER              folder for checkpoints, metrics and curves; without it nothing is saved
  --devices N                   run on N virtual CPU devices
  --init-from FOLDER            begin with the parameters of another run
  --explain                     print the sharding of the parameters and the memory of a step, then exit
  --print-config                print the config that these options make of the file's, then exit
  --epochs N, --steps N         length of the run
  --batch-size N                examples per step, over all devices
  --optimizer NAME              the optimizer; its fields are --optimizer.learning-rate N and others
  --exchange NAME               how gradients are averaged over the slow network
  --mesh.replica N              replicas, which exchange gradients; also --mesh.stage, .fsdp, .context and .tensor

With --config FILE --help: every option, with its default in that file.

Configs that come with jaxdl:
{configs}

Other commands: python -m jaxdl --help"""
