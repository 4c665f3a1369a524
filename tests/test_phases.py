"""Phases of a run: which step sees which examples, at which size, with which learning rate."""

import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest
from faulty_train import make_labels_poisonous, poison_batches
from photographs import folder_of_photographs
from runs import TinyResNet

import jaxdl
from jaxdl.core.config import ConfigError, Periodic
from jaxdl.data import Cache, ImageFolder, Photos
from jaxdl.data.order import EpochShuffle
from jaxdl.data.phases import Phase, make_timeline
from jaxdl.data.source import TrainRows
from jaxdl.models import ViT
from jaxdl.optim import SGD, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import shared_programs
from jaxdl.training.run.plan.build import make_plan

PHASES = (Phase(epochs=2, size=32), Phase(epochs=1, size=48, batch_size=4), Phase(epochs=1, size=48, min_scale=0.5))


REPORT = {"every_steps": 1, "curves": False, "tensorboard": False}


def timeline(phases=PHASES, num_examples=24, batch_size=8, **length):
    return make_timeline(num_examples, batch_size, **{"epochs": None, "steps": None} | length, phases=phases)


def test_steps_of_phases_follow_on_each_other():
    found = timeline()
    assert [(one.first, one.num_steps, one.start, one.batch_size) for one in found.segments] == [
        (0, 6, 0, 8),
        (6, 6, 48, 4),
        (12, 3, 72, 8),
    ]
    assert (found.total_steps, found.total_examples, found.scheduled_steps) == (15, 96, 12)
    positions = [found.position(step) for step in range(16)]
    assert positions == [*range(0, 48, 8), *range(48, 72, 4), *range(72, 97, 8)]
    assert [found.segment(step).index for step in (0, 5, 6, 11, 12, 14, 15)] == [0, 0, 1, 1, 2, 2, 2]
    assert found.epoch(12) == 3


def test_a_phase_that_is_no_whole_number_of_steps_ends_with_the_step():
    found = timeline((Phase(epochs=1, size=32), Phase(epochs=1, size=48)), num_examples=30)
    assert [(one.num_steps, one.start) for one in found.segments] == [(4, 0), (4, 32)]
    assert found.total_examples == 64, "the second one ends where two epochs do"


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"epochs": 2.0}, 6),
        ({"epochs": 1.1}, 4),
        ({"steps": 5}, 5),
        ({"epochs": 2.0, "within": (8, 10)}, 8),
        ({"epochs": 3.0, "within": (8, 10)}, 9),
        ({"epochs": 50.0, "within": (8, 10)}, 10),
        ({"steps": 5, "within": (8, 10)}, 5),
    ],
)
def test_without_phases_it_is_one_stretch(length, steps):
    found = timeline((), **length)
    (one,) = found.segments
    assert (one.num_steps, one.batch_size, one.phase) == (steps, 8, None)


def test_a_batch_may_be_larger_than_the_data_where_the_steps_have_limits():
    found = timeline((), num_examples=3, epochs=2.0, within=(4, 9))
    assert (found.total_steps, found.total_examples) == (4, 32)
    assert found.epoch(4) == pytest.approx(32 / 3)
    order = EpochShuffle(3, seed=1)
    rows = np.concatenate([EpochShuffle(3, seed=1).indices(found.position(step), 8) for step in range(4)])
    np.testing.assert_array_equal(rows, order.indices(0, 32))
    assert all(sorted(rows[first : first + 3]) == [0, 1, 2] for first in range(0, 30, 3)), "an epoch has each row once"


@pytest.mark.parametrize("epochs", [0.25, 0.5, 1.0, 1.5, None])
def test_periods_in_epochs_are_counted_in_examples(epochs):
    found = timeline()
    due = [step for step in range(16) if found.due(step, Periodic(every_epochs=epochs))]
    every = 24 * (epochs or 1.0)
    wanted = [
        step for step in range(1, 16) if found.position(step) // every > found.position(step - 1) // every or step == 15
    ]
    assert due == wanted
    if epochs is None:
        assert due == [3, 6, 12, 15]
    assert [step for step in range(16) if found.due(step, Periodic(every_steps=4))] == [4, 8, 12, 15]


