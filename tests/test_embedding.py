"""Embedding tables on meshes, against an oracle that has whole tables and dense gradients, in float64."""

import copy
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import kinds
from jaxdl.data.tables.tabular import Feature, count_ids
from jaxdl.parallel.embedding import (
    ColumnWise,
    DataParallel,
    EmbeddingConfig,
    Replicated,
    RowAdaGrad,
    RowAdam,
    RowOptimizer,
    RowSGD,
    RowWise,
    RowWiseAdaGrad,
    Table,
    TableRowWise,
    Tables,
    TableWise,
    sorting,
)
from jaxdl.parallel.embedding.jagged import fitting, packed
from jaxdl.parallel.mesh import MeshConfig, make_mesh

TABLES = (
    Table(name="shared", rows=50, columns=8, features=("one", "three")),
    Table(name="mean", rows=13, columns=8, features=("four",), pooling="mean"),
    Table(name="large", rows=101, columns=8, features=("other",)),
    Table(name="wide", rows=7, columns=16, features=("two",)),
)
NUM_IDS = {"one": 1, "three": 3, "four": 4, "other": 1, "two": 2}
OF_FEATURE = {feature: table for table in TABLES for feature in table.features}
BATCH, RATE, STEPS = 16, 0.1, 20
COLUMNS = sum(OF_FEATURE[name].columns for name in NUM_IDS)
WEIGHTS = np.random.default_rng(0).standard_normal((BATCH, COLUMNS)).astype(np.float32)
OPTIMIZERS = (RowWiseAdaGrad(), RowSGD(), RowAdaGrad(), RowAdam())
ALL = (TableWise(), RowWise(), ColumnWise(), TableRowWise(), DataParallel(), Replicated())
MESHES = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)]


def mesh_of(sizes):
    config = MeshConfig(**dict(zip(("replica", "fsdp", "tensor"), sizes, strict=True)))
    return make_mesh(config, jax.devices()[: np.prod(sizes)])


@functools.lru_cache
def batches():
    """Ids with many repetitions, in one example and over all; some features have fewer than they may."""
    draw, found = np.random.default_rng(1), []
    for _ in range(STEPS):
        columns = []
        for name, width in NUM_IDS.items():
            ids = (draw.zipf(1.3, (BATCH, width)) - 1) % OF_FEATURE[name].rows
            if width > 1:
                ids[draw.random((BATCH, width)) < 0.3] = -1
            columns.append(ids)
        found.append(np.concatenate(columns, axis=1).astype(np.int32))
    return found


def gradient(vectors, numpy, weights=WEIGHTS):
    """That of some loss with respect to the pooled vectors."""
    return numpy.cos(3 * vectors) * weights


@functools.lru_cache
def program(scheme, optimizer, sizes, jagged=()):
    """`Tables`, and the compiled step of a state, ids and a count."""
    tables = Tables(TABLES, NUM_IDS, EmbeddingConfig(scheme=scheme, optimizer=optimizer), mesh_of(sizes), jagged)
    return tables, compiled(tables, jagged)


def compiled(tables, jagged=(), weights=WEIGHTS):
    """The step of a state, ids and a count."""

    def step(state, ids, count, kept):
        located = tables.locate(*(ids if jagged else (ids,)))
        vectors = tables.lookup({name: one["rows"] for name, one in state.items()}, located)
        found, squares = tables.gradients(located, gradient(vectors, jnp, weights))
        new = tables.update(
            state, found, kept=kept, factor=jnp.float32(0.5), learning_rate=jnp.float32(RATE), count=count
        )
        return new, vectors, squares

    return jax.jit(step, donate_argnums=0, out_shardings=(tables.shardings(), None, None))


def made(tables):
    """The initial state, as a run makes it."""
    return jax.jit(lambda: tables.init(jax.random.key(3)), out_shardings=tables.shardings())()


@functools.lru_cache
def initial_rows():
    """Those of one device, in the order of ids."""
    one, _ = program(TableWise(), RowWiseAdaGrad(), MESHES[0])
    return {name: kept["rows"] for name, kept in whole(one, made(one)).items()}


def fresh(tables):
    """The same state as `made`, which a test of its own compares, without a program for each."""
    found = {}
    for buffer in tables.buffers:
        found[buffer.name] = {name: np.zeros(x.shape, x.dtype) for name, x in tables.shapes[buffer.name].items()}
        for table in buffer.tables:
            places = buffer.places.of(table.name, np.arange(table.rows))
            found[buffer.name]["rows"][places] = initial_rows()[table.name.split()[-1]]
    return jax.tree.map(jax.device_put, found, tables.shardings())


def whole(tables, state):
    """The rows of each table, and what is kept of them, in the order of ids."""
    found = {}
    for buffer in tables.buffers:
        for table in buffer.tables:
            places = buffer.places.of(table.name, np.arange(table.rows))
            found[table.name] = {name: np.asarray(x)[places] for name, x in state[buffer.name].items()}
    return found


