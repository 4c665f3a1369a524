"""`bench train --h100`: kernels by kind, read off a program; a step before and after."""

import dataclasses
import importlib.util
import io
import json

import jax
import pytest
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.parallel.compiler import CompilerConfig, hlo
from jaxdl.parallel.compiler.roofline import kernels, summed
from jaxdl.performance.bench import roofline as bench
from jaxdl.performance.bench import train
from jaxdl.performance.planner import h100
from jaxdl.training.experiment import Experiment

BIG = 8_375_000
PROGRAM = """HloModule jit_train_step, is_scheduled=true

%%slices (p: f32[%(big)d]) -> f32[2] {
  %%p = f32[%(big)d]{0} parameter(0)
  %%s = f32[%(big)d]{0} slice(%%p), slice={[0:%(big)d]}
  %%t = f32[%(big)d]{0} slice(%%p), slice={[0:%(big)d]}
  ROOT %%r = f32[2]{0} reduce(%%s, %%t), dimensions={0}
}

%%scaled (p: f32[%(big)d]) -> f32[%(big)d] {
  %%p = f32[%(big)d]{0} parameter(0)
  ROOT %%n = f32[%(big)d]{0} negate(%%p)
}

%%body (t: f32[%(big)d]) -> f32[%(big)d] {
  %%t = f32[%(big)d]{0} parameter(0)
  ROOT %%l = f32[%(big)d]{0} fusion(%%t), kind=kLoop, calls=%%scaled, metadata={op_name="jit(step)/jvp(model)/neg"}
}

ENTRY %%main (x: f32[%(big)d], a: bf16[512,512], b: bf16[512,512]) -> f32[2] {
  %%x = f32[%(big)d]{0} parameter(0)
  %%a = bf16[512,512]{1,0} parameter(1)
  %%b = bf16[512,512]{1,0} parameter(2)
  %%sum = f32[%(big)d]{0} all-reduce(%%x), replica_groups={}
  %%w = f32[%(big)d]{0} while(%%sum), condition=%%c, body=%%body, backend_config={"known_trip_count":{"n":"3"}}
  %%dot = bf16[512,512]{1,0} custom-call(%%a, %%b), lhs_contracting_dims={1}, custom_call_target="__cublas$gemm"
  ROOT %%f = f32[2]{0} fusion(%%w), kind=kInput, calls=%%slices, metadata={op_name="transpose(jvp(model))/sum"}
}
""" % {"big": BIG}  # noqa: UP031


def test_kernels_by_kind_and_part():
    """A loop's count as often as it runs; an operand that is read twice counts once; a message is no kernel."""
    found = summed(kernels(hlo.parse(PROGRAM)))
    assert list(found) == ["elementwise, forward", "reduction, backward", "cublas gemm, rest", "all"]
    loop, reduction, product, every = found.values()
    assert (loop["kernels"], loop["bytes"]) == (3, 3 * 2 * 4 * BIG)
    assert loop["least_sec"] == pytest.approx(3 * 2 * 4 * BIG / 3.35e12)
    assert (reduction["kernels"], reduction["bytes"]) == (1, 4 * BIG + 8)
    assert product["product_sec"] == pytest.approx(2 * 512**3 / 989e12)
    assert product["least_sec"] == pytest.approx(3 * 2 * 512**2 / 3.35e12), "the bytes take longer"
    assert every == {name: sum(row[name] for row in (loop, reduction, product)) for name in every}


@pytest.mark.parametrize(("precision", "peak"), [("", 494e12), ("operand_precision={highest,highest}, ", 67e12)])
def test_float32_products_count_as_tf32_unless_they_are_exact(precision, peak):
    program = f"""ENTRY %main (a: f32[64,64], b: f32[64,64]) -> f32[64,64] {{
  %a = f32[64,64]{{1,0}} parameter(0)
  %b = f32[64,64]{{1,0}} parameter(1)
  ROOT %dot = f32[64,64]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, {precision}rhs_contracting_dims={{0}}
}}
"""
    (found,) = kernels(hlo.parse(program))
    assert found.product_sec == pytest.approx(2 * 64**3 / peak)


