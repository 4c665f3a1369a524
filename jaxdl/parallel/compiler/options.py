"""XLA's options for the compiled train step: those that its messages need, and the user's own.

They apply to one compiled function and, unlike `XLA_FLAGS`, to nothing else in the process.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import pydantic
from jax.experimental.compilation_cache import compilation_cache

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.paths import expand_home, is_text
from jaxdl.core.programs import programs_folder
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.cluster.address import several_processes
from jaxdl.parallel.cluster.agree import from_each_process
from jaxdl.parallel.compiler.overlap import Links
from jaxdl.parallel.compiler.profile import profile_of
from jaxdl.parallel.mesh import SLOW_AXES, STAGE_AXES, ways

Options = dict[str, bool | int | float | str]
"""XLA options: name -> value."""

INSIDE_REPLICAS: Options = {
    # Without these XLA merges reduce-scatters until they have 30 MB, which for many models merges all of them: then no
    # gradient is ready before the end of the backward pass, and none of the exchange overlaps with it.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    # By default XLA gathers all parameters of up to 30 MB at once, and the first layer waits for those of the last.
    "xla_gpu_all_gather_combine_threshold_bytes": 4 * 2**20,
    # By default XLA lets no message start while another is under way: those inside replicas, many and short, then wait
    # for those between replicas, and the backward pass for both. With a limit below their number XLA starts one only
    # when another is needed: those needed late, such as what top-k selects from, start after the backward pass.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 128,
    "xla_gpu_executable_num_communication_streams": 2,
}
"""What the exchange needs on GPUs to overlap with messages inside a replica."""

BETWEEN_STAGES: Options = INSIDE_REPLICAS | {
    # By default NCCL makes one group of all devices for what goes from stage to stage, over which short messages inside
    # a node take ten times as long (openxla/xla#40505).
    "xla_gpu_collective_permute_connected_components": True,
}
"""What a pipeline needs on GPUs: permutes overlap a stage's layers, which have messages of their own."""

ASSUMED_GBPS = 100.0
ASSUMED = Links(replica_bytes_per_sec=ASSUMED_GBPS * 1e9 / 8)
"""The network for which XLA orders a step of several replicas on GPUs when its speed is not given."""

_replaced: dict[str | None, str | None] = {}
"""Cache folder that a run has set -> the previous one."""
_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_OF_ONE_PLATFORM = {"xla_cpu_": "cpu", "xla_gpu_": "gpu", "xla_tpu_": "tpu"}


