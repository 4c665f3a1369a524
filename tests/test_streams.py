"""Streams of texts and photographs: rows are a function of seed and position, from any storage and after any kill."""

import json
import re
import tarfile
from collections import Counter

import numpy as np
import pytest
from mirror import COMMIT, mirror
from runs import measured, tiny_experiment
from stream_shards import PACK, add, write_mds

from jaxdl import train
from jaxdl.core.config import ConfigError
from jaxdl.data import Cache, Documents, ImageStream, Photos, TextStream
from jaxdl.data.streams.fetch import Fetched
from jaxdl.data.streams.shard_order import ShardOrder, index_of, place_of
from jaxdl.models import Transformer
from jaxdl.optim import AdamW, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.run.plan.length import timeline_of
from jaxdl.training.tasks import LanguageModelling

TEXTS = {
    "n": ("int", 8, lambda n: np.int64(n).tobytes()),
    "text": ("str", None, str.encode),
    "more": ("bytes", None, bytes),
}


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(0)
    return [f"document {n}: " + "w" * int(random.integers(0, 90)) for n in range(100)]


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    """The same documents in shards of 20: JSON lines, tar files and MDS, in a folder that is a hub's, too."""
    folder = tmp_path_factory.mktemp("served")
    hub = folder / "ada" / "words"
    hub.mkdir(parents=True)
    for shard in range(5):
        some = texts[shard * 20 : shard * 20 + 20]
        (hub / f"w-{shard}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
        with tarfile.open(folder / f"w-{shard}.tar", "w") as tar:
            for n, text in enumerate(some):
                named = f"{n:03}.json" if n % 2 else f"{n:03}.txt"
                add(tar, named, (json.dumps({"text": text}) if n % 2 else text).encode())
            add(tar, "000.jpg", b"not text")
    samples = [{"n": n, "text": text, "more": b"x" * (n % 3)} for n, text in enumerate(texts)]
    for compression in (None, *PACK):
        write_mds(folder / f"mds-{compression}", TEXTS, samples, compression=compression)
    return folder


def stream(folder, **settings):
    return TextStream(**{"length": 48, "num_test": 4, "together": 2, "keep": str(folder)} | settings)


def read(splits, count=120, seed=3, start=0):
    """Rows of training, each as its bytes."""
    indices, _ = splits.train.order(seed).rows(start, count)
    return [row.tobytes() for row in splits.train.batch(indices)["tokens"]]


def documents_in(splits, rows):
    """How often each document of training is in the rows of an epoch, by its first words."""
    ones = [bytes(np.frombuffer(row, np.int32).astype(np.uint8)) for row in rows]
    return Counter(int(part.split(b":")[0]) for row in ones for part in row.split(b"document ")[1:])


def epoch_of(order, most=4000):
    """The examples of the first epoch."""
    indices, epochs = order.rows(0, most)
    return indices[epochs == 0]


def test_an_epoch_has_every_document_once_and_none_that_is_held_out(folder, tmp_path):
    splits = stream(tmp_path, files=(f"{folder}/ada/words/w-*.jsonl",)).build()
    order = splits.train.order(0)
    first = epoch_of(order)
    rows = [row.tobytes() for row in splits.train.batch(first)["tokens"]]
    counts = documents_in(splits, rows)
    assert set(counts.values()) == {1}
    assert sorted(counts) == list(range(4, 100)), "the first four are held out"
    second, epochs = order.rows(len(first), len(first))
    assert set(epochs) == {1}
    assert sorted(second) == sorted(first)
    assert second.tolist() != first.tolist()


def test_rows_are_those_of_documents_of_each_shard(folder, tmp_path):
    splits = stream(tmp_path, files=(f"{folder}/ada/words/w-*.jsonl",)).build()
    words = f"{folder}/ada/words"
    alone = Documents(paths=(f"{words}/w-3.jsonl",), test_paths=(f"{words}/w-0.jsonl",), length=48,
                      shards=str(tmp_path / "other")).build()  # fmt: skip
    rows = np.arange(len(alone.train))
    ours = splits.train.batch(index_of(3, rows))
    for name, values in alone.train.batch(rows).items():
        np.testing.assert_array_equal(ours[name], values)


@pytest.mark.parametrize("packing", [True, False])
def test_a_position_is_found_whatever_was_read_before(folder, tmp_path, packing):
    settings = {"files": (f"{folder}/ada/words/w-*.jsonl",), "packing": packing}
    whole = read(stream(tmp_path, **settings).build(), 300)
    for keep in ("other", "."):  # On another machine all before has to be counted; here it is known.
        assert read(stream(tmp_path / keep, **settings).build(), 50, start=250) == whole[250:]
    (tmp_path / "rows").rename(tmp_path / "lost")
    assert read(stream(tmp_path, **settings).build(), 50, start=250) == whole[250:]
    assert read(stream(tmp_path, **settings).build(), 50, seed=4) != whole[:50]


@pytest.mark.parametrize("form", ["tar", *(f"mds-{compression}" for compression in (None, *PACK))])
def test_the_same_documents_give_the_same_rows_in_every_format(folder, tmp_path, form, capfd):
    lines = read(stream(tmp_path, files=(f"{folder}/ada/words/w-*.jsonl",)).build())
    files = f"{folder}/w-{{0..4}}.tar" if form == "tar" else f"{folder}/{form}"
    assert read(stream(tmp_path, files=(files,)).build()) == lines
    if form == "tar":
        assert "w-0.tar: not read are members that are not text: 1 (000.jpg)" in capfd.readouterr().err


def test_rows_of_web_servers_and_the_hub_are_those_of_the_disk(folder, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    lines = read(stream(tmp_path, files=(f"{folder}/ada/words/w-*.jsonl",)).build())
    with mirror(folder) as (address, asked):
        served = stream(tmp_path / "web", files=(f"{address}/ada/words/w-{{0..4}}.jsonl",))
        assert read(served.build()) == lines
        assert read(stream(tmp_path / "web", files=(f"{address}/mds-zstd/",)).build()) == lines
        assert not list((tmp_path / "web" / "copies").glob("*jsonl")), "only the tokens are kept"
        asked.clear()
        assert read(served.build()) == lines
        copied = [request for request in asked if re.fullmatch(r"GET /ada/words/w-\d.jsonl", request)]
        assert not copied, "no shard is copied twice"


def test_a_commit_of_the_hub_is_kept(folder, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    import huggingface_hub.constants as constants

    with mirror(folder) as (address, _):
        for module, name in ((constants, "ENDPOINT"), (datasets.config, "HF_ENDPOINT")):
            monkeypatch.setattr(module, name, address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        splits = stream(tmp_path, hub="ada/words").build()
        assert splits.train.content() == stream(tmp_path, hub="ada/words", revision=COMMIT).build().train.content()
        lines = read(stream(tmp_path, files=(f"{folder}/ada/words/w-*.jsonl",)).build())
        assert read(splits) == lines
        with pytest.raises(ConfigError, match="the hub does not tell of it"):
            stream(tmp_path, hub="ada/nothing").build()


def test_copies_are_removed_when_there_are_too_many(tmp_path):
    pytest.importorskip("aiohttp")
    served, kept = tmp_path / "served", tmp_path / "kept"
    served.mkdir()
    for n in range(6):
        (served / f"{n}.bin").write_bytes(bytes(1000))
    with mirror(served) as (address, _):
        from jaxdl.data import remote

        files = remote.expand(f"{address}/{{0..5}}.bin")
        fetched = Fetched(str(kept), 3000)
        for file in files:
            assert fetched.path(file).read_bytes() == bytes(1000)
            assert sum(path.stat().st_size for path in kept.glob("*.bin")) <= 3000
        assert [fetched.path(file).exists() for file in files[-2:]] == [True, True]


def test_a_run_on_a_stream_goes_on_to_the_row(folder, tmp_path):
    experiment = tiny_experiment(
        data=stream(tmp_path / "keep", files=(f"{folder}/mds-None",)),
        model=Transformer(num_layers=1, embed_dim=16, num_heads=2),
        task=LanguageModelling(), optimizer=AdamW(learning_rate=1e-3), schedule=Cosine(warmup_steps=1),
        evaluation=EvaluationConfig(), batch_size=16, epochs=None, steps=9, mesh=MeshConfig(fsdp=8),
    )  # fmt: skip
    train(experiment, workdir=tmp_path / "whole")
    train(experiment, workdir=tmp_path / "parts", max_steps=4)
    train(experiment, workdir=tmp_path / "parts")
    whole, parts = (
        {row["step"]: row["train/loss"] for row in measured(tmp_path / name) if "train/loss" in row}
        for name in ("whole", "parts")
    )
    assert len(whole) >= 5
    assert {step: parts[step] for step in whole if step in parts} == {
        step: whole[step] for step in parts if step in whole
    }
    assert max(whole) in parts
    evaluated = [row["step"] for row in measured(tmp_path / "whole") if "eval/loss" in row or "test/loss" in row]
    assert len(evaluated) >= 5, "a stream is evaluated a tenth of the run apart"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None, "epochs": 2.0}, "data text_stream: it is read while the run trains"),
        ({"schedule": Cosine(warmup_epochs=1)}, r"schedule\.warmup_epochs=1\.0: data text_stream"),
        ({"evaluation": EvaluationConfig(every_epochs=1)}, r"evaluation\.every_epochs=1\.0: data text_stream"),
    ],
)
def test_lengths_in_epochs_are_refused(folder, tmp_path, changes, message):
    data = stream(tmp_path, files=(f"{folder}/mds-None",))
    settings = {"data": data, "task": LanguageModelling(), "model": Transformer(), "epochs": None, "steps": 5}
    experiment = tiny_experiment(**settings | changes)
    splits = data.build()
    with pytest.raises(ConfigError, match=message):
        timeline_of(experiment, len(splits.train), splits.train.spec)


