"""`python -m jaxdl.convert from-timm` and `to-timm`: small networks, and the logits that timm and torchvision had."""

import json

import numpy as np
import pytest
from mistakes import refusal
from safetensors.numpy import load_file, save_file
from timm_cases import CASES, MEAN, STD, images, recorded, weights

import jaxdl
from jaxdl.inference.convert.__main__ import main

LEVELS = [*("--mean", *map(str, MEAN)), *("--std", *map(str, STD))]


def write_network(path, name, change=lambda tensors: tensors):
    """Writes a case as the program that it is from does; returns the file."""
    save_file(change(weights(recorded()[name]["shapes"])), path, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A function: the workdir of a case."""
    folder = tmp_path_factory.mktemp("timm")

    def make(name):
        workdir = folder / name
        if not workdir.exists():
            file = write_network(folder / f"{name}.safetensors", name)
            main(["from-timm", str(file), str(workdir), "--size", str(CASES[name][2]), *LEVELS])
        return workdir

    return make


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_other_program(name, converted):
    predictor = jaxdl.restore(converted(name))
    found = predictor.logits(images(CASES[name][2]))
    np.testing.assert_allclose(found, recorded()[name]["logits"], atol=1e-4)
