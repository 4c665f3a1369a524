"""Shared by the tests of whole runs: a tiny experiment, its command line as a process, and its saved state."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import jax
import numpy as np

from jaxdl.core.kinds import forgotten
from jaxdl.data import SyntheticImages
from jaxdl.models import EncoderDecoder, Perceptron, ResNet
from jaxdl.models.config import Model
from jaxdl.models.perceptron import PerceptronModule
from jaxdl.optim import LARS, AdamW, Constant, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import ReportConfig
from jaxdl.training.checkpoint import Checkpoints
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Classification, Translation

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests" / "step_worker.py"
"""A program that counts steps, as a run on an engine."""
ONE_DEVICE = MeshConfig(replica=1, fsdp=1, tensor=1)
MESHES = {
    "replica 8": MeshConfig(replica=8, fsdp=1, tensor=1),
    "fsdp 8": MeshConfig(replica=1, fsdp=8, tensor=1),
    "tensor 4 x fsdp 2": MeshConfig(replica=1, fsdp=2, tensor=4),
    "replica 2 x fsdp 2 x tensor 2": MeshConfig(replica=2, fsdp=2, tensor=2),
}
"""Meshes of eight devices on which losses are those of one device."""
_started: weakref.WeakSet["Started"] = weakref.WeakSet()


with forgotten():  # The kinds that tests list are those of jaxdl.

    class TinyResNet(ResNet, kind="tiny_resnet"):
        """A ResNet of one block: most of the time of a short run goes into the tracing and compiling of its layers."""

        @property
        def blocks(self) -> tuple[int, ...]:
            """One block in one stage."""
            return (1,)

        @property
        def users_name(self) -> None:
            """None: its steps are those of a model of jaxdl, which are checked more than those of a user's model."""
            return None

    class TinyPerceptron(Model, kind="tiny_perceptron"):
        """One hidden layer, for the images of the tiny experiment: half of the time of a `TinyResNet`."""

        units: int = 16

        def build(self, *, num_classes: int, channels: int, dtype):
            """As `Model.build`."""
            config, sizes = Perceptron(units=(self.units,)), {"num_classes": num_classes, "num_features": 64 * channels}
            return lambda rngs: FlatPerceptron(config, rngs, dtype=dtype, **sizes)

        @property
        def users_name(self) -> None:
            """As `TinyResNet`'s."""
            return None


class FlatPerceptron(PerceptronModule):
    """A perceptron of the pixels of images."""

    def __call__(self, x, *, train):
        """Logits [batch, class]."""
        return super().__call__(x.reshape(len(x), -1), train=train)


def tiny_experiment(**changes) -> Experiment:
    """A few steps of a small ResNet, with everything in its state: momentum, batch norm, moving average."""
    values = {
        "data": SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=96, num_test=40),
        "model": TinyResNet(depth=8, width=32),
        "task": Classification(augment="flip"),
        "optimizer": LARS(learning_rate=2.0),
        "schedule": Cosine(warmup_steps=2),
        "step": StepConfig(ema_decay=0.9),
        "batch_size": 16,
        "steps": 12,
        "mesh": MeshConfig(replica=2, fsdp=2, tensor=1, cpu_devices=4),
        "evaluation": EvaluationConfig(every_steps=4),
        "report": ReportConfig(every_steps=1, tensorboard=False, curves=False),
    }
    return Experiment(**(values | {"checkpoint": {"every_steps": 4}} | changes))


