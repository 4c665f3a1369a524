"""The stand-in of ImageNet, read through TensorFlow Datasets: every stage of the image pipeline on real JPEG files."""

import os
import pickle

import numpy as np
import pytest

from jaxdl.data import TFDS, Cache, Photos

pytestmark = pytest.mark.skipif("TFDS_DATA_DIR" not in os.environ, reason="TFDS_DATA_DIR is not set")


def build(**photos):
    return TFDS(name="imagenet2012", photos=Photos(size=96, workers=0, **photos)).build()


def test_it_is_there():
    splits = build()
    assert (len(splits.train), len(splits.test)) == (384, 96)
    assert splits.train.spec.num_classes == 1000
    batch = splits.train.batch(np.arange(16))
    assert batch["image"].shape == (16, 96, 96, 3)
    assert batch["image"].std() > 20


def test_records_go_to_another_process():
    records = build().train.studio.records[0]
    again = pickle.loads(pickle.dumps(records))
    assert again.read(17) == records.read(17)
    assert again.identity == records.identity


def resident_bytes(pids):
    """Memory of these processes; what they share is counted once."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    return total


def test_memory_stays_within_the_budget_over_three_epochs(tmp_path):
    """Pixels of all images take 40 MB; with a budget of 16 MiB, memory grows by 10 % more than that at most."""
    budget = 2**24
    source = build(cache=Cache(short_side=184, memory_bytes=budget, disk=str(tmp_path))).train.at(size=96)
    source.studio.config = source.studio.config.replaced({"workers": 2})
    pool = source.studio.pool()

    def epoch(number):
        from jaxdl.data.source import TrainRows

        rows = (TrainRows(np.arange(start, start + 32), np.full(32, number), 0) for start in range(0, 384, 32))
        for batch in source.train_batches(rows):
            assert batch["image"].any()
        return resident_bytes([os.getpid(), *pool.worker_ids()])

    source.batch(np.arange(32))  # Libraries are loaded, buffers made.
    before = resident_bytes([os.getpid(), *pool.worker_ids()]) - stored(source)
    after = [epoch(number) for number in range(3)]
    assert stored(source) <= budget
    assert stored(source) > 0.8 * budget * 384 / 480, "the share of the training images is filled"
    assert max(after) - before <= 1.1 * budget
    source.close()


def stored(source):
    """Bytes of the memory tier."""
    folder = source.studio.recipe().splits[0].tiers[0].folder
    return sum(path.stat().st_size for path in folder.glob("segment-*"))