@pytest.mark.parametrize(
    ("target", "mask", "products"), [("", "CAUSAL", 2 / 2), ("", "NO_MASK", 2), ("Backward", "CAUSAL", 5 / 2)]
)
def test_attention_counts_as_its_products(target, mask, products):
    """A causal mask halves them."""
    program = f"""ENTRY %main (q: bf16[2,64,8,16], k: bf16[2,32,4,16]) -> bf16[2,8,64,16] {{
  %q = bf16[2,64,8,16]{{3,2,1,0}} parameter(0)
  %k = bf16[2,32,4,16]{{3,2,1,0}} parameter(1)
  %c = (bf16[2,8,64,16]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmax{target}", backend_config={{"fmha":{{"mask_type":"{mask}"}}}}
  ROOT %out = bf16[2,8,64,16]{{3,2,1,0}} get-tuple-element(%c), index=0
}}
"""
    (found,) = kernels(hlo.parse(program))
    assert found.product_sec == pytest.approx(products * 2 * (2 * 8) * 64 * 32 * 16 / 989e12)


def test_a_table_with_the_figures_before(tmp_path):
    found = {"kernels": summed(kernels(hlo.parse(PROGRAM)))}
    kept = {name: row for name, row in found["kernels"].items() if name != "reduction, backward"}
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"kernels": {"sort, rest": kept["all"], **kept}}))
    printed = io.StringIO()
    Console(width=200, file=printed).print(bench.table("title", found, bench.read(path)))
    rows = [line.split("│")[1:-1] for line in printed.getvalue().splitlines() if line.startswith("│")]
    rows = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert list(rows)[-1] == "all"
    assert rows["elementwise, forward"] == ["3", "0.20", "0.00", "0.06"] * 2
    assert rows["sort, rest"] == [""] * 4 + rows["all"][4:]
    assert rows["reduction, backward"] == ["1", "0.03", "0.00", "0.01"] + [""] * 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--before", "x.json"], "--before x.json: only with --h100"),
        (["--h100", "--against", "torch"], "--h100 with --against"),
        (["--h100", "--before", "pyproject.toml"], "--before pyproject.toml: not a file that --h100 --json wrote"),
    ],
)
def test_mistakes(args, message):
    with pytest.raises(ConfigError, match=message):
        train.main(["--config", "configs/digits.py", *args])


@dataclasses.dataclass
class Planned:
    """What of a plan is read."""

    experiment: Experiment


def test_without_a_gpu_a_product_of_triton_may_have_no_tile(monkeypatch, capsys):
    tried = []

    def compile_train_step(plan):
        tried.append(plan.experiment.compiler.options)
        if not any("triton" in option for option in tried[-1]):
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.66")
        return "program"

    monkeypatch.setattr(h100, "compile_train_step", compile_train_step)
    given = ("xla_gpu_autotune_level=0",)
    plan = Planned(Experiment(compiler=CompilerConfig(options=given)))
    assert h100.compile_step(plan) == "program"
    assert tried == [given, (*given, "xla_gpu_enable_triton_gemm=false")]
    assert "all products by cuBLAS" in capsys.readouterr().out


has_cuda_compiler = importlib.util.find_spec("jax_cuda12_plugin") is not None


@pytest.mark.skipif(has_cuda_compiler, reason="JAX's CUDA compiler (jax_cuda12_plugin) is installed")
def test_without_the_compiler_it_says_what_to_install():
    with pytest.raises(ConfigError, match="the package jax_cuda12_plugin is not installed"):
        train.main(["--config", "configs/digits.py", "--h100"])


@pytest.mark.skipif(not has_cuda_compiler, reason="JAX's CUDA compiler (jax_cuda12_plugin) is not installed")
def test_a_step_for_the_h100(capsys):
    train.main(["--config", "configs/digits.py", "--h100"])
    printed = capsys.readouterr().out
    assert "cudnn" in printed
    assert "GB of temporary memory" in printed
