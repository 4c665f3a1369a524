"""The planner's costs of stages, of split texts and of `tensor`, on closed forms, and what it compares by them."""

import dataclasses
import itertools
import math
import re

import jax
import pytest
from test_planner import cluster, workload

import jaxdl
from jaxdl.data import SyntheticText
from jaxdl.exchange import Dense, Quantized
from jaxdl.exchange.cost import Link
from jaxdl.models import Transformer
from jaxdl.parallel.compiler import hlo, overlap
from jaxdl.parallel.mesh import AXES, MeshConfig
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.performance.planner import context_cost, pipeline
from jaxdl.performance.planner.choices import choices
from jaxdl.performance.planner.decoder import Decoder, decoder_of
from jaxdl.performance.planner.h100 import compile_step
from jaxdl.performance.planner.memory import Fit, Parameters, Step, memory, sharding_of
from jaxdl.performance.planner.reasons import best_of_each_mesh, mesh_of, why_it_wins
from jaxdl.performance.planner.search import make_candidate, search
from jaxdl.performance.planner.steptime import Efficiency, Profile, Split, own_time
from jaxdl.performance.planner.tensor_cost import tensor_profile
from jaxdl.performance.planner.trials import Trials
from jaxdl.training.step.turns import idle_share, kept_inputs, num_messages, room_for_layers, time_in_turns
from jaxdl.training.tasks import LanguageModelling

DECODER = Decoder(
    num_layers=8, width=1024, key_width=256, vocab_size=32_000, length=2048, itemsize=2,
    layer_weights=8 * 12 * 1024**2, stacked_share=0.75, stages=(2, 4, 8), splits_length=True,
)  # fmt: skip
SHAPES = {
    "layers": jax.ShapeDtypeStruct((8, 1024, 12 * 1024), "float32"),
    "table": jax.ShapeDtypeStruct((32_768, 1024), "float32"),
}
PARAMETERS = Parameters({"layers": ("layers", "embed", "mlp"), "table": ("vocab", "embed")}, SHAPES, 2.0)


def sizes(**changes):
    return dict.fromkeys(AXES, 1) | changes


def plan(nodes=4, gpus=2, rate=1e9, device_bytes=8e10, exchange=None, fixed=(), **changes):
    """Layouts of a decoder on a cluster."""
    where = cluster(nodes, gpus, rate, device_bytes)
    where.machine.links.update({"context": where.machine.links["fsdp"]})
    work = workload(parameters=PARAMETERS, decoder=DECODER, exchange=exchange or Dense(), **changes)
    return search(work, where, dict(fixed))


def test_a_pipeline_beats_an_exchange_below_these_tokens():
    # Of 1.2 billion parameters, width 2,048, on 4 nodes, in bfloat16: parallel.md, section 1.
    dense = pipeline.exchange_bytes(1.2e9, 4, 2)
    assert dense == pytest.approx(2 * 3 / 4 * 1.2e9 * 2)
    assert pipeline.break_even_tokens(dense, 2048, 2) == pytest.approx(440_000, rel=0.01)
    eight_bits = pipeline.exchange_bytes(1.2e9, 4, 2, 0.5)
    assert pipeline.break_even_tokens(eight_bits, 2048, 2) == pytest.approx(220_000, rel=0.01)
    # Of 100 entries one is kept, with its place in 6 bytes, and gathered by three others: 18 of 300 bytes.
    top = pipeline.exchange_bytes(1.2e9, 4, 2, 3 * 0.01 * 6 / (2 * 3 / 4 * 2))
    assert pipeline.break_even_tokens(top, 2048, 2) == pytest.approx(26_000, rel=0.02)
    # At Q* both send the same.
    even = pipeline.break_even_tokens(dense, 2048, 2)
    assert pipeline.activation_bytes(even, 2048, 2) == pytest.approx(dense)
    # 4 nodes of 8 GPUs with 400 TFLOP/s hide its messages behind 117 Gb/s.
    assert 8e-9 * pipeline.rate_that_hides(1.2e9, 2048, 2, 4, 8 * 4e14) == pytest.approx(117, rel=0.01)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 2), (4, 16)])