class CompilerConfig(Config):
    """How XLA compiles the train step. Results are the same up to rounding."""

    options: tuple[str, ...] = ()
    """XLA options as NAME=VALUE, `xla_gpu_all_gather_combine_threshold_bytes=1000000`; they override jaxdl's own."""

    network_gbps: float | None = pydantic.Field(default=None, ge=0)
    """Gb/s that one device sends to other replicas: a node's bandwidth divided by its devices. XLA orders the step for
    that network (GPUs only; it compiles twice). None takes 100; 0 leaves the order to XLA (it compiles once)."""
    network_latency_us: float = pydantic.Field(default=20.0, ge=0)
    """Latency in microseconds of a message to other replicas."""

    cache_dir: str | None = None
    """Folder for programs that took a second or more to compile, so that a resumed run, or a similar one, need not
    compile them again. Several hosts must share it: the first process writes for all. None takes the environment's
    JAX_COMPILATION_CACHE_DIR, or for a single process a folder of this machine in ~/.cache/jaxdl, of at most 2 GiB
    (JAX_ENABLE_COMPILATION_CACHE=false: none)."""

    @pydantic.model_validator(mode="after")
    def _latency_of_a_network(self) -> CompilerConfig:
        if not self.network_gbps and self.network_latency_us != type(self).model_fields["network_latency_us"].default:
            raise ValueError(
                f"network_latency_us = {self.network_latency_us:g} without network_gbps above 0: give both."
            )
        return self

    @pydantic.model_validator(mode="after")
    def _named_once(self) -> CompilerConfig:
        names = [option.partition("=")[0] for option in self.options]
        for option, name in zip(self.options, names, strict=True):
            if not re.fullmatch(r"xla_\w+=.+", option):
                raise ValueError(f"options = {option!r}: not NAME=VALUE with a name that begins with xla_.")
            if names.count(name) > 1:
                raise ValueError(f"options = {self.options}: {name} is set twice. Set it once.")
        return self

    def check(self, platform: str, axes: Mapping[str, int]) -> None:
        """Raises ConfigError for settings that cannot take effect on a platform ("cpu", "gpu", "tpu")."""
        if self.network_gbps is not None and (platform != "gpu" or ways(axes, SLOW_AXES) == 1):
            where = (
                f"{platform} programs are not ordered for a network" if platform != "gpu" else "there is one replica"
            )
            raise ConfigError(f"--compiler.network-gbps {self.network_gbps:g}: {where}. Leave it out.")
        for name in self.values():
            belongs = next((other for prefix, other in _OF_ONE_PLATFORM.items() if name.startswith(prefix)), platform)
            if belongs != platform:
                raise ConfigError(
                    f"--compiler.options {name}: it is an option of {belongs} devices, and these are {platform} "
                    "devices. Leave it out."
                )

    def keep_programs(self) -> None:
        """Makes JAX keep the programs that it compiles from now on in `cache_dir`, or in its default place.

        Raises ConfigError for a folder that cannot be written.
        """
        present = jax.config.values["jax_compilation_cache_dir"]
        source, given = "--compiler.cache-dir", self.cache_dir
        if given is None:
            given = present  # The variable's, or what a program has given to jax.config.update.
            source = _VARIABLE if given == os.environ.get(_VARIABLE) else "jax_compilation_cache_dir"
        if given is not None and not is_text(given):
            raise ConfigError(f"{source} {given!r}: XLA refuses a path that is not UTF-8. Choose another.")
        wanted = _replaced.pop(present, present)
        if self.cache_dir is not None:
            before = wanted
            wanted = self.cache_dir if "://" in self.cache_dir else str(expand_home(self.cache_dir))
            parent = os.path.dirname(os.path.abspath(wanted))
            writable = os.access(wanted if os.path.exists(wanted) else parent, os.W_OK | os.X_OK)
            if "://" not in wanted and not (writable and os.path.isdir(wanted if os.path.exists(wanted) else parent)):
                raise ConfigError(
                    f"--compiler.cache-dir {self.cache_dir}: no folder that can be written, nor one to be made in "
                    f"{parent}. Make it, or choose another."
                )
            _replaced[wanted] = before
        elif wanted is None and not _is_one_of_several() and (folder := programs_folder()) is not None:
            wanted = folder
            _replaced[wanted] = None
        if present != wanted:
            jax.config.update("jax_compilation_cache_dir", wanted)
            compilation_cache.reset_cache()  # It looks for the folder when the first program is compiled.

    def links(self, platform: str, axes: Mapping[str, int]) -> Links | None:
        """The network for which XLA orders the train step on a mesh; `ASSUMED` when its speed is not given.

        None where XLA alone decides on the order: with one replica of one stage, off GPUs, and with `network_gbps` 0.
        """
        if platform != "gpu" or ways(axes, SLOW_AXES) == 1 or self.network_gbps == 0:
            return None
        if self.network_gbps is None:
            return ASSUMED
        return Links(
            replica_bytes_per_sec=self.network_gbps * 1e9 / 8, replica_latency_sec=self.network_latency_us * 1e-6
        )

    def values(self) -> Options:
        """The user's options: name -> value."""
        return {name: _value(text) for name, _, text in (option.partition("=") for option in self.options)}

    def own(self, platform: str, axes: Mapping[str, int]) -> Options:
        """The options that jaxdl adds to the user's for a train step on a mesh with these axes.

        Those that `options` or the environment's XLA_FLAGS set are left to them. Collectives over `replica` need no
        option to stay apart: see `jaxdl.exchange.buckets.held_back`.
        """
        options = BETWEEN_STAGES if ways(axes, STAGE_AXES) > 1 else INSIDE_REPLICAS
        slow = ways(axes, SLOW_AXES)
        if platform != "gpu" or slow == 1 or (options is INSIDE_REPLICAS and math.prod(axes.values()) == slow):
            return {}
        asked = {*self.values(), *re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", ""))}
        return {name: value for name, value in options.items() if name not in asked}


def _is_one_of_several() -> bool:
    """Whether other processes train with this one. JAX, which would say so too, may not have been started yet."""
    return jax.distributed.is_initialized() or several_processes()


def _from_each(content: bytes) -> Sequence[bytes]:
    wait_for_all()  # One host may compile for longer than another.
    return from_each_process(content)


def compiled(
    lowered: Any,
    options: Options,
    axes: Mapping[str, int],
    links: Links | None = None,
    *,
    own: Options | None = None,
    from_each: Callable[[bytes], Sequence[bytes]] = _from_each,
) -> Any:
    """The compiled function, for a mesh with these axes; with `links` ordered for that network.

    With `links` all processes call this alike, in the order of their other collectives, and all get the same order:
    that which the first process asks for, or, when one of them fails, XLA's own.

    Args:
      lowered: the function, `jax.stages.Lowered`.
      options: the user's options.
      own: further options, left out where XLA does not know them.
      from_each: returns the bytes that each process gives it, in the order of the processes.

    Raises ConfigError for an option of `options`, or a value, that XLA does not know, and for a program whose order
    cannot be read; for `ASSUMED` links that and a failure to compile the ordered program are only a warning.
    """
    first, options = _compiled(lowered, options, own or {})
    if links is None:
        return first
    ordered: Any = None

    def order() -> bytes:
        nonlocal ordered
        ordered = lowered.compile(compiler_options={**options, "fdo_profile": profile})
        return b""

    try:
        # One order for all: with collectives in another order than the other processes' a process waits forever.
        profile = _of_first(lambda: _profile(first, axes, links), from_each)
        _of_first(order, from_each)
    except _NotOrderedError as error:
        if links is not ASSUMED:
            raise (error.__cause__ or ConfigError(str(error))) from None
        what = " ".join(str(error).split())
        print(f"warning: the step is not ordered for the network, XLA's own order is used: {what}", file=sys.stderr)
        return first
    return ordered


class _NotOrderedError(Exception):
    """The step cannot be ordered, in this process (that is its cause) or in another."""


def _profile(program: Any, axes: Mapping[str, int], links: Links) -> bytes:
    try:
        return profile_of(program.as_text(), axes, links)
    except Exception as error:  # Whatever a form of text that the parser does not know leads to.
        raise ConfigError(
            f"--compiler.network-gbps: the programs of this JAX ({jax.__version__}) have an unknown form "
            f"({type(error).__name__}: {error}). Give 0 to leave their order to XLA."
        ) from None


def _of_first(act: Callable[[], bytes], from_each: Callable[[bytes], Sequence[bytes]]) -> bytes:
    """What `act` returns in the first process, in all. Raises _NotOrderedError in all when `act` raises in one."""
    failure: Exception | None = None
    try:
        content = b"+" + act()
    except Exception as error:
        failure, content = error, b"-" + str(error).encode()
    every = from_each(content)
    for process, answer in enumerate(every):
        if answer.startswith(b"-"):
            where = f"process {process}: " if len(every) > 1 else ""
            raise _NotOrderedError(f"{where}{answer[1:].decode()}") from failure
    return every[0][1:]


def _compiled(lowered: Any, options: Options, further_options: Options) -> tuple[Any, Options]:
    """The compiled function, and all options that XLA has taken."""
    while True:
        every = further_options | options
        try:
            return lowered.compile(compiler_options=every or None), every
        except jax.errors.JaxRuntimeError as error:
            problem = re.search(r"No such compile option: '?(\w+)|While setting option (\w+), (.*)", str(error))
            name = problem and (problem[1] or problem[2])
            if problem is None or name is None:
                raise
            if name not in further_options:
                what = "XLA has no such option here" if problem[1] else f"XLA says {problem[3].rstrip('.')}"
                raise ConfigError(
                    f"--compiler.options {name}={options.get(name)}: {what} (JAX {jax.__version__}). Leave it out, or "
                    "look its name and values up in XLA's debug options."
                ) from None
            further_options = {other: value for other, value in further_options.items() if other != name}


def _value(text: str) -> bool | int | float | str:
    """The value that a text stands for; XLA wants true and false as booleans."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
