"""Look-ahead caches of tables: plans against references, training bit-equal to whole tables, checkpoints of either."""

import contextlib
import types

import jax
import numpy as np
import pytest
from test_embedding import whole as rows_of_ids

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.files import step_dir
from jaxdl.data import Clicks
from jaxdl.models import DLRM
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.cluster import host_memory_bytes
from jaxdl.parallel.embedding import ColumnWise, DataParallel, EmbeddingConfig, Replicated, RowWise, Table, TableRowWise
from jaxdl.parallel.embedding.cache import CacheConfig, SlotPlan, Window
from jaxdl.parallel.embedding.layout import copied_bytes, make_buffers
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.planner import nominal_machine
from jaxdl.performance.planner.mesh_tables import tables_on_meshes
from jaxdl.training.checkpoint import CheckpointConfig, Checkpoints
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.run.plan.memory import check_memory
from jaxdl.training.state import TABLES
from jaxdl.training.tasks import Binary

ROWS, SLOTS = 60, 12


def stream(seed, steps=200, size=8):
    draw = np.random.default_rng(seed)
    return [np.unique((draw.zipf(1.2, size) - 1) % ROWS) for _ in range(steps)]


def played(policy, batches, window):
    """The plan after all batches, the number of rows loaded, and what the slots hold according to the swaps."""
    plan, loaded, held = SlotPlan("t", ROWS, SLOTS, policy), 0, {}
    for number, now in enumerate(batches):
        swap = plan.planned(now, batches[number + 1 : number + 1 + window])
        for one, slot in zip(swap.evicted, swap.evicted_slots, strict=True):
            assert held.pop(slot) == one
        for one, slot in zip(swap.loaded, swap.loaded_slots, strict=True):
            assert slot not in held
            held[slot] = one
        loaded += len(swap.loaded)
        assert len(held) <= SLOTS
        assert all(held[plan.slot_of[one]] == one for one in now)
    assert plan.num_lookups - plan.num_hits == loaded
    return loaded, held


@pytest.mark.parametrize("policy", ["farthest", "lru", "lfu"])
@pytest.mark.parametrize("window", [1, 6])
def test_each_batch_finds_its_rows(policy, window):
    loaded, held = played(policy, stream(0), window)
    assert len(set(held.values())) == len(held)
    assert ROWS // 2 < loaded < sum(map(len, stream(0)))


def fewest_loads(batches):
    """Belady's choice with the whole future, row by row."""
    cached, loads = set(), 0
    for number, now in enumerate(batches):
        missing = set(now.tolist()) - cached
        loads += len(missing)
        room = SLOTS - len(cached | missing)
        if room < 0:

            def next_use(one, after=number):
                return next((i for i in range(after + 1, len(batches)) if one in batches[i]), len(batches))

            out = sorted(cached - set(now.tolist()), key=next_use, reverse=True)[:-room]
            cached -= set(out)
        cached |= missing
    return loads


def test_farthest_with_the_whole_future_loads_fewest():
    batches = stream(1, steps=120)
    least = fewest_loads(batches)
    assert played("farthest", batches, window=len(batches))[0] == least
    assert all(played(policy, batches, 2)[0] > least for policy in ("farthest", "lru", "lfu"))


def test_the_least_recently_used_leave():
    plan = SlotPlan("t", ROWS, 3, "lru")
    for now in ([1, 2, 3], [1], [3]):
        plan.planned(np.array(now), [])
    assert plan.planned(np.array([4]), []).evicted.tolist() == [2]
    assert plan.planned(np.array([5]), [np.array([1])]).evicted.tolist() == [3]  # 1 is older, and used next.


def test_the_least_often_used_leave():
    plan = SlotPlan("t", ROWS, 3, "lfu")
    for now in ([1, 2, 3], [1, 3], [1], [2], [2]):
        plan.planned(np.array(now), [])
    assert plan.planned(np.array([4]), []).evicted.tolist() == [3]


def test_slots_take_the_place_of_ids():
    plan = SlotPlan("t", ROWS, SLOTS, "lru")
    window = Window({"t": plan}, {"t": np.array([1, 2])}, 1)
    ids = np.array([[7, 5, -1], [8, 5, 40]], np.int32)
    window.add(ids, ids)
    slots, swaps = window.planned()
    np.testing.assert_array_equal(slots[:, 0], [7, 8])
    assert slots[0, 2] == -1
    np.testing.assert_array_equal(plan.id_of[slots[:, 1]], [5, 5])
    assert plan.id_of[slots[1, 2]] == 40
    assert sorted(swaps["t"].loaded) == [5, 40]


def test_a_batch_that_does_not_fit():
    with pytest.raises(ConfigError, match=r"touches 13 of its rows, and its cache has 12 slots.*fraction.0\.2167"):
        SlotPlan("t", ROWS, SLOTS, "lru").planned(np.arange(13), [])