def test_turns_are_counted_as_a_schedule_plays_them(stages, microbatches):
    ends = {}
    for turn, stage in itertools.product(range(microbatches + 2 * (stages - 1)), range(stages)):
        ahead, back = turn - stage, turn - 2 * (stages - 1) + stage
        for number, what in ((ahead, "forward"), (back, "backward")):
            if 0 <= number < microbatches:
                ends[what, stage, number] = turn
    waiting = max(ends["backward", 0, n] - ends["forward", 0, n] + 1 for n in range(microbatches))
    assert kept_inputs(stages) in (waiting, 0)
    assert max(ends.values()) + 1 == time_in_turns(stages, microbatches) + stages - 1
    ahead = [turn for (name, *_), turn in ends.items() if name == "forward"]
    messages = max(ahead) + 1 + max(ends.values()) + 1
    assert messages == num_messages(stages, microbatches)
    share = idle_share(stages, microbatches)
    assert share == pytest.approx((stages - 1) / (microbatches + stages - 1))
    even = pipeline.turns(1.0, 0.0, stages, microbatches)
    again = 4 / 3 if stages > 1 else 1.0
    assert even.total_sec == pytest.approx((microbatches + stages - 1) * again / stages)
    assert even.idle_sec == pytest.approx(share * even.total_sec)
    # The last stage has the output layer, but computes no forward pass again.
    heavy = pipeline.turns(1.0, 0.5, stages, microbatches)
    assert heavy.turn_sec == pytest.approx(1.0 if stages == 1 else 0.5 / stages + 0.5)


@pytest.mark.parametrize(
    ("layers", "stages", "output_layers", "sizes"),
    [
        (16, 4, 1.0, [4, 4, 4, 4]),
        (12, 4, 5.5, [4, 4, 4, 0]),  # GPT-2 124M.
        (26, 4, 0.0, [7, 7, 7, 5]),
        (24, 4, 4.0, [7, 7, 7, 3]),
        (5, 4, 0.0, None),
        (4, 1, 2.0, [4]),
    ],
)
def test_the_last_stage_has_fewer_layers_where_that_is_faster(layers, stages, output_layers, sizes):
    room = room_for_layers(layers, stages, output_layers)
    if sizes is None:
        assert room is None
        return
    assert [room] * (stages - 1) + [layers - (stages - 1) * room] == sizes

    def slowest(last: int) -> float:
        """Three passes of what the last stage has, and four of what the others have: one forward pass is done twice."""
        return max(3 * (last + output_layers), 4 * (layers - last) / max(stages - 1, 1))

    possible = [last for last in range(sizes[0] + 1) if (layers - last) % max(stages - 1, 1) == 0]
    assert stages == 1 or slowest(sizes[-1]) == min(slowest(last) for last in possible if (layers - last) >= last)
    # The planner divides time and memory alike.
    decoder = dataclasses.replace(DECODER, num_layers=layers, output_layers=output_layers)
    assert decoder.shares(stages) == pytest.approx((sizes[0] / layers, sizes[-1] / layers))
    head = 0.2
    found = pipeline.turns(1.0, head, stages, 8, shares=decoder.shares(stages))
    turn = max(0.8 * sizes[0] / layers * 4 / 3, 0.8 * sizes[-1] / layers + head) if stages > 1 else 1.0
    assert found.turn_sec == pytest.approx(turn)


def test_a_ring_sends_what_a_gather_would():
    # 65,536 tokens, 8 heads of keys of 128: all keys and values of a layer have 268 MB in bfloat16, of which 8
    # devices each lack 7/8.
    assert context_cost.key_bytes(65_536, 8, 8 * 128, 2) == pytest.approx(7 / 8 * 268.4e6, rel=1e-3)
    forward = context_cost.key_bytes(2048, 4, 256, 2)
    # Keys in 16 bits there and again, their gradients in 32: the bytes that tests/test_context.py counts.
    assert context_cost.pass_bytes(2048, 4, 256, 2) == 3 / 4 * 2048 * 2 * 256 * (2 + 2 + 4)
    assert context_cost.pass_bytes(2048, 4, 256, 2, again=True) == 5 * forward
    assert context_cost.pass_bytes(2048, 4, 256, 4) == 3 * context_cost.key_bytes(2048, 4, 256, 4)
    assert [context_cost.pass_messages(ways) for ways in (1, 2, 4)] == [0, 4, 8]
    assert context_cost.key_bytes(2048, 1, 256, 2) == 0


