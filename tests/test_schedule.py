"""What hides the exchange: programs played by hand-made schedules, messages kept apart, and XLA's order."""

import importlib.util
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import NAMED_SHAPES, ORDER, PLACES, Run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import schedule
from jaxdl.core.config import ConfigError
from jaxdl.exchange import (
    Dense,
    GradientLayout,
    PowerSGD,
    Quantized,
    TopK,
    exchanged_on_mesh,
    init_on_mesh,
    state_specs,
)
from jaxdl.exchange.buckets import held_back, in_turn, make_buckets
from jaxdl.parallel.compiler import Links, compiled, hlo
from jaxdl.parallel.compiler.collectives import operations
from jaxdl.parallel.compiler.options import ASSUMED
from jaxdl.parallel.compiler.overlap import play
from jaxdl.parallel.compiler.profile import profile_of
from jaxdl.performance.bench.shared import run_module
from jaxdl.performance.planner.h100 import h100_mesh

AXES = {"replica": 2, "fsdp": 4}
LINKS = Links(replica_bytes_per_sec=1e9, inner_bytes_per_sec=1e11, replica_latency_sec=1e-6, inner_latency_sec=0.0)
# A kernel that moves 2 x 33.5 MB takes 20 us at 3.35 TB/s; the all-reduce of 40 kB over two replicas 41 us.
PROGRAM = """HloModule jit_train_step, is_scheduled=true, entry_computation_layout={()->f32[]}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %b = f32[] parameter(1)
}

%copied (p: f32[8375000]) -> f32[8375000] {
  %p = f32[8375000]{0} parameter(0)
  ROOT %n = f32[8375000]{0} negate(%p)
}

ENTRY %main (x: f32[8375000], g: f32[10000]) -> f32[8375000] {
  %x = f32[8375000]{0} parameter(0)
  %g = f32[10000]{0} parameter(1)
  %forward = f32[8375000]{0} fusion(%x), kind=kLoop, calls=%copied, metadata={op_name="jit(step)/jvp(model)/neg"}
  %one = f32[8375000]{0} fusion(%forward), kind=kLoop, calls=%copied, metadata={op_name="transpose(jvp(model))/neg"}
  %start = f32[10000]{0} all-reduce-start(%g), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%sum
  %two = f32[8375000]{0} fusion(%one), kind=kLoop, calls=%copied, metadata={op_name="transpose(jvp(model))/neg"}
  BETWEEN
  %done = f32[10000]{0} all-reduce-done(%start)
  ROOT %three = f32[8375000]{0} fusion(%two), kind=kLoop, calls=%copied, metadata={op_name="jit(step)/sub"}
}
"""
INNER = "%inner = f32[1000000]{0} all-reduce(%g), replica_groups=[2,4]<=[8], to_apply=%sum"
KERNEL = 2 * 4 * 8_375_000 / 3.35e12


def played(between="", links=LINKS):
    return play(hlo.parse(PROGRAM.replace("BETWEEN", between)), AXES, links)


def test_a_message_beside_one_kernel():
    timeline = played()
    [one] = timeline.exchange
    assert (one.kind, one.axes, one.sent_bytes, one.is_async) == ("all-reduce", ("replica",), 40_000, True)
    assert one.kernels == {"fusion": 1}
    assert one.started_sec == pytest.approx(2 * KERNEL)
    assert one.seconds == pytest.approx(41e-6)
    assert one.compute_sec == pytest.approx(KERNEL)
    assert one.hidden == timeline.hidden_share == pytest.approx(KERNEL / 41e-6)
    assert timeline.backward == pytest.approx((KERNEL, 3 * KERNEL))
    assert schedule.place_in_backward(timeline, one) == pytest.approx(0.5)
    assert timeline.compute_sec == pytest.approx(4 * KERNEL)
    assert timeline.total_sec == pytest.approx(3 * KERNEL + 41e-6)
    assert timeline.waiting_sec == pytest.approx(41e-6 - KERNEL)
    # The backward pass does not begin with a kernel of it that runs early.
    spans = [(0, 1, "backward"), (1, 4, "forward"), (5, 8, "backward"), (8, 9, "forward"), (9, 12, "backward")]
    assert replace(timeline, spans=spans).backward == (5, 12)


def test_a_fast_network_is_hidden_whole():
    timeline = played(links=Links(1e12, 1e12, replica_latency_sec=0.0))
    assert timeline.hidden_share == 1.0
    assert timeline.waiting_sec == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("apart", "inner_begins"), [(False, 2 * KERNEL + 41e-6), (True, 3 * KERNEL)])
