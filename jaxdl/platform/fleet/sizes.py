"""Which numbers of hosts the mesh and the batch of a run allow, as its config says when it is submitted.

The config is loaded with the options of the command, as on each number of hosts, and checked as the run will be; JAX
starts no devices.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.startup import split_options, training_options
from jaxdl.platform.fleet.resources import Amounts
from jaxdl.platform.fleet.submission import words_on

_MOST_GPUS = 16
"""Where it is not known how many GPUs hosts have, a size is allowed if one number of them up to this allows it."""
_WITHOUT_TRAINING = ("--help", "-h", "--version", "--explain", "--print-config")
_WITH_WORDS = ("--init-names", "--may-change")
"""Options of training that are not fields of the experiment, with any number of words."""
_TOLD = 4
"""Number of sizes whose reasons are printed one by one."""


@dataclass(frozen=True)
class Fit:
    """What the config of a run says of the numbers of its hosts."""

    allowed: tuple[int, ...]
    left_out: Mapping[int, str]
    """The others, and why."""
    note: str = ""
    """Why nothing was checked, of a training command whose config cannot be read here."""


class UnreadError(Exception):
    """The config cannot be read here."""


ReadConfig = Callable[[tuple[str, ...], bool], tuple[Any, int | None]]
"""(options of the training, whether hosts have GPUs) -> (the experiment, the CPU devices that the options ask for)."""


def gpus_of_host(needs: Amounts, view: Mapping[str, Any] | None) -> Sequence[int]:
    """The numbers of GPUs that a host of a run may find; with 0 it has one CPU device.

    `view` is what the fleet's server wrote last, None before there is one.
    """
    asked = math.ceil(needs.get("gpus", 0.0))
    if view is None or "gives_gpus" not in view:
        return sorted({0, asked}) if needs else range(_MOST_GPUS + 1)
    if not view["gives_gpus"]:
        return [0]
    if needs:
        return [asked]
    return sorted({int(has.get("gpus", 0)) for has in view["has"].values()}) or range(_MOST_GPUS + 1)


def find_sizes(
    command: Sequence[str], sizes: Sequence[int], gpus: Sequence[int], read: ReadConfig | None = None
) -> Fit:
    """Which of these sizes the config of a training command allows on hosts with one of these numbers of GPUs.

    All of them for any other command, and where the config cannot be read.
    """
    every = tuple(sorted(set(sizes)))
    if not trains(command) or not every or every[0] < 1:
        return Fit(every, {})
    left_out: dict[int, str] = {}
    read = read or reader()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # What a config file prints.
            for size in every:
                words = tuple(training_options(words_on(command, size)) or ())
                # A batch that does not fit says more than a mesh that no such host has.
                refused = [why for num_gpus in gpus if (why := _why_refused(read, words, size, num_gpus)) is not None]
                if len(refused) == len(gpus):
                    left_out[size] = min(refused, key=lambda reason: reason[0])[1]
    except UnreadError as error:
        return Fit(
            every, {}, f"its config cannot be read here, so none of its sizes is ruled out: {_short(str(error))}"
        )
    return Fit(tuple(size for size in every if size not in left_out), left_out)


def trains(command: Sequence[str]) -> bool:
    """Whether a command, started once on each host, trains what a config describes."""
    args = training_options(command)
    if args is None or set(_WITHOUT_TRAINING) & set(args):
        return False
    # Otherwise its processes are other ones than the hosts.
    return not {"jaxdl.launch", "launch"} & set(command[: len(command) - len(args)])


def reader() -> ReadConfig:
    """Reads each config file once, and the same options once. Raises `UnreadError` and ConfigError."""

    @functools.cache
    def file(config: str, on_gpus: bool) -> Any:
        from jaxdl.training.experiment import load_experiment

        try:
            return load_experiment(config, gpus=on_gpus)
        except ConfigError as error:  # It may need what the nodes have.
            raise UnreadError(str(error)) from None

    @functools.cache
    def read(args: tuple[str, ...], on_gpus: bool) -> tuple[Any, int | None]:
        from jaxdl.training.experiment import parse

        values, others = split_options(args)
        if "config" not in values:
            raise ConfigError("no --config. Give --config FILE.")
        base = file(values["config"], on_gpus)
        experiment = parse(base, _without_words(others))
        if "devices" in values:
            return experiment.replaced({"mesh.cpu_devices": int(values["devices"])}), int(values["devices"])
        given = experiment.mesh.cpu_devices
        return experiment, given if given != base.mesh.cpu_devices else None

    return read


def devices_of_host(experiment: Any, gpus: int) -> int:
    """The devices of an experiment's mesh that a host with `gpus` GPUs has."""
    return (experiment.mesh.cpu_devices or gpus) if gpus else 1


