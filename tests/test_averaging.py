"""The mean of the last checkpoints: of what each would be evaluated with, by NumPy; and what is no such mean."""

import json

import jax
import numpy as np
import pytest
from mistakes import refusal

import jaxdl
from jaxdl.inference.evaluate.__main__ import main as evaluate
from jaxdl.inference.export.__main__ import main as export
from jaxdl.parallel.mesh import MeshConfig

MESH = MeshConfig(replica=2, fsdp=2, tensor=2)


def test_parameters_and_statistics_are_the_means_of_both_checkpoints(tiny_run):
    means, *ones = (
        jaxdl.restore(tiny_run.workdir, mesh=MESH, **which) for which in ({"average": 2}, {"step": 2}, {"step": 4})
    )
    assert means.step == 4
    trees = [(one.params, one.model_state) for one in ones]
    expected = jax.tree.map(lambda *x: np.mean(np.stack(x).astype(np.float64), axis=0), *jax.device_get(trees))
    found = (means.params, means.model_state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8), jax.device_get(found), expected)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, trees[0])
    apart = jax.tree.map(lambda x, y: np.abs(x - y).max(), *jax.device_get(trees))
    assert max(jax.tree.leaves(apart)) > 1e-3, "the two checkpoints differ"


@pytest.mark.slow
def test_the_commands_take_it(tiny_run, tmp_path, capsys):
    evaluate(["--workdir", str(tiny_run.workdir), "--average", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    expected = jaxdl.restore(tiny_run.workdir, average=2, mesh=MESH).evaluate()
    assert found["metrics"] == expected
    export(["--workdir", str(tiny_run.workdir), "--average", "2", "--to", str(tmp_path), "--format", "safetensors"])
    from safetensors.numpy import load_file

    saved = load_file(tmp_path / "params.safetensors")
    leaves = jax.tree_util.tree_flatten_with_path(jaxdl.restore(tiny_run.workdir, average=2).params)[0]
    for path, x in leaves:
        np.testing.assert_array_equal(saved[jax.tree_util.keystr(path, simple=True, separator=".")], x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--average", "3"], "--average 3: the workdir has 2 checkpoints (of steps 2, 4). Average fewer, or train "),
        (["--average", "2", "--step", "2"], "--average 2: the workdir has 1 checkpoint up to step 2 (of steps 2)"),
        (["--average", "2", "--step", "best"], "Remove --step best"),
        (["--average", "0"], "--average 0: give a whole number, 1 or more"),
    ],
)
def test_mistakes(tiny_run, capsys, options, message):
    assert message in refusal(capsys, "--workdir", str(tiny_run.workdir), *options, run=evaluate)
    with pytest.raises(jaxdl.ConfigError, match="average=5: the workdir has 2 checkpoints"):
        jaxdl.restore(tiny_run.workdir, average=5)
