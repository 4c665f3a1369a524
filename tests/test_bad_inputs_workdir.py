"""Paths that cannot be a workdir."""

import re

import pytest
from mistakes import refusal
from runs import tiny_experiment, write_config

import jaxdl
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.workdir.workdir import check_workdir


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config"), tiny_experiment(mesh=MeshConfig(replica=2, fsdp=4)))


EMPTY = "workdir '': empty. Give the folder of the run, or leave it out."


@pytest.mark.parametrize("name", ["", " "])
def test_no_name(capsys, config, name):
    assert refusal(capsys, "--config", config, "--workdir", name) == f"error: --{EMPTY}"
    with pytest.raises(jaxdl.ConfigError, match=re.escape(EMPTY)):
        jaxdl.train(tiny_experiment(), name)


def test_a_file_and_what_is_below_one(capsys, config, tmp_path):
    (tmp_path / "file").write_text("kept")
    for name in ("file", "file/run", "file/run/again"):
        message = refusal(capsys, "--config", config, "--workdir", tmp_path / name)
        reason = f"{tmp_path / 'file'} is a file, not a folder. Choose another --workdir."
        assert message == f"error: --workdir {tmp_path / name}: {reason}"
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_that_cannot_be_written(capsys, config, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(jaxdl.parallel.lease.lease.Path, "mkdir", refuse)
    message = refusal(capsys, "--config", config, "--workdir", tmp_path / "run")
    assert message == (f"error: --workdir {tmp_path / 'run'}: Permission denied. Choose a writable folder.")


def test_names_that_no_file_can_have(capsys, config, tmp_path):
    message = refusal(capsys, "--config", config, "--workdir", tmp_path / ("a" * 300))
    assert message.endswith("File name too long. Choose a writable folder.")
    for name in ("runs/a\0b", "runs/\ud800"):
        with pytest.raises(jaxdl.ConfigError, match="Choose another workdir"):
            jaxdl.train(tiny_experiment(), name)


def test_names_that_are_fine(tmp_path):
    assert check_workdir(None) is None
    assert check_workdir(".") is not None
    assert check_workdir(tmp_path / "new" / "run") == tmp_path / "new" / "run"
