"""A search from its settings to its report: checked, claimed in its folder, run, written down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxdl.core.config import ConfigError, differences
from jaxdl.core.files import SEARCH_FILE
from jaxdl.parallel.cluster import BROKEN, exits
from jaxdl.parallel.lease import Lease
from jaxdl.platform.search.config import (
    FREE,
    Lengths,
    SearchConfig,
    check_settings,
    combinations,
    objectives_of,
)
from jaxdl.platform.search.driver import Request, Search
from jaxdl.platform.search.journal import Journal, check_optuna, has_values
from jaxdl.platform.search.report import result, write_report
from jaxdl.platform.search.schedulers import Course
from jaxdl.platform.search.show import SearchView
from jaxdl.platform.search.space import Setting, parse_settings
from jaxdl.platform.search.trial import Objective, Trial
from jaxdl.report import replace_file
from jaxdl.report.status.rows import MARKS
from jaxdl.training.experiment import LENGTH, SINGLE_LENGTHS, Experiment, identity

JOURNAL_FILE = "journal.log"


@dataclass(frozen=True)
class Given:
    """What is searched, and where."""

    config: str
    """The file of the experiment, `FILE` or `FILE:FUNCTION`."""
    workdir: Path
    search: SearchConfig
    experiment: Experiment
    words: tuple[str, ...] = ()
    """The options that all trials share, as typed."""
    stage_data: str | None = None
    """Where trials keep copies of the data; it may be another folder when the search goes on."""
    content: bytes | None = None
    """What `config` is to have, where it is a file in the folder of the search."""


@dataclass(frozen=True)
class Outcome:
    """What a search has come to."""

    request: Request
    trials: list[Trial]
    report: dict[str, Any]
    """What result.json has."""
    signum: int | None
    """The signal that stopped it."""
    time_is_over: bool
    """Whether its hours were over. With neither nothing was left to do."""


def conduct(given: Given, shows: Callable[[SearchView], AbstractContextManager[Any]]) -> Outcome:
    """Searches until nothing is left to do, a signal comes or the hours are over; writes the report.

    `shows` makes the context, with the methods of `Shows`, that is told of the trials. Raises ConfigError.
    """
    check_optuna()
    settings = settings_of(given)
    objectives = objectives_of(given.search, given.experiment)
    _check_no_run(given.workdir)
    with_lease = Lease(given.workdir, _lost, lambda text: Console(stderr=True).print(text, highlight=False))
    request, course = _prepare(given, settings, objectives)
    policy = given.search.scheduler.policy(course)
    try:
        with_lease.acquire()
        _claim(given)
        if given.content is not None:
            replace_file(Path(given.config), given.content)
        journal = Journal(given.workdir / JOURNAL_FILE, settings, *request.directions)
        workers = given.search.engine.open(given.search.parallel, given.search.devices_per_trial)
        shown = SearchView(request, course, given.search.scheduler)
        with shows(shown) as showing:
            search = Search(request, journal, given.search.sampler, policy, workers, showing)
            signum = search.run()
        trials = journal.trials()
        report = result(request, trials, shown)
        write_report(given.workdir, request, trials, report, shown)
        return Outcome(request, trials, report, signum, search.time_is_over)
    except BrokenPipeError:
        raise
    except OSError as error:  # A full disk, say. A line of the journal that is not whole is cut off when it is opened.
        where, why = error.filename or given.workdir, error.strerror or error
        raise ConfigError(f"{where}: {why}. When that is put right, the same command goes on.") from None
    finally:
        with_lease.release()


def settings_of(given: Given) -> list[Setting]:
    """What varies. Raises ConfigError for what the experiment does not take."""
    settings = parse_settings(given.search.vary)
    check_settings(given.search, given.experiment, settings)
    _check_limits(given.words, settings)
    return settings


def _prepare(given: Given, settings: list[Setting], objectives: Sequence[Objective]) -> tuple[Request, Course]:
    """What the loop and the policy are made of. Raises ConfigError."""
    search, lengths = given.search, Lengths(given.experiment, settings)
    lengths.check(combinations(settings))
    most = search.sampler.check(settings)
    trials = search.trials or most
    if trials is None:
        raise ConfigError("--trials: how many is not given. Give --trials N, or --sampler grid for a whole grid.")
    if most is not None and trials > most:
        raise ConfigError(
            f"--trials {trials}: the grid has {most} combinations. Give {most} or fewer, or leave it out."
        )
    request = Request(
        folder=given.workdir,
        command=("--config", given.config, *given.words),
        settings=tuple(settings),
        metric=objectives[0].metric,
        direction=objectives[0].direction,
        others=tuple(objectives[1:]),
        length=lengths.of,
        seed=search.sampler_seed,
        retries=search.retries,
        changing=search.scheduler.changes_settings,
        stage_data=given.stage_data,
        hours=search.hours,
    )
    total = None if lengths.differ else lengths.timeline.total_steps
    course = Course(
        trials, total, lengths.align, request.direction, settings, request.seed, search.patience, request.directions[1:]
    )
    return request, course


def _check_no_run(folder: Path) -> None:
    """Raises ConfigError for the workdir of a run: the files of both would be mixed. Makes nothing."""
    marks = [name for name in MARKS if os.path.exists(folder / name)]
    if marks and not os.path.exists(folder / SEARCH_FILE):
        raise ConfigError(f"--workdir {folder}: a run is in it ({', '.join(marks)}). Choose another --workdir.")


def _claim(given: Given) -> None:
    """Writes search.json, or checks that the search in the folder is this one. Raises ConfigError."""
    path = given.workdir / SEARCH_FILE
    if path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            before, experiment = SearchConfig.model_validate(content["search"]), content["experiment"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ConfigError(
                f"{path}: it cannot be read ({error}). Restore it, or choose another --workdir."
            ) from None
        free = {name: getattr(before, name) for name in (*FREE, *_not_yet_fixed(given, before))}
        changes = differences(before, given.search.replaced(free))
        if _fixed_fields(experiment) != _fixed_fields(json.loads(given.experiment.to_json())):
            changes = [*changes, "the experiment is another one"]
        if before.trials and given.search.trials and given.search.trials < before.trials:
            changes = [*changes, f"trials: {before.trials} -> {given.search.trials}: only more are possible"]
        if changes:
            raise ConfigError(
                f"--workdir {given.workdir} belongs to another search:\n  " + "\n  ".join(changes) + "\nChoose another "
                "--workdir, or the settings of the search that is there."
            )
    content = {
        "search": json.loads(given.search.to_json()),
        "config": given.config,
        "options": list(given.words),
        "experiment": json.loads(given.experiment.to_json()),
    }
    try:
        replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"--workdir {given.workdir}: {error.strerror}. Choose a writable folder.") from None


def _not_yet_fixed(given: Given, before: SearchConfig) -> tuple[str, ...]:
    """The settings that may be others as long as no trial has a value: a metric that no run has is corrected so."""
    if has_values(given.workdir / JOURNAL_FILE):
        return ()
    both = (objectives_of(config, given.experiment) for config in (before, given.search))
    directions = {tuple(objective.direction for objective in objectives) for objectives in both}
    return ("metric", "direction") if len(directions) == 1 else ()


def _fixed_fields(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """What must stay of a dumped experiment: all that a run's workdir fixes, and the length, on which rungs depend."""
    return identity(experiment) | {name: experiment.get(name) for name in LENGTH}


def _lost(reason: str) -> None:
    exits.end_process(reason.replace("this run", "this search"), BROKEN)


def _check_limits(words: Sequence[str], settings: Sequence[Setting]) -> None:
    """Raises ConfigError for limits of the steps that a length which varies would unset."""
    length = next((setting.name for setting in settings if setting.name in SINGLE_LENGTHS), None)
    has_limits = any(word.partition("=")[0].replace("_", "-") == "--steps-within" for word in words)
    if length is not None and has_limits and all(setting.name != "steps_within" for setting in settings):
        raise ConfigError(
            f"--vary {length}: a length that varies has no limits, so --steps-within has no effect. Leave it out."
        )
