"""A train state of a few small arrays and its checkpoints, without a network, for tests of checkpoint files."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.training.checkpoint import CheckpointConfig, Checkpoints
from jaxdl.training.state import TrainState

SHAPES = {"w": (16, 24), "odd": (7, 5)}


def make_state(step=0, *, replicas=2, fsdp=1, shapes=SHAPES, dtype=jnp.float32):
    """A state whose values depend on `step`, on a mesh of `replicas` x `fsdp` devices."""
    devices = np.array(jax.devices()[: replicas * fsdp]).reshape(replicas, fsdp, 1)
    mesh, random = Mesh(devices, ("replica", "fsdp", "tensor")), np.random.default_rng(step)

    def put(value, *spec):
        return jax.device_put(jnp.asarray(value), NamedSharding(mesh, PartitionSpec(*spec)))

    params = {
        name: put(random.standard_normal(shape).astype(dtype), *(["fsdp"] if shape[0] % fsdp == 0 else []))
        for name, shape in shapes.items()
    }
    residual = {"w": put(random.standard_normal((replicas, 16)).astype(np.float32), "replica")}
    return TrainState(
        step=put(np.int32(step)),
        params=params,
        model_state={},
        ema_params={},
        opt_state={"count": put(np.int32(step))},
        exchange_state={"replica": {"residual": residual}},
        loss_scale={},  # pyright: ignore[reportArgumentType]
        guard={},  # pyright: ignore[reportArgumentType]
        key=put(np.array([1, 2], np.uint32)),
    )


def abstract(state):
    """The shapes and shardings of a state."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def open_checkpoints(workdir, *, read_only=False, **config):
    """The Checkpoints of a workdir; the metric is the accuracy."""
    config = CheckpointConfig(**({"keep": 5} | config))
    return Checkpoints(workdir, config, best_metric="accuracy", best_mode="max", read_only=read_only)


def save(workdir, accuracies, **config):
    """Saves the state of each step in `accuracies`: step -> accuracy, or None without an evaluation."""
    checkpoints = open_checkpoints(workdir, **config)
    for step, accuracy in accuracies.items():
        metrics = None if accuracy is None else {"accuracy": accuracy}
        checkpoints.save(make_state(step), step, evaluated_step=step if metrics else -1, metrics=metrics)
    checkpoints.close()
    assert not checkpoints.take_notes()


def restore(workdir, *, read_only=False, state=None, **options):
    """The newest checkpoint, read as by a new process."""
    checkpoints = open_checkpoints(workdir, read_only=read_only)
    try:
        return checkpoints.restore(abstract(state or make_state()), **options)
    finally:
        checkpoints.close()


def same(state, step):
    """Whether a restored state is that of the step, bit by bit."""
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(make_state(step)), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def names(workdir):
    """The paths of all files and folders in `checkpoints`."""
    folder = workdir / "checkpoints"
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
