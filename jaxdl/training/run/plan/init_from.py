"""`--init-from`: the parameters with which a run begins, taken from a checkpoint of another run, whole or in part.

What is taken is decided from names and shapes, before anything is compiled; the arrays are read when the state is made,
sharded as this run has them. The optimizer's state is not taken. `init.json` in the workdir says what was taken: a run
that is killed before its first checkpoint, or rolled back to its start, begins again with the same parameters.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.core.config import ConfigError
from jaxdl.core.files import CHECKPOINTS_FOLDER, DATA_FILE, INIT_FILE, step_dir
from jaxdl.core.patterns import check_patterns, matches
from jaxdl.core.runs import Which, check_checkpoint, check_run, check_which, has_checkpoint
from jaxdl.core.startup import is_alone
from jaxdl.data import DataSpec, TextSpec, spec_from_json
from jaxdl.models import Model
from jaxdl.parallel.cluster.agree import of_first_process, processes_without
from jaxdl.training.checkpoint import Damaged, read_model, stored_model
from jaxdl.training.checkpoint.agree import on_first
from jaxdl.training.checkpoint.retention import Best
from jaxdl.training.experiment import read_experiment
from jaxdl.training.run.plan.init_images import HEAD, has_other_classes
from jaxdl.training.run.workdir.workdir import read_file, write_file
from jaxdl.training.state import TrainState

OPTION = "--init-from"
_SHOWN = 4
"""How many names a message has; `init.json` has all."""


@dataclass(frozen=True)
class InitFrom:
    """The parameters that a run begins with: those of a checkpoint of another run.

    Parameters and batch statistics of the same name and shape are taken; the parameters are those that the other run
    evaluates, its moving average where it has one. All others keep their initial values.
    """

    workdir: str | Path
    """The folder of the other run."""
    names: Sequence[str] = ()
    """Patterns of the names that `--explain` prints, such as `stage*` or `stem` (see `jaxdl.core.patterns`); none takes
    all."""
    step: Which = "newest"
    """Which one: "newest", "best" or the number of a step."""


@dataclass(frozen=True)
class Initial:
    """What a run takes from a checkpoint of another run. Arrays are named as `--explain` names them, `stem/kernel`."""

    workdir: Path
    step: int
    names: tuple[str, ...]
    taken: tuple[str, ...]
    """The arrays that are taken."""
    left: Mapping[str, str]
    """Array that keeps its initial values although it was asked for -> why."""
    unused: tuple[str, ...]
    """Arrays of the checkpoint that this network does not have."""
    averaged: bool
    """Whether the parameters are the moving average of the other run."""
    context: int | None = None
    """How many tokens the network of the other run reads, if this one goes on with its positions."""

    @property
    def text(self) -> str:
        """What is taken, in words."""
        which = f" that match {', '.join(self.names)}" if self.names else ""
        text = (
            f"initial values: {len(self.taken)} of {len(self.taken) + len(self.left)} arrays{which} are those of "
            f"{self.workdir}, step {self.step}"
        )
        if self.left:
            text += f"; left at their own: {_some(f'{name} ({why})' for name, why in self.left.items())}"
        if self.unused:
            text += f"; only in the checkpoint: {_some(self.unused)}"
        return text

    def same_as(self, asked: InitFrom) -> bool:
        """Whether this is what `asked` asks for; the newest or the best one may have become another one."""
        step = asked.step if isinstance(asked.step, int) else self.step
        return (self.workdir, self.names, self.step) == (Path(asked.workdir).absolute(), tuple(asked.names), step)

    def apply(
        self, state: TrainState, abstract: TrainState, filled_shapes: Mapping[str, tuple[int, ...]]
    ) -> TrainState:
        """The fresh state with the arrays that are taken; all processes call it.

        `filled_shapes` are those of `jaxdl.training.state.StateSpec`. Raises ConfigError, on all processes, when the
        arrays cannot be read any more.
        """
        folder, every = step_dir(self.workdir, self.step), _arrays(abstract)
        wanted = {self._stored(every[name][0]): every[name][1] for name in self.taken}
        _check_seen(self.workdir, self.step)
        try:
            arrays = read_model(folder, wanted, {self._stored(path): shape for path, shape in filled_shapes.items()})
        except Damaged as error:
            raise ConfigError(f"{folder} is damaged ({error}). Choose another --init-step.") from None
        values = {every[name][0]: arrays[self._stored(every[name][0])] for name in self.taken}
        tree = {"params": state.params, "model_state": state.model_state}
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        changed = treedef.unflatten([values.get(_name(path, "."), leaf) for path, leaf in flat])
        if state.ema_params:
            changed["ema_params"] = jax.tree.map(jnp.copy, changed["params"])
        return state.replace(**changed)

    def _stored(self, path: str) -> str:
        """The path in the checkpoint of the array at a path in the state."""
        return path.replace("params.", "ema_params.", 1) if self.averaged and path.startswith("params.") else path


def as_init(given: InitFrom | str | Path | None, workdir: Path | None) -> InitFrom | None:
    """`init_from` as it was given to a run in `workdir`. Raises ConfigError when there is no run to take it from."""
    if given is None:
        return None
    asked = given if isinstance(given, InitFrom) else InitFrom(given)
    if not isinstance(asked.workdir, str | Path) or isinstance(asked.names, str):
        raise ConfigError(f"{OPTION} {given!r}: give a folder, or InitFrom(folder, names=[...]).")
    check_which(asked.step, "--init-step")
    folder = check_run(asked.workdir, OPTION) if is_alone() else Path(asked.workdir)
    if workdir is not None and folder.resolve() == workdir.resolve():
        raise ConfigError(
            f"{OPTION} {folder}: this is the --workdir of the run itself, which resumes without the option."
        )
    return asked


def beginning(
    workdir: Path | None,
    asked: InitFrom | None,
    start_over: bool,
    abstract: TrainState,
    *,
    model: Model | None = None,
    spec: DataSpec | None = None,
) -> tuple[Initial | None, str]:
    """(what the run in `workdir` takes from another run when it begins, a note for the user); all processes call it.

    A run that has begun before begins again as it did then, unless it may `start_over`. Raises ConfigError when that is
    not what is asked for now, what `find_initial` raises, and when the `model` would train adapters beside random
    values.
    """
    initial, note = _choose(workdir, asked, start_over, abstract, model, spec)
    if model is not None and model.needs_base:
        names = [name for name, (path, _) in _arrays(abstract).items() if path.startswith("params.")]
        _check_base(model, names, initial, workdir)
    return initial, note


def _choose(
    workdir: Path | None,
    asked: InitFrom | None,
    start_over: bool,
    abstract: TrainState,
    model: Model | None,
    spec: DataSpec | None,
) -> tuple[Initial | None, str]:
    recorded = read_initial(workdir) if workdir is not None else None
    if asked is None or (recorded is not None and recorded.same_as(asked)):
        return recorded, ""
    if not start_over and recorded is not None:
        raise ConfigError(
            f"{OPTION} {asked.workdir}: the run in {workdir} began otherwise, with {recorded.text}. Leave the option "
            "out, or choose another --workdir."
        )
    if not start_over and workdir is not None and of_first_process(lambda: b"1" if has_checkpoint(workdir) else b""):
        return None, no_effect(asked.workdir)
    initial = find_initial(asked, abstract, spec)
    if model is not None:
        initial = replace(initial, context=_context(initial, model))
    return initial, "" if workdir is not None else initial.text


def _context(initial: Initial, model: Model) -> int | None:
    """How many tokens the network there reads, if all that knows positions is taken from it; all processes call it."""
    tables = ("embedding", "head")  # They know tokens alone, and may have other rows.
    left = [name for name in initial.left if name.partition("/")[0] not in tables]
    if initial.names or any(not any(matches(name, pattern) for pattern in model.trained) for name in left):
        return None

    def there() -> bytes:
        spec = reading_spec(initial.workdir)
        try:
            same = isinstance(spec, TextSpec) and model.reads_as(read_experiment(initial.workdir).model)
        except ConfigError:  # Its own model or data cannot be imported here: its context is not known.
            same = False
        if not same or not isinstance(spec, TextSpec):
            return b"null"
        return json.dumps(spec.length).encode()

    return json.loads(of_first_process(there))


def reading_spec(workdir: Path) -> DataSpec:
    """What the network of the run in a workdir reads: its training examples, of texts perhaps longer ones.

    A network that began with the parameters of another reads as many tokens as that one did, although it was tuned with
    shorter texts. Raises OSError, and ConfigError.
    """
    spec, path = spec_from_json((workdir / DATA_FILE).read_text(encoding="utf-8")), workdir / INIT_FILE
    if not isinstance(spec, TextSpec) or not path.is_file():
        return spec
    return replace(spec, length=max(spec.length, _parse(path, path.read_bytes()).context or 0))


def _check_base(model: Model, names: Sequence[str], initial: Initial | None, workdir: Path | None) -> None:
    """Raises ConfigError when a run would begin with adapters beside random values; all processes call it.

    `names` are those of the parameters, and `initial` what the run takes from another one. A run in `workdir` that has
    a checkpoint goes on from it.
    """
    taken = initial.taken if initial is not None else ()
    base = [name for name in names if not any(matches(name, pattern) for pattern in model.trained)]
    random = [name for name in base if name not in taken]
    if not random or (workdir is not None and of_first_process(lambda: b"1" if has_checkpoint(workdir) else b"")):
        return
    allow = "or allow that with --model.lora.random-base, to try the config out"
    if initial is None:
        raise ConfigError(
            f"adapters (--model.lora.rank) without {OPTION}: all {len(base)} arrays of the network beside them are "
            f"frozen, and would keep random values. Give {OPTION} FOLDER, the workdir of a trained network, {allow}. A "
            "downloaded checkpoint becomes such a workdir by python -m jaxdl.convert from-hf."
        )
    why = (f"{name} ({initial.left.get(name, 'not in --init-names')})" for name in random)
    raise ConfigError(
        f"{OPTION} {initial.workdir}: {len(random)} of the {len(base)} arrays beside the adapters (--model.lora.rank) "
        f"are not taken from it; they are frozen, and would keep random values: {_some(why)}. Make the model as that "
        f"run's, {allow}."
    )


def no_effect(workdir: str | Path) -> str:
    """The note of a run that has a checkpoint of its own, and takes nothing from the run in `workdir`."""
    return f"{OPTION} {workdir}: no effect, the run goes on from its own checkpoint"


def find_initial(asked: InitFrom, abstract: TrainState, spec: DataSpec | None = None) -> Initial:
    """What a run takes from another run's checkpoint, whose description alone is read; all processes call it.

    `abstract` is the state of this run, as shapes, and `spec` that of its data: the layer of other classes is not
    taken, although it may have the same shape. Raises ConfigError, on all processes, when there is no such checkpoint
    or not all of them see it, when a pattern matches nothing of this network, and when the checkpoint has none of the
    parameters asked for in the same shape.
    """
    folder, which = Path(asked.workdir).absolute(), check_which(asked.step, "--init-step")
    step, content = json.loads(on_first(lambda: json.dumps(_describe(asked.workdir, which))))
    _check_seen(folder, step)
    stored = {name: (tuple(shape), dtype) for name, (shape, dtype) in content.items()}
    every, names = _arrays(abstract), tuple(asked.names)
    check_patterns(names, list(every), "--init-names")
    averaged = any(name.startswith("ema_params.") for name in stored)
    initial = Initial(folder, step, names, (), {}, (), averaged)
    taken, left = [], {}
    other_head = not names and has_other_classes(folder, spec)
    for name, (path, x) in every.items():
        there, here = stored.get(initial._stored(path)), (tuple(x.shape), str(x.dtype))
        if names and not any(matches(name, pattern) for pattern in names):
            continue
        if there == here and other_head and name.partition("/")[0] == HEAD:
            left[name] = "of other classes"
        elif there == here:
            taken.append(name)
        else:
            left[name] = "not in the checkpoint" if there is None else f"{_shape(there)} there, {_shape(here)} here"
    known = {initial._stored(path) for name, (path, _) in every.items()}
    kept = [key for key in stored if key != "step" and not (averaged and key.startswith("params."))]
    plain = {key: key.partition(".")[2].replace(".", "/") for key in kept}
    if not any(every[name][0].startswith("params.") for name in taken):
        raise ConfigError(
            f"{OPTION} {asked.workdir}: its checkpoint of step {step} has none of the parameters asked for: "
            f"{_some(f'{name} ({why})' for name, why in left.items())}. {_near(left, plain.values())}"
        )
    return Initial(
        folder, step, names, tuple(taken), left, tuple(plain[key] for key in kept if key not in known), averaged
    )


def keep_initial(workdir: Path, initial: Initial) -> None:
    """Writes `init.json`. Raises ConfigError, on all processes, when it cannot be written."""
    values = asdict(initial) | {"workdir": str(initial.workdir)}
    write_file(workdir / INIT_FILE, (json.dumps(values, indent=2) + "\n").encode())


def read_initial(workdir: Path) -> Initial | None:
    """What the run in a workdir began with, from `init.json`; None without one. Raises ConfigError."""
    path = workdir / INIT_FILE
    content = read_file(path)
    return _parse(path, content) if content else None


def _parse(path: Path, content: bytes) -> Initial:
    """The content of an `init.json`. Raises ConfigError."""
    try:
        values: dict[str, Any] = json.loads(content)
        for name, type_ in (("workdir", Path), ("names", tuple), ("taken", tuple), ("unused", tuple)):
            values[name] = type_(values[name])
        assert type(values.get("context")) in (int, type(None))
        return Initial(**values)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise ConfigError(f"{path}: it cannot be read. Restore it, or choose another --workdir.") from None


def _describe(workdir: str | Path, which: Which) -> tuple[int, dict[str, tuple[tuple[int, ...], str]]]:
    """(the step of the checkpoint that is asked for, (shape, dtype) of each of its arrays); the first process calls it.

    Raises ConfigError, and Unreadable when the disk does not respond.
    """
    folder = check_run(workdir, OPTION)
    steps = check_checkpoint(folder, which, OPTION)[::-1]
    if isinstance(which, int):
        steps = [which]
    elif which == "best":
        steps = Best(folder / CHECKPOINTS_FOLDER, 1, read_experiment(folder).task.resolved_mode).order(steps)
        if not steps:
            raise ConfigError(f"{OPTION} {folder}: no checkpoint has an evaluation. Choose another --init-step.")
    return steps[0], stored_model(step_dir(folder, steps[0]))


def _check_seen(workdir: Path, step: int) -> None:
    """Raises ConfigError, on all processes, when one of them does not see the checkpoint."""
    if lacking := processes_without(os.path.isdir(step_dir(workdir, step))):
        raise ConfigError(
            f"{OPTION} {workdir}: its checkpoint of step {step}, with which this run begins, is not there on "
            f"{lacking}. Restore it to a file system that all hosts share, or choose another --init-step and "
            "--workdir."
        )


def _arrays(abstract: TrainState) -> dict[str, tuple[str, Any]]:
    """Name -> (path in a checkpoint, shape struct) of the parameters and the batch statistics."""
    flat = jax.tree_util.tree_flatten_with_path({"params": abstract.params, "model_state": abstract.model_state})[0]
    return {_name(path[1:], "/"): (_name(path, "."), x) for path, x in flat}


def _name(path: Any, separator: str) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def _shape(array: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = array
    return f"{dtype} {list(shape)}"


def _some(texts: Iterable[str]) -> str:
    """The first of these, and how many more there are."""
    every = list(texts)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")


def _near(wanted: Iterable[str], there: Iterable[str]) -> str:
    """A sentence with the names that are there and are nearest to the wanted ones."""
    there = list(there)
    near = dict.fromkeys(_nearest(list(wanted)[:_SHOWN], there))
    return f"The nearest names: {_some(near)}." if near else f"Names there: {_some(there)}."


def _nearest(wanted: Sequence[str], there: Sequence[str]) -> Iterator[str]:
    for lacking in wanted:
        groups = [*there, *(name.partition("/")[0] for name in there)]
        yield from difflib.get_close_matches(lacking, groups, n=2, cutoff=0.5)
