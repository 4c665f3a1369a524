"""The order of the examples, and the loader: rows, prefetching, its end."""

import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.core.config import ConfigError
from jaxdl.data import Batches, EpochShuffle, Source, SyntheticText, TrainLoader, eval_batches
from jaxdl.data.loader import local_rows
from jaxdl.data.spec import ImageSpec


class Numbers(Source):
    """Example i is an image of one pixel with value i; remembers what was read."""

    def __init__(self, count, fail_at=None, delay_sec=0.0):
        self.count, self.fail_at, self.delay_sec = count, fail_at, delay_sec
        self.reads = []

    @property
    def spec(self):
        return ImageSpec(1, 1, 1, 10, (0.0,), (1.0,))

    def __len__(self):
        return self.count

    def batch(self, indices):
        time.sleep(self.delay_sec)
        if self.fail_at is not None and len(self.reads) == self.fail_at:
            raise OSError("the disk is gone")
        self.reads.append(indices)
        return {"image": indices.astype(np.uint8).reshape(-1, 1, 1, 1), "label": indices.astype(np.int32)}


def make_sharding(replica=2, fsdp=4, tensor=1):
    devices = np.array(jax.devices()[: replica * fsdp * tensor]).reshape(replica, fsdp, tensor)
    return NamedSharding(Mesh(devices, ("replica", "fsdp", "tensor")), PartitionSpec(("replica", "fsdp")))


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "jaxdl-loader"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    if left_since(before):
        gc.collect()  # Only then: among the objects of all tests before it takes two seconds.
    assert not left_since(before)


def left_since(before):
    return {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("jaxdl")}


# The order


def test_every_epoch_is_another_permutation():
    order = EpochShuffle(101, seed=3)
    epochs = [order.indices(epoch * 101, 101) for epoch in range(4)]
    for epoch in epochs:
        assert epoch.dtype == np.int64
        np.testing.assert_array_equal(np.sort(epoch), np.arange(101))
    assert len({epoch.tobytes() for epoch in epochs}) == 4
    assert not np.array_equal(epochs[0], EpochShuffle(101, seed=4).indices(0, 101))


@pytest.mark.parametrize("batch_size", [1, 7, 64, 250])
def test_the_stream_does_not_depend_on_the_batch_size(batch_size):
    stream = EpochShuffle(101, seed=0).indices(0, 1000)
    order = EpochShuffle(101, seed=0)
    batches = [order.indices(step * batch_size, batch_size) for step in range(1000 // batch_size)]
    np.testing.assert_array_equal(np.concatenate(batches), stream[: len(batches) * batch_size])


def test_the_order_does_not_depend_on_what_was_asked_before():
    used = EpochShuffle(10, seed=1)
    for start in (95, 3, 41, 0, 77):
        np.testing.assert_array_equal(used.indices(start, 25), EpochShuffle(10, seed=1).indices(start, 25))


def test_the_order_of_a_seed_is_what_it_always_was():
    # A change here, be it by NumPy, means that a resumed run sees other data than the one it continues.
    assert EpochShuffle(10, seed=0).indices(8, 6).tolist() == [2, 4, 9, 4, 2, 1]


# Rows on devices


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8)])
def test_global_batches_are_the_same_on_every_mesh(shape):
    sharding = make_sharding(*shape)
    order = EpochShuffle(50, seed=5)
    with TrainLoader(Numbers(50), batch_size=16, seed=5, sharding=sharding, start=0, num_steps=5) as loader:
        batches = list(loader)
    assert len(batches) == 5
    for step, batch in enumerate(batches):
        expected = order.indices(step * 16, 16)
        assert batch["image"].shape == (16, 1, 1, 1)
        assert all(array.sharding == sharding for array in batch.values())
        np.testing.assert_array_equal(batch["label"], expected)
        for shard in batch["label"].addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])


@pytest.mark.parametrize(("shape", "num_processes"), [((2, 4, 1), 2), ((2, 2, 2), 2), ((2, 2, 2), 4), ((1, 2, 4), 8)])
def test_processes_share_the_rows(shape, num_processes):
    sharding = make_sharding(*shape)
    index_map = sharding.devices_indices_map((16,))
    devices = list(sharding.mesh.devices.flat)
    per_process = len(devices) // num_processes
    covered = set()
    for process in range(num_processes):
        own = devices[process * per_process : (process + 1) * per_process]
        rows = local_rows({device: index_map[device] for device in own}, 16)
        held = [set(range(*index_map[device][0].indices(16))) for device in own]
        read = [row for start, stop in rows for row in range(start, stop)]
        assert len(read) == len(set(read)), "a row is read once, however many devices hold it"
        assert set(read) == set().union(*held)
        assert [slot.stop - slot.start for slot in rows.values()] == [stop - start for start, stop in rows]
        covered |= set(read)
    assert covered == set(range(16))


