"""Checkpoints: written asynchronously, restored onto the current mesh, checked by fingerprints.

A checkpoint is flat: one array a leaf of the train state, by its path, in three items (`model`, `optimizer`,
`exchange`), and a JSON with the fingerprint of each array.

A checkpoint that cannot be written (a full disk) ends no run: it is a note, the half of it is removed, and nothing that
is whole is touched; a new one is deleted for only when it is whole itself.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pydantic
from jax import lax

from jaxdl.config import ConfigError, Periodic
from jaxdl.exchange import resplit
from jaxdl.keeping import Best
from jaxdl.state import TrainState
from jaxdl.workdir import all_processes, check_room, disk_reason

ITEMS = {
    "model": ("step", "params", "model_state", "ema_params"),
    "optimizer": ("opt_state", "loss_scale", "guard", "key"),
    "exchange": ("exchange_state",),
}
"""The items of a checkpoint and the fields of the train state in each; prediction needs only `model`."""


class CheckpointConfig(Periodic):
    """When checkpoints are written to the workdir, and which are kept. One is always written at the end of a run."""

    keep: int = pydantic.Field(default=2, ge=1)
    """Keep the newest this many."""
    keep_best: int = pydantic.Field(default=1, ge=0)
    """Keep also this many with the best evaluation."""


@dataclass(frozen=True)
class Restored:
    """What was read from a checkpoint."""

    state: TrainState
    step: int
    evaluated_step: int
    """The last step that had been evaluated, -1 if none."""
    damaged: tuple[str, ...]
    """A line for each newer checkpoint that could not be used, and where it was moved."""
    notes: tuple[str, ...] = ()
    """A line for what had to be changed for this mesh."""


class Checkpoints:
    """The checkpoints of one workdir. With `read_only` nothing in it is changed, so a run may go on writing there."""

    def __init__(
        self,
        workdir: Path,
        config: CheckpointConfig,
        *,
        best_metric: str,
        best_mode: Literal["max", "min"],
        read_only: bool = False,
    ) -> None:
        self.read_only = read_only
        self.folder = workdir.absolute() / "checkpoints"
        policies = ocp.checkpoint_managers
        self._metric, self._best = best_metric, Best(self.folder, config.keep_best, best_mode)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(n=config.keep), self._best]),
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
            save_interval_steps=0 if read_only else 1,
            step_prefix="step",
        )
        try:
            with _quiet_orbax():
                self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=_handlers())
        except OSError as error:
            raise ConfigError(f"{self.folder}: {error.strerror}. Choose a folder that can be written.") from None
        self._fingerprint = jax.jit(fingerprints)
        self._under_way: int | None = None
        self._notes: list[str] = []

    def save(self, state: TrainState, step: int, *, evaluated_step: int, metrics: dict[str, float] | None) -> None:
        """Starts writing `state`; returns when it has been copied, so that training may go on.

        `metrics` are those of the evaluation at this step, if there was one. A disk that refuses it makes a note.
        """
        self.wait()
        if step in self.steps:
            return
        items = _items(state)
        prints = jax.device_get(self._fingerprint(items))
        shapes = {name: list(x.shape) for name, x in items["exchange"].items()}
        score = None if metrics is None else metrics[self._metric]
        self._best.add(step, score)
        meta = {
            "evaluated_step": evaluated_step,
            "score": score,
            "fingerprints": jax.tree.map(int, prints),
            "exchange_shapes": shapes,
        }
        arguments: dict[str, Any] = {name: ocp.args.PyTreeSave(item) for name, item in items.items() if item}
        arguments["meta"] = ocp.args.JsonSave(meta)

        def start() -> None:
            with _quiet_orbax():
                self._manager.save(step, args=ocp.args.Composite(**arguments), force=True)

        room = functools.partial(check_room, self.folder, sum(x.nbytes for x in jax.tree.leaves(items)))
        # Asked before anything is written: processes that wait for one that cannot write its part wait long.
        if all(self._settled(step, act) for act in (self._probe, room, start)):
            self._under_way = step

    def wait(self) -> None:
        """Returns when everything is written, or has failed; raises only what is not the disk's doing."""
        step, self._under_way = self._under_way, None
        if step is not None:

            def finish() -> None:
                with _quiet_orbax(logging.CRITICAL):
                    self._manager.wait_until_finished()
                self._manager.check_for_errors()

            self._settled(step, finish)

    def _settled(self, step: int, act: Callable[[], None]) -> bool:
        """Whether `act` was possible on all processes; if not, removes what there is of the checkpoint and notes it."""
        reason = None
        try:
            act()
        except Exception as error:
            reason = disk_reason(error)
            if reason is None:
                raise
        if all_processes(reason is None):
            return True
        if jax.process_index() == 0:
            for half in self.folder.glob(f"step_{step}.*"):
                shutil.rmtree(half, ignore_errors=True)
        all_processes(True)
        self._manager.reload()
        if step not in self.steps:  # What failed may have come after it was whole: making room by deleting an old one.
            newest = f"the newest whole one is of step {self.steps[-1]}" if self.steps else "there is no whole one yet"
            self._notes.append(
                f"the checkpoint of step {step} could not be written: {reason or 'another process could not'}; "
                f"training goes on; {newest}"
            )
        return False

    def _probe(self) -> None:
        """Raises OSError when nothing can be written at all. One process' disk may be another than the others'."""
        path = self.folder / f".probe.{jax.process_index()}.tmp"
        try:
            with path.open("wb") as file:
                file.write(b"0" * 65536)
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def take_notes(self) -> list[str]:
        """What has been noted since this was last called."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Waits for what is being written and ends the writer's threads."""
        try:
            with _quiet_orbax(logging.CRITICAL):
                self._manager.close()
        except Exception as error:
            if disk_reason(error) is None:
                raise

    @property
    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def restore(
        self,
        abstract: TrainState,
        *,
        items: tuple[str, ...] = tuple(ITEMS),
        fresh_exchange_state: Callable[[], Any] | None = None,
    ) -> Restored | None:
        """The newest checkpoint that is undamaged, laid out by the shardings in `abstract`; None when there is none.

        One that cannot be read, or whose arrays do not have their fingerprints, is moved to `checkpoints/damaged`, not
        deleted (with `read_only` it stays), and the one before it is tried. Fields of items not asked for stay as they
        are in `abstract`. With another number of replicas the exchange's state is split anew (`exchange.resplit`);
        `fresh_exchange_state` makes that of a new run, for what cannot be carried over; without it that is an error.
        """
        damaged: list[str] = []
        for step in reversed(self.steps):
            try:
                state, meta = self._restore_step(step, abstract, items, fresh_exchange_state)
            except Exception as error:
                if not _is_damage(error):
                    raise
                damaged.append(self._put_aside(step, error))
                continue
            note = (
                resplit.changed(_items(abstract)["exchange"], _exchange_shapes(meta)) if "exchange" in items else None
            )
            return Restored(state, step, meta["evaluated_step"], tuple(damaged), (note,) if note else ())
        if damaged:
            raise ConfigError(
                "\n".join(damaged) + f"\nNo whole checkpoint is left in {self.folder}. To start anew, use another "
                "--workdir; to keep this one, restore its checkpoints from a backup."
            )
        return None

    def _restore_step(
        self, step: int, abstract: TrainState, items: tuple[str, ...], fresh_exchange_state: Callable[[], Any] | None
    ) -> tuple[TrainState, Any]:
        wanted = {name: item for name, item in _items(abstract).items() if name in items and item}
        error, found, meta = None, {}, {}
        try:
            found, meta = _read(self.folder / f"step_{step}", wanted)
        except Exception as raised:  # Kept until the other processes know: this one must not go another way than they.
            error = raised
        if not all_processes(error is None):
            fine = error is None or _is_damage(error)
            if not all_processes(fine) and fine:  # What one process cannot read for another reason is no damage.
                raise OSError(errno.EIO, "another process could not read its part", str(self.folder))
            raise error or ValueError("another process could not read its part")
        prints = jax.tree.map(int, jax.device_get(self._fingerprint(found)))
        bad = [
            f"{item}.{leaf}"
            for item, leaves in prints.items()
            for leaf, value in leaves.items()
            if meta["fingerprints"][item].get(leaf) != value
        ]
        if bad:
            raise ValueError(f"the stored values of {', '.join(bad[:3])} have changed since they were written")
        if "exchange" in wanted:
            fresh = functools.partial(_fresh_exchange, abstract, fresh_exchange_state)
            found["exchange"] = resplit.resplit(found.get("exchange", {}), wanted["exchange"], fresh)
        return _state(found, abstract), meta

    def put_aside_after(self, step: int) -> None:
        """Moves the checkpoints after this step to `checkpoints/left`: the run went back, and takes another course."""
        self.wait()
        for later in [one for one in self.steps if one > step]:
            self._move(later, "left")

    def _put_aside(self, step: int, error: Exception) -> str:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if self.read_only:
            return f"checkpoint step_{step} is damaged ({reason})"
        return f"checkpoint step_{step} is damaged ({reason}); moved to {self._move(step, 'damaged')}"

    def _move(self, step: int, folder: str) -> Path:
        """Moves a checkpoint to a folder beside it; the new path. Raises ConfigError when that cannot be done."""
        source = self.folder / f"step_{step}"
        target = self.folder / folder / f"step_{step}"
        number = 0
        while target.exists():
            number += 1
            target = target.with_name(f"step_{step}.{number}")
        reason = None
        try:
            if jax.process_index() == 0:
                target.parent.mkdir(exist_ok=True)
                os.replace(source, target)
        except OSError as error:
            reason = error.strerror
        if not all_processes(reason is None):  # Before it is moved, no process may look for the next one.
            reason = reason or "the first process could not"
            raise ConfigError(
                f"{source}: not moved to {target.parent}: {reason}. Make room there, or make it writable."
            )
        self._manager.reload()
        return target


