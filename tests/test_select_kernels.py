"""The kernels of the selection on NVIDIA GPUs: interpreted on the CPU, and as they are lowered for GPUs."""

import contextlib
import functools
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P
from test_select import best, bits_of, nasty_inputs
from test_sharding import TEXT

from jaxdl.core.config import ConfigError
from jaxdl.parallel.collectives import kernels, own_kernels, select
from jaxdl.parallel.collectives.blocks import block_width
from jaxdl.parallel.collectives.compact import COARSE_BITS, KEY_BITS
from jaxdl.parallel.compiler import hlo
from jaxdl.performance.bench import select as bench_select
from jaxdl.training.run.plan.exchange import choose_exchange

CALL = "__gpu$xla.gpu.triton"


@pytest.fixture
def small_programs(monkeypatch):
    """So small that a few thousand entries have many programs, each of several chunks."""
    monkeypatch.setattr(kernels, "TILE", 256)
    monkeypatch.setattr(kernels, "MAXIMA_PROGRAMS", 11)
    monkeypatch.setattr(kernels, "CHUNK", 32)
    monkeypatch.setattr(kernels, "CHUNKS", 2)
    monkeypatch.setattr(kernels, "PROGRAMS", 8)


def inputs_of(n):
    rng = np.random.default_rng(0)
    near = np.float32(1) + rng.integers(0, 300, n).astype(np.float32) * np.float32(2**-23)  # Differ by the last bits.
    spread = rng.standard_normal(n) * 2.0 ** rng.integers(-126, 120, n)
    of_gpus = np.where(rng.random(n) < 0.5, 0x7FFFFFFF, 0x7FFFFFFE).astype(np.int32).view(np.float32)  # Two NaNs.
    return [*nasty_inputs(n, jnp.float32), near, spread.astype(np.float32), of_gpus]


@pytest.mark.slow
def test_the_largest_in_two_stages(small_programs):
    n, k = 6007, 30  # Blocks of 16, the last of which is not full.
    run = jax.jit(functools.partial(kernels.largest_by_kernels, k=k, leading=KEY_BITS, interpret=True))
    for i, x in enumerate(inputs_of(n)):
        np.testing.assert_array_equal(run(x), best(bits_of(x), k), err_msg=f"input {i}")


@pytest.mark.slow
def test_too_many_for_blocks_in_a_batch(small_programs):
    n, k = 1003, 300
    run = functools.partial(kernels.largest_by_kernels, k=k, leading=COARSE_BITS, interpret=True)
    x = np.stack(inputs_of(n))
    np.testing.assert_array_equal(jax.jit(jax.vmap(run))(x), [best(bits_of(row) >> 7, k) for row in x])


needs_no_gpu = pytest.mark.skipif(hasattr(triton, "get_gpu_info"), reason="JAX 0.11 lowers them where a GPU is")


def lowered(method, n=100_000, k=100):
    traced = jax.jit(functools.partial(select.select_top_k, k=k, method=method)).trace(jnp.zeros(n))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Of the capability that it is given, as far as the choice of the kernels sees."""
    devices = jax.local_devices

    def pretend(**known):
        gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", **known)
        # In another thread, where the kernels are tried, are the real ones.
        main = threading.current_thread()
        monkeypatch.setattr(
            jax, "local_devices", lambda **_: [gpu] if threading.current_thread() is main else devices()
        )

    yield pretend
    select.KERNELS.forget()


@pytest.fixture
def two_hosts(on_a_gpu, monkeypatch):
    """This process is one of two, on GPUs where the kernels work: the other one's answer, and what was sent to it."""
    answers, sent = [b"yes"], []

    def exchanged(own):
        sent.append(own)
        return [own, *answers]

    on_a_gpu(compute_capability="9.0")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(kernels, "select_rightly", lambda: True)
    monkeypatch.setattr(own_kernels, "from_each_process", exchanged)
    return answers, sent


@needs_no_gpu
def test_where_they_are_lowered(on_a_gpu, monkeypatch):
    assert lowered("threshold").count(CALL) == 8
    assert lowered("exact", k=50_000).count(CALL) == 4
    for capability, route, served in (
        ("9.0", "xla", False), ("8.0", "auto", False), ("8.0", "triton", True), ("7.0", "triton", False),
    ):  # fmt: skip
        monkeypatch.setenv("JAXDL_SELECTION", route)
        on_a_gpu(compute_capability=capability)
        assert select.KERNELS.used() == served
    assert CALL not in lowered("exact")
    monkeypatch.setenv("JAXDL_SELECTION", "auto")
    on_a_gpu()
    assert not select.KERNELS.used()  # Of an unknown capability.
    monkeypatch.setenv("JAXDL_SELECTION", "cub")
    with pytest.raises(ValueError, match="JAXDL_SELECTION=cub"):
        select.KERNELS.used()


@pytest.mark.slow
@needs_no_gpu
def test_they_are_tried_first_on_a_gpu(on_a_gpu, small_programs, monkeypatch):
    tried, rightly = [], kernels.select_rightly

    def here():
        tried.append(rightly(1003, interpret=True))
        return tried[-1]

    monkeypatch.setattr(kernels, "select_rightly", here)
    on_a_gpu(compute_capability="9.0")
    assert lowered("threshold", n=99_000).count(CALL) == 8  # Tried in the middle of lowering, once.
    assert lowered("exact", n=99_000).count(CALL) == 8
    assert tried == [True]
    select.KERNELS.forget()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "largest_by_kernels", lambda x, k, leading, interpret: jnp.arange(k))
        with pytest.warns(UserWarning, match="give wrong results on this NVIDIA H100.*JAXDL_SELECTION=xla"):
            assert CALL not in lowered("exact", n=98_000)
    assert tried == [True, False]
    select.KERNELS.forget()
    monkeypatch.setattr(kernels, "select_rightly", lambda: jnp.zeros(2) @ jnp.zeros(3))
    with pytest.warns(UserWarning, match=r"do not run \(TypeError: "):
        assert CALL not in lowered("exact", n=97_000)


