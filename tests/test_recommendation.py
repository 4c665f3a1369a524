"""Runs with embedding tables: equal on meshes, with micro-batches and clipping; memory; resume; AUC; MovieLens."""

import functools
import re
from typing import ClassVar

import jax
import numpy as np
import pytest
from mistakes import refusal
from sklearn.metrics import roc_auc_score

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.data import Data, Feature, MovieLens, Splits, TabularArrays, TabularSource, TabularSpec
from jaxdl.data.tables.ranks import area_by_ranks
from jaxdl.models import DLRM
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.embedding import ColumnWise, DataParallel, EmbeddingConfig, RowSGD, RowWise, Table
from jaxdl.parallel.embedding.layout import make_buffers
from jaxdl.parallel.embedding.table import check_tables
from jaxdl.parallel.mesh import AXES, MeshConfig, batch_sharding
from jaxdl.performance.planner.table_report import measured_workload
from jaxdl.report import ReportConfig
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.plan.network import tables_of
from jaxdl.training.step import StepConfig, make_train_step
from jaxdl.training.tasks import Binary
from jaxdl.training.tasks.binary import area_under_curve

FEATURES = (Feature("user", 40), Feature("item", 90), Feature("words", 30, num_ids=3))
SPEC = TabularSpec(("age",), FEATURES, positives=0.5)

with forgotten():  # The kinds that tests list are those of jaxdl.

    class Likes(Data, kind="likes"):
        """Made up: a person likes a film by the parity of both."""

        num_examples: int = 256

        @property
        def users_name(self):
            """None, as of a data set of jaxdl."""
            return None

        def build(self):
            """The same examples for training and evaluation."""
            draw = np.random.default_rng(0)
            ids = np.stack([draw.integers(0, 40, self.num_examples), draw.integers(0, 90, self.num_examples)], axis=1)
            words = draw.integers(-1, 30, (self.num_examples, 3))
            label = ((ids[:, 0] + ids[:, 1]) % 2).astype(np.float32)
            numbers = draw.standard_normal((self.num_examples, 1))
            source = TabularArrays(numbers, np.concatenate([ids, words], axis=1), label, SPEC)
            return Splits(source, source)


def experiment(sizes=(1, 1, 1), **changes):
    values = {
        "model": DLRM(columns=8, bottom=(8,), top=(32,)),
        "data": Likes(),
        "task": Binary(),
        "optimizer": SGD(learning_rate=0.1, momentum=0.9),
        "schedule": Constant(),
        "batch_size": 32,
        "steps": 20,
        "mesh": MeshConfig(**dict(zip(("replica", "fsdp", "tensor"), sizes, strict=True))),
        "report": ReportConfig(every_steps=1, tensorboard=False, curves=False),
    }
    return Experiment(**(values | changes))


@functools.cache
def on_one_device():
    return trained(experiment())


def trained(one):
    """(losses of 20 steps, the last norm, the state) of an experiment."""
    devices = jax.devices()[: one.mesh.replica * one.mesh.fsdp * one.mesh.tensor]
    plan = make_plan(one, devices)
    step, state, losses = make_train_step(plan.parts), make_initial_state(plan), []
    for number in range(20):
        rows = (np.arange(32) + 32 * number) % 256
        batch = jax.device_put(plan.splits.train.batch(rows), batch_sharding(plan.parts.layout.mesh))
        state, metrics = step(state, batch)
        losses.append(float(metrics["sums/loss"]) / 32)
    return losses, float(metrics["grad_norm"]), state


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((2, 2, 2), {"embedding": EmbeddingConfig(scheme=RowWise(), schemes=(("item", ColumnWise()),))}),
        pytest.param(
            (1, 2, 1),
            {"step": StepConfig(microbatches=4), "embedding": EmbeddingConfig(scheme=DataParallel())},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["mixed", "micro-batches"],
)
def test_losses_are_those_of_one_device(sizes, changes):
    one, several = on_one_device(), trained(experiment(sizes, **changes))
    np.testing.assert_allclose(several[0], one[0], rtol=1e-5)
    assert several[1] == pytest.approx(one[1], rel=1e-4)
    assert one[0][-1] < 0.8 * one[0][0]