JAGGED = tuple(
    Feature(name, 1, width, *{"three": (1.5, 0.1), "four": (2.5, 0.1)}.get(name, (None, 0.0)))
    for name, width in NUM_IDS.items()
)
"""Of two features examples often have fewer ids than columns; some batches need the second bucket."""


def as_jagged(tables, ids):
    """The ids as values and lengths, in the first bucket that holds them."""
    examples, lengths = BATCH // tables.mesh.size, count_ids(ids, JAGGED)
    capacity = fitting(tables.buckets(BATCH), lengths, examples)
    return packed(ids, JAGGED, capacity, examples), lengths


def spread(tables, ids):
    return jax.device_put(ids, NamedSharding(tables.mesh, PartitionSpec(("replica", "fsdp"))))


@functools.lru_cache
def trained(scheme, optimizer, sizes, steps=STEPS, jagged=()):
    """(tables after one step and after all, pooled vectors of the first and the last, the last sum of squares)."""
    tables, step = program(scheme, optimizer, sizes, jagged)
    return stepped(tables, step, [as_jagged(tables, ids) if jagged else ids for ids in batches()[:steps]])


def stepped(tables, step, every):
    """What `trained` returns, of steps with these ids."""
    state, first, vectors, squares = fresh(tables), {}, [], None
    for number, ids in enumerate(every, start=1):
        state, pooled, squares = step(state, spread(tables, ids), jnp.int32(number), jnp.bool_(True))
        vectors.append(np.asarray(pooled))
        first = first or whole(tables, state)
    check_copies(state)
    return (first, whole(tables, state)), (vectors[0], vectors[-1]), float(squares)


def trained_together(scheme, sizes):
    """Of each optimizer (tables, pooled vectors) as in `trained`, from one program: each has tables of its own.

    They are those of 8 columns: the features of all but the last.
    """
    tables, num_ids = [], {}
    for optimizer in OPTIMIZERS:
        for one in TABLES[:-1]:
            features = tuple(f"{optimizer.kind} {name}" for name in one.features)
            own = {"name": f"{optimizer.kind} {one.name}", "features": features, "optimizer": optimizer}
            tables.append(Table(**(dict(one) | own)))
        num_ids |= {f"{optimizer.kind} {name}": NUM_IDS[name] for name in list(NUM_IDS)[:-1]}
    several = Tables(tables, num_ids, EmbeddingConfig(scheme=scheme), mesh_of(sizes))
    every = [np.tile(ids[:, : -NUM_IDS["two"]], len(OPTIMIZERS)) for ids in batches()]
    mine = COLUMNS - OF_FEATURE["two"].columns
    step = compiled(several, weights=np.tile(WEIGHTS[:, :mine], len(OPTIMIZERS)))
    both, vectors, _ = stepped(several, step, every)
    for number, one in enumerate(OPTIMIZERS):
        own = [{name.split()[-1]: x for name, x in rows.items() if name.startswith(f"{one.kind} ")} for rows in both]
        yield one, own, [x[:, number * mine : (number + 1) * mine] for x in vectors]


def check_copies(state):
    for x in jax.tree.leaves(state):
        seen = {}
        for shard in x.addressable_shards:
            first = seen.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(first, shard.data)


@functools.lru_cache
def oracle(optimizer):
    """The same from gradients of whole tables, in float64: after one step and after all, what is kept beside rows."""
    start, _ = program(TableWise(), optimizer, (1, 1, 1))
    rows = {name: one["rows"].astype(np.float64) for name, one in whole(start, fresh(start)).items()}
    kept = {name: {"mean": np.zeros(x.shape), "square": np.zeros(x.shape)} for name, x in rows.items()}
    after, vectors, squares = [], [], 0.0
    for number, ids in enumerate(batches(), start=1):
        pooled, weights, first = {}, {}, 0
        for name, width in NUM_IDS.items():
            table, mine = OF_FEATURE[name], ids[:, first : first + width]
            used = (mine >= 0).astype(np.float64)
            if table.pooling == "mean":
                used /= np.maximum(used.sum(axis=1, keepdims=True), 1)
            # [example, row]: how often the example has the row.
            weights[name] = np.einsum("bh,bhv->bv", used, mine[..., None] == np.arange(table.rows))
            pooled[name] = weights[name] @ rows[table.name]
            first += width
        vectors.append(np.concatenate(list(pooled.values()), axis=1))
        ends = np.cumsum([x.shape[1] for x in pooled.values()])[:-1]
        grads = dict(zip(pooled, np.split(gradient(vectors[-1], np), ends, axis=1), strict=True))
        dense = {table.name: sum(weights[name].T @ grads[name] for name in table.features) for table in TABLES}
        touched = {table.name: sum(weights[name].sum(axis=0) for name in table.features) > 0 for table in TABLES}
        squares = sum((x**2).sum() for x in dense.values())
        for name, mine in touched.items():
            dense_update(optimizer, rows[name], kept[name], 0.5 * dense[name], mine, number)
        if number in (1, STEPS):
            after.append(copy.deepcopy((rows, kept)))
    return after, (vectors[0], vectors[-1]), squares


