"""Checkpoints: written asynchronously, restored onto the current mesh, checked by fingerprints.

A checkpoint is flat: one array a leaf of the train state, by its path, in three items (`model`, `optimizer`,
`exchange`), and a JSON with the fingerprint of each array. `workdir/config.json` is the run's resolved config.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pydantic
from jax import lax
from jax.experimental import multihost_utils

from jaxdl.config import Config, ConfigError, Periodic
from jaxdl.exchange import ExchangeConfig, resplit
from jaxdl.report import replace_file
from jaxdl.state import TrainState

ITEMS = {
    "model": ("step", "params", "model_state", "ema_params"),
    "optimizer": ("opt_state", "loss_scale", "key"),
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
        keep: list[Any] = [policies.LatestN(n=config.keep)]
        if config.keep_best:
            keep.append(
                policies.BestN(
                    get_metric_fn=lambda metrics: metrics[best_metric],
                    reverse=best_mode == "min",
                    n=config.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
            save_interval_steps=0 if read_only else 1,
            step_prefix="step",
        )
        with _quiet_orbax():
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=_handlers())
        self._fingerprint = jax.jit(fingerprints)

    def save(self, state: TrainState, step: int, *, evaluated_step: int, metrics: dict[str, float] | None) -> None:
        """Starts writing `state`; returns when it has been copied, so that training may go on.

        `metrics` are those of the evaluation at this step, if there was one. Raises what an earlier write failed with.
        """
        items = _items(state)
        prints = jax.device_get(self._fingerprint(items))
        shapes = {name: list(x.shape) for name, x in items["exchange"].items()}
        meta = {
            "evaluated_step": evaluated_step,
            "fingerprints": jax.tree.map(int, prints),
            "exchange_shapes": shapes,
        }
        arguments: dict[str, Any] = {name: ocp.args.PyTreeSave(item) for name, item in items.items() if item}
        arguments["meta"] = ocp.args.JsonSave(meta)
        with _quiet_orbax():
            self._manager.save(step, args=ocp.args.Composite(**arguments), metrics=metrics, force=True)

    def wait(self) -> None:
        """Returns when everything is written; raises what failed."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def close(self) -> None:
        """Waits for what is being written and ends the writer's threads."""
        self._manager.close()

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
        if not _all_processes(error is None):
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

    def _put_aside(self, step: int, error: Exception) -> str:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if self.read_only:
            return f"checkpoint step_{step} is damaged ({reason})"
        source = self.folder / f"step_{step}"
        target = self.folder / "damaged" / f"step_{step}"
        number = 0
        while target.exists():
            number += 1
            target = target.with_name(f"step_{step}.{number}")
        if jax.process_index() == 0:
            target.parent.mkdir(exist_ok=True)
            os.replace(source, target)
        _all_processes(True)  # Before it is moved, no process may look for the next one.
        self._manager.reload()
        return f"checkpoint step_{step} is damaged ({reason}); moved to {target}"


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


def _all_processes(fine: bool) -> bool:
    """Whether all processes are fine; each waits here for the others."""
    return bool(np.all(multihost_utils.process_allgather(np.bool_(fine)))) if jax.process_count() > 1 else fine


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


def claim_workdir(workdir: Path, config: Config, identity: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Makes the workdir this run's own, or goes on with an earlier run of the same config in it.

    `identity` takes away the fields that may change between runs (the mesh, reports...). Writes `config.json`.
    Raises ConfigError with the difference when the workdir belongs to another config.
    """
    path = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        earlier = path.read_text() if path.exists() else None
        if earlier is None and jax.process_index() == 0:
            replace_file(path, (config.to_json() + "\n").encode())
    except UnicodeDecodeError:
        earlier = ""
    except OSError as error:
        raise ConfigError(f"--workdir {workdir}: {error.strerror}. Choose a folder that can be written.") from None
    if earlier is not None:
        try:
            there, here = identity(json.loads(earlier)), identity(json.loads(config.to_json()))
        except (ValueError, AttributeError):
            raise ConfigError(f"{path}: not a config any more. Restore it, or choose another --workdir.") from None
        if there != here:
            lines = difflib.unified_diff(
                _lines(there), _lines(here), "in the workdir", "asked for now", n=0, lineterm=""
            )
            changes = "\n".join("  " + line for line in lines if not line.startswith("@@"))
            raise ConfigError(
                f"--workdir {workdir} belongs to a run of a different config:\n{changes}\n"
                "Choose another --workdir, or the settings of the run that is there."
            )
        if jax.process_index() == 0:
            replace_file(path, (config.to_json() + "\n").encode())


def write_choice(workdir: Path, config: Config, reasons: Sequence[str]) -> None:
    """Keeps the exchange that was chosen for a run, and why, in `exchange.json`."""
    text = json.dumps({"exchange": config.model_dump(), "reasons": list(reasons)}, indent=2)
    replace_file(workdir / "exchange.json", (text + "\n").encode())


def read_choice(workdir: Path) -> Any:
    """The exchange that was chosen for the run in a workdir, or None. Raises ConfigError when it cannot be read."""
    path = workdir / "exchange.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())["exchange"]
        return pydantic.TypeAdapter(Annotated[ExchangeConfig, pydantic.Discriminator("kind")]).validate_python(values)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path}: not a choice of exchange any more. Restore it, or choose another --workdir."
        ) from None


def _lines(config: Any, prefix: str = "") -> list[str]:
    """A config as sorted lines `dotted.field = value`."""
    if not isinstance(config, dict):
        return [f"{prefix} = {json.dumps(config)}"]
    return [line for name in sorted(config) for line in _lines(config[name], f"{prefix}.{name}" if prefix else name)]


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Keeps Orbax's advice about its own arguments off the user's screen; errors still show."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