@pytest.mark.slow
def test_clipping_is_by_the_norm_of_rows_and_parameters():
    """Plain SGD: with all gradients clipped to one norm, a step moves all of them by rate times that norm."""
    one = experiment(
        optimizer=SGD(learning_rate=0.5, momentum=0.0),
        step=StepConfig(clip_norm=1e-3),
        embedding=EmbeddingConfig(optimizer=RowSGD()),
    )
    plan = make_plan(one, jax.devices()[:1])
    before = jax.device_get(make_initial_state(plan))
    after, metrics = make_train_step(plan.parts)(make_initial_state(plan), plan.splits.train.batch(np.arange(32)))
    assert metrics["grad_norm"] > 1e-2
    moved = jax.tree.map(
        lambda x, y: np.sum((np.asarray(y, np.float64) - x) ** 2),
        *((state.params, state.tables) for state in (before, jax.device_get(after))),
    )
    assert np.sqrt(sum(jax.tree.leaves(moved))) == pytest.approx(0.5 * 1e-3, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"step": StepConfig(microbatches=2)}, marks=pytest.mark.slow)],
    ids=["guard", "micro-batches"],
)
def test_no_other_buffer_is_as_large_as_a_table(changes):
    """The guard is on: a choice between old and new tables would be a copy."""
    rows = 2_000_000
    table = Table(name="large", rows=rows, columns=8, features=("user", "item", "words"))
    plan = make_plan(experiment(model=DLRM(columns=8, own_tables=(table,)), **changes), jax.devices()[:1])
    batch = plan.splits.train.batch_shapes(32, evaluating=False)
    memory = make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), batch).compile().memory_analysis()
    table_bytes = rows * (8 + 1) * 4
    assert memory.temp_size_in_bytes < 0.05 * table_bytes
    assert memory.argument_size_in_bytes < 1.01 * table_bytes + 2**16
    assert memory.alias_size_in_bytes > table_bytes


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh_with_another_scheme(tmp_path):
    """The checkpoint that it resumes from has the rows that changed in the last step alone."""
    whole = experiment(
        (1, 8, 1),
        checkpoint=CheckpointConfig(every_steps=9, differential_tables=2),
        evaluation=EvaluationConfig(batch_size=48),
    )
    history = jaxdl.train(whole, workdir=tmp_path / "cut", max_steps=10).history
    first, second = (size for size in history["checkpoint/table_bytes"] if not np.isnan(size))
    assert 2000 < second < first == np.nanmax(history["checkpoint/table_bytes_whole"])
    changed = whole.replaced({"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}, "embedding.scheme": "table_row_wise"})
    run = jaxdl.train(changed, workdir=tmp_path / "cut")
    again = jaxdl.train(whole, workdir=tmp_path / "whole")
    assert run.summary["metrics"]["loss"] == pytest.approx(again.summary["metrics"]["loss"], rel=1e-4)
    batch = whole.data.build().test.batch(np.arange(256))
    predicted = jaxdl.restore(tmp_path / "cut").predict(batch)
    np.testing.assert_allclose(predicted, run.predict(batch), rtol=1e-5)
    assert run.predict({name: x[:0] for name, x in batch.items()}).shape == (0,)
    # The last of six batches has 32 rows of padding. Two predictions may change places by rounding.
    assert run.metrics["auc"] == pytest.approx(roc_auc_score(batch["label"], predicted), abs=2 / 128**2)
    assert run.metrics["auc_error"] == 0


def test_the_area_under_the_curve_is_that_of_scikit_learn():
    draw = np.random.default_rng(0)
    label, place = draw.integers(0, 2, 2000), draw.integers(0, 50, 2000)
    histogram = np.stack([np.bincount(place[label == one], minlength=50) for one in (0, 1)])
    area, error = area_under_curve(histogram.astype(np.float64))
    assert area == pytest.approx(roc_auc_score(label, place), abs=1e-12)
    assert 0 < error < 0.02
    assert np.isnan(area_under_curve(np.array([[0.0, 0], [1, 2]]))[0])


def test_the_area_by_ranks_is_that_of_scikit_learn_without_padding():
    draw = np.random.default_rng(1)
    label, logit = draw.integers(0, 2, 500).astype(np.float32), draw.integers(-9, 9, 500).astype(np.float32)
    mask = np.arange(500) < 470
    found = Binary().of_each(jax.numpy.asarray(logit), {"label": label, "mask": mask})
    sums = {"loss": 1.0, "weight": 470.0, "positives": float(label[mask].sum()), "predicted": 1.0}
    metrics = Binary().metrics(sums | jax.device_get(found), SPEC)
    assert metrics["auc"] == pytest.approx(roc_auc_score(label[mask], logit[mask]), abs=1e-15)
    assert metrics["auc_error"] == 0
    assert np.isnan(area_by_ranks(np.array([1.0, np.nan]), np.array([True, False])))
    assert np.isnan(area_by_ranks(np.ones(3), np.ones(3, bool)))


def test_an_id_that_a_feature_has_not():
    with pytest.raises(ConfigError, match=r"example 1 has the id 90 of item; its ids are from 0 to 89"):
        TabularArrays(np.zeros((2, 1)), np.array([[0, 0, -1, -1, -1], [0, 90, 0, 0, 0]]), np.zeros(2), SPEC)


class _Unchecked(TabularSource):
    """A source of a user's own, one of whose ids is out of range."""

    spec = SPEC

    def __init__(self, wrong):
        self._ids = np.zeros((64, 5), np.int32)
        if wrong:
            self._ids[33, 3] = 30

    def __len__(self):
        return 64

    def batch(self, indices):
        """Zeros, but for the ids."""
        zeros = {"numbers": np.zeros((len(indices), 1), np.float32), "label": np.zeros(len(indices), np.float32)}
        return zeros | {"ids": self._ids[indices]}


with forgotten():

    class Own(Data, kind="own_unchecked"):
        """One of the splits has a wrong id."""

        wrong: ClassVar[str] = ""
        """Which: no field, since the runs share their programs."""

        def build(self):
            return Splits(_Unchecked(self.wrong == "train"), _Unchecked(self.wrong == "test"))


@pytest.mark.parametrize(
    ("split", "changes"),
    [
        pytest.param(
            "train", {"embedding.cache.fraction": 0.9, "embedding.cache.min_rows": 30}, marks=pytest.mark.slow
        ),
        ("test", {}),
    ],
)
def test_an_id_out_of_range_of_a_source_of_ones_own(split, changes, monkeypatch):
    monkeypatch.setattr(Own, "wrong", split)
    with forgotten():
        one = experiment((1, 8, 1), data=Own(), steps=3, evaluation=EvaluationConfig(batch_size=32)).replaced(changes)
        with pytest.raises(ConfigError, match="example 33 has the id 30 of words; its ids are from 0 to 29"):
            jaxdl.train(one)


MOVIELENS = {
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "7\t5\t4\t881250949\n8\t5\t3\t881250950\n7\t6\t5\t881250951\n8\t6\t1\t881250952\n",
    "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "7\t24\tM\tlawyer\t85711\n8\t53\tF\tother\t94043\n",
    "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "5\tToy Story\t1995\tAnimation Comedy\n6\tHeat\t1995\tAction\n",
}


@pytest.fixture
def movielens(tmp_path):
    for name, text in MOVIELENS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_movielens_reads_its_files(movielens):
    splits = MovieLens(folder=str(movielens), test_fraction=0.25).build()
    spec = splits.train.spec
    assert (len(splits.train), len(splits.test)) == (3, 1)
    sizes = {one.name: (one.rows, one.num_ids) for one in spec.features}
    assert sizes["user"] == (2, 1)
    assert sizes["genre"] == (3, 2)
    every = [source.batch(np.arange(len(source))) for source in (splits.train, splits.test)]
    assert sorted(np.concatenate([x["label"] for x in every]).tolist()) == [0, 0, 1, 1]
    assert (np.concatenate([x["ids"] for x in every])[:, -1] == -1).sum() == 2  # Heat has one genre.


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ml-100k.user", None, r"ml-100k.user: it cannot be read \(No such file"),
        ("ml-100k.item", "item_id:token\tclass:token_seq\n5\n", r"line 2 does not have the 2 columns"),
        ("ml-100k.item", "item_id:token\tclass:token_seq\n", "it has no line after its header"),
        ("ml-100k.inter", MOVIELENS["ml-100k.inter"][:73], "there is one rating"),
        ("ml-100k.user", MOVIELENS["ml-100k.user"].replace("8\t53", "9\t53"), r"there is no user_id 8"),
        ("ml-100k.user", MOVIELENS["ml-100k.user"].replace("8\t53", "8\tinf"), "an age or a time is not a number"),
        (
            "ml-100k.inter",
            re.sub(r"(?m)^(\d+\t\d+)\t\d", r"\1\t77", MOVIELENS["ml-100k.inter"]),
            "a rating is 77, not 1 to 5",
        ),
    ],
)
def test_movielens_with_other_files(movielens, name, text, message):
    if text is None:
        (movielens / name).unlink()
    else:
        (movielens / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        MovieLens(folder=str(movielens)).build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--agreement", "local_sgd"], "embedding tables are updated in each step"),
        (["--embedding.scheme", "row_wise", "--model", "resnet"], "task binary needs table"),
    ],
)
def test_settings_that_do_not_work_with_tables(movielens, capsys, options, message):
    header, *rows = MOVIELENS["ml-100k.inter"].splitlines(keepends=True)
    (movielens / "ml-100k.inter").write_text(header + 4 * "".join(rows))
    folder = ["--data.folder", str(movielens), "--batch-size", "8", "--epochs", "None", "--steps", "2"]
    folder += ["--mesh.cpu-devices", "None", "--mesh.replica", "2", "--mesh.fsdp", "4"]
    assert message in refusal(capsys, "--config", "configs/movielens_dlrm.py", *folder, *options)


