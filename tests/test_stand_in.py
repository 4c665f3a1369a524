"""The stand-in of ImageNet, read through TensorFlow Datasets: every stage of the image pipeline on real JPEG files."""

import os
import pickle

import numpy as np
import pytest

from jaxdl.data import TFDS, Cache, Photos
from jaxdl.data.source import TrainRows

pytestmark = pytest.mark.skipif("TFDS_DATA_DIR" not in os.environ, reason="TFDS_DATA_DIR is not set")


def build(**photos):
    return TFDS(name="imagenet2012", photos=Photos(size=96, **{"workers": 0} | photos)).build()


def test_it_is_there():
    splits = build()
    assert (len(splits.train), len(splits.test)) == (384, 96)
    assert splits.train.spec.num_classes == 1000
    batch = splits.train.batch(np.arange(16))
    assert batch["image"].shape == (16, 96, 96, 3)
    assert batch["image"].std() > 20


@pytest.mark.slow
def test_records_go_to_another_process():
    records = build().train.pipeline.records[0]
    again = pickle.loads(pickle.dumps(records))
    assert again.read(17) == records.read(17)
    assert again.identity == records.identity


def resident_bytes(source):
    """Memory of the trainer and its workers, what they share counted once; the cache and the batches, mapped or not."""
    pool, total = source.pipeline.pool(), stored(source)
    total += os.fstat(pool.area.file).st_blocks * 512
    for pid in (os.getpid(), *pool.worker_ids()):
        with open(f"/proc/{pid}/smaps_rollup") as file:
            kinds = ("Pss_Anon:", "Pss_File:")  # Pss_Shmem is of what is counted above.
            total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith(kinds))
    return total


@pytest.mark.slow
def test_memory_stays_within_the_budget_over_three_epochs(tmp_path):
    """Pixels of all images take 40 MB; with a budget of 16 MiB, memory grows by 10 % more than that at most."""
    budget = 2**24
    cache = Cache(short_side=184, memory_bytes=budget, disk=str(tmp_path))
    source = build(cache=cache, workers=2).train.at(size=96)
    assert len(source.pipeline.pool().worker_ids()) == 2

    def epoch(number):
        rows = (TrainRows(np.arange(start, start + 32), np.full(32, number), 0) for start in range(0, 384, 32))
        for batch in source.train_batches(rows):
            assert batch["image"].any()
        return resident_bytes(source)

    source.batch(np.arange(32))  # Libraries are loaded, buffers made.
    before = resident_bytes(source) - stored(source)
    after = [epoch(number) for number in range(3)]
    assert 0.8 * budget * 384 / 480 < stored(source) <= budget, "the share of the training images is filled"
    assert max(after) - before <= 1.1 * budget
    source.close()


def stored(source):
    """Bytes of the memory tier."""
    folder = source.pipeline.plan().splits[0].tiers[0].folder
    return sum(path.stat().st_size for path in folder.glob("segment-*"))
