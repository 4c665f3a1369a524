"""`--init-from`: a run begins with the parameters of another run, whole or in part, on any mesh."""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from mistakes import refusal
from runs import assert_bit_equal, rows, tiny_experiment, write_config

import jaxdl
from jaxdl.core.files import CONFIG_FILE, DATA_FILE, INIT_FILE, MARK_FILE, step_dir
from jaxdl.core.startup import first_look
from jaxdl.data.spec import TextSpec, spec_to_json
from jaxdl.models import Transformer
from jaxdl.parallel.cluster import agree
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.plan.build import add_initial, make_initial_state, make_plan
from jaxdl.training.run.plan.init_from import InitFrom, _context, as_init
from jaxdl.training.run.workdir.records import Workdir

MESH = MeshConfig(replica=2, fsdp=2, tensor=2)
EXPERIMENT = tiny_experiment(steps=4, checkpoint={"every_steps": 2}, evaluation={"every_steps": 2}, mesh=MESH)
OTHER_HEAD = {"data.num_classes": 7, "seed": 5}


@pytest.fixture
def source(tiny_run):
    assert tiny_run.plan.asked == EXPERIMENT
    return tiny_run


def begun(experiment, init=None):
    """(the initial state of a run, what it took), without a workdir."""
    plan = add_initial(make_plan(experiment), init, Workdir())
    return make_initial_state(plan), plan


