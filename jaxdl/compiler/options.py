"""XLA's options for the compiled train step: those that its messages need, and the user's own.

They apply to one compiled function and, unlike `XLA_FLAGS`, to nothing else in the process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import pydantic
from jax.experimental.compilation_cache import compilation_cache

from jaxdl.compiler.overlap import Links
from jaxdl.compiler.profile import profile_of
from jaxdl.config import Config, ConfigError

Options = dict[str, bool | int | float | str]
"""XLA options: name -> value."""

INSIDE_REPLICAS: Options = {
    # Without these XLA merges reduce-scatters until they have 30 MB, which for many models merges all of them: then no
    # gradient is ready before the end of the backward pass, and none of the exchange overlaps with it.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    # By default XLA gathers all parameters of up to 30 MB at once, and the first layer waits for those of the last.
    "xla_gpu_all_gather_combine_threshold_bytes": 4 * 2**20,
    # By default XLA lets no message start while another is under way: those inside replicas, many and short, then wait
    # for those between replicas, and the backward pass for both.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_gpu_executable_num_communication_streams": 2,
}
"""What the exchange needs on GPUs to overlap with messages inside a replica."""

ASSUMED = Links(replica_bytes_per_sec=100e9 / 8)
"""The network for which XLA orders a step of several replicas on GPUs when its speed is not given."""

_replaced: dict[str | None, str | None] = {}
"""Cache folder that a run has set -> the previous one."""
_OF_ONE_PLATFORM = {"xla_cpu_": "cpu", "xla_gpu_": "gpu", "xla_tpu_": "tpu"}


class CompilerConfig(Config):
    """How XLA compiles the train step. Results are the same up to rounding."""

    options: tuple[str, ...] = ()
    """XLA options as NAME=VALUE, `xla_gpu_all_gather_combine_threshold_bytes=1000000`; they override jaxdl's own."""

    network_gbps: float | None = pydantic.Field(default=None, gt=0)
    """Gb/s that one device sends to other replicas: a node's bandwidth divided by its devices. XLA orders the step for
    that network (GPUs only; it compiles twice). None takes 100."""
    network_latency_us: float = pydantic.Field(default=20.0, ge=0)
    """Latency in microseconds of a message to other replicas."""

    cache_dir: str | None = None
    """Folder for programs that took a second or more to compile, so that a resumed run, or a similar one, need not
    compile them again. Several hosts must share it: the first process writes for all."""

    @pydantic.model_validator(mode="after")
    def _latency_of_a_network(self) -> CompilerConfig:
        if (
            self.network_gbps is None
            and self.network_latency_us != type(self).model_fields["network_latency_us"].default
        ):
            raise ValueError(f"network_latency_us = {self.network_latency_us:g} without network_gbps: give both.")
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

    def check(self, platform: str, num_replicas: int) -> None:
        """Raises ConfigError for settings that cannot take effect on a platform ("cpu", "gpu", "tpu")."""
        if self.network_gbps is not None and (platform != "gpu" or num_replicas == 1):
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
        wanted = _replaced.pop(present, present)
        if self.cache_dir is not None:
            before = wanted
            wanted = os.path.expanduser(self.cache_dir)
            parent = os.path.dirname(os.path.abspath(wanted))
            writable = os.access(wanted if os.path.exists(wanted) else parent, os.W_OK | os.X_OK)
            if "://" not in wanted and not (writable and os.path.isdir(wanted if os.path.exists(wanted) else parent)):
                raise ConfigError(
                    f"--compiler.cache-dir {self.cache_dir}: no folder that can be written, nor one to be made in "
                    f"{parent}. Make it, or choose another."
                )
            _replaced[wanted] = before
        if present != wanted:
            jax.config.update("jax_compilation_cache_dir", wanted)
            compilation_cache.reset_cache()  # It looks for the folder when the first program is compiled.

    @property
    def links(self) -> Links | None:
        """The network of the settings, or None."""
        if self.network_gbps is None:
            return None
        return Links(
            replica_bytes_per_sec=self.network_gbps * 1e9 / 8, replica_latency_sec=self.network_latency_us * 1e-6
        )

    def values(self) -> Options:
        """The user's options: name -> value."""
        return {name: _value(text) for name, _, text in (option.partition("=") for option in self.options)}

    def own(self, platform: str, *, num_replicas: int, num_inner: int) -> Options:
        """The options that jaxdl adds to the user's for a train step with `num_inner` devices in a replica.

        Those that `options` or the environment's XLA_FLAGS set are left to them. Collectives over `replica` need no
        option to stay apart: see `jaxdl.exchange.buckets.held_back`.
        """
        if platform != "gpu" or num_replicas == 1 or num_inner == 1:
            return {}
        asked = {*self.values(), *re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", ""))}
        return {name: value for name, value in INSIDE_REPLICAS.items() if name not in asked}


def compiled(
    lowered: Any, options: Options, axes: Mapping[str, int], links: Links | None = None, *, own: Options | None = None
) -> Any:
    """The compiled function, for a mesh with these axes; with `links` ordered for that network.

    `own` are further options, left out where XLA does not know them; `ASSUMED` links are too where the order of the
    program cannot be read. Raises ConfigError for an option of `options`, or a value, that XLA does not know.
    """
    first, options = _compiled(lowered, options, own or {})
    if links is None:
        return first
    try:
        profile = profile_of(first.as_text(), axes, links)
    except ValueError as error:
        if links is ASSUMED:
            return first
        raise ConfigError(
            f"--compiler.network-gbps: the programs of this JAX ({jax.__version__}) have an unknown form: {error} "
            "Leave it out."
        ) from None
    return lowered.compile(compiler_options={**options, "fdo_profile": profile})


def _compiled(lowered: Any, options: Options, own: Options) -> tuple[Any, Options]:
    """The compiled function, and all options that XLA has taken."""
    while True:
        every = own | options
        try:
            return lowered.compile(compiler_options=every or None), every
        except jax.errors.JaxRuntimeError as error:
            problem = re.search(r"No such compile option: '?(\w+)|While setting option (\w+), (.*)", str(error))
            name = problem and (problem[1] or problem[2])
            if problem is None or name is None:
                raise
            if name not in own:
                what = "XLA has no such option here" if problem[1] else f"XLA says {problem[3].rstrip('.')}"
                raise ConfigError(
                    f"--compiler.options {name}={options.get(name)}: {what} (JAX {jax.__version__}). Leave it out, or "
                    "look its name and values up in XLA's debug options."
                ) from None
            own = {other: value for other, value in own.items() if other != name}


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
