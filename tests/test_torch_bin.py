"""Files of torch.save are read without PyTorch; what would be executed is refused by its name."""

import base64
import json
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxdl import ConfigError
from jaxdl.inference.convert.tensors import find_tensors
from jaxdl.inference.convert.torch_bin import READERS, tensors_in_bin

RECORDED = json.loads((Path(__file__).parent / "torch_bin.json").read_text())
NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def write(tmp_path):
    """Writes a recorded file; returns its path."""

    def written(name, file="pytorch_model.bin"):
        path = tmp_path / file
        path.write_bytes(base64.b64decode(RECORDED[name]))
        return path

    return written


def test_tensors_are_those_of_torch(write):
    """Also transposed ones, parts of others, 16 bits, parameters, and those of a module's state."""
    found = {name: tensor.read() for name, tensor in tensors_in_bin(write("tensors")).items()}
    wanted = {"plain": NUMBERS, "half": NUMBERS.astype(ml_dtypes.bfloat16), "turned": NUMBERS.T,
              "part": NUMBERS[1:, 2:], "parameter": NUMBERS[0], "empty": NUMBERS[:0]}  # fmt: skip
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)
    assert tensors_in_bin(write("state"))["weight"].read().tolist() == [[0.5, 0.5]]
    np.testing.assert_array_equal(tensors_in_bin(write("inside"))["plain"].read(), NUMBERS)


def test_several_files_and_their_index(write, tmp_path):
    write("tensors", "pytorch_model-00001-of-00002.bin")
    write("state", "pytorch_model-00002-of-00002.bin")
    places = {"plain": "pytorch_model-00001-of-00002.bin", "weight": "pytorch_model-00002-of-00002.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert {"plain", "weight"} <= find_tensors(tmp_path, READERS).keys()
    index.write_text(json.dumps({"weight_map": places | {"gone": "pytorch_model-00002-of-00002.bin"}}))
    with pytest.raises(ConfigError, match="gone is not in"):
        find_tensors(tmp_path, READERS)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("harmful", "it names posix.mkdir, which would be executed by PyTorch. jaxdl reads tensors alone"),
        ("module", "it names torch.nn.modules.linear.Linear"),
        ("number", "epoch is int, not a tensor"),
        ("list", "its content is list, not a dictionary of tensors"),
        ("older", "the form from before PyTorch 1.6, which is not read. Save it again"),
    ],
)
def test_what_is_no_tensor_is_refused(write, tmp_path, monkeypatch, name, problem):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        tensors_in_bin(write(name))
    assert not (tmp_path / "was_executed").exists()


class _Calls:
    """A pickle of it calls a function with arguments."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_form_of_a_pickle_is_executed(write, tmp_path, protocol):
    """In each protocol, functions of modules that are there, and of ones that are not."""
    made = tmp_path / "made"
    for function, args in ((exec, (f"open({str(made)!r}, 'w')",)), (made.mkdir, ()), (getattr, (str, "join"))):
        pickled = pickle.dumps({"x": _Calls(function, *args)}, protocol)
        with pytest.raises(ConfigError, match="it names "):
            tensors_in_bin(_with_pickle(write, pickled))
        assert not made.exists()


def _named(module, name):
    return f"c{module}\n{name}\n".encode()


_TENSOR = (
    b"}(X\x01\0\0\0x" + _named("torch._utils", "_rebuild_tensor_v2") + b"((X\x07\0\0\0storage"
    + _named("torch", "FloatStorage") + b"X\x01\0\0\x000X\x03\0\0\0cpuK\x0ctQK\0K\x03K\x04\x86K\x04K\x01\x86\x89NtR"
)  # fmt: skip
"""A pickle up to where a tensor [3, 4] is the last on its stack."""


@pytest.mark.parametrize(
    ("pickled", "problem"),
    [
        # Strides that read before the numbers, in both forms of a state, after the tensor is made.
        (_TENSOR + b"}X\x07\0\0\0stridesI-90000\nI1\n\x86sbu.", "it changes what describes a tensor"),
        (_TENSOR + b"N}X\x07\0\0\0stridesI-90000\nI1\n\x86s\x86bu.", "it changes what describes a tensor"),
        (_named("torch._utils", "_rebuild_parameter") + b"}X\x01\0\0\0xK\x01sb.", "it changes what describes"),
        (b"}r\xff\xff\xff\x7f.", "it remembers an object under the number 2147483647"),
    ],
)
def test_a_pickle_changes_no_tensor(write, pickled, problem):
    np.testing.assert_array_equal(tensors_in_bin(_with_pickle(write, _TENSOR + b"u."))["x"].read(), NUMBERS)
    with pytest.raises(ConfigError, match=problem):
        tensors_in_bin(_with_pickle(write, pickled))


@pytest.mark.parametrize("member", ["data.pkl", "byteorder"])
def test_members_that_would_be_unpacked_are_refused(write, member):
    path = write("tensors")
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    members.setdefault("archive/byteorder", b"little")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            large = name.endswith(member)
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if large else zipfile.ZIP_STORED)
    with pytest.raises(ConfigError, match=f"{member} is compressed"):
        tensors_in_bin(path)


def _with_pickle(write, pickled):
    """A file with another pickle."""
    path = write("tensors")
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else content)
    return path


def test_damaged_files_are_told(write):
    """Cut off anywhere, and with any byte of the pickle changed: a message or the same tensors, never a crash."""
    path = write("tensors")
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            tensors_in_bin(path)
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    refused = 0
    rng = np.random.default_rng(0)
    for place in range(len(pickled)):
        changed = bytearray(pickled)
        changed[place] ^= int(rng.integers(1, 256))
        try:
            for tensor in tensors_in_bin(_with_pickle(write, bytes(changed))).values():
                np.array(tensor.read())
        except ConfigError:
            refused += 1
    assert refused > len(pickled) / 3
