"""`python -m jaxdl.data prepare`: the disk cache is filled before a run."""

import re
from pathlib import Path

import numpy as np
import pytest
from photographs import folder_of_photographs

from jaxdl.data.__main__ import main

CONFIG = """
from jaxdl.data import Cache, ImageFolder, Photos
from jaxdl.training.experiment import Experiment

def config():
    cache = Cache(short_side=64, memory_bytes=2**20, disk={disk!r})
    return Experiment(data=ImageFolder(folder={path!r}, photos=Photos(size=48, workers=2, cache=cache)), epochs=1)
"""


@pytest.fixture
def config(tmp_path):
    folder = folder_of_photographs(tmp_path / "photographs")
    file = tmp_path / "config.py"
    file.write_text(CONFIG.format(disk=str(tmp_path / "cache"), path=str(folder)))
    return str(file)


def test_help_needs_no_config(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["prepare", "--help"])
    assert "tokenizes documents, conversations and pairs" in capsys.readouterr().out


@pytest.mark.slow
def test_it_fills_the_cache_and_says_what_was_there(config, tmp_path, capsys):
    main(["prepare", "--config", config])
    assert "30 images read, 0 already cached" in " ".join(capsys.readouterr().out.split())
    main(["prepare", "--config", config])
    assert "0 images read, 30 already cached" in " ".join(capsys.readouterr().out.split())
    from jaxdl.core.modules import load_file

    source = load_file(config).data.build().train
    source.batch(np.arange(24))
    assert source.activity().tiers["origin"] == 0
    source.close()
    main(["prepare", "--config", config, "--data.photos.cache.short-side", "72"])
    assert "30 images read" in " ".join(capsys.readouterr().out.split()), "another form is another cache"
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_disk_limit_that_is_reached_is_told(config, capsys):
    main(["prepare", "--config", config, "--data.photos.cache.disk-bytes", "200000"])
    told = " ".join(capsys.readouterr().out.split())
    kept = 30 - int(re.search(r"warning: (\d+) images did not fit", told)[1])
    assert 5 < kept < 25
    assert re.search(r"All take about 0\.\d MB; cache.disk_bytes = 200,000", told)


MISTAKES = [
    ([], ""),
    (["fill"], "fill: there is no such command. Commands: prepare, show, tokenizer."),
    (["prepare"], "no --config. Give --config FILE"),
    (["prepare", "--config", "RUN"], "not a Python file. Give the Python file of the run"),
    (["prepare", "--seed", "x", "--config=CONFIG"], "--seed x: not a whole number"),
    (["prepare", "--config", "none.py"], "none.py"),
    (["prepare", "--config", "CONFIG", "--data.photos.cache.disk", "None"], "has no disk cache to fill"),
    (["prepare", "--config", "CONFIG", "--data.path", "/nowhere"], "/nowhere: no such folder"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_mistakes_are_told(args, message, config, capsys):
    run = Path(config).with_name("config.json")
    run.write_text("{}")
    with pytest.raises(SystemExit) as end:
        main([one.replace("CONFIG", config).replace("RUN", str(run)) for one in args])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