def test_the_time_of_stages_has_idle_turns_and_messages():
    where, profile = cluster().machine, Profile(Fit(), Fit(of_example=1e-3), Fit(2e-3))
    link, head = Link(1e-4, 1e9), DECODER.head_share
    split = Split(DECODER, link, between_nodes=True, common_bytes=4e6)
    machine = dataclasses.replace(where, overlaps=False)
    found = own_time(profile, sizes(stage=4), 2, 8, machine, Efficiency(1.0), split=split)
    turn = max(2e-3 * (1 - head) / 4 * 4 / 3, 2e-3 * (1 - head) / 4 + 2e-3 * head)
    assert found.compute_sec == pytest.approx(11 * turn + (1 - 0.75 * 3 / 4) * 2e-3)
    assert found.idle_sec == pytest.approx(3 * turn)
    turns = 8 + 3 * 3 / 2
    activations, tables = turns * 2 * 2 * 2048 * 1024 * 2, 2 * 3 / 4 * 4e6
    assert found.node_bytes == pytest.approx(activations + tables)
    messages = turns * 2e-4 + activations / 1e9 + 6e-4 + tables / 1e9
    assert found.slow_sec == pytest.approx(messages)
    assert found.exposed_slow_sec == pytest.approx(messages)
    # Inside a node the same is no message to another node; beside kernels all but the sum of tables hides.
    beside = own_time(
        profile,
        sizes(stage=4),
        2,
        8,
        where,
        Efficiency(1.0, 1.0),
        split=dataclasses.replace(split, between_nodes=False),
    )
    assert beside.node_bytes == beside.exposed_slow_sec == 0
    assert beside.inner_sec == pytest.approx(messages)
    left = max(0.0, messages - 6e-4 - tables / 1e9 - found.compute_sec)
    assert beside.exposed_sec == pytest.approx(left + 6e-4 + tables / 1e9)


def test_stages_gather_once_a_step():
    # Float32: two gathers and a sum of equal size. bfloat16: two gathers of half of the size of the sum.
    assert pipeline.gather_uses(4, 8) == pytest.approx(1 / 3 + 8 / 3)
    assert pipeline.gather_uses(2, 8) == pytest.approx(1 / 4 + 8 / 2)
    profile = Profile(Fit(), Fit(), Fit(), fsdp_bytes=1e9, fsdp_messages=12)
    machine = dataclasses.replace(cluster().machine, overlaps=False)
    machine.links["fsdp"] = Link(1e-5, 1e9)
    found = own_time(
        profile, sizes(stage=4, fsdp=2), 1, 8, machine, Efficiency(), split=Split(DECODER, Link(0.0, 1e30))
    )
    uses = (1 - 0.75 * 3 / 4) * (1 / 4 + 8 / 2)
    assert found.inner_sec == pytest.approx(uses * (12 * 1e-5 + 0.5))


def test_split_texts_divide_the_passes_and_send_keys():
    profile = Profile(Fit(), Fit(of_example=1e-3), Fit())
    machine = dataclasses.replace(cluster().machine, overlaps=False)
    machine.links["context"] = Link(1e-5, 1e10)
    whole = own_time(profile, sizes(), 4, 1, machine, Efficiency(1.0))
    found = own_time(profile, sizes(context=4), 4, 1, machine, Efficiency(1.0), split=Split(DECODER, Link(0.0, 1e9)))
    assert found.compute_sec == pytest.approx(whole.compute_sec / 4)
    num_bytes = 8 * 4 * 3 / 4 * 2048 * 2 * 256 * (2 + 2 + 4)  # Layers, examples; keys twice, and their gradients.
    assert found.inner_sec == pytest.approx(8 * 8 * 1e-5 + num_bytes / 1e10)


