"""The measurement of selections, and compiling for a GPU that is not there."""

import importlib.util
import json

import jax
import numpy as np
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.parallel.collectives.select import KERNELS, LEADING, METHODS, MOST_BY_KERNELS
from jaxdl.performance.bench import __main__ as bench
from jaxdl.performance.bench import select
from jaxdl.performance.planner.h100 import h100_mesh


@pytest.mark.slow
def test_times_and_recall(tmp_path, capsys):
    path = tmp_path / "select.json"
    bench.main(["select", "--num-elements", "20000", "--density", "0.01", "--num-repeats", "2", "--json", str(path)])
    result = json.loads(path.read_text())
    assert set(result["seconds"]) == {"one read", "a copy", "lax.top_k", *METHODS}
    assert result["right"] == {"exact": True, "threshold": True}
    assert all(len(times) == 2 for times in result["seconds"].values())
    assert set(result["recall"]) == set(select.DISTRIBUTIONS)
    for row in result["recall"].values():
        assert row["exact"] == 1
        assert row["threshold"] >= 0.99
        assert 0 < row["block"] < 1
    printed = capsys.readouterr().out
    assert "k = 200 of 20,000" in printed
    assert "Student-t(3), one outlier" in printed


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize("options", [["--num-elements", "0"], ["--num-repeats", "0"], ["--density", "2"]])
def test_options_that_measure_nothing(options, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["select", *options])
    assert end.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_the_outlier():
    x = np.sort(np.abs(select.sample("Student-t(3), one outlier", 1000)))
    np.testing.assert_allclose(x[-1] / x[-2], 1e4, rtol=0.9)
    assert select.sample("normal", 10).dtype == np.float32


def test_our_kernels_are_shown_only_where_they_select(monkeypatch):
    monkeypatch.setattr(select.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(type(KERNELS), "used", lambda self: True)
    few, many = (select.SelectBench(num_elements=number) for number in (MOST_BY_KERNELS, MOST_BY_KERNELS + 1))
    assert select.has_own_kernels(few)
    assert list(select.plain_sides(few)) == [f"{method}, plain XLA" for method in LEADING]
    assert not select.has_own_kernels(many)
    assert not select.plain_sides(many)


def test_what_is_read_from_a_program():
    program = """
      %a = (f32[1000]{0}, s32[1000]{0}) sort(%x, %i), dimensions={0}
      %b = f32[30]{0} fusion(%x), kind=kLoop, calls=%sort_of
      %c = (f32[40,50]{1,0}, u8[9]{0}) custom-call(%x), custom_call_target="xla.gpu.ext.cub_sort_pairs"
      %d = (s32[], f32[7]{0}) while(%t), condition=%c, body=%b
      %e = f32[7]{0} get-tuple-element(%d), index=1
    """
    facts = select.program_facts(program)
    assert {name: facts[name] for name in ("kernels", "loops", "largest_sort")} == {
        "kernels": 3, "loops": 1, "largest_sort": 2000,
    }  # fmt: skip


def test_a_mesh_of_other_than_eight():
    with pytest.raises(ConfigError, match="multiply to 8"):
        h100_mesh({"device": 4})


def test_without_the_compiler(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "cuda" in name else found(name))
    with pytest.raises(SystemExit) as end:
        bench.main(["select", "--hlo", "h100"])
    assert end.value.code == 2
    assert f"jax-cuda12-plugin=={jax.__version__}" in capsys.readouterr().err


def test_no_sort_and_few_kernels_are_compiled_for_gpus(tmp_path, capsys):
    pytest.importorskip("jax_cuda12_plugin", reason="JAX's compiler for CUDA is not on the path")
    path = tmp_path / "select.json"
    bench.main(["select", "--hlo", "h100", "--num-elements", "100000", "--json", str(path)])
    assert "lax.top_k" in capsys.readouterr().out
    programs = json.loads(path.read_text())["programs"]
    if KERNELS.used():
        assert max(programs[method]["kernels"] for method in ("exact", "threshold")) <= 12
    assert programs["mstopk"]["temp_bytes"] < 4 * 100_000