def _without_words(args: Sequence[str]) -> list[str]:
    """The options without those of `_WITH_WORDS` and their words."""
    kept, left_out = [], False
    for word in args:
        if word.startswith("--"):
            left_out = word.partition("=")[0].replace("_", "-") in _WITH_WORDS
        if not left_out:
            kept.append(word)
    return kept


def _why_refused(read: ReadConfig, args: tuple[str, ...], size: int, gpus: int) -> tuple[int, str] | None:
    """(How little it says, why the run cannot be on `size` hosts with `gpus` GPUs each); None if it can."""
    from jaxdl.parallel.mesh import BATCH_AXES, Axis, ways
    from jaxdl.training.run.plan.validate import check_axes, check_batches, check_norms

    rank = 0
    try:
        experiment, asked = read(args, gpus > 0)
        if not gpus and asked not in (None, 1):
            raise ConfigError(f"--devices {asked}: a host without GPUs has one CPU device. Leave the option out.")
        each = devices_of_host(experiment, gpus)
        if experiment.plan.planner:  # Its mesh and micro-batches are known when it runs.
            return None
        rank = 1
        sizes = experiment.mesh.sizes(size * each)
        rank = 0
        check_axes(experiment, sizes)
        check_batches(
            experiment,
            ways(sizes, BATCH_AXES),
            experiment.evaluation.batch_size or experiment.batch_size,
        )
        if isinstance(getattr(experiment.model, "norm_span", None), int):
            check_norms(experiment, sizes[Axis.REPLICA], has_norms=True)
    except ConfigError as error:
        return rank, " ".join(str(error).split())
    return None


def describe_left_out(left_out: Mapping[int, str], unit: str) -> list[str]:
    """Lines on the sizes that were left out; `unit`: node or host."""
    lines = [f"not on {_format_sizes([size], unit)}: {_short(why)}" for size, why in list(left_out.items())[:_TOLD]]
    if others := list(left_out)[_TOLD:]:
        lines.append(f"nor on {_format_sizes(others, unit)}, for such reasons")
    return lines


def refusal(command: Sequence[str], asked: str, fit: Fit, gpus: Sequence[int], unit: str) -> ConfigError:
    """The error that no size is allowed; `asked`: the options that gave them."""
    reasons = list(dict.fromkeys(fit.left_out.values()))
    if len(reasons) == 1 and len(fit.left_out) > 1:  # The number of hosts is not what is wrong.
        return ConfigError(f"{asked}: the run can train on no number of {unit}s. {reasons[0]}")
    others = [size for size in range(1, 2 * _MOST_GPUS + 1) if size not in fit.left_out]
    possible = find_sizes(command, others, gpus).allowed
    advice = "Change the mesh or the batch size of the command."
    if possible:
        advice = f"They allow {_format_sizes(possible, unit)}: give --sizes, or change them."
    why = "; ".join(describe_left_out(fit.left_out, unit))
    return ConfigError(f"{asked}: the mesh and the batch of the run do not allow this ({why}). {advice}")


def _format_sizes(sizes: Sequence[int], unit: str) -> str:
    """`1 node`, `1, 2 or 4 nodes`."""
    first, last = ", ".join(map(str, sizes[:-1])), str(sizes[-1])
    return f"{first} or {last} {unit}s" if first else f"{last} {unit}{'' if last == '1' else 's'}"


def _short(why: str) -> str:
    """The message of an error without its advice."""
    return why.partition(". ")[0].rstrip(".")
