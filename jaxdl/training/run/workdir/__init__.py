"""The workdir of a run."""