def spec_of(rows=9):
    return TabularSpec(("n",), (Feature("one", rows, 1), Feature("two", 5, 2)), 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0.0, 5.0])}, "neither 0 nor 1"),
        ({"numbers": np.array([[0.0], [np.nan]])}, "not finite"),
        ({"numbers": np.zeros((3, 1))}, r"numbers have the shape \[3, 1\], not \[2, 1\]"),
        ({"ids": np.zeros((2, 1), np.int32)}, r"ids have the shape \[2, 1\], not \[2, 3\]"),
        ({"ids": np.zeros((2, 3))}, "ids are float64"),
    ],
)
def test_arrays_that_are_no_examples(changes, message):
    arrays = {"numbers": np.zeros((2, 1)), "ids": np.zeros((2, 3), np.int32), "labels": np.array([0.0, 1.0])} | changes
    with pytest.raises(ConfigError, match=message):
        TabularArrays(**arrays, spec=spec_of())


def test_ids_are_checked_before_they_are_cut_to_32_bits():
    with pytest.raises(ConfigError, match="has the id 4294967301 of one"):
        spec_of().to_predict({"numbers": np.zeros((1, 1)), "ids": np.array([[2**32 + 5, 0, 1]])}, "predict")
    with pytest.raises(ConfigError, match="numbers of 3 examples, and ids of 1"):
        spec_of().to_predict({"numbers": np.zeros((3, 1)), "ids": np.zeros((1, 3), np.int32)}, "predict")


