"""TensorFlow Datasets without TensorFlow: on tiny data sets written here, and on the ones of TFDS_DATA_DIR."""

import io
import json
import os
import sys

import numpy as np
import pytest
from PIL import Image

from jaxdl.core.config import ConfigError
from jaxdl.data import TFDS, TextSpec

needs_data = pytest.mark.skipif(
    "TFDS_DATA_DIR" not in os.environ,
    reason="set TFDS_DATA_DIR to a folder in which tfds has prepared fashion_mnist and imagenet2012 as array_record",
)

MODULE = "tensorflow_datasets.core.features"
LABEL = {"pythonClassName": f"{MODULE}.class_label_feature.ClassLabel", "classLabel": {"numClasses": "3"}}
TEXT = {"pythonClassName": f"{MODULE}.text_feature.Text", "text": {}}


def image_feature(*dimensions):
    shape = {"dimensions": [str(size) for size in dimensions]}
    return {"pythonClassName": f"{MODULE}.image_feature.Image", "image": {"dtype": "uint8", "shape": shape}}


def encode(image, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(image.squeeze()).save(file, kind)
    return file.getvalue()


def write_dataset(folder, features, splits, file_format="array_record"):
    """A data set called "tiny" as `tfds build` would leave it; each example is a dict of bytes or int."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorflow_datasets.proto import tf_example_pb2

    root = folder / "tiny" / "1.0.0"
    root.mkdir(parents=True)
    tree = {"pythonClassName": f"{MODULE}.features_dict.FeaturesDict", "featuresDict": {"features": features}}
    (root / "features.json").write_text(json.dumps(tree))
    info = {"name": "tiny", "version": "1.0.0", "fileFormat": file_format, "moduleName": "tiny", "splits": []}
    for split, examples in splits.items():
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        info["splits"].append(
            {"name": split, "shardLengths": [str(len(examples))], "numBytes": "1", "filepathTemplate": template}
        )
        writer = ArrayRecordWriter(str(root / f"tiny-{split}.array_record-00000-of-00001"), "group_size:1")
        for example in examples:
            record = tf_example_pb2.Example()
            for key, value in example.items():
                target = record.features.feature[key]
                (target.bytes_list if isinstance(value, bytes) else target.int64_list).value.append(value)
            writer.write(record.SerializeToString())
        writer.close()
    (root / "dataset_info.json").write_text(json.dumps(info))
    return str(folder)


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (12, 5, 6, 3), dtype=np.uint8)


def write_images(folder, images, **changes):
    examples = [{"image": encode(image), "label": i % 3} for i, image in enumerate(images)]
    for index, example in changes.items():
        examples[int(index[1:])] |= example
    features = {"image": image_feature(*images.shape[1:]), "label": LABEL}
    return write_dataset(folder, features, {"train": examples[:8], "validation": examples[8:]})


@pytest.mark.parametrize("memory_limit_bytes", [0, 10**6])
def test_images_come_back_as_they_were(tmp_path, images, memory_limit_bytes):
    data_dir = write_images(tmp_path, images)
    splits = TFDS(name="tiny", data_dir=data_dir, memory_limit_bytes=memory_limit_bytes).build()
    assert (len(splits.train), len(splits.test)) == (8, 4)
    batch = splits.train.batch(np.array([5, 0]))
    np.testing.assert_array_equal(batch["image"], images[[5, 0]])
    np.testing.assert_array_equal(batch["label"], [2, 0])
    np.testing.assert_array_equal(splits.test.batch(np.arange(4))["image"], images[8:])
    spec = splits.train.spec
    assert (spec.height, spec.width, spec.channels, spec.num_classes) == (5, 6, 3, 3)
    np.testing.assert_allclose(spec.mean, images[:8].mean(axis=(0, 1, 2)), rtol=1e-12)
    assert "tensorflow" not in sys.modules


def test_the_folder_may_come_from_the_environment(tmp_path, images, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", write_images(tmp_path, images))
    splits = TFDS(name="tiny", train_split="train[:50%]", test_split="train[50%:]").build()
    np.testing.assert_array_equal(splits.test.batch(np.arange(4))["image"], images[4:8])


@pytest.mark.parametrize("memory_limit_bytes", [0, 10**6])
def test_images_are_resized_by_the_shorter_side_and_cropped_in_the_centre(tmp_path, memory_limit_bytes):
    # Left half black, right half white, 40 high and 80 wide: the centre crop keeps the edge in the middle.
    wide = np.zeros((40, 80, 3), np.uint8)
    wide[:, 40:] = 255
    tall = wide.transpose(1, 0, 2)
    smooth = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None, None] * 4, (64, 64, 3))
    examples = [{"image": encode(image), "label": 0} for image in (wide, tall, smooth)]
    data_dir = write_dataset(
        tmp_path, {"image": image_feature(-1, -1, 3), "label": LABEL}, {"train": examples, "test": examples}
    )
    config = TFDS(name="tiny", data_dir=data_dir, image_size=20, memory_limit_bytes=memory_limit_bytes)
    first, second, third = config.build().train.batch(np.arange(3))["image"].astype(int)
    assert first.shape == (20, 20, 3)
    assert (first[:, :9] == 0).all()
    assert (first[:, 11:] == 255).all()
    np.testing.assert_array_equal(second, first.transpose(1, 0, 2))
    assert np.abs(third[1:-1, 0, 0] - ((np.arange(20) + 0.5) * 3.2 - 0.5)[1:-1] * 4).max() <= 1
    with pytest.raises(ConfigError, match=r"vary in size\. Set image_size"):
        config.replaced({"image_size": None}).build()


@pytest.mark.parametrize("problem", [{"image": b"\x89PNG\r\n\x1a\nbroken"}, {"label": -1}])
def test_a_broken_example_is_named(tmp_path, images, problem):
    data_dir = write_images(tmp_path, images, _6=problem)
    with pytest.raises(ConfigError, match=r"tiny, split 'train', example 6: .*(cannot be decoded|label is -1)"):
        TFDS(name="tiny", data_dir=data_dir).build()


def test_a_truncated_photograph_is_named(tmp_path):
    photograph = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    whole = {"image": encode(photograph, "JPEG"), "label": 0}
    examples = [whole, whole | {"image": whole["image"][:9000]}]
    features = {"image": image_feature(-1, -1, 3), "label": LABEL}
    data_dir = write_dataset(tmp_path, features, {"train": [whole], "test": examples})
    test = TFDS(name="tiny", data_dir=data_dir, image_size=150, memory_limit_bytes=0).build().test
    assert test.batch(np.array([0]))["image"].shape == (1, 150, 150, 3)
    with pytest.raises(ConfigError, match="split 'test', example 1: its image cannot be decoded"):
        test.batch(np.array([0, 1]))


def test_text_becomes_a_stream(tmp_path):
    documents = [f"document {i}".encode() for i in range(6)]
    splits = {"train": [{"text": d} for d in documents[:4]], "test": [{"text": d} for d in documents[4:]]}
    data_dir = write_dataset(tmp_path, {"text": TEXT}, splits)
    config = TFDS(name="tiny", data_dir=data_dir, text_key="text", length=8)
    built = config.build()
    assert built.train.spec == TextSpec(vocab_size=256, length=8, bytes_per_token=1.0)
    batch = built.test.eval_batch(np.arange(len(built.test)))
    assert bytes(batch["tokens"][:, 1:][batch["mask"]].astype(np.uint8)) == b"\0".join(documents[4:])[1:]
    assert bytes(built.train.batch(np.array([1]))["tokens"][0].astype(np.uint8)) == b"\0".join(documents)[8:17]
    with pytest.raises(ConfigError, match="more text than memory_limit_bytes = 30"):
        config.replaced({"memory_limit_bytes": 30}).build()
    with pytest.raises(ConfigError, match="needs text_key"):
        TFDS(name="tiny", data_dir=data_dir).build()
    with pytest.raises(ConfigError, match="Set text_key to text"):
        config.replaced({"text_key": "content"}).build()


@pytest.mark.parametrize("name", ["mnist", "no_such_data_set", "cifar10:9.9.9"])
def test_a_data_set_that_is_not_prepared_is_told_how(tmp_path, name):
    with pytest.raises(ConfigError) as caught:
        TFDS(name=name, data_dir=str(tmp_path)).build()
    command = f"pip install tensorflow tensorflow-datasets && tfds build {name} --file_format=array_record"
    assert f"{command} --data_dir={tmp_path}" in str(caught.value)


def test_another_file_format_is_told(tmp_path, images):
    data_dir = write_dataset(tmp_path, {"image": image_feature(5, 6, 3), "label": LABEL}, {"train": []}, "tfrecord")
    with pytest.raises(ConfigError, match="as tfrecord, which cannot be read by index without TensorFlow"):
        TFDS(name="tiny", data_dir=data_dir, test_split="train").build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_split": "nowhere"}, r"The splits are train \(8 examples\), validation"),
        ({"image_key": "picture"}, "Set image_key to image"),
        ({"label_key": "image"}, "Set label_key to label"),
        ({"length": 5}, "no effect on images"),
        ({"text_key": "text", "image_size": 5}, "no effect on text"),
    ],
)
def test_what_the_data_set_has_not_is_told(tmp_path, images, changes, message):
    config = TFDS(name="tiny", data_dir=write_images(tmp_path, images))
    with pytest.raises(ConfigError, match=message):
        config.replaced(changes).build()


def test_a_data_set_without_a_test_split_is_told(tmp_path, images):
    examples = [{"image": encode(image), "label": 0} for image in images]
    features = {"image": image_feature(5, 6, 3), "label": LABEL}
    data_dir = write_dataset(tmp_path, features, {"train": examples})
    with pytest.raises(ConfigError, match="neither a test nor a validation split"):
        TFDS(name="tiny", data_dir=data_dir).build()
    assert len(TFDS(name="tiny", data_dir=data_dir, train_split="train[:9]", test_split="train[9:]").build().test) == 3


@needs_data
def test_fashion_mnist():
    splits = TFDS(name="fashion_mnist", train_split="train[:5000]").build()
    assert (len(splits.train), len(splits.test)) == (5000, 10000)
    labels = splits.test.batch(np.arange(10000))["label"]
    np.testing.assert_array_equal(np.bincount(labels), [1000] * 10)
    assert splits.train.spec.num_classes == 10
    # The published mean and standard deviation of the whole training split are 0.2860 and 0.3530 (of 1).
    np.testing.assert_allclose(splits.train.spec.mean, [0.2860 * 255], rtol=0.02)
    np.testing.assert_allclose(splits.train.spec.std, [0.3530 * 255], rtol=0.02)
    assert "tensorflow" not in sys.modules


@needs_data
def test_photographs_that_vary_in_size():
    config = TFDS(name="imagenet2012", train_split="train[:64]", image_size=48)
    kept = config.build()
    decoded = config.replaced({"memory_limit_bytes": 0}).build()
    indices = np.array([63, 5, 17])
    for name, values in kept.train.batch(indices).items():
        np.testing.assert_array_equal(values, decoded.train.batch(indices)[name])
    assert kept.train.spec == decoded.train.spec
    assert kept.test.spec.num_classes == 1000
    assert len(kept.test) == 96
