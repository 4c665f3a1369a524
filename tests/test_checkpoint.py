"""Checkpoints: restoring on other meshes, retention, and refusals."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import assert_bit_equal, saved_state, tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.files import step_dir, step_folder
from jaxdl.data import SyntheticText, eval_batches
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.training.checkpoint import Checkpoints
from jaxdl.training.evaluation import evaluate, make_eval_step
from jaxdl.training.experiment import Experiment, identity
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.workdir.records import keep_examples
from jaxdl.training.run.workdir.workdir import claim_workdir
from jaxdl.training.tasks import LanguageModelling

IMAGES = tiny_experiment(mesh=MeshConfig(replica=2, fsdp=2), steps=4)
TEXT = tiny_experiment(
    data=SyntheticText(vocab_size=32, length=16, num_train=96, num_test=40),
    model=Transformer(num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=2),
    task=LanguageModelling(),
    optimizer=AdamW(),
    mesh=MeshConfig(replica=2, fsdp=2),
    steps=4,
)


def restored_plan(experiment, workdir, mesh, num_devices):
    plan = make_plan(experiment.replaced({"mesh": mesh}), jax.devices()[:num_devices])
    task = plan.parts.task
    checkpoints = Checkpoints(
        workdir, experiment.checkpoint, best_metric=task.best_metric, best_mode=task.resolved_mode
    )
    restored = checkpoints.restore(plan.parts.state_spec.abstract())
    checkpoints.close()
    return plan, restored


def evaluated(plan, state):
    sharding = batch_sharding(plan.parts.layout.mesh)
    with eval_batches(plan.splits.test, batch_size=plan.eval_batch_size, sharding=sharding) as batches:
        return evaluate(plan.parts, make_eval_step(plan.parts), state.eval_params, state.model_state, batches)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a checkpoint of its last step, 4."""
    return jaxdl.train(IMAGES, tmp_path_factory.mktemp("trained") / "run", quiet=True, devices=jax.devices()[:4])


def test_restores_on_any_mesh_with_equal_evaluation(trained):
    state = jax.tree.map(np.asarray, trained.state)
    for mesh, num_devices in ((MeshConfig(fsdp=2, tensor=2), 4), (MeshConfig(), 1)):
        plan, restored = restored_plan(IMAGES, trained.workdir, mesh, num_devices)
        assert restored.step == 4
        sharded = [leaf for leaf in jax.tree.leaves(restored.state.params) if not leaf.sharding.is_fully_replicated]
        assert bool(sharded) == (num_devices > 1)
        assert_bit_equal(jax.tree.map(np.asarray, restored.state), state)
        metrics = evaluated(plan, restored.state)
        for metric, value in trained.metrics.items():
            np.testing.assert_allclose(metrics[metric], value, rtol=1e-5, err_msg=f"{metric} on {num_devices}")


@pytest.mark.slow
def test_resuming_on_another_mesh_follows_the_same_trajectory(tmp_path):
    longer = TEXT.replaced({"steps": 8, "evaluation": {"every_steps": 8}, "schedule": "constant"})
    whole = jaxdl.train(longer, quiet=True, devices=jax.devices()[:4])
    plan = make_plan(longer, jax.devices()[:4])
    task = plan.parts.task
    half = jaxdl.train(longer.replaced({"steps": 4}), tmp_path, quiet=True, devices=jax.devices()[:4])
    (tmp_path / "config.json").write_text(longer.to_json())
    resumed = jaxdl.train(longer.replaced({"mesh": MeshConfig(fsdp=4, tensor=2)}), tmp_path, quiet=True)
    assert half.summary["steps"] == 4
    assert resumed.history["step"][-1] == 8
    np.testing.assert_allclose(resumed.metrics[task.best_metric], whole.metrics[task.best_metric], rtol=1e-5)