def test_memory_of_stages_and_of_split_texts():
    fit, one = Fit(1e6, 8e6, 1e5), sharding_of(ShardingConfig(), "sharded")
    alone = memory(PARAMETERS, fit, Step(sizes(), one, 8, 2))
    parts = memory(PARAMETERS, fit, Step(sizes(context=2), one, 8, 2), example_bytes=1e3)
    size = 4 * (8 * 1024 * 12 * 1024 + 32_768 * 1024)
    assert alone.state == 3 * size
    assert parts.state == 3 * size / 2  # Parameters are split over `context` as over `fsdp`.
    assert parts.temporary == pytest.approx(1e6 + 8e6 / 2 + 1e5 * 2 / 2 + size / 2)
    assert parts.batch == 2 * 1e3 * 2 * 8 / 2
    staged = memory(PARAMETERS, fit, Step(sizes(stage=4), one, 8, 2, decoder=DECODER))
    assert staged.state == 3 * 4 * (2 * 1024 * 12 * 1024 + 32_768 * 1024)
    kept, head = 1 - 0.75 * 3 / 4, DECODER.head_share
    inputs = 7 * 2 * 2048 * 1024 * 2  # 2 S - 1 micro-batches of 2 examples.
    running = kept * 9e6 + 2e5 * (head + (1 - head) / 4) + inputs
    assert staged.temporary == pytest.approx(running + staged.state / 3)
    whole = memory(PARAMETERS, fit, Step(sizes(stage=4, fsdp=2), one, 8, 2, decoder=DECODER))
    # A stage's parameters in bfloat16, gathered, beside its half of their sum.
    running = kept * (1e6 + 4e6) + 2e5 * (head + (1 - head) / 4) + inputs
    assert whole.temporary == pytest.approx(running + staged.state / 3 / 2 + staged.state / 3 / 2)


def test_long_texts_of_a_large_model_fit_where_their_length_is_split():
    # A Llama of 8 billion parameters, texts of 131,072 tokens: with remat `block` the inputs of 32 layers in bfloat16,
    # and the work on one of them.
    shapes = {
        "layers": jax.ShapeDtypeStruct((32, 4096, 53_248), "float32"),
        "tables": jax.ShapeDtypeStruct((2 * 128_256, 4096), "float32"),
    }
    axes = {"layers": ("layers", "embed", "mlp"), "tables": ("vocab", "embed")}
    inputs, layer = 32 * 131_072 * 4096 * 2, 131_072 * (3 * 14_336 + 8 * 4096) * 2
    large = Parameters(axes, shapes, optimizer_copies=2.0)
    size = 4 * sum(math.prod(x.shape) for x in shapes.values())
    fit, config = Fit(0.0, size, inputs + layer), sharding_of(ShardingConfig(), "sharded")
    needs = {
        name: memory(large, fit, Step(sizes(**{name: 8}), config, 1, 1), example_bytes=4 * 131_072)
        for name in ("fsdp", "context")
    }
    assert needs["fsdp"].state == needs["context"].state == pytest.approx(3 * size / 8)
    assert needs["fsdp"].temporary == pytest.approx(size / 8 + inputs + layer)
    assert needs["context"].temporary == pytest.approx(size / 8 + (inputs + layer) / 8)
    assert needs["context"].total < 25e9 < 65e9 < needs["fsdp"].total


def test_which_stages_and_splits_are_tried():
    where = cluster(nodes=4, gpus=2)
    work = workload(decoder=DECODER, parameters=PARAMETERS, tensor_fits=lambda size: size == 1)
    every = list(choices(work, where, {}))
    meshes = {(one.replica, one.stage, one.fsdp, one.context) for one in every}
    assert {(4, 1, 2, 1), (4, 1, 1, 2), (1, 4, 2, 1), (2, 2, 2, 1), (1, 8, 1, 1), (4, 2, 1, 1)} <= meshes
    assert all(replica * stage * fsdp * context == 8 for replica, stage, fsdp, context in meshes)
    # Without stages replicas are the nodes, and what is inside a stage never leaves a node.
    assert {replica for replica, stage, _, _ in meshes if stage == 1} == {4}
    assert all(fsdp * context <= 2 for _, _, fsdp, context in meshes)
    assert all(one.microbatches >= one.stage for one in every)
    assert {"mesh.stage", "mesh.context"}.isdisjoint(
        next(one for one in every if one.stage == 1 == one.context).settings
    )
    assert {one.stage for one in choices(work, where, {"mesh.stage": 4})} == {4}
    assert {one.context for one in choices(work, where, {"mesh.context": 2})} == {2}
    odd = dataclasses.replace(DECODER, stages=(), length=2050)
    assert {(one.stage, one.context) for one in choices(dataclasses.replace(work, decoder=odd), where, {})} == {(1, 1)}
    assert odd.can_split(5)
    assert not odd.can_split(2)
    whole = dataclasses.replace(DECODER, splits_length=False)
    assert {one.context for one in choices(dataclasses.replace(work, decoder=whole), where, {})} == {1}