@pytest.mark.slow
def test_two_processes_read_only_their_own_rows(tmp_path):
    """And end, though they forget the loader."""
    program = textwrap.dedent("""
        import os, sys
        import numpy as np
        port, process = sys.argv[1:]
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
        jax.distributed.initialize(f"localhost:{port}", 2, int(process))
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from jaxdl.data import EpochShuffle, TrainLoader
        from test_loader import Numbers
        sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "fsdp")),
                                 PartitionSpec(("replica", "fsdp")))
        source = Numbers(50)
        loader = TrainLoader(source, batch_size=8, seed=1, sharding=sharding, start=16, num_steps=9)
        batch = next(loader)
        expected = EpochShuffle(50, 1).indices(16, 8)
        own = expected[4 * int(process):][:4]
        assert batch["label"].shape == (8,)
        assert source.reads[0].tolist() == own.tolist(), (source.reads, own)
        for shard in batch["label"].addressable_shards:
            assert np.asarray(shard.data).tolist() == expected[shard.index].tolist()
        print("rows are right")
    """)
    script = tmp_path / "process.py"
    script.write_text(program)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))])
    environment = os.environ | {"PYTHONPATH": paths}
    started = [
        subprocess.Popen([sys.executable, str(script), port, str(i)], env=environment, stdout=-1, stderr=-2, text=True)
        for i in range(2)
    ]
    try:
        for process in started:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
            assert "rows are right" in output
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize("batch_size", [0, 12])
def test_a_batch_that_cannot_be_split_is_refused(batch_size):
    with pytest.raises(ConfigError, match="multiple of 8"):
        TrainLoader(Numbers(50), batch_size=batch_size, seed=0, sharding=make_sharding(), start=0, num_steps=1)


def test_no_examples_are_refused():
    with pytest.raises(ConfigError, match="no examples"):
        eval_batches(Numbers(0), batch_size=8, sharding=make_sharding())


# Where the loader starts and ends


@pytest.mark.parametrize("start", [1, 6, 10])
def test_a_resumed_loader_gives_the_tail(start):
    def labels(start_step, num_steps):
        with TrainLoader(
            Numbers(20), batch_size=8, seed=2, sharding=make_sharding(), start=8 * start_step, num_steps=num_steps
        ) as loader:
            return [np.asarray(batch["label"]).tolist() for batch in loader]

    assert labels(start, 10 - start) == labels(0, 10)[start:]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 24, 37])
def test_evaluation_covers_every_example_once(count):
    seen, num_batches = [], 0
    with eval_batches(Numbers(count), batch_size=8, sharding=make_sharding()) as batches:
        for batch in batches:
            mask = np.asarray(batch["mask"])
            assert batch["image"].shape == (8, 1, 1, 1)
            assert mask.shape == (8,)
            assert not np.asarray(batch["image"])[~mask].any()
            assert not np.asarray(batch["label"])[~mask].any()
            seen += np.asarray(batch["label"])[mask].tolist()
            num_batches += 1
    assert seen == list(range(count))
    assert num_batches == -(-count // 8)


def test_evaluation_of_text_has_a_mask_for_every_target():
    source = SyntheticText(num_test=5, length=6).build().test
    with eval_batches(source, batch_size=8, sharding=make_sharding()) as batches:
        (batch,) = batches
    assert batch["tokens"].shape == (8, 7)
    np.testing.assert_array_equal(batch["mask"], np.arange(8)[:, None].repeat(6, axis=1) < 5)
    np.testing.assert_array_equal(batch["tokens"][:5], source.batch(np.arange(5))["tokens"])


# The thread


def train_loader(source, prefetch=2, num_steps=1000):
    return TrainLoader(
        source, batch_size=8, seed=0, sharding=make_sharding(), start=0, num_steps=num_steps, prefetch=prefetch
    )


def wait_until(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_thread_reads_ahead_and_no_further(prefetch):
    source = Numbers(50)
    with train_loader(source, prefetch) as loader:
        wait_until(lambda: len(source.reads) == prefetch + 1)
        next(loader)
        wait_until(lambda: len(source.reads) == prefetch + 2)
        time.sleep(0.1)
        assert len(source.reads) == prefetch + 2


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_ends_the_thread_at_once(taken):
    loader = train_loader(Numbers(50))
    for _ in range(taken):
        next(loader)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 2
    assert not loader_threads()
    assert list(loader) == []
    loader.close()


def test_close_wakes_a_waiting_consumer():
    loader = train_loader(Numbers(50, delay_sec=0.5))
    waiting = threading.Thread(target=lambda: list(loader))
    waiting.start()
    loader.close()
    waiting.join(5)
    assert not waiting.is_alive()


@pytest.mark.slow
def test_a_loader_that_is_dropped_ends_its_thread():
    loader = eval_batches(Numbers(500), batch_size=8, sharding=make_sharding())
    for _ in loader:
        break
    assert loader_threads()
    del loader
    gc.collect()
    wait_until(lambda: not loader_threads())


def test_the_end_of_the_batches_ends_the_thread():
    loader = train_loader(Numbers(50), num_steps=3)
    assert len(list(loader)) == 3
    wait_until(lambda: not loader_threads())
    assert list(loader) == []


def test_an_error_comes_after_the_batches_before_it():
    source = Numbers(50, fail_at=3)
    loader = train_loader(source)
    for _ in range(3):
        next(loader)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(loader)
    assert any(entry.name == "batch" for entry in caught.traceback), "the traceback shows where it happened"
    assert list(loader) == []
    loader.close()


def test_an_error_after_close_is_not_raised():
    loader = train_loader(Numbers(50, fail_at=0, delay_sec=0.2))
    loader.close()
    assert list(loader) == []


def test_an_error_nobody_asks_for_is_no_obstacle():
    loader = train_loader(Numbers(50, fail_at=0))
    wait_until(lambda: not loader_threads())
    loader.close()


def test_no_room_is_refused():
    with pytest.raises(ConfigError, match="prefetch = 0"):
        Batches(iter(()), prefetch=0)