def test_keeps_the_newest_and_the_best(tmp_path):
    plan = make_plan(IMAGES, jax.devices()[:4])
    state = make_initial_state(plan)
    config = IMAGES.checkpoint.replaced({"keep": 2, "keep_best": 1})
    checkpoints = Checkpoints(tmp_path, config, best_metric="accuracy", best_mode="max")
    for step, accuracy in enumerate([0.1, 0.9, 0.3, 0.2, None, 0.5]):
        metrics = None if accuracy is None else {"accuracy": accuracy, "loss": 1.0}
        checkpoints.save(state, step, evaluated_step=step, metrics=metrics)
    checkpoints.wait()
    assert checkpoints.steps == [1, 4, 5]
    checkpoints.close()
    again = Checkpoints(tmp_path, config, best_metric="accuracy", best_mode="max")
    for step in (6, 7):
        again.save(state, step, evaluated_step=step, metrics={"accuracy": 0.6, "loss": 1.0})
    again.close()
    assert again.steps == [1, 6, 7]  # The best one is known after a resume.


def test_a_saved_state_is_not_changed_by_the_steps_after_it(tmp_path):
    """The step donates its state, so a save in progress must not see the values of the next step."""
    experiment = IMAGES.replaced({"checkpoint.every_steps": 1, "checkpoint.keep": 4})
    run = jaxdl.train(experiment, tmp_path, quiet=True, devices=jax.devices()[:4])
    assert_bit_equal(saved_state(tmp_path, IMAGES), jax.tree.map(np.asarray, run.state))


def test_all_checkpoints_damaged(tmp_path, trained):
    workdir = shutil.copytree(trained.workdir, tmp_path / "copy")
    for path in step_dir(workdir, 4).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(ConfigError, match="There is no intact checkpoint"):
        jaxdl.train(IMAGES, workdir, quiet=True, devices=jax.devices()[:4])
    assert (workdir / "checkpoints" / "damaged" / step_folder(4)).is_dir()


def test_contents_of_earlier_versions_are_written_again_as_they_are_now(tmp_path):
    def content(name):
        return {split: {"examples": 3, "content": f"{split} {name}"} for split in ("train", "test")}

    former = {split: (f"{split} before",) for split in ("train", "test")}
    keep_examples(tmp_path, content("before"))
    with pytest.raises(ConfigError, match=r"the data changed since its run began.*as many, 3"):
        keep_examples(tmp_path, content("now"))
    keep_examples(tmp_path, content("now"), former)
    assert json.loads((tmp_path / "examples.json").read_text()) == content("now")


def test_workdir_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Choose a writable folder"):
        claim_workdir(tmp_path / "file" / "run", IMAGES, identity)


def test_mesh_and_reports_may_change_between_runs(tmp_path):
    claim_workdir(tmp_path, IMAGES, identity)
    changed = IMAGES.replaced({"mesh.fsdp": 4, "report.every_steps": 7, "checkpoint.keep": 9})
    claim_workdir(tmp_path, changed, identity)
    assert Experiment.from_json((tmp_path / "config.json").read_text()) == changed
    with pytest.raises(ConfigError, match=r"-seed = 0\n  \+seed = 1"):
        claim_workdir(tmp_path, IMAGES.replaced({"seed": 1}), identity)


def test_a_run_from_before_reduce_dtype_keeps_its_sums(tmp_path):
    experiment = IMAGES.replaced({"precision": "bfloat16"})
    claim_workdir(tmp_path, experiment, identity)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["precision"]["reduce_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match='reduce_dtype = "compute"'):
        claim_workdir(tmp_path, experiment, identity)
    claim_workdir(tmp_path, experiment.replaced({"precision.reduce_dtype": "compute"}), identity)


def test_fields_that_did_not_exist_yet_had_their_defaults(tmp_path):
    claim_workdir(tmp_path, TEXT, identity)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"] = {name: config["model"][name] for name in ("kind", "num_layers", "embed_dim", "num_kv_heads")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    claim_workdir(tmp_path, TEXT, identity)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"-model.window = null\n  \+model.window = 8"):
        claim_workdir(tmp_path, TEXT.replaced({"model.window": 8}), identity)


def test_names_of_folders_stay():
    """Workdirs of earlier versions have these names."""
    assert step_dir(Path("run"), 8) == Path("run/checkpoints/step_8")
