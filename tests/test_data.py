"""The data sets that need no preparation: digits, text, synthetic. (TFDS: test_tfds.py.)"""

import json
import os

import numpy as np
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.data import Digits, ImageSpec, SyntheticImages, SyntheticText, TextFiles, TextSpec, standard_library_files
from jaxdl.data.digits import read_digits, stratified_split
from jaxdl.data.source import channel_statistics
from jaxdl.data.text.token_windows import find_files

CONFIGS = [
    Digits(),
    SyntheticImages(height=5, width=7, num_train=40, num_test=12),
    SyntheticText(length=9, num_train=40, num_test=12),
    TextFiles(paths=(os.path.dirname(json.__file__),), length=16, max_bytes=20_000),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_batches_have_the_shapes_of_the_specification(config):
    splits = config.build()
    assert splits.train.spec == splits.test.spec
    spec = splits.train.spec
    for source in (splits.train, splits.test):
        batch = source.batch(np.array([3, 0, 3]))
        if isinstance(spec, ImageSpec):
            assert set(batch) == {"image", "label"}
            assert batch["image"].shape == (3, spec.height, spec.width, spec.channels)
            assert batch["image"].dtype == np.uint8
            assert (batch["label"].shape, batch["label"].dtype) == ((3,), np.int32)
            assert len(spec.mean) == len(spec.std) == spec.channels
        else:
            assert set(batch) == {"tokens"}
            assert batch["tokens"].shape == (3, spec.length + 1)
            assert batch["tokens"].dtype == np.int32
            assert batch["tokens"].max() < spec.vocab_size
        for values in batch.values():
            np.testing.assert_array_equal(values[0], values[2])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_batch_belongs_to_the_caller(config):
    source = config.build().train
    before = source.batch(np.arange(3))
    for values in source.batch(np.arange(3)).values():
        values += 1
    for name, values in source.batch(np.arange(3)).items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_rows_depend_on_the_index_alone(config):
    first, second = config.build().train, config.build().train
    for name, values in first.batch(np.array([7, 2, 5])).items():
        np.testing.assert_array_equal(values[1], second.batch(np.array([2]))[name][0])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_evaluation_rows_past_the_end_are_padding(config):
    test = config.build().test
    last = len(test) - 1
    batch = test.eval_batch(np.array([0, last + 1, last, last + 50]))
    known = test.batch(np.array([0, last]))
    for name, values in known.items():
        assert batch[name].dtype == values.dtype
        np.testing.assert_array_equal(batch[name][[0, 2]], values)
        assert not batch[name][[1, 3]].any()
    assert batch["mask"].dtype == bool
    assert batch["mask"][0].all()
    assert batch["mask"][2].any()
    assert not batch["mask"][[1, 3]].any()
    alone = test.eval_batch(np.array([last + 1, last + 2]))
    assert {name: values.shape[1:] for name, values in alone.items()} == {
        name: values.shape[1:] for name, values in batch.items()
    }
    assert not any(values.any() for values in alone.values())


# Images


def test_digits_are_split_by_class_without_overlap():
    from sklearn.datasets import load_digits

    data, labels = load_digits(return_X_y=True)
    for ours, theirs in zip(read_digits(), (data, labels), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    train, test = stratified_split(labels, 0.2, seed=0)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(1797))
    for label in range(10):
        share = (labels[test] == label).sum() / (labels == label).sum()
        assert abs(share - 0.2) < 0.004
    assert not np.array_equal(test, stratified_split(labels, 0.2, seed=1)[1])
    splits = Digits().build()
    assert (len(splits.train), len(splits.test)) == (len(train), len(test))
    image = splits.test.batch(np.array([4]))["image"][0, :, :, 0]
    np.testing.assert_array_equal(image, np.round(load_digits().images[test[4]] / 16 * 255))


def test_a_class_is_on_both_sides_of_a_split():
    train, test = stratified_split(np.array([0, 0, 1, 1]), 0.01, seed=0)
    assert len(train) == len(test) == 2


def test_statistics_are_those_of_the_training_images():
    splits = Digits().build()
    images = splits.train.batch(np.arange(len(splits.train)))["image"]
    np.testing.assert_allclose(splits.train.spec.mean, images.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(splits.train.spec.std, images.std(axis=(0, 1, 2)), rtol=1e-9)


def test_statistics_of_a_constant_channel_have_a_floor():
    images = np.stack([np.full((600, 2, 2), 7), np.arange(2400).reshape(600, 2, 2) % 256], axis=-1).astype(np.uint8)
    mean, std = channel_statistics(lambda rows: images[rows], 600)
    assert (mean[0], std[0]) == (7.0, 1.0)
    np.testing.assert_allclose(std[1], images[..., 1].std(), rtol=1e-9)
    few, _ = channel_statistics(lambda rows: images[rows], 600, max_examples=3)
    np.testing.assert_allclose(few, images[[0, 299, 599]].mean(axis=(0, 1, 2)))


def test_synthetic_images_can_be_learned_and_are_not_repeated():
    splits = SyntheticImages(height=8, width=8, num_train=400, num_test=200, num_classes=5).build()
    train, test = (source.batch(np.arange(len(source))) for source in (splits.train, splits.test))
    centres = np.stack([train["image"][train["label"] == label].mean(axis=0) for label in range(5)])
    distances = ((test["image"][:, None] - centres) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == test["label"]).mean() > 0.95
    assert np.bincount(train["label"], minlength=5).min() > 50
    rows = {image.tobytes() for image in np.concatenate([train["image"], test["image"]])}
    assert len(rows) == 600


def test_synthetic_text_has_the_entropy_that_it_promises():
    tokens = SyntheticText(vocab_size=6, length=2000, num_train=30).build().train.batch(np.arange(30))["tokens"]
    counts = np.zeros((6, 6))
    np.add.at(counts, (tokens[:, :-1].ravel(), tokens[:, 1:].ravel()), 1)
    chances = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(chances * np.log2(np.where(chances > 0, chances, 1))).sum(axis=1)
    np.testing.assert_allclose(entropy, 1.75, atol=0.03)
    np.testing.assert_allclose(np.sort(chances, axis=1)[:, 2:], [[0.125, 0.125, 0.25, 0.5]] * 6, atol=0.03)


# Text


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def covered_targets(source):
    """The targets in evaluation order, and the input before each."""
    batch = source.eval_batch(np.arange(len(source) + 3))
    return batch["tokens"][:, 1:][batch["mask"]], batch["tokens"][:, :-1][batch["mask"]]


@pytest.mark.parametrize("size", [40, 41, 42, 48, 49, 57])
def test_windows_cover_every_target_once(tmp_path, size):
    text = bytes(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) & 127)
    write(tmp_path, {"a.txt": text})
    splits = TextFiles(paths=(str(tmp_path / "a.txt"),), length=8, test_fraction=0.5).build()
    cut = round(size * 0.5)
    train, held_out = text[:cut], text[cut:]
    targets, inputs = covered_targets(splits.test)
    assert bytes(targets.astype(np.uint8)) == held_out[1:]
    assert bytes(inputs.astype(np.uint8)) == held_out[:-1]
    assert len(splits.train) == (len(train) - 1) // 8
    windows = splits.train.batch(np.arange(len(splits.train)))["tokens"]
    for i, window in enumerate(windows):
        assert bytes(window.astype(np.uint8)) == train[i * 8 : i * 8 + 9]


def test_whole_files_are_held_out_and_the_choice_moves_no_other_file(tmp_path):
    files = {f"part{i % 7}/{i}.py": f"<{i}>".encode() * 20 for i in range(60)}
    write(tmp_path, files | {"other.txt": b"not Python"})
    config = TextFiles(paths=(str(tmp_path),), length=4, test_fraction=0.2)

    def held_out():
        splits = config.build()
        targets, inputs = covered_targets(splits.test)
        test = bytes([int(inputs[0])]) + bytes(targets.astype(np.uint8))
        train = bytes(splits.train.batch(np.arange(len(splits.train)))["tokens"][:, :-1].astype(np.uint8).ravel())
        return set(test.split(b"\0")), set(train.split(b"\0")[:-1])

    test, train = held_out()
    assert test <= set(files.values())
    assert train <= set(files.values())
    assert not test & train
    assert 5 <= len(test) <= 20
    assert len(test | train) >= 59
    write(tmp_path, {"new.py": b"<new>" * 20})
    assert held_out()[0] - {b"<new>" * 20} == test
    elsewhere = write(tmp_path / "moved", files)
    config = TextFiles(paths=(str(elsewhere),), length=4, test_fraction=0.2)
    assert held_out()[0] == test


def test_a_file_named_twice_is_read_once(tmp_path):
    write(tmp_path, {"a/x.py": b"first", "a/b/y.py": b"second"})
    names = [file.name for file in find_files((str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/x.py")))]
    assert names == ["a/b/y.py", "a/x.py"]


def test_max_bytes_is_kept_and_takes_from_all_the_files(tmp_path):
    write(tmp_path, {f"{i:03}.py": b"%03d" % i * 100 for i in range(100)})
    splits = TextFiles(paths=(str(tmp_path),), length=10, max_bytes=3100, test_fraction=0.3).build()
    test = covered_targets(splits.test)[0]
    train = splits.train.batch(np.arange(len(splits.train)))["tokens"][:, 1:].ravel()
    assert 3100 - 20 < len(test) + len(train) <= 3100 + 11
    numbers = {int(part[:3]) for part in bytes(train.astype(np.uint8)).split(b"\0")[1:] if len(part) >= 3}
    assert max(numbers) - min(numbers) > 30


def test_a_cut_leaves_characters_whole(tmp_path):
    write(tmp_path, {"a.txt": "ü€".encode() * 50})
    splits = TextFiles(paths=(str(tmp_path / "a.txt"),), length=8, test_fraction=0.5).build()
    first = splits.test.batch(np.array([0]))["tokens"][0]
    assert int(first[0]) & 0xC0 != 0x80


def make_tokenizer(path, special=()):
    import tokenizers

    words = [*special, "?", "a", "bb", "ccc", "\n"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize(("special", "separator"), [(("<|endoftext|>",), 0), ((), 4)])
def test_a_tokenizer_counts_bytes_per_token(tmp_path, special, separator):
    write(tmp_path, {f"{i}.py": b"a bb ccc a" for i in range(10)})
    tokenizer = make_tokenizer(tmp_path / "words.json", special)
    config = TextFiles(paths=(str(tmp_path),), tokenizer=tokenizer, length=3, test_fraction=0.5)
    splits = config.build()
    first = len(special)
    document = [first + 1, first + 2, first + 3, first + 1]
    targets, inputs = covered_targets(splits.test)
    stream = [int(inputs[0]), *targets.tolist()]
    num_files = (len(stream) + 1) // 5
    assert stream == ([*document, separator] * num_files)[:-1]
    assert isinstance(splits.test.spec, TextSpec)
    assert splits.test.spec.vocab_size == first + 5
    assert splits.test.spec.bytes_per_token == (num_files * 11 - 1) / len(stream)


def test_bytes_need_not_be_text_but_tokens_do(tmp_path):
    write(tmp_path, {f"{i}.py": b"a bb \xff" * 10 for i in range(3)})
    config = TextFiles(paths=(str(tmp_path),), length=4)
    assert 255 in config.build().train.batch(np.arange(4))["tokens"]
    with pytest.raises(ConfigError, match=r"not UTF-8.*train on bytes"):
        config.replaced({"tokenizer": make_tokenizer(tmp_path / "words.json")}).build()


@pytest.mark.slow
def test_the_standard_library():
    files = standard_library_files()
    assert any(file.endswith("argparse.py") for file in files)
    assert not any(part in file for file in files for part in ("/site-packages/", "/test/", "/idlelib/"))
    assert [file.name for file in find_files(("python:stdlib",))] == sorted(
        {f.name for f in find_files(("python:stdlib",))}
    )
    splits = TextFiles(length=64, max_bytes=200_000).build()
    text = bytes(splits.train.batch(np.arange(len(splits.train)))["tokens"][:, 1:].astype(np.uint8).ravel())
    assert text.count(b"import ") > 20
    assert splits.train.spec.bytes_per_token == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": ()}, "paths is empty"),
        ({"paths": ("nowhere",)}, "nowhere: no such file or folder"),
        ({"glob": "**/*.cobol"}, "no file in it matches"),
        ({"paths": ("python:stdlib",), "glob": "**/*.txt"}, "has no effect"),
        ({"length": 100_000}, "less than one window"),
        ({"tokenizer": "nowhere.json"}, "no such file"),
        ({"glob": "empty.py"}, "empty"),
        ({"glob": "/abs/*.py"}, "glob = '/abs/\\*.py': .* Give a pattern inside"),
        ({"split_seed": 2**32}, "split_seed: .* less than 4294967296"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, changes, message):
    write(tmp_path, {"a.py": b"x" * 100, "b.py": b"y" * 100, "empty.py": b""})
    with pytest.raises(ConfigError, match=message):
        TextFiles(paths=(str(tmp_path),)).replaced(changes).build()


def test_a_broken_tokenizer_is_told(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a JSON file of the tokenizers library"):
        TextFiles(tokenizer=str(tmp_path / "bad.json"), max_bytes=5000).build()