def test_a_slow_network_and_few_tokens_make_stages_win():
    none = (("model.remat", "none"),)
    slow, fast = (plan(rate=rate, fixed=none) for rate in (3e7, 1e11))
    assert slow.best.choice.stage > 1
    assert fast.best.choice.stage == 1
    tokens = 64 * 2048
    for layouts in (slow, fast):
        said = why_it_wins(layouts)
        plain = next(one for one in layouts.candidates if one.choice.replica == 4)
        pipe = next(one for one in layouts.candidates if one.choice.replica < 4)
        [even] = re.findall(rf"a step has {tokens:,} tokens, fewer than the Q\* = ([\d,]+) below", said)
        [by_time] = re.findall(r"send for a shorter time below ([\d,]+)\)", said)
        assert int(by_time.replace(",", "")) == pytest.approx(int(even.replace(",", "")), rel=0.25)  # But for latency.
        # A step of Q* tokens would send as much as the exchange: of each token d numbers of 2 bytes there and back.
        more = (int(even.replace(",", "")) - tokens) / pipe.choice.replica * 2 * 1024 * 2
        more *= 1 + 3 / 2 * (pipe.choice.stage - 1) / pipe.choice.microbatches
        assert 2 * pipe.time.node_bytes + more == pytest.approx(2 * plain.time.node_bytes, rel=1e-4)
        assert said.startswith(f"{mesh_of(layouts.best.choice)} wins over ")
        assert "stages wait for each other for" in said
    # Eight bits halve Q*, and the stages' advantage.
    quantized = plan(rate=3e7, exchange=Quantized(bits=8), fixed=none)
    ratios = []
    for layouts in (slow, quantized):
        plain, staged = (
            next(one for one in layouts.candidates if (one.choice.stage > 1) == wanted) for wanted in (False, True)
        )
        ratios.append(plain.time.total_sec / staged.time.total_sec)
    assert ratios[0] > ratios[1]
    assert why_it_wins(dataclasses.replace(slow, decoder=None)) == ""
    # In one node there is no network that stages could spare.
    assert "they save no message on a slow network" in why_it_wins(plan(nodes=1, gpus=4, fixed=none))


def test_a_model_that_fits_in_stages_alone():
    size = 4 * (8 * 1024 * 12 * 1024 + 32_768 * 1024) / 1e9
    # A node has room for half of the state, not for all of it.
    layouts = plan(gpus=1, device_bytes=2.4e9 * size, rate=1e11, fixed=(("model.remat", "block"),))
    assert layouts.best.choice.stage > 1
    assert "no layout without stages between nodes fits into memory" in why_it_wins(layouts)
    assert [mesh_of(one.choice) for one in best_of_each_mesh(layouts.candidates)].count(
        mesh_of(layouts.best.choice)
    ) == 1


def test_tensor_is_compared_by_formula_and_compiled_where_it_seems_best():
    asked = []

    def profiles(tensor, remat, sharding):
        asked.append(tensor)
        return Profile(Fit(1e6), Fit(1e-5, 0.0, 3e-4 / tensor), Fit(), fsdp_bytes=3e9, fsdp_messages=6)

    fixed = (("model.remat", "none"), ("mesh.stage", 1), ("mesh.context", 1))
    layouts = plan(nodes=1, gpus=4, compares_tensor=True, profiles=profiles, fixed=fixed)
    assert {one.choice.tensor for one in layouts.candidates} == {1, 2, 4}
    assert layouts.best.choice.tensor in asked
    alone = profiles(1, "none", "sharded")
    half = tensor_profile(alone, 2, DECODER)
    assert half.passes_sec.at(1, 8) == pytest.approx(1e-5 + 8 * 1.5e-4)
    assert half.tensor_bytes.at(1, 1) == 4 * 8 * 2 * 1 / 2 * 2048 * 1024 * 2  # Sums, layers, all-reduce.
    assert half.fsdp_bytes == 1.5e9


