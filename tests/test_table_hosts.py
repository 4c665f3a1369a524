"""Where several processes keep the rows of tables with a cache, without starting any: who has what, and may load it."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_embedding import mesh_of

from jaxdl.core.config import ConfigError
from jaxdl.parallel.embedding import (
    ColumnWise,
    DataParallel,
    EmbeddingConfig,
    Replicated,
    RowWise,
    RowWiseAdaGrad,
    Table,
    TableRowWise,
    TableWise,
)
from jaxdl.parallel.embedding.cache import SlotPlan, Window
from jaxdl.parallel.embedding.hosts import HostRows
from jaxdl.parallel.embedding.layout import make_buffers
from jaxdl.parallel.mesh import HostAxis, host_sizes
from jaxdl.training.checkpoint.fingerprint import fingerprints, host_fingerprints, text

SCHEMES = (TableWise(), RowWise(), ColumnWise(), TableRowWise(), DataParallel(), Replicated())
ROWS = {"large": 301, "second": 100, "third": 75, "small": 13}
SLOTS = {"large": 64, "second": 32, "third": 16, "small": 13}
COLUMNS = 8


def hosts_of(scheme, sizes, num_processes):
    """The rows of each process of a mesh of these sizes, and the mesh of processes."""
    tables = [Table(name=name, rows=SLOTS[name], columns=COLUMNS, features=(name,)) for name in ROWS]
    mesh = mesh_of(sizes)
    config = EmbeddingConfig(scheme=scheme, optimizer=RowWiseAdaGrad())
    (buffer,) = make_buffers(tables, dict.fromkeys(ROWS, 1), config, dict(mesh.shape))
    processes = np.repeat(np.arange(num_processes), mesh.size // num_processes).reshape(sizes[0], -1)
    found = np.array(jax.devices()[:num_processes]).reshape(host_sizes(processes))
    host_mesh = Mesh(found, tuple(axis.value for axis in HostAxis))
    return [HostRows(buffer, ROWS, mesh, host_mesh, process) for process in range(num_processes)], host_mesh


MESHES = pytest.mark.parametrize(
    ("sizes", "num_processes"),
    [((2, 4, 1), 2), ((1, 4, 2), 4), ((2, 2, 2), 4), ((4, 2, 1), 2), ((2, 4, 1), 8), ((1, 1, 1), 1)],
)
EACH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.kind)


@EACH
@MESHES
def test_each_process_has_the_rows_that_its_devices_may_need(scheme, sizes, num_processes):
    hosts, host_mesh = hosts_of(scheme, sizes, num_processes)
    buffer, (num_nodes, _) = hosts[0].buffer, host_mesh.devices.shape
    copies = {"data_parallel": num_processes, "replicated": num_nodes}.get(scheme.kind, 1)
    for name, rows in ROWS.items():
        ids, slots = np.arange(rows), np.arange(SLOTS[name])
        held = np.zeros((rows, COLUMNS), int)
        for host in hosts:
            held[host.is_here(name, ids), host.columns] += 1
        assert (held == copies).all()
        homes, parts = hosts[0].home_of(ids), buffer.places.of(name, slots) // buffer.local_rows
        for home, part in zip(hosts[0].home_of(slots), parts, strict=True):
            with_slot = [host for host in hosts if any(device.part == part for device in host.devices)]
            assert with_slot
            assert all(
                host.is_here(name, ids[homes == home]).all() for host in with_slot
            )  # Of these alone it gets one.


@EACH
@MESHES
def test_the_array_of_all_processes_has_each_row_in_its_place(scheme, sizes, num_processes):
    hosts, host_mesh = hosts_of(scheme, sizes, num_processes)
    places, spec = hosts[0].places, hosts[0].buffer.rows_spec
    whole = np.full((places.num_rows, COLUMNS), -1.0)
    where = hosts[0].sharding(spec).devices_indices_map(whole.shape)
    for host, device in zip(hosts, host_mesh.devices.flat, strict=True):
        mine = np.full(whole[where[device]].shape, -1.0)
        for number, (name, rows) in enumerate(ROWS.items()):
            if host.has(name):
                numbers, ids = host.ids(name, np.arange(len(host.part_of(name, mine))))
                np.testing.assert_array_equal(np.sort(ids), np.flatnonzero(host.is_here(name, np.arange(rows))))
                np.testing.assert_array_equal(host.numbers(ids), numbers)
                values = coded(number, ids)[:, host.columns]
                assert host.shape(name, one_number=False) == host.part_of(name, mine).shape
                host.part_of(name, mine)[numbers] = values
        before = whole[where[device]]
        assert ((before == -1) | (before == mine)).all(), "copies are equal"
        whole[where[device]] = mine
    for number, (name, rows) in enumerate(ROWS.items()):
        np.testing.assert_array_equal(whole[places.of(name, np.arange(rows))], coded(number, np.arange(rows)))


def coded(table, ids):
    """Values that say which table, id and column they are of."""
    return table * 10_000 + ids[:, None] * 10.0 + np.arange(COLUMNS)


@pytest.mark.parametrize(
    ("processes", "sizes"),
    [
        ([[0, 0, 0, 0], [1, 1, 1, 1]], (2, 1)),
        ([[0, 0, 1, 1], [2, 2, 3, 3]], (2, 2)),
        ([[0], [0], [1], [1]], (2, 1)),
        ([[5, 5]], (1, 1)),
    ],
)
def test_processes_are_parts_of_nodes_or_several(processes, sizes):
    assert host_sizes(np.array(processes)) == sizes


@pytest.mark.parametrize("processes", [[[0, 0], [0, 1], [1, 1]], [[0, 0, 0], [1, 1, 1], [2, 2, 3]]])
def test_processes_with_other_parts_of_nodes(processes):
    with pytest.raises(ConfigError, match=r"a process has 3 devices and a replica [23] .* Change the mesh"):
        host_sizes(np.array(processes))


def test_ids_stay_at_home():
    """Three processes share a table; each has every third id, and every third slot."""
    plan = SlotPlan("t", 60, 12, "farthest", 3, lambda ids: ids % 3)
    draw = np.random.default_rng(0)
    for _ in range(50):
        now = np.unique(draw.integers(0, 60, 3))
        swap = plan.planned(now, [])
        assert (plan.slot_of[now] % 3 == now % 3).all()
        assert (swap.loaded % 3 == swap.loaded_slots % 3).all()
    assert (plan.id_of >= 0).all()
    plan.planned(np.array([0, 3, 6, 9]), [])
    with pytest.raises(ConfigError, match=r"touches 5 .* has 4 slots for rows of process 1 of the 3 .*fraction.0\.25"):
        plan.planned(np.array([1, 4, 7, 10, 13]), [])


def test_the_plan_is_that_of_the_whole_batch():
    """Two processes have half of the examples each; both plan as one that has all of them."""
    draw = np.random.default_rng(1)
    batches = [draw.integers(-1, 60, (6, 2)).astype(np.int32) for _ in range(20)]
    made = {}
    for name, mine in (("both", slice(0, 6)), ("first", slice(0, 3)), ("second", slice(3, 6))):
        window = Window({"t": SlotPlan("t", 60, 24, "lru")}, {"t": np.arange(2)}, 2)
        made[name] = []
        for batch in batches:
            window.add(batch[mine], batch)
        made[name] = [window.planned() for _ in batches]
    for both, first, second in zip(*made.values(), strict=True):
        np.testing.assert_array_equal(both[0], np.concatenate([first[0], second[0]]))
        for one in (first, second):
            for x, y in zip(both[1]["t"], one[1]["t"], strict=True):
                np.testing.assert_array_equal(x, y)


def test_a_source_with_other_ids_than_its_batches():
    window = Window({"t": SlotPlan("t", 60, 24, "lru")}, {"t": np.arange(1)}, 1)
    window.add(np.array([[7]], np.int32), np.array([[8], [9]], np.int32))
    with pytest.raises(ConfigError, match="table t: the data has other ids for an example in its batch"):
        window.planned()


@pytest.mark.parametrize("spec", [("fsdp", "tensor"), (("replica", "fsdp"), None), (None, "fsdp"), (None, None)])
def test_fingerprints_of_parts_are_those_of_the_whole(spec):
    x = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
    placed = jax.device_put(x, NamedSharding(mesh_of((2, 2, 2)), PartitionSpec(*spec)))
    (words,) = host_fingerprints([placed])
    assert text(words) == text(np.asarray(fingerprints(jax.numpy.asarray(x))))
