"""Where kernels of our own run: on NVIDIA GPUs on which they have proved right, the same on all processes."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.cluster.agree import from_each_process


@dataclass
class OwnKernels:
    """A group of kernels by XLA's Triton, for which plain XLA does the same more slowly.

    By default they are used on GPUs of compute capability 9 (Hopper) or later where they prove right; and where no GPU
    is, to compile for some. An environment variable decides otherwise: `xla` is plain XLA, and `triton` takes the
    kernels untried, from capability 8 (A100) on.
    """

    variable: str
    """The environment variable."""
    what: str
    """What messages call the kernels."""
    instead: str
    """What messages say of plain XLA."""
    rightly: Callable[[], bool]
    """Runs the kernels on one device; whether their results are right. It may fail in any way."""
    _agreed: list[bool] = field(default_factory=list)
    """What `agree` found; empty before."""
    _tried: list[bool] = field(default_factory=list)

    def used(self) -> bool:
        """Whether programs have the kernels.

        In several processes, which must compile the same, it is as they agreed in `agree`, and no where they have not.
        Nothing is sent: a process may ask alone. Raises ConfigError for other words in the variable.
        """
        return self._suits_here() if jax.process_count() == 1 else any(self._agreed)

    def agree(self) -> None:
        """Several processes agree, once, on `used`: yes if each of them, asked alone, says so.

        All processes call it at the same place of the program. Raises ConfigError on all of them for what one of them
        raises it for.
        """
        if jax.process_count() == 1 or self._agreed:
            return
        try:
            local_answer = b"yes" if self._suits_here() else b"no"
        except ConfigError as error:
            local_answer = str(error).encode()
        answers = from_each_process(local_answer)
        for answer in answers:
            if answer not in (b"yes", b"no"):
                raise ConfigError(answer.decode())
        self._agreed.append(set(answers) == {b"yes"})
        if local_answer == b"yes" and not self._agreed[0]:
            self._warn("are not used on another host")

    def forget(self) -> None:
        """Tries the kernels again, and agrees again, when they are next asked for."""
        self._agreed.clear()
        self._tried.clear()

    def _suits_here(self) -> bool:
        wanted = os.environ.get(self.variable, "auto")
        if wanted not in ("auto", "triton", "xla"):
            raise ConfigError(
                f"{self.variable}={wanted}: {self.what} are chosen by 'xla' (none), by 'triton', or 'auto' (the "
                "default): where they prove right."
            )
        if wanted == "xla":
            return False
        try:
            triton = importlib.import_module("jax.experimental.pallas.triton")
            # JAX 0.11 compiles only for GPUs that are there and that it knows by name.
            getattr(triton, "get_gpu_info", lambda: None)()
        except (ImportError, ValueError):  # It also announces a version without Triton.
            return False
        gpus = [device for device in jax.local_devices() if device.platform != "cpu"]
        least = 8 if wanted == "triton" else 9
        if any(capability(gpu) < least for gpu in gpus):
            return False
        return not gpus or wanted == "triton" or self._work()

    def _work(self) -> bool:
        """Whether they give the right results on this process's GPU.

        They are tried once, in a thread of its own, because this is asked in the middle of tracing. Where they fail, a
        warning says so.
        """

        def tried() -> str:
            try:
                return "" if self.rightly() else "give wrong results"
            except Exception as error:  # Whatever Pallas, Triton or the driver says: there is another way.
                return f"do not run ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]})"

        if not self._tried:
            with ThreadPoolExecutor(1) as threads:
                problem = threads.submit(tried).result()
            if problem:
                self._warn(f"{problem} on this {jax.local_devices()[0].device_kind}")
            self._tried.append(not problem)
        return self._tried[0]

    def _warn(self, problem: str) -> None:
        warnings.warn(
            f"{self.what} {problem}: {self.instead}. {self.variable}=xla does so without this message.", stacklevel=4
        )


def capability(gpu: Any) -> float:
    """The compute capability of an NVIDIA GPU, 9 for Hopper; 0 of other devices."""
    try:
        return float(getattr(gpu, "compute_capability", 0))
    except ValueError:  # AMD's are names.
        return 0.0
