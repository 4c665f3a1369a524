"""`python -m jaxdl.convert from-timm` and `to-timm`: small networks, and the logits that timm and torchvision had."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from mistakes import refusal
from safetensors.numpy import load_file, save_file
from timm_cases import CASES, MEAN, STD, images, recorded, weights

import jaxdl
from jaxdl.inference.convert.__main__ import main
from jaxdl.inference.convert.from_timm import Asked, Network

LEVELS = [*("--mean", *map(str, MEAN)), *("--std", *map(str, STD))]
NAMES = ["cat", "dog", "owl", "a hen", "bee"]


def write_network(path, name, change=lambda tensors: tensors):
    """Writes a case as the program that it is from does; returns the file."""
    path.parent.mkdir(exist_ok=True)
    save_file(change(weights(recorded()[name]["shapes"])), path, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_other_program(name, tmp_path):
    """Without a workdir: to compile what saves and restores the many arrays of a ResNet takes longer."""
    size = CASES[name][2]
    found = Network(write_network(tmp_path / "x.safetensors", name), Asked(size, MEAN, STD))
    network = found.model.network((), num_classes=5, channels=3, dtype=jnp.float32)
    kinds = [flatten_dict(shapes, sep="/") for shapes in (network.param_shapes, network.state_shapes)]
    arrays = found.arrays({**kinds[0], **kinds[1]})
    params, stats = (unflatten_dict({path: arrays[path] for path in kind}, sep="/") for kind in kinds)
    (inputs,) = found.spec.inputs({"image": images(size)})
    logits = jax.jit(lambda params, stats, x: network.apply(params, stats, x, train=False)[0])(params, stats, inputs)
    np.testing.assert_allclose(logits, recorded()[name]["logits"], atol=1e-4)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The run that the folder of a ViT became, with timm's config.json."""
    folder = tmp_path_factory.mktemp("timm")
    write_network(folder / "vit" / "model.safetensors", "vit_token")
    images = {"mean": MEAN, "std": STD, "input_size": [3, 32, 32], "crop_pct": 0.75}
    (folder / "vit" / "config.json").write_text(json.dumps({"pretrained_cfg": images, "label_names": NAMES}))
    main(["from-timm", str(folder / "vit"), str(folder / "run")])
    return folder / "run"


def test_the_workdir_is_one_of_a_run(workdir):
    predictor = jaxdl.restore(workdir)
    np.testing.assert_allclose(predictor.logits(images(32)), recorded()["vit_token"]["logits"], atol=1e-4)
    assert predictor.experiment.data.photos.eval_fraction == 0.75
    best = np.argmax(recorded()["vit_token"]["logits"][0])
    # A photograph of which the evaluation's crop, three quarters, is nearly the image.
    photograph = np.pad(images(32)[0], ((5, 6), (5, 6), (0, 0)), mode="edge")
    assert predictor.predict(photograph).name == NAMES[best]
    with pytest.raises(jaxdl.ConfigError, match="its training data are not here"):
        predictor.evaluate()


def test_the_tensors_come_back(workdir, tmp_path, capsys):
    main(["to-timm", str(workdir), str(tmp_path / "back")])
    assert "vit_tiny_patch16_224" in capsys.readouterr().out
    before, after = (load_file(folder / "model.safetensors") for folder in (workdir.parent / "vit", tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    wanted = {
        "img_size": 32,
        "patch_size": 8,
        "depth": 2,
        "class_token": True,
        "global_pool": "token",
        "fc_norm": False,
    }
    assert (config["model_args"], config["label_names"]) == (wanted, NAMES)
    np.testing.assert_allclose(config["pretrained_cfg"]["mean"], MEAN, rtol=1e-6)


WRONG = [
    (lambda x: {k: v for k, v in x.items() if k != "blocks.1.attn.proj.bias"}, "missing: blocks.1.attn.proj.bias"),
    (lambda x: x | {"norm_pre.weight": x["norm.weight"]}, "unexpected: norm_pre.weight"),
    (lambda x: x | {"head.bias": x["head.bias"][:4]}, "of another shape: head.bias is [4], not [5]"),
    (lambda x: {"stem.0.weight": x["head.weight"]}, "of none of the networks that are converted: ResNet, ViT of timm"),
    (lambda x: x | {"patch_embed.proj.weight": np.zeros((200, 3, 8, 8), np.float32)}, "tokens of 200 numbers"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_other_networks_are_refused(number, tmp_path, capsys):
    change, reason = WRONG[number]
    file = write_network(tmp_path / "x.safetensors", "vit_token", change)
    assert reason in refusal(capsys, "from-timm", file, tmp_path / "run", run=main)
    assert not (tmp_path / "run").exists()