def experiment(cache=None, **changes):
    values = {
        "model": DLRM(columns=8, bottom=(8,), top=(8,)),
        "data": Clicks(rows=(9000, 3000, 4000, 50), num_ids=(2, 1, 2, 1), train_examples=3000, test_examples=200),
        "task": Binary(),
        "optimizer": SGD(learning_rate=0.1, momentum=0.9),
        "schedule": Constant(),
        "batch_size": 32,
        "steps": 12,
        "embedding": EmbeddingConfig(schemes=(("feature00", ColumnWise()), ("feature01", Replicated()))),
        "mesh": MeshConfig(replica=4, fsdp=2),
        "evaluation": EvaluationConfig(every_steps=6, batch_size=40),
        "checkpoint": CheckpointConfig(every_steps=5, differential_tables=3),
    }
    found = Experiment(**(values | changes))
    return found if cache is None else found.replaced({"embedding.cache": cache})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run whose tables are on the devices."""
    workdir = tmp_path_factory.mktemp("whole")
    return jaxdl.train(experiment(), workdir=workdir), workdir


def assert_same_network(workdir, other):
    one, two = (jaxdl.restore(folder) for folder in (workdir, other))
    for name, rows in one.model_state["tables"].items():
        np.testing.assert_array_equal(rows, two.model_state["tables"][name])


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that had a cache in memory, then none, then one whose rows are in files: the run and its workdir."""
    workdir, files = tmp_path_factory.mktemp("resumed"), tmp_path_factory.mktemp("files")
    lru = CacheConfig(fraction=0.1, min_rows=1000, policy="lru", window=3)
    jaxdl.train(experiment(lru), workdir=workdir, max_steps=5)
    jaxdl.train(experiment(), workdir=workdir, max_steps=5)
    run = jaxdl.train(experiment(CacheConfig(fraction=0.1, min_rows=1000, folder=str(files))), workdir=workdir)
    assert not list(files.iterdir())
    return run, workdir


@pytest.mark.slow
def test_a_run_resumes_with_a_cache_and_without_bit_for_bit(whole, resumed):
    (run, workdir), (again, other) = whole, resumed
    assert again.metrics["loss"] == run.metrics["loss"]
    assert_same_network(workdir, other)
    with pytest.raises(ConfigError, match=r"Use jaxdl.restore\(WORKDIR\)"):
        again.predict({"numbers": np.zeros((1, 13)), "ids": np.zeros((1, 6), int)})


def restored_rows(workdir, one):
    """The rows of each table, and what is kept of them, as a run of the experiment gets them from a checkpoint."""
    plan = make_plan(one)
    store = plan.caches.store if plan.caches else None
    arguments = {"best_metric": "auc", "best_mode": "max", "read_only": True, "form": plan.caches}
    layout = (store or plan.parts.tables).layout
    with contextlib.closing(Checkpoints(workdir, one.checkpoint, table_layout=layout, **arguments)) as checkpoints:
        found = checkpoints.restore(plan.parts.state_spec.abstract(), items=("tables",))
    assert not found.damaged
    rows = rows_of_ids(plan.parts.tables, found.state.tables)
    return rows | {name: store.in_order(name) for name in (store.rows if store else ())}


@pytest.mark.slow
def test_a_folder_that_is_missing_at_a_resume_is_the_mistake_that_it_is_in_a_new_run(whole, tmp_path):
    """Not a damaged or unreadable checkpoint, which is tried again, or moved away with --checkpoint.start-over."""
    made = experiment(CacheConfig(fraction=0.1, min_rows=1000, folder=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match=r"missing: No such file.*Give a writable folder") as fresh:
        make_plan(made).caches.store.init(jax.random.key(0))
    for other in (made, made.replaced({"embedding.schemes": ()})):
        with pytest.raises(ConfigError) as error:
            restored_rows(whole[1], other)
        assert (type(error.value), str(error.value)) == (ConfigError, str(fresh.value))


def test_an_evaluation_copies_slots_alone():
    """The rows of tables without a cache may be nearly all that the devices have."""
    plan = make_plan(experiment(CacheConfig(fraction=0.1, min_rows=5000)))
    tables, caches, seen = plan.parts.tables, plan.caches, {}
    caches.store.init(jax.random.key(0))
    blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tables.shapes)
    state = types.SimpleNamespace(tables=jax.tree.map(jax.device_put, blank, tables.shardings()))
    step, source = caches.evaluating(state, lambda _, state, batch: seen.update(state[TABLES]), plan.splits.test, 40)
    for batch in source.eval_batches(np.arange(first, first + 40) for first in range(0, 200, 40)):
        step({}, {}, batch)
    of_buffer = {one.name: {table.name for table in one.tables} for one in tables.buffers}
    assert seen.keys() == of_buffer.keys()
    copied = [name for name, one in state.tables.items() if seen[name] is not one["rows"]]
    assert copied == [name for name, members in of_buffer.items() if members & caches.store.whole.keys()]
    assert 0 < len(copied) < len(of_buffer)
    for name in copied:
        assert seen[name].any()
        assert not np.asarray(state.tables[name]["rows"]).any()  # The slots of training.
    of_device = sum(seen[name].addressable_shards[0].data.nbytes for name in copied)
    assert copied_bytes(tables.buffers, caches.store.whole.keys()) == of_device


