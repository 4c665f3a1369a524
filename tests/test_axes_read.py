"""Runs of stages, and of texts split over devices, as the commands read them: what one device reads, on any mesh."""

import json

import jax
import numpy as np
import pytest
from runs import assert_bit_equal

import jaxdl
from jaxdl.data import TextFiles
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.inference.evaluate.__main__ import main as evaluate
from jaxdl.inference.export.__main__ import main as export
from jaxdl.inference.generate.__main__ import main as generate
from jaxdl.inference.score.__main__ import main as score
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import LanguageModelling

LENGTH = 16
TOKENS = (np.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % 256).astype(np.int32)
EXPERIMENT = Experiment(
    model=Transformer(num_layers=3, embed_dim=32, num_heads=2, mlp_dim=48, tied_embeddings=False),
    task=LanguageModelling(),
    optimizer=AdamW(learning_rate=0.02),
    batch_size=8,
    steps=2,
    step={"microbatches": 2, "ema_decay": 0.5},
    sharding={"min_shard_elements": 16},
    report={"curves": False, "tensorboard": False},
)
"""Its parameters are not those that are evaluated."""


@pytest.fixture(scope="module", params=["stage", "context"])
def trained(request, tmp_path_factory):
    """`(run, the network on one device, options of commands that read it on the mesh of the run)`."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "texts").mkdir()
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text(f"{number} fish, red fish, blue fish\n" * 20)
    data = TextFiles(paths=(str(folder / "texts"),), glob="*.txt", length=LENGTH, test_fraction=0.25)
    mesh = MeshConfig(replica=1, fsdp=4, **{request.param: 2})
    run = jaxdl.train(EXPERIMENT.replaced({"data": data, "mesh": mesh}), folder / "run", quiet=True)
    options = ["--mesh.fsdp", "4", f"--mesh.{request.param}", "2"]
    return run, jaxdl.restore(run.workdir), options


def test_the_parameters_are_those_of_the_run(trained):
    run, one, _ = trained
    # The last of two stages has a layer fewer than there is room for.
    averaged = jax.tree.map(lambda x, like: np.asarray(x)[: len(like)], run.state.ema_params, one.params)
    assert_bit_equal(jax.tree.map(np.asarray, one.params), averaged)
    assert len(jax.tree.leaves(one.params)[0].devices()) == 1
    several = jaxdl.restore(run.workdir, mesh=run.plan.experiment.mesh)
    assert len(jax.tree.leaves(several.params)[0].devices()) == 8
    np.testing.assert_allclose(several.logits(TOKENS), one.logits(TOKENS), atol=1e-5)


def test_generate_writes_the_text_of_one_device(trained, capsys):
    run, one, options = trained
    args = ["--workdir", str(run.workdir), "--num-tokens", "9", "--temperature", "0", "--prompt", "1 f", "2 "]
    expected = [found.text for found in one.complete(["1 f", "2 "], num_tokens=9, temperature=0)]
    for more in ([], options):
        generate([*args, *more])
        assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == expected


def test_score_and_evaluate_find_the_loss_of_one_device(trained, tmp_path, capsys):
    run, one, options = trained
    (tmp_path / "text.txt").write_text("2 fish, blue fish, and as many other fish as do not fit into a row\n")
    losses = []
    for name, more in (("one", []), ("several", options)):
        where = str(tmp_path / "text.txt")
        score(["--workdir", str(run.workdir), "--text", where, "--to", str(tmp_path / name), *more])
        losses.append(json.loads((tmp_path / name).read_text())["text"][where]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    wanted = one.evaluate(run.plan.experiment.data)["loss"]
    assert run.metrics["loss"] == pytest.approx(wanted, rel=1e-5)
    capsys.readouterr()
    evaluate(["--workdir", str(run.workdir), "--json"])  # On the mesh of the run.
    assert json.loads(capsys.readouterr().out)["metrics"]["loss"] == run.metrics["loss"]


def test_convert_and_export_write_the_network_of_one_device(trained, tmp_path):
    run, one, _ = trained
    convert(["to-hf", str(run.workdir), str(tmp_path / "hf")])
    convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / "back"), "--length", str(LENGTH)])
    np.testing.assert_array_equal(jaxdl.restore(tmp_path / "back").logits(TOKENS), one.logits(TOKENS))
    export(["--workdir", str(run.workdir), "--to", str(tmp_path / "out"), "--platforms", "cpu"])
    function = jax.export.deserialize(bytearray((tmp_path / "out" / "predict.stablehlo").read_bytes()))
    assert function.nr_devices == 1
    np.testing.assert_allclose(function.call(TOKENS), jax.nn.softmax(one.logits(TOKENS)), atol=1e-5)
