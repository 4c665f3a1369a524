"""A converted Gemma 2 (caps, norms around branches, windows in some layers) is tuned, split, killed and exported."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import ONE_DEVICE, assert_bit_equal, has_step, kill, measured, start, wait_for, write_config
from test_convert import bits
from test_families import write

import jaxdl
from jaxdl.data import SyntheticText
from jaxdl.inference.convert.__main__ import main
from jaxdl.inference.export.__main__ import main as export
from jaxdl.models import LoRA
from jaxdl.optim import AdamW, Constant
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.init_from import InitFrom
from jaxdl.training.tasks import LanguageModelling


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma2")
    # Without caps in the way the network would be at the bounds of its logits.
    settings = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    main(["from-hf", str(write(folder / "hf", "gemma2", **settings)), str(folder / "run")])
    return folder / "run"


def experiment(base, **changes):
    return Experiment(
        model=jaxdl.load(base / "config.json").model,
        data=SyntheticText(vocab_size=32, length=16, num_train=64, num_test=8),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=0.01),
        schedule=Constant(),
        mesh=ONE_DEVICE,
        batch_size=8,
        steps=4,
        report={"curves": False, "tensorboard": False, "every_steps": 1},
        sharding={"min_shard_elements": 16},
    ).replaced(changes)


def train(base, workdir, **changes):
    """The losses of a run that begins with the converted network."""
    run = experiment(base, **changes)
    num = math.prod(getattr(run.mesh, name) or 1 for name in ("replica", "fsdp", "tensor", "context"))
    jaxdl.train(run, workdir, quiet=True, devices=jax.devices()[:num], init_from=InitFrom(base))
    return [row["train/loss"] for row in measured(workdir) if "train/loss" in row]


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """(the workdir, the losses) of a run on one device."""
    workdir = tmp_path_factory.mktemp("tuned")
    return workdir, train(base, workdir)


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(replica=2, fsdp=2, tensor=2), pytest.param(MeshConfig(fsdp=2, context=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_losses_are_those_of_one_device(mesh, base, tuned, tmp_path):
    found = train(base, tmp_path, mesh=mesh)
    assert found[-1] < 0.98 * found[0]
    np.testing.assert_allclose(found, tuned[1], rtol=1e-5)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(base, tuned, tmp_path):
    run = experiment(base, **{"checkpoint": {"every_steps": 1}})
    config, workdir = write_config(tmp_path, run), tmp_path / "run"
    args = ("--init-from", str(base), "--mesh.cpu-devices", "1")
    process = start(config, workdir, *args)
    wait_for(process, has_step(workdir, 2))
    kill(process)
    jaxdl.train(run, workdir, quiet=True, devices=jax.devices()[:1])
    assert_bit_equal(jaxdl.restore(workdir).params, jaxdl.restore(tuned[0]).params)


def test_adapters_are_tuned_merged_and_exported(base, tmp_path):
    changes = {"model.lora": LoRA(rank=2, targets=("attention", "mlp")), "mesh": MeshConfig(fsdp=2), "steps": 2}
    train(base, tmp_path / "tuned", **changes)
    main(["to-hf", str(tmp_path / "tuned"), str(tmp_path / "hf")])
    before, after = bits(base.parent / "hf"), bits(tmp_path / "hf")
    assert {name for name in after if before[name] != after[name]} == {
        name for name in before if "self_attn" in name or ".mlp." in name
    }
    main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "back"), "--length", "16"])
    tokens = np.random.default_rng(0).integers(0, 32, (2, 16))
    logits = jaxdl.restore(tmp_path / "tuned").logits(tokens)
    np.testing.assert_allclose(logits, jaxdl.restore(tmp_path / "back").logits(tokens), atol=1e-4)
    export(["--workdir", str(tmp_path / "back"), "--to", str(tmp_path / "export")])
    function = jax.export.deserialize(bytearray((tmp_path / "export" / "predict.stablehlo").read_bytes()))
    np.testing.assert_allclose(function.call(jnp.int32(tokens)), jax.nn.softmax(logits), atol=1e-4)