def test_messages_inside_a_replica_wait_for_the_network_on_a_shared_stream(apart, inner_begins):
    links = Links(1e9, 1e11, 1e-6, 0.0, apart=apart)
    timeline = played(INNER, links)
    [inner] = [one for one in timeline.messages if not one.over_slow]
    assert not inner.is_async
    assert inner.begin_sec == pytest.approx(inner_begins)
    assert inner.seconds == pytest.approx(2 * 3 / 4 * 4_000_000 / 1e11)


def test_a_program_without_an_order_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        play(hlo.parse(PROGRAM.replace(", is_scheduled=true", "")), AXES, LINKS)


def test_loops_slices_and_products():
    text = """HloModule m, is_scheduled=true

%body (t: f32[12,512,512]) -> f32[512,512] {
  %t = f32[12,512,512]{2,1,0} parameter(0)
  %s = f32[512,512]{1,0} fusion(%t), kind=kLoop, calls=%sliced
  %gathered = f32[512,512]{1,0} all-gather(%s), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %d = f32[512,512]{1,0} fusion(%gathered, %gathered), kind=kCustom, calls=%product
}

%sliced (p: f32[12,512,512]) -> f32[512,512] {
  %p = f32[12,512,512]{2,1,0} parameter(0)
  %i = s32[] constant(0)
  ROOT %ds = f32[1,512,512]{2,1,0} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,512,512}
}

%product (a: f32[512,512], b: f32[512,512]) -> f32[512,512] {
  %a = f32[512,512]{1,0} parameter(0)
  %b = f32[512,512]{1,0} parameter(1)
  ROOT %dot = f32[512,512]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[12,512,512]) -> f32[512,512] {
  %x = f32[12,512,512]{2,1,0} parameter(0)
  ROOT %loop = f32[512,512]{1,0} while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"12"}}
}
"""
    module = hlo.parse(text)
    body = module.computations["body"]
    slice_bytes = 4 * 512 * 512
    assert module.seconds("body", body["s"]) == pytest.approx(2 * slice_bytes / 3.35e12)
    assert module.seconds("body", body["d"]) == pytest.approx(max(3 * slice_bytes / 3.35e12, 2 * 512**3 / 494e12))
    timeline = play(module, AXES, LINKS)
    [gather] = timeline.messages
    assert (gather.kind, gather.axes, gather.times) == ("all-gather", ("fsdp",), 12)
    assert timeline.compute_sec == pytest.approx(12 * module.total_sec("body"))
    assert timeline.total_sec == pytest.approx(timeline.compute_sec + 12 * gather.seconds)
    assert module.kernels("main", module.computations["main"]["loop"]) == {"fusion": 12, "matmul": 12}
    # XLA orders what is in a loop by the same profile.
    assert read_profile(profile_of(text, AXES, LINKS)).keys() == {"loop", "s", "gathered", "d"}


def test_flops_of_a_convolution():
    line = "bf16[64,56,56,64] custom-call(%x, %w), dim_labels=b01f_o01i->b01f, window={size=3x3}"
    text = (
        "HloModule m, is_scheduled=true\n\nENTRY %main (x: bf16[64,56,56,64]) -> bf16[1] {\n"
        "  %x = bf16[64,56,56,64] parameter(0)\n  %w = bf16[64,3,3,64] parameter(1)\n"
        f'  ROOT %cudnn-conv = {line}, custom_call_target="__cudnn$convForward"\n}}\n'
    )
    module = hlo.parse(text)
    one = module.computations["main"]["cudnn-conv"]
    num_bytes = 2 * (2 * 64 * 56 * 56 * 64 + 64 * 9 * 64)
    assert module.seconds("main", one) == pytest.approx(
        max(2 * 64 * 56 * 56 * 64 * 9 * 64 / 989e12, num_bytes / 3.35e12)
    )
    assert module.kernels("main", one) == {"conv": 1}


def test_what_is_ready_first_is_sent_first():
    """A bucket is ready with its last gradient, whatever the order in which buckets got full."""
    specs = {"a": P("fsdp"), "b": P(), "c": P("fsdp"), "d": P("fsdp")}
    layout = GradientLayout(specs=specs, inner={"fsdp": 2}, order=("a", "b", "c", "d"))
    buckets = make_buckets(["a", "b", "c", "d"], dict.fromkeys(specs, (10,)), layout, max_elements=20)
    assert [bucket.names for bucket in buckets] == [("a", "c"), ("b",), ("d",)]
    assert [buckets[number].names for number in in_turn(buckets, layout.order, layout)] == [("b",), ("a", "c"), ("d",)]
    # What is ready last has no kernels to run beside: a short message of its own.
    mib = 16 * 10 * 4 / 2**20
    # What is sharded unlike the last gradient stays together.
    specs["e"], layout = P(), replace(layout, specs=specs | {"e": P()}, order=("a", "b", "c", "e", "d"))
    apart, _ = Dense(bucket_mib=mib).buckets(dict.fromkeys(specs, (10,)), layout)
    assert [bucket.names for bucket in apart] == [("a", "c"), ("d",), ("b", "e")]
    assert len(Dense(bucket_mib=mib, bucket_order="forward").buckets(dict.fromkeys(specs, (10,)), layout)[0]) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_held_back_is_the_same_number(dtype):
    x = jnp.asarray([1.5, -0.0, np.nan, np.inf], dtype)
    for last in (0.0, np.nan, -np.inf, 3.25):
        held = jax.jit(held_back)(x, jnp.asarray(last, dtype))
        assert np.array_equal(np.asarray(held).view(np.uint8), np.asarray(x).view(np.uint8))
    assert held_back(x, None) is x


