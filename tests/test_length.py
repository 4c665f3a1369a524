"""Where a run ends: `max_steps`, and a run whose length is changed when it resumes."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from mistakes import refusal
from runs import TinyPerceptron, assert_bit_equal, measured, rows, tiny_experiment, write_config

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.files import step_dir
from jaxdl.data.phases import Phase, make_timeline
from jaxdl.exchange import TopK
from jaxdl.optim import WSD, Constant, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.compile import Programs, program_key
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.run.plan.length import change_of_length, steps_of

TWO = jax.devices()[:2]
EXPERIMENT = tiny_experiment(
    model=TinyPerceptron(),
    mesh=MeshConfig(replica=2, fsdp=1),
    exchange=TopK(density=0.1, dense_warmup_steps=4, min_elements=64),
    schedule=Constant(),
    evaluation={"every_steps": 100},
    checkpoint={"every_steps": 100},
    report={"every_steps": 3, "tensorboard": False, "curves": False},
    steps=8,
)


def train(experiment, workdir=None, **options):
    return jaxdl.train(experiment, workdir, devices=TWO, **options)


def as_numpy(run):
    return jax.tree.map(np.asarray, run.state)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 8 steps that never stopped: its final state and its workdir."""
    workdir = tmp_path_factory.mktemp("straight")
    return as_numpy(train(EXPERIMENT, workdir)), workdir


@pytest.mark.slow
def test_a_trial_stops_evaluates_saves_and_resumes(tmp_path, straight, capsys):
    # Shorter than the exchange's warm-up (4) and the profile's start (5), which are for the whole run.
    experiment = EXPERIMENT.replaced({"report.profile_start_step": 5})
    trial = train(experiment, tmp_path, max_steps=3)
    assert "stopped at step 3 of 8, as max_steps asks; the same call without it resumes" in capsys.readouterr().out
    assert (trial.summary["status"], trial.summary["steps"], trial.summary["total_steps"]) == ("stopped", 3, 8)
    assert trial.metrics["accuracy"] >= 0, "the last step is evaluated"
    assert step_dir(tmp_path, 3).is_dir()
    before = measured(tmp_path)
    again = train(experiment, tmp_path, max_steps=3)
    assert again.summary == trial.summary, "the same trial again has nothing to do"
    assert measured(tmp_path) == before

    whole = train(experiment, tmp_path)
    assert whole.summary["status"] == "finished"
    assert_bit_equal(as_numpy(whole), straight[0])
    assert [row["step"] for row in measured(tmp_path)] == [3, 3, 6, 8, 8]
    assert (tmp_path / "profile").is_dir()


@pytest.mark.slow
def test_a_trial_without_a_workdir_says_that_nothing_is_kept(capsys):
    run = train(EXPERIMENT, max_steps=2)
    assert run.summary["steps"] == 2
    assert "no checkpoint of this step was written" in capsys.readouterr().out


def test_a_trial_as_long_as_the_run_is_the_run(straight):
    assert train(EXPERIMENT, straight[1], max_steps=9).summary["status"] == "finished"


def test_trials_that_are_refused(tmp_path, straight, capsys):
    config = write_config(tmp_path, EXPERIMENT.replaced({"mesh.fsdp": 4}))
    message = refusal(capsys, "--config", config, "--max-steps", 0)
    assert message == "error: --max-steps 0: give a whole number, 1 or more, or leave it out."
    message = refusal(capsys, "--config", config, "--workdir", straight[1], "--max-steps", 5)
    assert "--max-steps 5: the run in this --workdir has done 8 steps already" in message


def events(workdir):
    return [row["event"] for row in rows(workdir) if "event" in row]


