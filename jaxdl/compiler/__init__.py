"""How XLA compiles the train step: options of one function, and a schedule that knows the network."""

from jaxdl.compiler.options import CompilerConfig, Options, compiled
from jaxdl.compiler.overlap import Links

__all__ = ["CompilerConfig", "Links", "Options", "compiled"]