MANY = {"bucket_mib": 0.004, "min_elements": 0}
APART = {
    "dense": Dense(bucket_mib=0.004),
    "topk": TopK(density=0.1, method="block", **MANY),
    "quantized": Quantized(block_size=8, **MANY),
    "powersgd": PowerSGD(rank=1, bucket_mib=0.004, min_elements=100),
}


@pytest.mark.parametrize(("exchange", "kind"), [("dense", "all-reduce"), ("topk", "all-gather")])
def test_each_bucket_is_a_message(exchange, kind):
    """XLA for CPUs merges all-reduces as well; what depends on one another stays apart."""
    run = Run(APART[exchange], PLACES["replica 8"])
    sizes = dict(NAMED_SHAPES)
    buckets = make_buckets(ORDER, sizes, run.place.layout, max_elements=APART[exchange].bucket_elements)
    assert len(buckets) == 4
    # Beside them is the sum of the norms, which XLA may put into the last one.
    kinds = [one.kind for one in operations(str(run.compiled.as_text()), run.mesh.shape)]
    assert kinds.count(kind) in ((4, 5) if exchange == "dense" else (4,))


has_cuda_compiler = importlib.util.find_spec("jax_cuda12_plugin") is not None


@pytest.mark.skipif(not has_cuda_compiler, reason="JAX's CUDA compiler (jax_cuda12_plugin) is not installed")
@pytest.mark.parametrize("exchange", list(APART))
def test_xla_merges_no_messages_for_the_h100(exchange):
    """Default thresholds merge everything below 30 MB that is independent."""
    mesh = h100_mesh({"replica": 8})
    specs = {f"w{number}": P() for number in range(4)}
    shapes = {name: jax.ShapeDtypeStruct((64, 32), jnp.float32) for name in specs}
    built = APART[exchange].build(GradientLayout(specs=specs))
    places = state_specs(built, shapes, specs, mesh)
    state = jax.eval_shape(lambda: init_on_mesh(built, shapes, specs, mesh))
    update = exchanged_on_mesh(built, specs, places, mesh)

    def struct(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    grads = {name: struct(jax.ShapeDtypeStruct((8, *x.shape), x.dtype), P("replica")) for name, x in shapes.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    text = jax.jit(update).lower(grads, jax.tree.map(struct, state, places), key).compile().as_text()
    assert text is not None
    kinds = [one.kind for one in operations(text, mesh.shape)]
    counts = {
        "dense": {"all-reduce": 4},
        "topk": {"all-gather": 4, "all-reduce": 1},
        "quantized": {"all-to-all": 4, "all-gather": 4, "all-reduce": 1},
        "powersgd": {"all-reduce": 9},
    }
    assert {kind: kinds.count(kind) for kind in set(kinds) - {"sort"}} == counts[exchange]
    timeline = play(hlo.parse(text), mesh.shape, LINKS)
    assert all(one.is_async for one in timeline.exchange)


def read_profile(data):
    """name -> cost in microseconds, of the protocol buffer."""
    found, place = {}, 0

    def varint():
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(data):
        assert varint() == 10, "field 1, with a length"
        end = varint() + place
        assert varint() == 10
        length = varint()
        name = data[place : place + length].decode()
        place += length
        assert varint() == 2 << 3 | 1, "field 2, a double"
        [found[name]] = np.frombuffer(data[place : place + 8], "<f8")
        place += 8
        assert place == end
    return found


def test_the_profile_has_the_times_of_kernels_and_messages():
    long_name = "x" * 200
    program = PROGRAM.replace("BETWEEN", INNER).replace("%inner", f"%{long_name}")
    kernels = dict.fromkeys(("forward", "one", "two", "three"), pytest.approx(1e6 * KERNEL))
    found = read_profile(profile_of(program, AXES, LINKS))  # Longer than the two kernels of the backward pass.
    assert found == kernels | {"start": pytest.approx(41), long_name: pytest.approx(60)}
    # Counted as often as they fit into it: 11 us so that they take its 40 us; but 6 us four times.
    found = read_profile(profile_of(program, AXES, replace(LINKS, replica_bytes_per_sec=4e9, inner_bytes_per_sec=1e12)))
    assert found == kernels | {"start": pytest.approx(2e6 * KERNEL), long_name: pytest.approx(4 * 6)}


@pytest.mark.skipif(not has_cuda_compiler, reason="JAX's CUDA compiler (jax_cuda12_plugin) is not installed")
def test_xla_orders_the_program_for_the_network():
    """A gradient that is late waits for no compute: on a slow network it has to begin with the step."""
    mesh = h100_mesh({"replica": 8})
    size = 1024

    def step(pending, x, w):
        total = jax.lax.psum(pending[0], "replica")
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return total, x

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("replica"), P("replica"), P()), out_specs=(P(), P("replica")))

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    pending, x = struct((8, 1_000_000), P("replica")), struct((8 * 8192, size), P("replica"))
    lowered = jax.jit(mapped).lower(pending, x, struct((size, size), P()))
    links = Links(5e9)
    hidden = {
        name: play(hlo.parse(compiled(lowered, {}, mesh.shape, network).as_text()), mesh.shape, links).hidden_share
        for name, network in {"unknown": None, "known": links}.items()
    }
    assert hidden["known"] > 0.15
    assert hidden["known"] >= hidden["unknown"]


