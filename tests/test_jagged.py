"""Jagged features: buckets, packing, runs with values and lengths, and with the ids of the next batch sent ahead."""

import itertools

import jax
import numpy as np
import pytest

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import Clicks, Feature
from jaxdl.data.tables.tabular import count_ids, with_statistics
from jaxdl.models import DLRM
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.embedding import EmbeddingConfig, jagged
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.parallel.embedding.jagged import buckets, examples_of, fitting, packed
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import ReportConfig
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.run.tables.jagged_batches import in_evaluation, in_training
from jaxdl.training.tasks import Binary

HISTORY, ONE, PAIR = Feature("history", 99, 20, 3.0, 4.0), Feature("one", 9), Feature("pair", 9, 2, 1.5, 0.5)
DATA = Clicks(rows=(300, 50, 40), num_ids=(6, 1, 3), jagged=True, train_examples=400, test_examples=50)


def test_buckets_begin_above_the_mean_and_end_with_every_id():
    assert buckets((HISTORY, ONE, PAIR), 64) == ((5, 1, 2), (10, 1, 2), (20, 1, 2))
    assert buckets((HISTORY, ONE), 10**6) == ((4, 1), (8, 1), (16, 1), (20, 1))
    assert buckets((HISTORY, PAIR), 1) == ((19, 2), (20, 2))


def test_packing_drops_nothing_and_lengths_say_whose_ids_they_are():
    draw, examples = np.random.default_rng(0), 8
    ids = np.where(draw.random((32, 23)) < 0.3, draw.integers(0, 9, (32, 23)), -1).astype(np.int32)
    features = (HISTORY, ONE, PAIR)
    counts = count_ids(ids, features)
    capacity = fitting(buckets(features, examples), counts, examples)
    assert 6 <= capacity[0] < 20
    made = packed(ids, features, capacity, examples)
    assert made.shape == (32, sum(capacity))
    np.testing.assert_array_equal(made[:, capacity[0]], ids[:, 20])  # It is not jagged.
    for first, width, room, number in ((0, 20, capacity[0], 0), (21, 2, capacity[2], 2)):
        start = 0 if number == 0 else capacity[0] + 1
        owner = np.asarray(examples_of(counts[:, number].reshape(4, examples), np.int32(room), room))
        for block in range(4):
            rows = slice(block * examples, (block + 1) * examples)
            mine = made[rows, start : start + room].ravel()
            for example in range(examples):
                expected = ids[rows, first : first + width][example]
                found = mine[(owner[block].ravel() == example) & (mine >= 0)]
                np.testing.assert_array_equal(found, expected[expected >= 0])


def test_a_batch_with_more_ids_has_the_next_bucket():
    counts = np.full((8, 2), 1)
    several = ((2, 1), (4, 1), (20, 1))
    assert fitting(several, counts, 4) == (2, 1)
    counts[3, 0] = 6  # 9 of 8.
    assert fitting(several, counts, 4) == (4, 1)
    counts[:] = 20, 1
    assert fitting(several, counts, 4) == (20, 1)


def test_statistics_of_ids():
    ids = np.array([[1, -1, 3], [1, 2, 3], [-1, -1, 3], [-1, 1, 3]])
    pair, one = with_statistics((Feature("pair", 9, 2), Feature("one", 9)), ids)
    assert (pair.mean_ids, pair.std_ids) == (1.0, 0.7071)
    assert one.mean_ids is None


def experiment(**changes):
    values = {
        "model": DLRM(columns=8, bottom=(8,), top=(8,)),
        "data": DATA,
        "task": Binary(),
        "optimizer": SGD(learning_rate=0.1, momentum=0.9),
        "schedule": Constant(),
        "batch_size": 32,
        "steps": 10,
        "mesh": MeshConfig(replica=2, fsdp=2),
        "evaluation": EvaluationConfig(every_steps=5),
        "checkpoint": CheckpointConfig(every_steps=8),
        "report": ReportConfig(every_steps=1, tensorboard=False, curves=False),
    }
    return Experiment(**(values | changes))


@pytest.fixture
def small_buckets(monkeypatch):
    """Half of the batches have more ids than the first bucket holds."""
    monkeypatch.setattr(jagged, "_DEVIATIONS", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("small_buckets")
def test_a_run_with_all_of_it_that_is_resumed_has_the_bits_of_columns(tmp_path):
    options = EmbeddingConfig(jagged=True, ids_ahead=True, cache=CacheConfig(fraction=0.5, min_rows=100))
    one, other = experiment(), experiment(embedding=options)
    columns = jaxdl.train(one, workdir=tmp_path / "columns", devices=jax.devices()[:4])
    jaxdl.train(other, workdir=tmp_path / "jagged", devices=jax.devices()[:4], max_steps=4)
    changed = jaxdl.train(other, workdir=tmp_path / "jagged", devices=jax.devices()[:4])
    for name in ("train/loss", "eval/loss", "eval/auc"):
        np.testing.assert_array_equal(columns.history[name][-7:], changed.history[name][-7:])
    states = [
        jaxdl.restore(tmp_path / name).predict(DATA.build().test.batch(np.arange(9))) for name in ("columns", "jagged")
    ]
    np.testing.assert_array_equal(*states)


@pytest.mark.usefixtures("small_buckets")
def test_each_process_chooses_the_bucket_of_the_whole_batch():
    """Two processes have half of the rows each; the bucket follows from both."""
    plan = make_plan(experiment(embedding=EmbeddingConfig(jagged=True)), jax.devices()[:4])
    tables, source = plan.parts.tables, plan.splits.train
    order, widths = source.order(0), []
    for step in range(8):
        rows, epochs = order.rows(32 * step, 32)
        made = []
        for some in (slice(0, 32), slice(0, 16), slice(16, 32)):
            prepared = in_training(tables, source, source, batch_size=32, seed=0, start=32 * step)
            request = type("Request", (), {"indices": rows[some], "epochs": epochs[some], "seed": 0})
            made += list(itertools.islice(prepared.train_batches(iter([request])), 1))
        np.testing.assert_array_equal(made[0]["ids"], np.concatenate([made[1]["ids"], made[2]["ids"]]))
        np.testing.assert_array_equal(source.id_counts(rows), made[0]["lengths"])
        widths.append(made[0]["ids"].shape[1])
    assert len(set(widths)) > 1
    [padded] = in_evaluation(tables, plan.splits.test, plan.splits.test, 32).eval_batches(iter([np.arange(32, 64)]))
    assert (padded["lengths"][18:] == 0).all()


def test_data_whose_examples_have_as_many_ids_as_each_other():
    fixed = experiment(data=DATA.replaced({"jagged": False}), embedding=EmbeddingConfig(jagged=True))
    with pytest.raises(ConfigError, match=r"embedding.jagged: in data clicks every feature has as many ids"):
        make_plan(fixed, jax.devices()[:4])
    with pytest.raises(ConfigError, match="data clicks: jagged, but no feature has several ids"):
        DATA.replaced({"num_ids": (1, 1, 1)}).build()
