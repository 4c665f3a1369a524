"""`python -m jaxdl.convert from-timm` and `to-timm`: small networks, and the logits that timm and torchvision had."""

import json
from contextlib import nullcontext

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
from jaxdl.inference.convert.vit import TimmViT
from jaxdl.models import ViT

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


@pytest.mark.parametrize(
    ("given", "pool"),
    [
        ({}, "token"),
        ({"model_args": {"global_pool": "token"}, "global_pool": "avg"}, "token"),
        ({"model_args": {"global_pool": "avg", "fc_norm": False, "class_token": True}}, "mean"),
        ({"global_pool": "avg"}, "mean"),
        ({"model_args": {"fc_norm": True}}, "fc_norm = True of its config is not that of its tensors"),
        ({"global_pool": "map"}, "global_pool = 'map' of its config is not converted"),
        ({"model_args": {"depth": 3}}, "depth = 3 of its config is not that of its tensors, 2"),
        ({"model_args": {"act_layer": "gelu_tanh"}}, "act_layer = 'gelu_tanh' in model_args"),
        ({"model_args": [1]}, "must be an object"),
        ({"architecture": "vit_base_patch16_siglip_gap_224"}, "no network that jaxdl is known to compute"),
        ({"architecture": "vit_base_patch16_224.augreg_in21k"}, "token"),
        ({"architecture": "resnet50"}, "no network that jaxdl is known to compute"),
    ],
)
def test_what_a_config_says_of_a_vit_counts(tmp_path, given, pool):
    file = write_network(tmp_path / "model.safetensors", "vit_token")
    (tmp_path / "config.json").write_text(json.dumps(given))
    if " " in pool:
        with pytest.raises(jaxdl.ConfigError, match=pool):
            Network(file, Asked())
    else:
        found = Network(file, Asked())
        assert found.model.pool == pool
        assert ("no config.json says which network" in found.remarks[0]) == ("architecture" not in given)


def test_a_vit_that_reads_the_mean_beside_a_class_token_comes_back(tmp_path):
    layout, model = TimmViT(), ViT(size="tiny", patch=8, class_token=True, pool="mean", positions="learned", grid=4)
    _, given = layout.timm(model, 32)
    shapes = recorded()["vit_token"]["shapes"]
    assert layout.model(shapes, {**given, "depth": 2}) == model.replaced({"num_layers": 2})
    assert layout.model(shapes, {}).pool == "token"


@pytest.mark.parametrize("name", ["resnetaa50", "resnetblur50", "resnet50_clip", "seresnet50"])
def test_resnets_with_parts_without_tensors_are_refused(tmp_path, name):
    file = write_network(tmp_path / "model.safetensors", "resnet18")
    for said, refused in ((name, True), ("resnet18", False), ("tv_resnet34.tv_in1k", False)):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": said, "global_pool": "avg"}))
        with pytest.raises(jaxdl.ConfigError, match=f"{said} is no network") if refused else nullcontext():
            Network(file, Asked())


WRONG = [
    (lambda x: {k: v for k, v in x.items() if k != "blocks.1.attn.proj.bias"}, "missing: blocks.1.attn.proj.bias"),
    (lambda x: x | {"norm_pre.weight": x["norm.weight"]}, "unexpected: norm_pre.weight"),
    (lambda x: x | {"head.bias": x["head.bias"][:4]}, "of another shape: head.bias is [4], not [5]"),
    (lambda x: {"stem.0.weight": x["head.weight"]}, "of none of the networks that are converted: ResNet, ViT of timm"),
    (lambda x: x | {"patch_embed.proj.weight": np.zeros((200, 3, 8, 8), np.float32)}, "tokens of 200 numbers"),
    (lambda x: {k: v for k, v in x.items() if k != "pos_embed"}, "its table of positions has 0 rows"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_other_networks_are_refused(number, tmp_path, capsys):
    change, reason = WRONG[number]
    file = write_network(tmp_path / "x.safetensors", "vit_token", change)
    assert reason in refusal(capsys, "from-timm", file, tmp_path / "run", run=main)
    assert not (tmp_path / "run").exists()