def broken_index(folder, change):
    index = json.loads((folder / "mds-None" / "index.json").read_text())
    change(index)
    return json.dumps(index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=1), "version 1 of the format"),
        (lambda index: index["shards"][0].update(format="json"), "its shards are 'json'"),
        (lambda index: index["shards"][0].pop("column_names"), "not the index of MDS shards .KeyError: .column_names"),
        (lambda index: index["shards"][1]["column_names"].__setitem__(1, "body"), "has the columns n, body, more"),
        (lambda index: index["shards"][1]["column_encodings"].__setitem__(1, "pkl"), "encoded as 'pkl'"),
        (lambda index: index["shards"][0].update(samples=19), "damaged, it is not as its index says"),
        (lambda index: index["shards"].clear(), "no shard with samples"),
        (lambda index: index["shards"][0]["raw_data"].update(basename="gone.mds"), "gone.mds"),
    ],
)
def test_damaged_shards_of_mds_are_told(folder, tmp_path, change, message):
    (tmp_path / "mds").mkdir()
    for file in (folder / "mds-None").glob("*.mds"):
        (tmp_path / "mds" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "mds" / "index.json").write_text(broken_index(folder, change))
    with pytest.raises(ConfigError, match=message):
        stream(tmp_path, files=(str(tmp_path / "mds"),)).build()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tar", b"no tar file", "not a whole tar file"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "line 2 is not JSON"),
        ("a.jsonl", b'{"txt": "x"}\n', "it has no 'text', but txt"),
        ("a.jsonl", b"", "there is no text in it"),
        ("a.txt", b"\xff\xfe\x00", "UTF-16"),
        ("a.jsonl.gz", b"no gzip", "it cannot be read"),
        ("a.parquet", b"no parquet", "cannot be read as Parquet"),
        ("a.txt", b"one document", "it has one document, so none can be held out"),
    ],
)
def test_bad_files_are_told(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        stream(tmp_path, files=(str(tmp_path / name),)).build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hub": "a/b", "files": ("x",)}, "hub = 'a/b' and files: give one of them"),
        ({"files": ("x",), "test_split": "val"}, "test_split = 'val': it has no effect on files"),
        ({"hub": "a/b", "test_split": "val", "num_test": 5}, "num_test = 5: it has no effect"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TextStream(**settings)
    with pytest.raises(ValueError, match=r"photos\.cache has no effect"):
        ImageStream(photos=Photos(cache=Cache(memory_bytes=1 << 20)))


class Counts:
    """Shards of so many examples."""

    def __init__(self, counts):
        self.counts, self.num_shards, self.asked = counts, len(counts), []

    def count(self, shard):
        return self.counts[shard]

    def soon(self, shards):
        self.asked.append(list(shards))


def test_the_order_of_shards_against_a_list_of_all():
    counts = [5, 0, 7, 1, 3]
    order, again = (ShardOrder(Counts(counts), 9, 2) for _ in range(2))
    whole, epochs = order.rows(0, 48)
    shards, rows = place_of(whole)
    for epoch in range(3):
        some = epochs == epoch
        assert sorted(zip(shards[some].tolist(), rows[some].tolist(), strict=True)) == [
            (shard, row) for shard, count in enumerate(counts) for row in range(count)
        ]
    for start in (0, 15, 16, 17, 40):
        np.testing.assert_array_equal(again.rows(start, 8)[0], whole[start : start + 8])
    with pytest.raises(ConfigError, match="no example in any"):
        ShardOrder(Counts([0, 0]), 0, 1).rows(0, 1)
