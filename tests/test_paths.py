"""A path is no pattern: folders and files of any name are taken by the letter."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from runs import assert_bit_equal

from jaxdl.core.config import ConfigError
from jaxdl.core.files import step_dir
from jaxdl.core.paths import expand_home, find_paths
from jaxdl.data import Tabular, remote
from jaxdl.data.staging import Stage
from jaxdl.data.tables.row_groups import find_files
from jaxdl.models import Perceptron
from jaxdl.parallel.compiler import CompilerConfig
from jaxdl.parallel.lease.holder import RECORD_BYTES, Holder
from jaxdl.platform.search.driver import PROGRAMS, Request
from jaxdl.report.status.record import Record, State, utc_now
from jaxdl.report.status.rows import find_workdirs
from jaxdl.training.checkpoint import CheckpointConfig, Checkpoints
from jaxdl.training.checkpoint.complete import check_complete
from jaxdl.training.checkpoint.errors import Incomplete
from jaxdl.training.checkpoint.literal import literal, with_names
from jaxdl.training.experiment import Experiment
from jaxdl.training.state import TrainState
from jaxdl.training.tasks import Classification

ODD = ("x=[256, 256]", "a\\b", "a*b", "a?b", "{0..1}", "~nobody", "#%41", "gs:", "a\nb", "'\"", "\U0001f600",
       os.fsdecode(b"\xff"))  # fmt: skip
"""Names that a pattern, an address, a shell or UTF-8 makes something else of."""


def tiny_state():
    """A train state with an array or two in each item."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("one",))
    state = TrainState(
        step=jnp.int32(3), params={"w": jnp.arange(5.0)}, model_state={}, opt_state={"m": jnp.ones(2)},
        exchange_state={"r": jnp.ones((1, 4))}, agreement_state={}, ema_params=None, loss_scale=None, guard={},
        key=jax.random.key_data(jax.random.key(0)), tables={},
    )  # fmt: skip
    return jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def saved(workdir, state):
    """A checkpoint of step 3, and the notes on it."""
    checkpoints = Checkpoints(workdir, CheckpointConfig(), best_metric="loss", best_mode="min")
    checkpoints.save(state, 3, evaluated_step=-1, metrics=None)
    checkpoints.wait()
    return checkpoints, checkpoints.take_notes()


@pytest.mark.parametrize("name", ODD)
def test_a_checkpoint_in_a_folder_of_any_name_is_restored(tmp_path, name):
    state, workdir = tiny_state(), tmp_path / name
    (tmp_path / "aXb").mkdir()  # What `a*b` and `a?b` match as well.
    workdir.mkdir()
    checkpoints, notes = saved(workdir, state)
    assert not notes
    restored = checkpoints.restore(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    )
    assert restored.step == 3
    assert_bit_equal(restored.state.params, state.params)
    checkpoints.close()
    assert {path.name for path in tmp_path.iterdir()} == {name, "aXb"}, "nothing is written beside it"


def test_a_checkpoint_that_lacks_what_a_restore_needs_is_none(tmp_path):
    checkpoints, _ = saved(tmp_path, tiny_state())
    folder = step_dir(tmp_path, 3)
    check_complete(folder)
    for item in ("model", "optimizer", "exchange"):
        manifest = folder / item / "manifest.ocdbt"
        content = manifest.read_bytes()
        manifest.unlink()
        with pytest.raises(Incomplete, match=f"{item} has not all of"):
            check_complete(folder)
        manifest.write_bytes(content)
    checkpoints.close()


def test_a_path_is_given_to_orbax_by_the_letter(tmp_path):
    plain = tmp_path / "run of 2026, é" / "checkpoints"
    assert literal(plain) == plain
    odd = tmp_path / "a[1]" / "checkpoints"
    odd.parent.mkdir()
    shown = literal(odd)
    assert "[" not in str(shown)
    assert os.path.samefile(shown.parent, odd.parent)
    assert literal(odd) == shown, "one open file for each folder"
    assert with_names(f"no {shown}") == f"no {odd}"
    odd.parent.rmdir()
    odd.parent.mkdir()
    assert literal(odd) != shown, "the folder is another one"
    assert str(literal(Path("/s3/run"))) != "/s3/run" or not Path("/s3").exists()