def dense_update(optimizer, rows, kept, grad, touched, number):
    """Updates the touched rows in place."""
    g = grad[touched] + optimizer.weight_decay * rows[touched]
    if isinstance(optimizer, RowSGD):
        rows[touched] -= RATE * g
        return
    if isinstance(optimizer, RowAdam):
        kept["mean"][touched] = 0.9 * kept["mean"][touched] + 0.1 * g
        kept["square"][touched] = 0.999 * kept["square"][touched] + 0.001 * g**2
        mean, square = kept["mean"][touched] / (1 - 0.9**number), kept["square"][touched] / (1 - 0.999**number)
        rows[touched] -= RATE * mean / (np.sqrt(square) + 1e-8)
        return
    kept["square"][touched] += (g**2).mean(axis=1, keepdims=True) if isinstance(optimizer, RowWiseAdaGrad) else g**2
    rows[touched] -= RATE * g / (np.sqrt(kept["square"][touched]) + 1e-8)


def assert_like_oracle(both, pooled, optimizer):
    """Tables after one step and after all, and the first of the oracle's vectors: to 1e-6 of their scale."""
    after, vectors, _ = oracle(optimizer)
    for tables, (rows, kept) in zip(both, after, strict=True):
        for name, one in tables.items():
            assert_close(one["rows"], rows[name], 1e-6)
            assert one.keys() == {"rows", *optimizer.row_numbers}
            for what in optimizer.row_numbers:
                assert_close(one[what], kept[name][what][:, 0] if one[what].ndim == 1 else kept[name][what], 1e-6)
    for mine, expected in zip(pooled, vectors, strict=True):
        assert_close(mine, expected[:, : mine.shape[1]], 1e-6)


def assert_close(found, expected, error):
    np.testing.assert_allclose(found, expected, rtol=0, atol=error * np.abs(expected).max())


def assert_all_like_oracle(found, optimizer):
    both, pooled, square = found
    for tables in both:
        assert tables.keys() == {one.name for one in TABLES}
    assert pooled[0].shape == (BATCH, COLUMNS)
    assert_like_oracle(both, pooled, optimizer)
    assert square == pytest.approx(oracle(optimizer)[-1], rel=1e-6)


def test_every_scheme_is_tried():
    assert {type(one).kind for one in ALL} == set(kinds(type(ALL[0]).part))


def schemes_on_meshes():
    """Each scheme on eight devices, and one on two and one on four. Those on eight stay in `make test`."""
    cases = [(scheme, MESHES[3]) for scheme in ALL] + [(DataParallel(), MESHES[1]), (ColumnWise(), MESHES[2])]
    for scheme, sizes in cases:
        marks = () if sizes == MESHES[3] else pytest.mark.slow
        yield pytest.param(scheme, sizes, id=f"{scheme.kind}, {np.prod(sizes)} devices", marks=marks)


@pytest.mark.parametrize(("scheme", "sizes"), [*schemes_on_meshes()])
def test_one_step_and_twenty(scheme, sizes):
    assert_all_like_oracle(trained(scheme, RowWiseAdaGrad(), sizes), RowWiseAdaGrad())


@pytest.mark.parametrize("name", NUM_IDS)
def test_ids_of_the_first_batch_repeat_across_devices_and_in_examples(name):
    first = sum(NUM_IDS[one] for one in itertools.takewhile(lambda one: one != name, NUM_IDS))
    ids = batches()[0][:, first : first + NUM_IDS[name]]
    repeated = [len(set(one[one >= 0])) < (one >= 0).sum() for one in ids]
    assert any(repeated) == (NUM_IDS[name] > 1)
    for sizes in MESHES[1:]:
        shares = np.split(ids, np.prod(sizes))
        assert any(np.intersect1d(one[one >= 0], two[two >= 0]).size for one, two in itertools.pairwise(shares))


def test_every_optimizer_is_tried():
    assert {type(one).kind for one in OPTIMIZERS} == set(kinds(RowOptimizer))


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(RowWise(), id="row_wise"), pytest.param(ColumnWise(), id="column_wise", marks=pytest.mark.slow)],
)
def test_one_step_and_twenty_of_every_optimizer(scheme):
    for optimizer, both, pooled in trained_together(scheme, MESHES[3]):
        assert [len(tables) for tables in both] == [len(TABLES) - 1] * 2
        assert_like_oracle(both, pooled, optimizer)