def _is_damage(error: Exception) -> bool:
    """Whether an error in reading is due to the checkpoint itself. Orbax raises many kinds for a damaged file.

    Too little memory, a disk that does not answer, or a checkpoint of other arrays say nothing against its files.
    """
    if isinstance(error, OSError):
        return error.errno in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
    return not isinstance(error, MemoryError | jax.errors.JaxRuntimeError | ConfigError)


def _read(folder: Path, wanted: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """`(items, meta)` of a checkpoint; each process reads its own part and waits for no other."""
    meta = json.loads((folder / "meta" / "metadata").read_text())
    stored = _exchange_shapes(meta)
    for name, item in wanted.items():
        other = sorted(item.keys() ^ meta["fingerprints"].get(name, {}).keys())
        if other and not (name == "exchange" and resplit.same_kind(item, stored)):
            raise ConfigError(
                f"{folder}: this checkpoint is of another network or another version of jaxdl: {other[0]} is "
                f"{'not in it' if other[0] in item else 'unknown here'}. Restore it with the version that wrote it."
            )
    if "exchange" in wanted:
        wanted = wanted | {"exchange": resplit.readable(wanted["exchange"], stored)}
    wanted = {name: item for name, item in wanted.items() if item}
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    with _quiet_orbax(), ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        found = {name: reader.restore(folder / name, args=ocp.args.StandardRestore(x)) for name, x in wanted.items()}
    return found, meta


def _exchange_shapes(meta: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in meta.get("exchange_shapes", {}).items()}


def _fresh_exchange(abstract: TrainState, make: Callable[[], Any] | None) -> dict[str, Any]:
    if make is None:
        raise ConfigError(
            "the checkpoint has no state of the exchange for this mesh. Restore it with fresh_exchange_state."
        )
    return _items(abstract.replace(exchange_state=make()))["exchange"]


def _handlers() -> dict[str, Any]:
    """Orbax's handlers. Small arrays are written by one replica: sharing them out costs a compilation each."""
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    trees = {name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry) for name in ITEMS}
    return trees | {"meta": ocp.JsonCheckpointHandler()}