def test_what_exists_by_the_letter_is_taken(tmp_path, monkeypatch):
    for name in ODD:
        folder = tmp_path / name
        folder.mkdir()
        file = folder / f"{name}.bin"
        for path in (file, folder / "z.bin"):
            path.write_bytes(b"1")
        assert find_paths(file) == [file]
        assert find_files([str(file)], "--data.train") == [file]
        assert [one.address for one in remote.expand(str(file))] == [str(file)]
        assert [one.name for one in remote.expand(f"{folder}/z*.bin")] == ["z.bin"], "its folder is no pattern"
        assert Path(Stage(tmp_path / "staged").files(str(file))).name == file.name
        (folder / "config.json").write_text("{}")
        assert find_workdirs([str(folder)]) == [folder]
        monkeypatch.chdir(folder)
        assert expand_home(f"{name}.bin") == Path(f"{name}.bin")
    monkeypatch.chdir(tmp_path)
    assert expand_home("~nobody") == Path("~nobody")
    assert expand_home("~nobody-else/x") == Path("~nobody-else/x"), "there is no such user"


def test_a_pattern_is_still_one(tmp_path):
    (tmp_path / "x[1]").mkdir()
    for name in ("a1.tar", "a2.tar", "b[1].tar", "b1.tar"):
        (tmp_path / "x[1]" / name).write_bytes(b"1")

    def names(pattern):
        return [one.name for one in remote.expand(f"{tmp_path}/{pattern}")]

    assert names("x[1]/a*.tar") == names("x[[]1]/a?.tar") == names("x[1]/a{1..2}.tar") == ["a1.tar", "a2.tar"]
    assert names("x[1]/b[1].tar") == ["b[1].tar"]
    with pytest.raises(ConfigError, match="no such file"):
        names("x[1]/c[1].tar")


def test_addresses_are_taken_by_the_letter_too(tmp_path):
    for name in ("x[1]", "a*b", "{0..1}"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.tar").write_bytes(b"12")
        (found,) = remote.expand(f"file://{folder}/{name}.tar")
        assert (found.name, found.num_bytes) == (f"{name}.tar", 2)
        assert [one.name for one in remote.expand(f"file://{folder}/*.tar")] == [f"{name}.tar"]


NOT_UTF8 = os.fsdecode(b"a\xff")


def test_a_config_has_a_path_that_is_not_utf8():
    experiment = Experiment(
        data=Tabular(train=(NOT_UTF8,)), model=Perceptron(units=(4,)), task=Classification(), batch_size=4, steps=1
    )
    text = experiment.to_json()
    assert text.isascii()
    assert Experiment.from_json(text) == experiment
    for damaged in (text[:-2], text.replace("tabular", "tables")):
        with pytest.raises(ConfigError):
            Experiment.from_json(damaged)


def test_a_status_has_a_path_that_is_not_utf8():
    now, process = utc_now(), Holder("token", command=f"jaxdl.train --workdir {NOT_UTF8}")
    record = Record(State.PROCESSING, now, now, process=process)
    assert Record.from_bytes(record.to_bytes()) == record
    for letter in ("\u65e5", "\U0001f600", "\x1b", NOT_UTF8[1]):
        lease = Holder("token", host="h", command=300 * letter)
        assert len(lease.to_bytes()) == RECORD_BYTES
        there = Holder.from_bytes(lease.to_bytes())
        assert (there.token, there.command) == ("token", len(there.command) * letter)
        assert (len(there.command) + 1) * (
            len(json.dumps(letter)) - 2
        ) > RECORD_BYTES - 500 or there.command == lease.command


def test_a_folder_of_compiled_programs_that_is_not_utf8_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"compiler.cache_dir .*a.udcff': XLA refuses a path that is not UTF-8"):
        CompilerConfig(cache_dir=str(tmp_path / NOT_UTF8)).keep_programs()
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", NOT_UTF8)
        for name in ("jax_compilation_cache_dir", PROGRAMS):  # Of the program, and of the shell.
            with pytest.raises(ConfigError, match=rf"^{name} '.*not UTF-8"):
                CompilerConfig().keep_programs()
            monkeypatch.setenv(PROGRAMS, NOT_UTF8)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    monkeypatch.delenv(PROGRAMS, raising=False)
    assert Request.environment(SimpleNamespace(folder=tmp_path / NOT_UTF8)) == {}
    assert Request.environment(SimpleNamespace(folder=tmp_path)) == {PROGRAMS: str(tmp_path / "programs")}


def test_a_range_is_read_where_nobody_may_list(monkeypatch):
    class Bucket:
        def exists(self, path):
            raise PermissionError(path)

        def info(self, path):
            return {"name": path, "size": len(path)}

    monkeypatch.setattr(remote, "_filesystem", lambda address: (Bucket(), address.removeprefix("s3://")))
    assert [one.address for one in remote.expand("s3://b/t-{09..11}.tar")] == [
        f"s3://b/t-{number}.tar" for number in ("09", "10", "11")
    ]