def test_the_learning_rate_follows_the_batch_and_the_examples():
    found, schedule = timeline(), Cosine(warmup_epochs=1).build(peak=0.8, total_steps=12, steps_per_epoch=3)

    def rate(step):
        scheduled, size = found.scheduled(step)
        return schedule(scheduled) * size

    rates = [float(rate(step)) for step in range(15)]
    for step, one in enumerate(rates):
        segment = found.segment(step)
        wanted = float(schedule(found.position(step) / 8)) * segment.batch_size / 8
        assert one == pytest.approx(wanted, rel=1e-5)
    assert jax.jit(rate)(7) == pytest.approx(rates[7], rel=1e-5)
    same = timeline((Phase(epochs=1, size=32), Phase(epochs=1, size=48)))
    assert same.scheduled(7) == (7, 1), "one batch size: nothing changes, to the last bit"


def test_batches_larger_than_the_data_are_refused():
    with pytest.raises(ConfigError, match=r"batch_size=32: there are only 24 training examples"):
        timeline((Phase(epochs=1, size=32, batch_size=32),))


def experiment(folder, **changes):
    photos = Photos(size=48, workers=0, min_scale=0.3, cache=Cache(short_side=64, memory_bytes=2**22))
    values = {
        "data": ImageFolder(folder=str(folder), photos=photos),
        "model": TinyResNet(depth=8, width=8, stem="patch2"),
        "optimizer": SGD(learning_rate=0.05, momentum=0.9),
        "schedule": Cosine(warmup_epochs=1),
        "batch_size": 8,
        "phases": PHASES,
        "mesh": MeshConfig(cpu_devices=8, replica=2, fsdp=2),
    }
    return Experiment(**values | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_photographs(tmp_path_factory.mktemp("phases"))


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    return jaxdl.train(experiment(folder, report=REPORT), workdir, quiet=True, devices=jax.devices()[:4])


def column(run, name):
    return [value for value in run.history[name] if value is not None and not np.isnan(value)]


def test_a_run_goes_through_its_phases(whole):
    assert whole.summary["steps"] == 15
    rows = [json.loads(line) for line in (whole.workdir / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in trained] == list(range(1, 16))
    assert [row["epoch"] for row in trained] == pytest.approx(
        [(8 * step if step <= 6 else 48 + 4 * (step - 6) if step <= 12 else 72 + 8 * (step - 12)) / 24
         for step in range(1, 16)]
    )  # fmt: skip
    assert [row["step"] for row in rows if "eval/loss" in row] == [3, 6, 12, 15]
    assert np.isfinite(column(whole, "train/loss")).all()
    assert column(whole, "input/hits/memory")[-1] == 1.0, "from the second epoch on all comes from memory"
    assert all(0 <= value <= 1 for value in column(whole, "input/wait"))
    assert column(whole, "input/per_sec/augment")[-1] > 0


@pytest.mark.slow
def test_a_worker_makes_the_same_batches_of_each_phase(folder):
    found = []
    for workers in (0, 1):
        source = experiment(folder).data.replaced({"photos.workers": workers}).build().train
        parts = [source.at(size=phase.size, min_scale=phase.min_scale) for phase in PHASES]
        rows = TrainRows(np.arange(8), np.arange(8) // 4, 0)
        found.append([next(iter(part.train_batches([rows])))["image"].copy() for part in parts])
        source.close()
    assert [one.shape[1] for one in found[0]] == [32, 48, 48]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_goes_on_in_the_phase_where_it_stopped(whole, folder, tmp_path):
    """Between the steps of its second phase."""

    def interrupt(info):
        if info.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    one = experiment(folder, report=REPORT)
    with pytest.raises(jaxdl.Interrupted):
        jaxdl.train(one, tmp_path, quiet=True, devices=jax.devices()[:4], on_step=[interrupt])
    run = jaxdl.train(one, tmp_path, quiet=True, devices=jax.devices()[:4])
    for name in ("train/loss", "eval/loss", "train/learning_rate"):
        assert column(run, name) == column(whole, name), name
    for mine, wanted in zip(jax.tree.leaves(run.state.params), jax.tree.leaves(whole.state.params), strict=True):
        assert np.array_equal(mine, wanted)


def test_phases_need_images_of_any_size_and_no_other_length(folder):
    with pytest.raises(ConfigError, match="phases: the images of data digits have one size"):
        jaxdl.train(Experiment(phases=PHASES[:1], batch_size=8, mesh=MeshConfig(cpu_devices=8)), quiet=True)
    with pytest.raises(ConfigError, match="phases already set the length of the run"):
        experiment(folder, epochs=3.0)
    odd = experiment(folder, phases=(Phase(epochs=1, size=32, batch_size=6),))
    with pytest.raises(ConfigError, match=r"batch_size=6: cannot be split evenly"):
        jaxdl.train(odd, quiet=True, devices=jax.devices()[:4])
    centre = experiment(folder).replaced({"data.photos.crop": "centre"})
    with pytest.raises(ConfigError, match=r"phases.2.min_scale = 0.5: with photos.crop = centre there are no random"):
        jaxdl.train(centre, quiet=True, devices=jax.devices()[:4])


def test_a_phase_that_the_model_does_not_take_is_refused_at_the_start(folder):
    phases = (Phase(epochs=1, size=32), Phase(epochs=1, size=48, eval_size=40))
    one = experiment(folder, model=ViT(size="tiny", num_layers=1), phases=phases)
    with pytest.raises(ConfigError, match=r"phases.1: the model does not take images of 40 x 40 pixels \(40 x 40"):
        make_plan(one, jax.devices()[:4])


@pytest.mark.slow
def test_a_run_goes_back_into_an_earlier_phase(whole, folder, tmp_path, monkeypatch):
    """Steps 7 and 8, the first of the second phase, are bad: back to step 4, in the first one, and over them."""
    step_at = {timeline().position(step): step for step in range(15)}
    make_labels_poisonous(monkeypatch.setattr)
    poison_batches((7, 8), monkeypatch.setattr, lambda start, _: step_at[start])
    settings = {"report": REPORT, "guard": {"rollback_after": 2}, "checkpoint": {"every_steps": 4}}
    with shared_programs():  # The poisonous labels are part of the steps.
        run = jaxdl.train(experiment(folder, **settings), tmp_path, quiet=True, devices=jax.devices()[:4], max_steps=10)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [row["event"] for row in rows if "event" in row]
    assert [text.partition(":")[0] for text in events if "rolled back" in text] == [
        "rolled back from step 8 to the checkpoint of step 4"
    ]
    assert (int(run.state.step), int(run.state.guard["bad_steps"])) == (10, 2)
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    before = dict(enumerate(column(whole, "train/loss"), 1))
    assert [losses[step] for step in range(1, 7)] == [before[step] for step in range(1, 7)]
    assert all(np.isfinite(losses[step]) for step in (9, 10))


def test_a_run_does_not_go_on_with_other_data(whole, folder, tmp_path):
    one, workdir = experiment(folder, report=REPORT), shutil.copytree(whole.workdir, tmp_path / "run")
    for file in folder.rglob("*.jpg"):
        os.utime(file)  # A copy of the data is the same data.
    again = jaxdl.train(one, workdir, quiet=True, devices=jax.devices()[:4])
    assert again.summary["steps"] == 15
    first, copy = folder / "train" / "a" / "0.jpg", folder / "train" / "a" / "00.jpg"
    shutil.copy(first, copy)
    with pytest.raises(ConfigError, match=r"Its train split had 24 examples, and has 25 now"):
        jaxdl.train(one, workdir, quiet=True, devices=jax.devices()[:4])
    first.unlink()
    with pytest.raises(ConfigError, match=r"Its train split had other examples than now \(as many, 24\)"):
        jaxdl.train(one, workdir, quiet=True, devices=jax.devices()[:4])
    copy.rename(first)


@pytest.fixture
def programs_are_written():
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)


@pytest.mark.slow
@pytest.mark.usefixtures("programs_are_written")
def test_compiled_programs_are_kept(folder, tmp_path):
    one = experiment(folder, phases=(Phase(epochs=1, size=32),)).replaced(
        {"compiler.cache_dir": str(tmp_path / "programs")}
    )
    losses, before = [], jax.config.values["jax_compilation_cache_dir"]
    for _ in range(2):
        jax.clear_caches()
        run = jaxdl.train(one, quiet=True, devices=jax.devices()[:4])
        losses.append(column(run, "eval/loss"))
        kept = {file.name for file in (tmp_path / "programs").glob("*-cache")}
        assert any("train_step" in name for name in kept), kept
        if len(losses) == 1:
            first = kept
    make_plan(one.replaced({"compiler.cache_dir": None}), jax.devices()[:4])
    assert jax.config.values["jax_compilation_cache_dir"] == before, "that of the environment again"
    assert kept == first, "the second run found all that it needs"
    assert losses[0] == losses[1]
    with pytest.raises(ConfigError, match=r"compiler.cache_dir /nowhere/programs: no folder that can be written"):
        make_plan(one.replaced({"compiler.cache_dir": "/nowhere/programs"}), jax.devices()[:4])