@needs_no_gpu
def test_several_processes_agree_before_they_lower(two_hosts, monkeypatch):
    answers, sent = two_hosts
    assert CALL not in lowered("exact", n=96_000)
    assert not sent, "a process that lowers alone would wait for the others"
    select.KERNELS.agree()
    select.KERNELS.agree()
    assert lowered("exact", n=95_000).count(CALL) == 8
    monkeypatch.setenv("JAXDL_SELECTION", "xla")
    assert select.KERNELS.used(), "the programs of all processes must stay the same"
    assert sent == [b"yes"]
    select.KERNELS.forget()
    answers[:] = [b"no"]
    monkeypatch.setenv("JAXDL_SELECTION", "auto")
    with pytest.warns(UserWarning, match="not used on another host"):
        select.KERNELS.agree()
    assert not select.KERNELS.used()


@needs_no_gpu
@pytest.mark.parametrize("why", ["JAXDL_SELECTION", "capability", "import", "trial"])
def test_a_process_without_the_kernels_answers_too(two_hosts, on_a_gpu, monkeypatch, why):
    if why == "JAXDL_SELECTION":
        monkeypatch.setenv("JAXDL_SELECTION", "xla")
    elif why == "capability":
        on_a_gpu(compute_capability="gfx942")
    elif why == "import":
        monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    else:
        monkeypatch.setattr(kernels, "select_rightly", lambda: False)
    with pytest.warns(UserWarning, match="wrong results") if why == "trial" else contextlib.nullcontext():
        select.KERNELS.agree()
    assert two_hosts[1] == [b"no"]
    assert not select.KERNELS.used()


@pytest.mark.parametrize(("own", "other"), [("cub", b"yes"), ("auto", b"JAXDL_SELECTION=cub: no such")])
def test_a_wrong_word_on_one_host_ends_all(two_hosts, monkeypatch, own, other):
    two_hosts[0][:] = [other]
    monkeypatch.setenv("JAXDL_SELECTION", own)
    with pytest.raises(ConfigError, match="JAXDL_SELECTION=cub"):
        select.KERNELS.agree()
    assert len(two_hosts[1]) == 1


@needs_no_gpu
@pytest.mark.parametrize(("exchange", "platform", "replicas", "asks"), [
    ("topk", "gpu", 2, True), ("topk", "gpu", 1, False), ("topk", "cpu", 2, False), ("dense", "gpu", 2, False),
])  # fmt: skip
def test_runs_whose_exchange_selects_agree(two_hosts, exchange, platform, replicas, asks):
    mesh = types.SimpleNamespace(
        shape={"replica": replicas}, devices=np.array([types.SimpleNamespace(platform=platform)])
    )
    choose_exchange(TEXT.replaced({"exchange": exchange}), None, mesh)
    assert bool(two_hosts[1]) == asks


@pytest.mark.slow
@needs_no_gpu
def test_in_shard_map():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    local = functools.partial(select.select_top_k, k=60)
    for check_vma in (False, True):
        run = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=check_vma)
        text = jax.jit(run).trace(jnp.zeros(80_000)).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count(CALL) == 8


def test_the_trial_has_keys_for_every_program():
    n = kernels.TRIED
    stage = kernels.Stage(n, n // 2, *kernels.digits(KEY_BITS), interpret=False)
    assert block_width(n, n // 2, kernels.WIDTHS) is None
    assert stage.programs == kernels.PROGRAMS
    assert stage.span > kernels.CHUNK * kernels.CHUNKS
    assert n % stage.span
    assert kernels.fits(n, n // 2)


def test_counts_stay_whole():
    assert kernels.fits(25_600_000, 25_600)
    assert kernels.fits(1 << 24, 1 << 23)
    assert not kernels.fits((1 << 24) + 1, 1 << 23)
    assert not kernels.fits(1 << 30, 1 << 20)


def test_bytes_of_a_program():
    program = f"""
HloModule a
ENTRY %main (x: f32[1000], b: f32[50], i: s32[7]) -> s32[10] {{
  %x = f32[1000]{{0}} parameter(0)
  %b = f32[50]{{0}} parameter(1)
  %i = s32[7]{{0}} parameter(2)
  %c = (s32[20]{{0}}, f32[50]{{0}}) custom-call(%x, %b), custom_call_target="{CALL}", output_to_operand_aliasing={{{{1}}: (1, {{}})}}
  %d = s32[20]{{0}} get-tuple-element(%c), index=0
  ROOT %e = s32[10]{{0}} custom-call(%x, %i), custom_call_target="{CALL}", metadata={{op_name="{kernels.GATHERS}/call"}}
}}
"""  # noqa: E501
    assert kernels.GATHERS == hlo.GATHERS
    facts = bench_select.program_facts(program)
    # x, what it writes, and the sums in place; then as many entries of x as it writes, the indices, and the result.
    assert facts["moved_bytes"] == 4 * (1000 + 20 + 50) + 4 * (10 + 7 + 10)
    assert facts["kernels"] == 2
    seconds = facts["moved_bytes"] / hlo.MEMORY_BYTES_PER_SEC
    assert facts["launched_sec"] == pytest.approx(seconds + 2 * bench_select.LAUNCH_SEC)
