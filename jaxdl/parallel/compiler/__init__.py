"""XLA compilation of the train step: its options, and a schedule that accounts for the network."""

from jaxdl.parallel.compiler.options import CompilerConfig, Options, compiled
from jaxdl.parallel.compiler.overlap import Links

__all__ = ["CompilerConfig", "Links", "Options", "compiled"]