def test_a_finished_run_is_made_longer(tmp_path, straight, capsys):
    assert train(EXPERIMENT.replaced({"steps": 6}), tmp_path).summary["status"] == "finished"
    run = train(EXPERIMENT, tmp_path)
    assert_bit_equal(as_numpy(run), straight[0])
    assert run.summary["total_steps"] == 8
    assert events(tmp_path) == [
        "the length changed from 6 steps (--steps 6) to 8 (--steps 8); from here on the learning rate follows the "
        "schedule of the new length",
        "resumed from the checkpoint at step 6",
    ]
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["steps"] == 8
    train(EXPERIMENT.replaced({"steps": None, "epochs": 1.33}), tmp_path)
    assert len(events(tmp_path)) == 2, "1.33 epochs of 96 examples are 8 steps of 16: the same length"
    assert json.loads((tmp_path / "config.json").read_text())["epochs"] == 1.33

    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(jaxdl.ConfigError, match="steps=7: the run in this workdir has done 8 steps, and this is a"):
        train(EXPERIMENT.replaced({"steps": 7}), tmp_path)
    with pytest.raises(jaxdl.ConfigError, match=r"belongs to a run of a different config(?s:.*)seed"):
        train(EXPERIMENT.replaced({"steps": 9, "seed": 1}), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_checkpoint_of_the_plateau_cools_down_as_a_run_of_that_length(tmp_path, straight, capsys):
    """With `wsd` a copy of the workdir, resumed with another length, ends with the bits of a run of that length."""
    schedule = {"schedule": WSD(decay_steps=3), "checkpoint.every_steps": 4}
    long, cooled, whole = (EXPERIMENT.replaced(schedule | {"steps": steps}) for steps in (20, 8, 8))
    train(long, tmp_path / "long", max_steps=4)
    shutil.copytree(tmp_path / "long", tmp_path / "cooled")
    assert_bit_equal(as_numpy(train(cooled, tmp_path / "cooled")), as_numpy(train(whole, tmp_path / "whole")))
    assert not any("no cool-down" in event for event in events(tmp_path / "cooled"))
    train(cooled.replaced({"steps": 12}), tmp_path / "cooled", max_steps=9)
    assert "decay of the earlier length had begun at step 5, so this is no cool-down" in events(tmp_path / "cooled")[-2]


@pytest.mark.slow
def test_an_interrupted_run_is_made_shorter_but_not_than_it_is(tmp_path):
    train(EXPERIMENT, tmp_path, max_steps=3)
    run = train(EXPERIMENT.replaced({"steps": 6}), tmp_path)
    assert (run.summary["status"], run.summary["steps"]) == ("finished", 6)
    assert events(tmp_path)[0].startswith("the length changed from 8 steps (--steps 8) to 6 (--steps 6)")


PHASES = [Phase(epochs=1, size=16), Phase(epochs=2, size=32, batch_size=8)]


@pytest.mark.parametrize(
    ("phases", "done", "refused"),
    [
        (PHASES, 12, None),
        ([PHASES[0], Phase(epochs=3, size=32, batch_size=8)], 20, "from 20 steps"),
        ([*PHASES, Phase(epochs=1, size=64)], 20, "from 20 steps"),
        ([Phase(epochs=2, size=16), PHASES[1]], 4, "from 20 steps"),
        ([PHASES[0], Phase(epochs=1, size=48)], 4, "to 8"),
        ([Phase(epochs=2, size=16), PHASES[1]], 5, ConfigError),
        ([Phase(epochs=1, size=24), PHASES[1]], 3, ConfigError),
        ([Phase(epochs=1, size=24), PHASES[1]], 0, "from 20 steps"),
        ([PHASES[0], Phase(epochs=2, size=32)], 10, ConfigError),
        ([PHASES[0]], 5, ConfigError),
    ],
)
def test_phases_may_change_after_what_is_done(phases, done, refused):
    """64 examples in batches of 16: the first phase is 4 steps, the second 16 of 8."""
    asked = SimpleNamespace(
        batch_size=16,
        schedule=Constant(),
        model_dump=lambda **_: {"epochs": None, "steps": None, "phases": [one.model_dump() for one in phases]},
    )
    earlier = {"epochs": None, "steps": None, "phases": [one.model_dump(mode="json") for one in PHASES]}
    timeline = make_timeline(64, 16, epochs=None, steps=None, phases=phases)
    if refused is ConfigError:
        with pytest.raises(ConfigError, match="this workdir has done"):
            change_of_length(earlier, asked, timeline, done)
    elif refused is None:
        assert change_of_length(earlier, asked, timeline, done) is None
    else:
        assert refused in change_of_length(earlier, asked, timeline, done)


def test_a_length_in_tokens():
    from jaxdl.data import SyntheticText, TextSpec
    from jaxdl.models import Transformer
    from jaxdl.training.tasks import LanguageModelling

    packed = TextSpec(vocab_size=9, length=16, bytes_per_token=1.0, packed=True, mean_targets=12.5)
    assert [steps_of(tokens, 8, LanguageModelling(), packed) for tokens in (None, 1, 100, 101)] == [None, 1, 1, 2]
    text = {"model": Transformer(num_layers=1, embed_dim=8, num_heads=1), "task": LanguageModelling(), "steps": None}
    asked = EXPERIMENT.replaced(
        text | {"data": SyntheticText(length=10, num_train=64), "tokens": 801, "batch_size": 16, "report": {}}
    )
    plan = make_plan(asked, TWO)
    assert plan.total_steps == 6  # 160 tokens a step.
    earlier = {"epochs": None, "steps": None, "tokens": 480, "phases": []}
    told = change_of_length(earlier, asked, plan.timeline, 2, plan.parts.data_spec)
    assert "from 3 steps (--tokens 480) to 6 (--tokens 801)" in told
    same = earlier | {"tokens": 960}
    assert change_of_length(same, asked, plan.timeline, 2, plan.parts.data_spec) is None
    with pytest.raises(ConfigError, match=r"tokens=5: task classification with data that are images counts examples"):
        make_plan(EXPERIMENT.replaced({"steps": None, "tokens": 5}), TWO)
    with pytest.raises(ConfigError, match="epochs = 2 and tokens = 5: both set the length"):
        EXPERIMENT.replaced({"steps": None, "epochs": 2, "tokens": 5})


def test_limits_of_the_steps_are_of_a_length_in_epochs():
    limits = {"steps": None, "within": (40, 90)}
    assert [make_timeline(64, 16, epochs=x, **limits).total_steps for x in (1, 15, 30)] == [40, 60, 90]
    assert make_timeline(8, 16, epochs=1, **limits).total_steps == 40  # Each batch has the examples twice.
    with pytest.raises(ConfigError, match="there are only 8 training examples"):
        make_timeline(8, 16, epochs=None, steps=5, within=(40, 90))
    assert make_timeline(64, 16, epochs=None, steps=5, within=(40, 90)).total_steps == 5


def test_a_length_that_cannot_be_read():
    timeline = make_timeline(64, 16, epochs=None, steps=3)
    for earlier in ({}, {"epochs": None, "steps": None, "phases": [{"size": 3}]}):
        with pytest.raises(ConfigError, match=r"config\.json in the workdir has no length that can be read"):
            change_of_length(earlier, EXPERIMENT, timeline, 0)


def test_a_segment_after_the_end_is_not_compiled():
    compiled = []
    phases = [Phase(epochs=1, size=16), Phase(epochs=1, size=32)]
    first, second = make_timeline(64, 16, epochs=None, steps=None, phases=phases).segments
    plan = replace(make_plan(EXPERIMENT, TWO), timeline=make_timeline(64, 16, epochs=None, steps=None, phases=phases))
    programs = Programs(lambda plan, segment: compiled.append(segment.index))
    programs.of(plan, first, end=4)
    assert compiled == [0]
    programs.of(plan, first, end=5)
    programs.of(plan, second, end=5)
    assert compiled == [0, 1]


def test_runs_of_other_programs_share_none():
    """Length and schedule, network, mesh, batch: each change that compiled steps depend on is part of the key."""
    changes = [
        {}, {"seed": 1, "steps": 9, "guard.rollback_after": 3, "report.every_steps": 1},
        {"schedule": Cosine()}, {"schedule": Cosine(), "steps": 9}, {"model.units": 8}, {"batch_size": 8},
        {"exchange.density": 0.2}, {"guard.skip_nonfinite": False},
        {"optimizer.momentum_at_peak": 0.5}, {"optimizer.momentum_at_peak": 0.5, "steps": 9},
    ]  # fmt: skip
    plans = [make_plan(EXPERIMENT.replaced(change), TWO) for change in changes]
    plans.append(make_plan(EXPERIMENT, jax.devices()[2:4]))
    keys = [program_key(plan, plan.timeline.segments[0]) for plan in plans]
    assert keys[0] == keys[1]
    assert len(set(keys[1:])) == len(keys) - 1
