"""Saves and restores the checkpoints of a workdir, and keeps the newest and the best."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import CHECKPOINTS_FOLDER, DAMAGED_FOLDER, LEFT_FOLDER, step_folder
from jaxdl.exchange import resplit
from jaxdl.parallel.cluster.agree import all_processes, of_first_process
from jaxdl.parallel.embedding.places import Layout, to_json
from jaxdl.training.checkpoint.complete import check_complete
from jaxdl.training.checkpoint.config import CheckpointConfig
from jaxdl.training.checkpoint.differential import CHANGED, Differences, SaveChanged, WrittenTables, whole_bytes
from jaxdl.training.checkpoint.disk import check_folder, check_room, disk_reason
from jaxdl.training.checkpoint.errors import Damaged, NoneLeft, Unreadable
from jaxdl.training.checkpoint.items import ITEMS, Form, fresh_exchange, handlers, save_arguments, to_items, to_state
from jaxdl.training.checkpoint.literal import literal
from jaxdl.training.checkpoint.manifest import write_manifest
from jaxdl.training.checkpoint.meta import Meta, Stored
from jaxdl.training.checkpoint.orbax_logs import hush_orbax
from jaxdl.training.checkpoint.reading import EMPTY, Shapes, fingerprint_texts, read_checkpoint, with_shapes
from jaxdl.training.checkpoint.retention import Best, WithBases
from jaxdl.training.checkpoint.stored_tables import in_memory
from jaxdl.training.state import TABLES, TrainState

HALF = ".orbax-checkpoint-tmp"
"""Part of the name of a folder that is being written; older versions of Orbax append a number."""
_VANISH_SEC = 1.0
_CLEAR_SEC, _SETTLE_SEC = 5.0, 0.3


@dataclass(frozen=True)
class Restored:
    """The result of a restore."""

    state: TrainState
    step: int
    evaluated_step: int
    """The last evaluated step, -1 if none."""
    damaged: tuple[str, ...]
    """A line for each damaged checkpoint that was tried before this one, with the place it was moved to."""
    notes: tuple[str, ...] = ()
    """A line for each change that this mesh required."""


class Checkpoints:
    """The checkpoints of a workdir. With `read_only` it changes no files, so a run may write there at the same time."""

    def __init__(
        self,
        workdir: Path,
        config: CheckpointConfig,
        *,
        best_metric: str,
        best_mode: Literal["max", "min"],
        read_only: bool = False,
        table_layout: Layout = (),
        form: Form | None = None,
        filled_shapes: Shapes = EMPTY,
    ) -> None:
        """`table_layout` is that of the embedding tables in checkpoints, for which `form` changes states, if given.
        `filled_shapes` are those of `jaxdl.training.state.StateSpec`.

        Raises ConfigError if the folder cannot be used, Unreadable if it cannot be read."""
        self.read_only, self._table_layout, self._form = read_only, table_layout, form
        self._filled_shapes = filled_shapes
        self.folder = workdir.absolute() / CHECKPOINTS_FOLDER
        policies = ocp.checkpoint_managers
        self._metric, self._best = best_metric, Best(self.folder, config.keep_best, best_mode)
        self._kept = WithBases(self.folder, [policies.LatestN(n=config.keep), self._best])
        self._differences = Differences(config.differential_tables)
        self.written_tables: WrittenTables | None = None
        """What the last checkpoint has of the tables, if some are to have the changed rows alone."""
        self._under_way: int | None = None
        self._started: list[int] = []
        self._notes: list[str] = []
        hush_orbax()
        self._writing = -1
        check_folder(self.folder)
        if not read_only:
            self._clear()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            create=not read_only,
            read_only=read_only,
            save_interval_steps=0 if read_only else 1,
            step_prefix="step",
            lightweight_initialize=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._list_files),
        )
        try:
            self._manager = ocp.CheckpointManager(literal(self.folder), options=options, item_handlers=handlers())
        except OSError as error:
            raise ConfigError(f"{self.folder}: {error.strerror}. Choose a writable folder.") from None

    def save(self, state: TrainState, step: int, *, evaluated_step: int, metrics: dict[str, float] | None) -> None:
        """Starts writing `state`; returns once it is copied, so that training may continue.

        `metrics` are those of the evaluation at this step, if there was one. A disk error becomes a note.
        """
        self.wait()
        if step in self.steps:
            return
        self._writing = step
        stored = self._stored(state, step)
        if stored is None:
            return
        items, self.written_tables = to_items(stored), None
        score = None if metrics is None else metrics[self._metric]
        self._best.add(step, score)
        prints: dict[str, dict[str, str]] = {}
        filled = self._filled_shapes
        if not self._succeeded(step, lambda: prints.update(fingerprint_texts(items, step, filled))):
            return
        arrays = {
            item: {
                name: Stored(prints[item][name], filled.get(name, tuple(x.shape)), str(x.dtype))
                for name, x in leaves.items()
            }
            for item, leaves in items.items()
        }
        arguments = save_arguments(items)
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(items))
        changed = self._differences.find(step, items[TABLES], self.steps)
        base = changed.base if changed is not None else None
        if changed is not None:
            del arguments[TABLES]
            arguments[CHANGED] = SaveChanged(changed.rows)
            num_bytes += changed.num_bytes - whole_bytes(items[TABLES])
        self._kept.add(step, base)
        layout = to_json(self._table_layout)
        meta = Meta(evaluated_step, score, arrays, table_layout=layout, base=base, empty_layers=bool(filled))
        arguments["meta"] = ocp.args.JsonSave(meta.to_json())

        def start() -> None:
            self._manager.save(step, args=ocp.args.Composite(**arguments), force=True)

        room = functools.partial(check_room, self.folder, num_bytes)
        self._clear()
        # Checked before anything is written: otherwise processes wait long for one that cannot write its part.
        if all(self._succeeded(step, act) for act in (self._probe, room, start)):
            self._under_way = step
            self._started.append(step)
            self.written_tables = self._differences.written(items[TABLES], changed)

    def _stored(self, state: TrainState, step: int) -> TrainState | None:
        """The state as a checkpoint has it; None where a process has no room for it, which becomes a note."""
        form, made = self._form, []
        if form is None:
            return state
        return made[0] if self._succeeded(step, lambda: made.append(form.stored(state))) else None

    def _list_files(self) -> None:
        """Looks at what was written, and lists it. Orbax calls this on the first process before the final name."""
        for half in self.folder.glob(f"{step_folder(self._writing)}{HALF}*"):
            check_complete(half)
            write_manifest(half)

    def completed(self) -> list[tuple[int, Path]]:
        """Step and folder of the checkpoints that have become complete on disk since the last call. Waits for none."""
        under_way, done = self._under_way, []
        for step in self._started:
            folder = self.folder / step_folder(step)
            if folder.is_dir():  # It gets this name when it is complete.
                done.append((step, folder))
        self._started = [step for step in self._started if step == under_way and step not in dict(done)]
        return done

    def wait(self) -> None:
        """Waits until the checkpoint is written or has failed. Raises errors other than those of the disk."""
        step, self._under_way = self._under_way, None
        if step is not None:

            def finish() -> None:
                self._manager.wait_until_finished()
                self._manager.check_for_errors()

            self._succeeded(step, finish)

    def _succeeded(self, step: int, act: Callable[[], None]) -> bool:
        """Whether `act` succeeded on all processes; if not, removes the partial checkpoint and makes a note."""
        reason = None
        try:
            act()
        except Exception as error:
            reason = disk_reason(error)
            if reason is None:
                raise
        if all_processes(reason is None):
            return True
        self._clear(_SETTLE_SEC)
        all_processes(True)
        self._manager.reload()
        if step not in self.steps:  # If it is complete, the deletion of an old one failed.
            newest = (
                f"the newest complete one is at step {self.steps[-1]}" if self.steps else "there is no complete one yet"
            )
            self._notes.append(
                f"the checkpoint of step {step} could not be written: {reason or 'another process failed'}; "
                f"training continues; {newest}"
            )
        return False

    def _clear(self, settle_sec: float = 0.0) -> None:
        """Removes partial checkpoints, of earlier runs too, while no save is in progress.

        After a failed save, threads of Orbax and TensorStore may still be writing: it returns once those of Orbax have
        ended and no file has appeared for `settle_sec`, after `_CLEAR_SEC` at the latest. Files that appear later are
        removed before the next save.
        """
        end = time.monotonic() + _CLEAR_SEC
        if settle_sec:
            for thread in threading.enumerate():
                if type(thread).__module__.startswith("orbax."):
                    with contextlib.suppress(Exception):  # join raises the error that ended the thread.
                        thread.join(max(0.0, end - time.monotonic()))
        quiet_since = time.monotonic()
        while jax.process_index() == 0:
            # Probes of live processes are kept; before the first save, all probes are of an earlier run.
            probes = self.folder.glob(".probe.*.tmp") if self._writing < 0 else ()
            for path in [*self.folder.glob(f"*{HALF}*"), *probes]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
                quiet_since = time.monotonic()
            now = time.monotonic()
            if now > end or (now - quiet_since >= settle_sec and not list(self.folder.glob(f"*{HALF}*"))):
                return
            time.sleep(0.05)

    def _probe(self) -> None:
        """Raises OSError if this process cannot write. Each process checks, since their disks may differ."""
        path = self.folder / f".probe.{jax.process_index()}.tmp"
        try:
            with path.open("wb") as file:
                file.write(b"0" * 65536)
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def take_notes(self) -> list[str]:
        """The notes since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Waits for the save in progress and ends the threads of the writer."""
        try:
            self._manager.close()
        except Exception as error:
            if disk_reason(error) is None:
                raise
            self._clear(_SETTLE_SEC)

    @property
    def steps(self) -> list[int]:
        """The steps of complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def restore(
        self,
        abstract: TrainState,
        *,
        items: tuple[str, ...] = tuple(ITEMS),
        fresh_exchange_state: Callable[[], Any] | None = None,
        which: Literal["newest", "best"] | int = "newest",
    ) -> Restored | None:
        """An intact checkpoint, sharded as in `abstract`; None if there are no checkpoints.

        `which` is the newest, the one with the best evaluation, or the one of a step. A damaged checkpoint is
        quarantined in `checkpoints/damaged` (with `read_only` it is not moved), and the next newest (or best) one is
        tried. Fields of items other than `items` are those of `abstract`. For another number of replicas the state of
        the exchange is split again (`exchange.resplit`); `fresh_exchange_state` makes the initial state of those parts
        that cannot be carried over; without it they are an error.

        Raises NoneLeft if all are damaged, Unreadable if one cannot be read (it may be intact), Unusable for one of
        another network or version, and ConfigError for a step without a checkpoint.
        """
        whole = abstract if self._form is None else self._form.abstract(abstract)
        damaged: dict[int, str] = {}
        while (step := next((x for x in self.choice(which) if x not in damaged), None)) is not None:
            try:
                state, meta = self._restore_step(step, whole, items, fresh_exchange_state)
            except (Damaged, Unreadable) as error:
                if self._vanishes(step):
                    continue
                if isinstance(error, Unreadable):
                    raise
                damaged[step] = self._quarantine(step, error)
                continue
            state = self._form.live(state) if self._form else state
            wanted = with_shapes(to_items(abstract)["exchange"], self._filled_shapes)
            note = resplit.changed(wanted, meta.exchange_shapes) if "exchange" in items else None
            return Restored(state, step, meta.evaluated_step, tuple(damaged.values()), (note,) if note else ())
        if damaged:
            raise NoneLeft("\n".join(damaged.values()) + f"\nThere is no intact checkpoint in {self.folder}.")
        return None

    def choice(self, which: Literal["newest", "best"] | int) -> Sequence[int]:
        """The steps to try, in order. Raises ConfigError if the requested checkpoint does not exist."""
        if self.read_only:
            self._manager.reload()  # The run that writes here may have deleted some and made others.
        steps = self.steps
        if which == "newest" or not steps:
            return steps[::-1]
        there = f"there are checkpoints of steps {', '.join(map(str, steps))}"
        if which == "best":
            best = self._best.order(steps)
            if not best:
                raise ConfigError(f"{self.folder}: no checkpoint has an evaluation; {there}. Choose one of them.")
            return best
        if which not in steps:
            raise ConfigError(f"{self.folder}: there is no checkpoint of step {which}; {there}.")
        return [which]

    def _vanishes(self, step: int) -> bool:
        """Whether the run that writes here has deleted the checkpoint; waits up to `_VANISH_SEC`."""
        end = time.monotonic() + _VANISH_SEC
        while (self.folder / step_folder(step)).exists():
            if not self.read_only or time.monotonic() > end:
                return False
            time.sleep(0.05)
        return self.read_only

    def _restore_step(
        self, step: int, abstract: TrainState, items: tuple[str, ...], fresh_exchange_state: Callable[[], Any] | None
    ) -> tuple[TrainState, Meta]:
        wanted = {name: item for name, item in to_items(abstract).items() if name in items and item}
        arrays, meta = read_checkpoint(
            self.folder / step_folder(step),
            wanted,
            table_layout=self._table_layout,
            filled_shapes=self._filled_shapes,
            allocate=in_memory if self._form is None else self._form.allocate,
        )
        if "exchange" in wanted:
            fresh = functools.partial(fresh_exchange, abstract, fresh_exchange_state)
            arrays["exchange"] = resplit.resplit(arrays.get("exchange", {}), wanted["exchange"], fresh)
        return to_state(arrays, abstract), meta

    def quarantine_after(self, step: int) -> None:
        """Quarantines the checkpoints after this step in `checkpoints/left`: a rollback abandoned their trajectory."""
        self.wait()
        for later in [other for other in self.steps if other > step]:
            self._move(later, LEFT_FOLDER)

    def _quarantine(self, step: int, error: Exception) -> str:
        if self.read_only:
            return f"checkpoint {step_folder(step)} is damaged ({error})"
        return f"checkpoint {step_folder(step)} is damaged ({error}); moved to {self._move(step, DAMAGED_FOLDER)}"

    def _move(self, step: int, folder: str) -> Path:
        """Moves a checkpoint to a folder beside it; the new path. Raises ConfigError when that cannot be done."""
        source, parent = self.folder / step_folder(step), self.folder / folder

        def move() -> bytes:
            name, number = source.name, 0
            while (parent / name).exists():
                number += 1
                name = f"{source.name}.{number}"
            try:
                parent.mkdir(exist_ok=True)
                os.replace(source, parent / name)
            except OSError as error:
                raise ConfigError(
                    f"{source}: cannot be moved to {parent}: {error.strerror}. Free some space there, or make it "
                    "writable."
                ) from None
            return name.encode()

        target = parent / of_first_process(move).decode()  # Until it is moved, no process may search for the next one.
        self._manager.reload()
        return target