def test_the_memory_of_an_evaluation_is_counted():
    """By the planner, and by the check before a run."""
    cached, sizes = experiment(CacheConfig(fraction=0.5, min_rows=5000)), {"replica": 4, "fsdp": 2, "tensor": 1}
    plan = make_plan(cached)
    copied = copied_bytes(plan.parts.tables.buffers, {"feature00"})
    assert copied
    machine = nominal_machine("25gbit", gpus_per_node=2)
    planned = tables_on_meshes(cached, sizes, lambda: machine, ())(sizes, 1e9)
    assert planned.costs.evaluation_bytes == copied
    most = max(copied, planned.costs.vector_bytes, planned.costs.update_bytes)
    assert planned.costs.needed_bytes == planned.costs.device_bytes + most

    columns = 4096
    rows = host_memory_bytes() // (4 * columns)
    table = Table(name="feature00", rows=rows, columns=columns, features=("feature00",))
    buffers = make_buffers([table], {"feature00": 1}, EmbeddingConfig(), sizes)
    large = types.SimpleNamespace(buffers=buffers, config=cached.embedding)
    with pytest.raises(ConfigError, match=r"cache\.fraction.0\.5: .* the slots of an evaluation"):
        check_memory(cached.model, plan.parts.state_spec, plan.splits.train.spec, 1, large)


OTHERS = {
    "same": experiment(CacheConfig(fraction=0.1, min_rows=5000)),
    "whole": experiment(
        mesh=MeshConfig(replica=2, fsdp=4),
        embedding=EmbeddingConfig(scheme=RowWise(), schemes=(("feature00", TableRowWise()),)),
    ),
    "cache": experiment(
        CacheConfig(fraction=0.3, min_rows=4000),
        mesh=MeshConfig(replica=8, fsdp=1),
        embedding=EmbeddingConfig(schemes=(("feature00", Replicated()), ("feature0[13]", DataParallel()))),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_changed_rows_written_with_a_cache_come_to_any_layout(whole, resumed, other):
    """The newest checkpoint has the rows that changed; what is there must be the run's own whole tables."""
    run, (_, workdir) = whole[0], resumed
    last = step_dir(workdir, 12)
    assert (last / "changed_rows").exists()
    assert not (last / "tables").exists()
    expected = rows_of_ids(run.plan.parts.tables, run.state.tables)
    jax.tree.map(np.testing.assert_array_equal, restored_rows(workdir, OTHERS[other]), expected)


@pytest.mark.slow
def test_changed_rows_written_with_a_cache_come_to_a_predictor(whole, resumed):
    run, (_, workdir) = whole[0], resumed
    alone, like_the_run = jaxdl.restore(workdir), jaxdl.restore(workdir, mesh=run.plan.experiment.mesh)
    rows = rows_of_ids(alone.parts.tables, {name: {"rows": x} for name, x in alone.model_state["tables"].items()})
    expected = rows_of_ids(run.plan.parts.tables, run.state.tables)
    for name, one in rows.items():
        np.testing.assert_array_equal(one["rows"], expected[name]["rows"])
    assert like_the_run.evaluate() == run.metrics


@pytest.mark.parametrize(
    ("cache", "changes", "message"),
    [
        (
            {"fraction": 0.1},
            {},
            "no table that may have one has 10,000 rows or more; the largest, feature00, has 9,000",
        ),
        ({"fraction": 0.1, "min_rows": 1000, "folder": "/nowhere/at/all"}, {}, "Give a writable folder"),
        ({"fraction": 0.001, "min_rows": 1000}, {}, "a batch touches"),
        (
            {"fraction": 0.02, "min_rows": 1000},
            {"evaluation": EvaluationConfig(batch_size=200)},
            r"a smaller evaluation\.batch_size",
        ),
        ({"window": 3}, {}, "cache.window=3: there is no cache, so it has no effect"),
        ({"fraction": 0.1, "tables": ("user*",)}, {}, r"cache.tables user\*: no table has such a name"),
    ],
)
def test_caches_that_cannot_be(cache, changes, message):
    with pytest.raises(ConfigError, match=message):
        jaxdl.train(experiment(**changes).replaced({f"embedding.cache.{name}": x for name, x in cache.items()}))