def test_tables_that_cannot_hold_their_ids():
    arrays = {"numbers": np.zeros((2, 1)), "ids": np.zeros((2, 3), np.int32), "labels": np.array([0.0, 1.0])}
    source = TabularArrays(**arrays, spec=spec_of())
    small = DLRM(columns=4, own_tables=(Table(name="both", rows=6, columns=4, features=("one", "two")),))
    experiment = Experiment(model=small, task=Binary(), steps=1, batch_size=2)
    with pytest.raises(ConfigError, match="table both: it has 6 rows, and feature one has 9 ids"):
        tables_of(small, experiment.embedding, source.spec)
    lacking = small.model_copy(update={"own_tables": (Table(name="a", rows=9, columns=4, features=("one",)),)})
    incomplete = experiment.model_copy(update={"model": lacking})
    with pytest.raises(ConfigError, match="no table has the feature 'two' of the data"):
        tables_of(lacking, experiment.embedding, source.spec)
    with pytest.raises(ConfigError, match="no table has the feature 'two' of the data"):
        measured_workload(incomplete, dict.fromkeys(AXES, 1), lambda *_: Splits(source, source))
    huge = [Table(name=name, rows=6 * 10**8, columns=4, features=(name,)) for name in ("one", "two")]
    with pytest.raises(ConfigError, match=r"a device has 1,200,000,000 rows .* may have 1,073,741,823"):
        make_buffers(huge, {"one": 1, "two": 2}, EmbeddingConfig(), {"replica": 1, "fsdp": 1, "tensor": 1})
    for place in ((("one", -3),), (("one", 0), ("one", 1))):
        with pytest.raises(ConfigError, match=r"embedding.places 'one' .*one place, 0 or more"):
            check_tables(huge, ["one", "two"], EmbeddingConfig(places=place))
    with pytest.raises(ConfigError, match="a layer has 1 unit or more"):
        DLRM(bottom=(0,))
    with pytest.raises(ConfigError, match=r"no pairs\. Choose dcnv2"):
        DLRM(columns=4).build(num_numbers=0, features=(Feature("one", 9, 1),), dtype="float32")