@pytest.mark.slow
def test_weight_decay_counts_in_the_squares_of_all_columns():
    optimizer = RowWiseAdaGrad(weight_decay=0.05)
    assert_all_like_oracle(trained(ColumnWise(), optimizer, (2, 2, 1)), optimizer)


@pytest.mark.parametrize("scheme", [TableWise(), RowWise()], ids=lambda x: x.kind)
def test_bits_are_those_of_one_device(scheme):
    one, several = (trained(scheme, RowWiseAdaGrad(), each) for each in (MESHES[0], MESHES[3]))
    jax.tree.map(np.testing.assert_array_equal, one[:2], several[:2])


@pytest.mark.slow
def test_jagged_ids_have_the_bits_of_columns():
    columns = trained(TableWise(), RowWiseAdaGrad(), MESHES[0])
    jagged = trained(TableWise(), RowWiseAdaGrad(), MESHES[2], jagged=JAGGED)
    jax.tree.map(np.testing.assert_array_equal, columns[:2], jagged[:2])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [RowWise(), Replicated()], ids=["row_wise", "replicated"])
def test_jagged_ids_on_a_mesh(scheme):
    assert_all_like_oracle(trained(scheme, RowWiseAdaGrad(), MESHES[2], jagged=JAGGED), RowWiseAdaGrad())


@pytest.mark.parametrize("in_order", [True, False])
def test_rows_are_sorted_alike_on_every_platform(in_order):
    draw = np.random.default_rng(0)
    rows = draw.choice([0, 1, 7, 2**31 - 1], (3, 100)).astype(np.int32)
    places = np.stack([draw.choice(2**31 - 1, 100, replace=False) for _ in range(3)]).astype(np.int32)
    places = np.sort(places) if in_order else places
    order = np.lexsort((places, rows))
    wanted = np.take_along_axis(rows, order, 1), np.take_along_axis(places, order, 1)
    for one in (sorting.by_row, sorting.as_words, sorting.as_pairs):
        found = jax.vmap(functools.partial(one, in_order=in_order))(rows, places)
        np.testing.assert_array_equal(found, wanted)


def test_a_step_that_is_not_kept_changes_nothing():
    tables, step = program(Replicated(), RowWiseAdaGrad(), (2, 2, 1))
    before = whole(tables, fresh(tables))
    after, *_ = step(fresh(tables), spread(tables, batches()[0]), jnp.int32(1), jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, before, whole(tables, after))


@pytest.mark.slow
def test_rows_that_exceed_their_room_are_sent_all_the_same():
    whole, little = (trained(Replicated(room=one), RowWiseAdaGrad(), (2, 2, 1), 3) for one in (1, 0.02))
    jax.tree.map(np.testing.assert_array_equal, whole[:2], little[:2])


@pytest.mark.slow
def test_initial_rows_are_uniform_and_the_same_everywhere():
    one, _ = program(TableWise(), RowWiseAdaGrad(), (1, 1, 1))
    rows = whole(one, made(one))
    for scheme in (RowWise(), ColumnWise(), DataParallel()):
        several, _ = program(scheme, RowWiseAdaGrad(), MESHES[3])
        jax.tree.map(np.testing.assert_array_equal, rows, whole(several, made(several)))
    drawn = np.sort(rows["large"]["rows"].ravel()) * np.sqrt(101)
    expected = (np.arange(drawn.size) + 0.5) / drawn.size * 2 - 1
    assert np.abs(drawn - expected).max() < 1.63 / np.sqrt(drawn.size) * 2  # Kolmogorov-Smirnov, 1 %.


@pytest.mark.parametrize(
    ("tables", "config", "message"),
    [
        (TABLES[:-1], {}, "no table has the feature 'two'"),
        ((*TABLES, Table(name="more", rows=3, columns=8, features=("six",))), {}, "'six' is no feature of the data"),
        (
            (*TABLES, Table(name="wide", rows=3, columns=8, features=("six",))),
            {},
            "several tables have the name 'wide'",
        ),
        (TABLES, {"schemes": (("user*", RowWise()),)}, "no table has such a name"),
        (TABLES, {"schemes": (("*", RowWise()), ("large", TableWise()))}, "'large': patterns before it have all"),
    ],
)
def test_tables_that_do_not_fit(tables, config, message):
    with pytest.raises(ConfigError, match=message):
        Tables(tables, NUM_IDS, EmbeddingConfig(**config), mesh_of((1, 1, 1)))


def test_columns_that_cannot_be_cut():
    tables = [Table(name="odd", rows=5, columns=3, features=("one",))]
    with pytest.raises(ConfigError, match="3 columns cannot be cut evenly over 2"):
        Tables(tables, {"one": 1}, EmbeddingConfig(scheme=ColumnWise()), mesh_of((1, 2, 1)))
