"""Makes a workdir of a checkpoint of Hugging Face."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import LEASE_FILE
from jaxdl.core.runs import has_checkpoint
from jaxdl.data import Codec, Converted
from jaxdl.data.phases import make_timeline
from jaxdl.data.tokenizer_files import older_files
from jaxdl.inference.convert.checkpoint import Checkpoint, Progress
from jaxdl.inference.convert.growth import Grown, names_of
from jaxdl.inference.convert.layouts import layout_for
from jaxdl.inference.convert.special import JSON, SENTENCEPIECE, about_tokenizer, check_tokenizer, keep_tokenizer
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.lease import Lease
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.training.checkpoint import CheckpointConfig, Checkpoints, Earlier
from jaxdl.training.experiment import Experiment, identity
from jaxdl.training.run.plan.build import make_parts
from jaxdl.training.run.workdir.records import keep_spec
from jaxdl.training.run.workdir.tokenizer import keep_codec
from jaxdl.training.run.workdir.workdir import check_workdir, claim_workdir, make_lease, take_lease
from jaxdl.training.state import TrainState
from jaxdl.training.step import Parts


def from_hf(
    folder: Path,
    workdir: Path,
    *,
    length: int | None,
    add_tokens: str | None = None,
    progress: Progress = lambda done, every: None,
) -> str:
    """Makes a workdir, with a checkpoint of step 0, of the checkpoint in a folder; returns a text on what was made.

    Parameters become float32. `length` is how many tokens the network reads, by default all that it can; `add_tokens`
    are tokens that are added to its tokenizer, with commas between them. Raises ConfigError for what
    cannot be converted, and for a workdir with a run.
    """
    checkpoint = Checkpoint(folder)
    if length is not None and not 0 < length <= checkpoint.longest:
        raise ConfigError(f"--length {length}: the network reads 1 to {checkpoint.longest} tokens.")
    # Before anything is written.
    tokens = check_tokenizer(folder, checkpoint.config, older=checkpoint.layout.older_tokenizer)
    check_workdir(workdir)
    check_new(workdir)
    grown = Grown(folder, names_of(add_tokens))
    tokens = max(tokens or 0, grown.num_tokens) or tokens
    added = checkpoint.grow(tokens or 0, grown.added.values())
    added -= sum(number >= checkpoint.vocab_size for number in grown.added.values())  # These are named.
    with contextlib.suppress(ConfigError):  # In a program that runs on other devices these will do.
        start_devices(MeshConfig(cpu_devices=1))
    with all_or_nothing(workdir):
        parts = _write_run(checkpoint, workdir, length or checkpoint.length, grown, progress)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(parts.network.param_shapes))
    lines = [f"{folder} is now the run {workdir}: {checkpoint.layout.model_type}, {count:,} parameters"]
    lines += (*checkpoint.layout.remarks(checkpoint.config), *checkpoint.notes)
    lines += about_tokenizer(folder, checkpoint.layout.older_tokenizer)
    lines += grown.about()
    if (first := layout_for(checkpoint.model)) is not checkpoint.layout:
        lines.append(
            f"as a {first.model_type} it would compute the same, and so to-hf writes it, unless it is given --layout "
            f"{checkpoint.layout.model_type}"
        )
    if added:
        lines.append(
            f"its tokenizer has {tokens:,} tokens, and its table {checkpoint.vocab_size:,} rows: {added:,} rows are "
            "added, each the mean of the others. Their tokens mean nothing before they are trained"
        )
    return "\n".join((*lines, *(() if tokens else (_without_tokenizer(folder),))))


def _write_run(checkpoint: Checkpoint, workdir: Path, length: int, grown: Grown, progress: Progress) -> Parts:
    """Writes the run of a checkpoint; returns what its network is made of. Raises ConfigError."""
    try:
        older = checkpoint.layout.older_tokenizer
        tokenizer = keep_tokenizer(checkpoint.folder, checkpoint.config, workdir, older=older)
        if tokenizer is not None:
            grown.write(workdir / tokenizer)
        vocab_size = checkpoint.vocab_size if tokenizer is None else Codec(str(workdir / tokenizer)).vocab_size
        spec = checkpoint.layout.spec(checkpoint.config, vocab_size, length)
        experiment = _experiment(checkpoint, tokenizer)
        mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
        parts = make_parts(experiment, spec, mesh, make_timeline(1, 1, epochs=None, steps=1))
        params = checkpoint.params(parts.network.param_shapes, progress)
        claim_workdir(workdir, experiment, identity)
        keep_spec(workdir, spec)
        keep_codec(workdir, experiment.data.within(workdir))
        save_run(workdir, parts, begun_state(parts, params))
    except OSError as error:
        raise ConfigError(f"{workdir}: {error.strerror}. Choose a folder with room that can be written.") from None
    return parts


@contextlib.contextmanager
def all_or_nothing(workdir: Path) -> Iterator[None]:
    """Context that makes a run in a workdir, whose lease it holds.

    When it fails, nothing of it is left; what was there before stays. Without the lease nothing is touched: what is
    there is of the run that holds it. Raises ConfigError then, and for a workdir with a run.
    """
    missing = [path for path in (workdir, *workdir.parents) if not path.exists()]
    lease = make_lease(workdir)
    taken = made = False
    try:
        take_lease(lease)
        taken = True
        check_new(workdir)  # Another conversion may have ended just now.
        with _remove_unless_complete(workdir, lease):
            yield
        made = True
    finally:
        lease.release()
        if taken and not made:
            with contextlib.suppress(OSError):  # A folder that another program has put something into stays.
                for path in missing:
                    path.rmdir()


@contextlib.contextmanager
def _remove_unless_complete(workdir: Path, lease: Lease) -> Iterator[None]:
    """Context that fills a workdir, and removes what is new in it when it fails; the lease's files are the lease's."""
    before = {path.name for path in workdir.iterdir()}
    try:
        yield
    except BaseException:
        # On a full disk there may be no lease; another run may have taken it since.
        if workdir.is_dir() and (lease.held or not (workdir / LEASE_FILE).exists()):
            for path in [path for path in workdir.iterdir() if path.name not in before]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != LEASE_FILE and not path.name.startswith(".lease."):
                    path.unlink(missing_ok=True)
        raise


def check_new(workdir: Path) -> None:
    """Raises ConfigError for a workdir with a run."""
    if has_checkpoint(workdir):
        raise ConfigError(f"{workdir}: there is a run in this folder already. Choose another one.")


def _without_tokenizer(folder: Path) -> str:
    """What it means that a checkpoint has no tokenizer that can be read."""
    older = older_files(folder)
    advice = (
        f"its {' and '.join(older)} alone do not say how text is split: save it with transformers, "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), and convert again"
        if older
        else "put one of them there and convert again"
    )
    return (
        f"the checkpoint has no {JSON} or {SENTENCEPIECE}, so the run reads and writes numbers of tokens alone, no "
        f"text; {advice}"
    )


def _experiment(checkpoint: Checkpoint, tokenizer: str | None) -> Experiment:
    """The experiment of a converted run, whose optimizer keeps nothing."""
    return Experiment(
        model=checkpoint.model,
        data=Converted(tokenizer=tokenizer),
        task=checkpoint.layout.task(),
        optimizer=SGD(momentum=0),
        schedule=Constant(),
        steps=1,
    )


def begun_state(parts: Parts, params: dict[str, Any], model_state: dict[str, Any] | None = None) -> TrainState:
    """The train state of step 0 with these parameters; the optimizer keeps no array of their size."""
    fresh = jax.jit(lambda: parts.state_spec.init(jax.random.key(0)).replace(params={}))()
    placed = jax.tree.map(jax.device_put, params, parts.state_spec.shardings.params)
    if model_state is not None:
        stats = jax.tree.map(jax.device_put, model_state, parts.state_spec.shardings.model_state)
        fresh = fresh.replace(model_state=stats)
    return fresh.replace(params=placed, step=jnp.int32(0))


def save_run(workdir: Path, parts: Parts, state: TrainState) -> None:
    """Writes the checkpoint of step 0. Raises ConfigError."""
    task = parts.task
    checkpoints = Checkpoints(workdir, CheckpointConfig(), best_metric=task.best_metric, best_mode=task.resolved_mode)
    with contextlib.closing(checkpoints):
        checkpoints.save(state, 0, evaluated_step=-1, metrics=None)
        checkpoints.wait()
        notes = checkpoints.take_notes()
    if notes or not has_checkpoint(workdir):
        raise ConfigError(f"{workdir}: {' '.join(notes)}. Free some space, or choose another folder.")
    Earlier(workdir).mark(0)