def _items(state: TrainState) -> dict[str, dict[str, Any]]:
    """The state as flat items: name of the item -> path of the leaf -> array."""
    items: dict[str, dict[str, Any]] = {}
    for item, fields in ITEMS.items():
        flat = jax.tree_util.tree_flatten_with_path({field: getattr(state, field) for field in fields})[0]
        items[item] = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    return items


def _state(items: dict[str, dict[str, Any]], abstract: TrainState) -> TrainState:
    """The inverse of `_items`, in the structure of `abstract`; what is not in `items` stays."""
    changes: dict[str, Any] = {}
    for item, fields in ITEMS.items():
        tree = {field: getattr(abstract, field) for field in fields}
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
        found = items.get(item, {})
        changes |= treedef.unflatten([found.get(name, leaf) for name, (_, leaf) in zip(names, flat, strict=True)])
    return abstract.replace(**changes)


def fingerprints(tree: Any) -> Any:
    """A 32-bit sum of each array's bits, each weighted by its place; the same on every mesh.

    Integer sums wrap and can be taken in any order, so sharded arrays are summed where they lie.
    """

    def one(x: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
        place = jnp.uint32(1)
        for dim, size in enumerate(x.shape):
            place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        # An odd weight that differs from place to place: a changed bit, or two values swapped, change the sum.
        return jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)

    return jax.tree.map(one, tree)


@contextlib.contextmanager
def _quiet_orbax(lowest: int = logging.ERROR) -> Iterator[None]:
    """Keeps Orbax's advice about its own arguments off the user's screen; errors still show, if they are `lowest`."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(lowest)
    try:
        yield
    finally:
        logger.setLevel(level)