def tiny_translation(data, **changes) -> Experiment:
    """A tiny encoder-decoder on one device, for pairs of texts."""
    model = {"num_encoder_layers": 1, "num_decoder_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 16}
    return Experiment(
        data=data,
        model=EncoderDecoder(**(model | changes.pop("model", {}))),
        task=Translation(label_smoothing=0.1),
        schedule=Constant(),
        mesh=ONE_DEVICE,
        report=ReportConfig(tensorboard=False, curves=False),
        **({"optimizer": AdamW(learning_rate=1e-2), "batch_size": 4, "steps": 2} | changes),
    )


def write_config(folder: Path, experiment: Experiment) -> Path:
    """A config file that returns the experiment."""
    path = folder / "tiny.py"
    path.write_text(
        "from jaxdl.training.experiment import Experiment\n\n"
        f"def config():\n    return Experiment.from_json({experiment.to_json()!r})\n"
    )
    return path


class Started(subprocess.Popen):
    """A process of Python whose output goes to files, which `communicate` reads when it has ended.

    A pipe that the test does not read yet would block it after 64 KiB, and with it all processes that wait for it.
    """

    def __init__(self, *args: str, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
        inherited |= {"PYTHONFAULTHANDLER": "1"}  # See `finish`.
        self._files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        out, err = self._files
        super().__init__([sys.executable, *args], cwd=ROOT, env=inherited | environment, stdout=out, stderr=err)
        _started.add(self)

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[str, str]:
        """All output, when the process has ended. Raises TimeoutExpired."""
        self.wait(timeout)
        return self.printed

    @functools.cached_property
    def printed(self) -> tuple[str, str]:
        """What it has printed on stdout and stderr; read when it has ended, because both write at the same place."""
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read())
        return texts[0], texts[1]


def start(config: Path, workdir: Path, *args: str) -> Started:
    """Starts `python -m jaxdl.train` as a user does."""
    return Started("-m", "jaxdl.train", "--config", str(config), "--workdir", str(workdir), *args)


def wait_for(process: subprocess.Popen, condition, timeout_sec: float = 120) -> None:
    """Returns when the condition holds; fails if the process ends first or it takes too long."""
    end = time.monotonic() + timeout_sec
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"the run ended first: {process.communicate()}")
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def nothing_is_written() -> None:
    """Returns when the checkpoint that is being written in this process, if any, is whole or has failed."""
    while any(type(thread).__module__.startswith("orbax.") for thread in threading.enumerate()):
        time.sleep(0.01)


def rows(workdir: Path) -> list[dict]:
    """The complete lines of metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def measured(workdir: Path) -> list[dict]:
    """The rows of the history without events, and without the columns that depend on the clock."""
    clock = ("examples_per_sec", "tokens_per_sec", "input/", "seconds/")
    return [
        {name: value for name, value in row.items() if not name.startswith(clock)}
        for row in rows(workdir)
        if "event" not in row
    ]


def has_step(workdir: Path, step: int):
    """A condition: the run has reported this step."""
    return lambda: any(row["step"] >= step and "train/loss" in row for row in rows(workdir))


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """The exit code and all output. Fails, with the stacks of all processes that still run, if it hangs."""
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        hanging = [one for one in _started if one.poll() is None]
        for one in hanging:
            one.send_signal(signal.SIGABRT)
        texts = [f"{one.args}:\n{''.join(one.communicate(timeout=20))}" for one in hanging]
        raise AssertionError("\n\n".join(["after 240 s these processes still ran:", *texts])) from None
    return process.returncode, out + err


def stop(process: subprocess.Popen, signum: int) -> tuple[int, str]:
    """Sends the signal; the exit code (negative when the signal itself ended it) and the output."""
    process.send_signal(signum)
    return finish(process)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL."""
    assert stop(process, signal.SIGKILL)[0] == -signal.SIGKILL


def saved_state(workdir: Path, experiment: Experiment):
    """The newest saved state, on one device, as NumPy arrays."""
    plan = make_plan(experiment.replaced({"mesh": ONE_DEVICE}), jax.devices()[:1])
    checkpoints = Checkpoints(workdir, experiment.checkpoint, best_metric="accuracy", best_mode="max")
    restored = checkpoints.restore(plan.parts.state_spec.abstract())
    checkpoints.close()
    assert restored is not None
    assert not restored.damaged
    return jax.tree.map(np.asarray, restored.state)


def assert_bit_equal(one, other) -> None:
    """Every array of both trees has the same bits."""
    flat_one, flat_other = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (one, other))
    assert len(flat_one) == len(flat_other)
    for (path, x), (_, y) in zip(flat_one, flat_other, strict=True):
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes(), f"{jax.tree_util.keystr(path)} differs"