def named(tree):
    """Leaves of nested dictionaries by their names, `stem/kernel`, as NumPy arrays."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in flat}


@pytest.mark.slow
def test_all_parameters_on_another_mesh(source):
    experiment = EXPERIMENT.replaced({"mesh": MeshConfig(replica=1, fsdp=8), "seed": 5})
    state, plan = begun(experiment, InitFrom(source.workdir))
    assert_bit_equal(state.params, source.state.ema_params)
    assert_bit_equal(state.ema_params, source.state.ema_params)
    assert_bit_equal(state.model_state, source.state.model_state)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.opt_state)), "that of the optimizer is not taken"
    assert int(state.step) == 0
    wanted = plan.parts.state_spec.shardings.params
    assert jax.tree.all(jax.tree.map(lambda x, sharding: x.sharding == sharding, state.params, wanted))
    assert plan.reasons == (plan.initial.text,)
    assert not plan.initial.left
    assert not plan.initial.unused


def test_a_new_head_is_left_and_patterns_choose(source):
    experiment = EXPERIMENT.replaced(OTHER_HEAD)
    fresh, old = named(begun(experiment)[0].params), named(source.state.ema_params)
    state, plan = begun(experiment, InitFrom(source.workdir))
    head = sorted(name for name in old if old[name].shape != fresh[name].shape)
    assert head == sorted(plan.initial.left)
    assert len(head) == 2
    for name, x in named(state.params).items():
        np.testing.assert_array_equal(x, (fresh if name in head else old)[name])
    assert f"{head[0]} (float32 [4] there, float32 [7] here)" in plan.initial.text
    group = next(iter(old)).partition("/")[0]
    group = next(
        name.partition("/")[0] for name in old if name.partition("/")[0] not in (group, head[0].partition("/")[0])
    )
    state, plan = begun(experiment, InitFrom(source.workdir, names=[group], step=2))
    assert plan.initial.step == 2
    assert plan.initial.taken
    for name, x in named(state.params).items():
        assert np.array_equal(x, fresh[name]) == (not name.startswith(f"{group}/")), name


@pytest.mark.slow
def test_a_run_keeps_what_it_began_with(source, tmp_path, capsys):
    workdir, experiment = tmp_path / "run", EXPERIMENT.replaced({"seed": 5})
    first = jaxdl.train(experiment, workdir, quiet=True, max_steps=1, init_from=source.workdir)
    (event,) = [row for row in rows(workdir) if row.get("kind") == "init"]
    taken = len(jax.tree.leaves((source.state.params, source.state.model_state)))
    assert event["step"] == 0
    assert event["event"] == f"initial values: {taken} of {taken} arrays are those of {source.workdir}, step 4"
    kept = json.loads((workdir / INIT_FILE).read_text())
    assert (kept["workdir"], kept["step"], len(kept["taken"])) == (str(source.workdir), 4, taken)
    # As if it had been killed before its first checkpoint: it begins again with the same, without the option.
    shutil.rmtree(step_dir(workdir, 1))
    (workdir / MARK_FILE).unlink()
    assert_bit_equal(jaxdl.train(experiment, workdir, quiet=True, max_steps=1).state, first.state)
    with pytest.raises(jaxdl.ConfigError, match="began otherwise"):
        jaxdl.train(experiment, workdir, quiet=True, init_from=InitFrom(source.workdir, step=2))
    # A run that may start over begins anew with what is asked for, once its own checkpoints are lost.
    over = experiment.replaced({"checkpoint.start_over": True})
    shutil.rmtree(step_dir(workdir, 1))
    jaxdl.train(over, workdir, quiet=True, max_steps=1, init_from=InitFrom(source.workdir, step=2))
    jaxdl.train(over, workdir, max_steps=1, init_from=InitFrom(source.workdir, step=4))
    assert f"{source.workdir}: no effect, the run goes on from its own" in capsys.readouterr().out
    shutil.rmtree(step_dir(workdir, 1))
    again = jaxdl.train(over, workdir, quiet=True, max_steps=1, init_from=InitFrom(source.workdir, step=4))
    assert_bit_equal(again.state, first.state)
    begun = [json.loads((folder / INIT_FILE).read_text())["step"] for folder in (workdir, workdir / "earlier-2")]
    assert begun == [4, 2]


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_its_own_checkpoint(source, tmp_path, capsys):
    workdir = shutil.copytree(source.workdir, tmp_path / "run")
    shutil.rmtree(step_dir(workdir, 4))
    (workdir / MARK_FILE).unlink()
    run = jaxdl.train(EXPERIMENT, workdir, init_from=source.workdir)
    assert "resumed from the checkpoint at step 2" in (printed := capsys.readouterr().out)
    assert "no effect" in printed
    assert_bit_equal(run.state, source.state)
    assert not (workdir / INIT_FILE).exists()


def test_one_process_that_does_not_see_the_checkpoint_is_a_mistake_on_all(source, monkeypatch):
    """The others see it: they must not wait for the one that ends."""
    monkeypatch.setattr(agree, "from_each_process", lambda own: [own, b"", own])
    with pytest.raises(
        jaxdl.ConfigError, match=r"step 4, with which .* is not there on host \? \(process 1\)\. Restore"
    ):
        begun(EXPERIMENT, InitFrom(source.workdir))


def test_one_process_of_several_ends_with_the_others(tmp_path, monkeypatch):
    """Before they have met, a process that ended would let the others wait for it; then the first one looks for all."""
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    assert first_look(["--config", "digits", "--init-from", str(tmp_path)], "prog")["init-from"] == str(tmp_path)
    init = as_init(tmp_path, None)
    monkeypatch.delenv("JAX_PROCESS_ID")
    with pytest.raises(jaxdl.ConfigError, match="no run in this folder"):
        begun(EXPERIMENT, init)


@pytest.mark.parametrize(
    ("init", "problem"),
    [
        (
            {"names": ["hed"]},
            r"InitFrom.names hed: no parameter has such a name. Did you mean head",
        ),
        ({"step": 3}, r"there is no checkpoint of step 3; there are checkpoints of steps 2, 4"),
        ({"step": "latest"}, r"InitFrom.step 'latest': choose"),
        ({"workdir": "nowhere"}, r"init_from nowhere: there is no run in this folder"),
        ({"names": ["head"]}, r"has none of the parameters asked for: head/bias \(float32 \[4\] there"),
    ],
)
def test_what_cannot_be_taken(source, init, problem):
    with pytest.raises(jaxdl.ConfigError, match=problem):
        begun(EXPERIMENT.replaced(OTHER_HEAD), InitFrom(**{"workdir": source.workdir, **init}))


def test_mistakes_on_the_command_line(source, tmp_path, capsys):
    config = write_config(tmp_path, EXPERIMENT)
    assert "no effect without --init-from" in refusal(capsys, "--config", config, "--init-names", "stem", "head")
    assert "no run in this folder" in refusal(capsys, "--config", config, "--init-from", tmp_path)
    steps = refusal(capsys, "--config", config, "--init-from", source.workdir, "--init-step", "9")
    assert "checkpoints of steps 2, 4" in steps
    own = refusal(capsys, "--config", config, "--init-from", source.workdir, "--workdir", source.workdir)
    assert "--workdir of the run itself" in own


def test_a_damaged_checkpoint_is_refused(source, tmp_path):
    shutil.copytree(source.workdir, tmp_path / "run")
    for path in (step_dir(tmp_path / "run", 4) / "model").rglob("d/*"):
        path.unlink()
    with pytest.raises(jaxdl.ConfigError, match=r"is damaged .*Choose another InitFrom.step"):
        begun(EXPERIMENT, InitFrom(tmp_path / "run"))


def test_the_context_of_a_run_whose_config_cannot_be_read_is_not_known(tmp_path):
    """Its own model may be on another machine; its parameters are taken as they are."""
    spec = TextSpec(vocab_size=8, length=64, bytes_per_token=1.0)
    (tmp_path / DATA_FILE).write_text(spec_to_json(spec))
    found = SimpleNamespace(workdir=tmp_path, names=(), left=())
    model = Transformer(num_layers=1, embed_dim=8, num_heads=1)
    for text in ("{", '{"model": {"class": "/no/such/file.py:Own"}}'):
        (tmp_path / CONFIG_FILE).write_text(text)
        assert _context(found, model) is None