ALONE = PROGRAM.replace("BETWEEN", "")


class Lowered:
    """A function that compiles to PROGRAM, or another text, and with a profile to that profile; or fails to."""

    def __init__(self, text=ALONE, failure=None):
        self.text, self.failure = text, failure

    def compile(self, compiler_options):
        profile = (compiler_options or {}).get("fdo_profile")
        if profile is not None and self.failure is not None:
            raise self.failure
        return SimpleNamespace(as_text=lambda: self.text, profile=profile)


@pytest.mark.parametrize(
    ("lowered", "words"),
    [
        (Lowered(PROGRAM.replace("is_scheduled=true", "is_scheduled=false")), "(ValueError: this program is not sch"),
        (Lowered("HloModule x, is_scheduled=true\n"), "have an unknown form (KeyError: "),
        (Lowered(failure=RuntimeError("XLA cannot")), "XLA cannot"),
    ],
)
def test_a_step_that_cannot_be_ordered(lowered, words, capsys):
    assert compiled(lowered, {}, AXES, ASSUMED).profile is None
    assert words in capsys.readouterr().err
    expected = ConfigError if lowered.failure is None else RuntimeError
    with pytest.raises(expected, match=re.escape(words)):
        compiled(lowered, {}, AXES, LINKS)


@pytest.mark.parametrize("failure", [None, RuntimeError("XLA cannot")])
def test_all_processes_take_one_order(failure, capsys):
    """Each process reads another program; the second may fail to compile the ordered one."""
    texts = [ALONE, PROGRAM.replace("BETWEEN", INNER)]
    barrier, said = threading.Barrier(2, timeout=10), {}

    def process(number):
        def from_each(content):
            said[number] = content
            barrier.wait()
            every = [said[0], said[1]]
            barrier.wait()
            return every

        lowered = Lowered(texts[number], failure if number == 1 else None)
        return compiled(lowered, {}, AXES, ASSUMED, from_each=from_each).profile

    with ThreadPoolExecutor(2) as pool:
        profiles = list(pool.map(process, range(2)))
    expected = profile_of(texts[0], AXES, ASSUMED)
    assert expected != profile_of(texts[1], AXES, ASSUMED)
    assert profiles == [None if failure else expected] * 2
    assert capsys.readouterr().err.count("process 1: XLA cannot") == (2 if failure else 0)


def test_the_command_needs_devices_that_have_a_schedule(capsys):
    with pytest.raises(SystemExit) as end:
        run_module(schedule.main, ["--config", str(Path(__file__).parents[1] / "configs" / "digits.py")])
    assert end.value.code == 2
    assert "Give --h100" in capsys.readouterr().err


def test_the_program_is_ordered_for_the_network_that_is_played():
    asked = (None, None), (25, None), (None, 10), (25, 10), (None, 0)
    assert [schedule.speeds(*one) for one in asked] == [(100, 100), (25, 25), (10, 10), (10, 25), (0, 100)]


def test_tables_figure_and_json():
    found = {"dense": played(INNER), "topk": played()}
    assert schedule.summary_table(found, "title").row_count == 2
    assert schedule.messages_table(found["dense"], "dense").row_count == 2
    assert schedule.inner_messages(found["dense"]) == {"all-reduce": (1, 6e6, pytest.approx(6e-5))}
    values = json.loads(json.dumps({name: schedule.as_json(one) for name, one in found.items()}))
    assert schedule.figure(values).startswith(b"\x89PNG")
    [one] = values["topk"]["messages"]
    assert one["axes"] == ["replica"]
    assert one["kernels"] == {"fusion": 1}