def test_a_link_of_several_stages_of_a_node_is_shared_by_fewer_devices():
    where = cluster(nodes=2, gpus=4, rate=1e9)
    work = workload(decoder=DECODER, parameters=PARAMETERS)
    fixed = {"model.remat": "none", "step.microbatches": 8, "mesh.tensor": 1, "mesh.replica": 1, "mesh.context": 1}
    times = {}
    for one in choices(work, where, fixed):
        times[one.stage] = make_candidate(work, where, one).time
    assert times.keys() == {2, 4, 8}
    assert all(time.node_bytes > 0 for time in times.values())
    # Stages inside of nodes send others gradients alone, each device those of its layers and a part of the rest.
    [inside] = choices(work, where, fixed | {"mesh.replica": 2, "mesh.stage": 4, "sharding.param_sharding": "sharded"})
    own = 2 * 12 * 1024**2 + 32_768 * 1024 / 4
    assert make_candidate(work, where, inside).time.node_bytes == pytest.approx(4 * own)


def test_the_bytes_of_stages_are_those_of_the_compiled_step():
    experiment = jaxdl.Experiment(
        data=SyntheticText(vocab_size=32, length=16, num_train=64, num_test=16),
        model=Transformer(num_layers=4, embed_dim=32, num_heads=4),
        task=LanguageModelling(),
        sharding=ShardingConfig(min_shard_elements=1),
        steps=4,
    )
    asked = {"mesh": MeshConfig(stage=4, fsdp=2), "batch_size": 16, "step.microbatches": 4}
    step = Trials(experiment).plan(asked, jax.devices())
    decoder = decoder_of(step)
    assert (decoder.stages, decoder.num_layers, decoder.width) == ((2, 3, 4), 4, 32)
    assert decoder.splits_length
    small = experiment.replaced({"model.scan_layers": False})
    assert decoder_of(Trials(small).plan({}, jax.devices()[:1])).stages == ()
    sent = {}
    module = hlo.parse(compile_step(step).as_text())
    for one in overlap.play(module, dict(step.parts.layout.mesh.shape), overlap.Links(math.inf)).messages:
        sent[one.kind, one.axes] = sent.get((one.kind, one.axes), 0) + one.times * one.sent_bytes
    turn = pipeline.activation_bytes(decoder.tokens(16 / 2 / 4), decoder.width, decoder.itemsize)
    assert sent["collective-permute", ("stage",)] == num_messages(4, 4) * turn / 2
    # Each parameter is gathered once, however many micro-batches there are.
    layers = Parameters(step.parts.network.axes, step.parts.network.param_shapes)
    gathered = sum(size for (kind, axes), size in sent.items() if kind == "all-gather" and axes == ("fsdp",))
    local = layers.bytes(step.parts.layout)["parameters"]
    assert 0.9 * local < gathered < 1.5 * local


@pytest.mark.slow
def test_the_bytes_of_split_texts_are_about_those_of_the_compiled_step():
    experiment = jaxdl.Experiment(
        data=SyntheticText(vocab_size=32, length=32, num_train=64, num_test=16),
        model=Transformer(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2),
        task=LanguageModelling(),
        steps=4,
    )
    step = Trials(experiment).plan({"mesh": MeshConfig(fsdp=1, context=4), "batch_size": 4}, jax.devices()[:4])
    decoder, module = decoder_of(step), hlo.parse(compile_step(step).as_text())
    played = overlap.play(module, dict(step.parts.layout.mesh.shape), overlap.Links(math.inf))
    ring = [one for one in played.messages if one.kind == "collective-permute" and one.axes == ("context",)]
    sent = sum(one.times * one.sent_bytes for one in ring)
    predicted = 2 * 4 * context_cost.pass_bytes(32, 4, decoder.key_width, decoder.itemsize)
    # The others are tokens that go to the devices of their chunks.
    assert predicted <= sent < 1.25 * predicted
