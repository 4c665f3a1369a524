"""How a planner brings tokens to experts: bytes, seconds and memory on closed forms, and which way and mesh wins."""

import dataclasses
import math

import jax
import pytest
from test_gpu_rules import EXPERIMENT
from test_moe import SOFTMAX
from test_planner import cluster, workload
from test_planner_stages import DECODER

from jaxdl.exchange.cost import Link
from jaxdl.parallel.collectives.experts import WAYS
from jaxdl.parallel.compiler import wire_bytes
from jaxdl.parallel.mesh import AXES, MeshConfig
from jaxdl.performance.planner import expert_cost
from jaxdl.performance.planner.auto import settings_of
from jaxdl.performance.planner.choices import choices
from jaxdl.performance.planner.decoder import decoder_of
from jaxdl.performance.planner.expert_cost import Mixture, Path
from jaxdl.performance.planner.few import few_layouts, search_layouts
from jaxdl.performance.planner.memory import Fit, Parameters
from jaxdl.performance.planner.reasons import why_it_wins, why_this_way
from jaxdl.performance.planner.search import search
from jaxdl.performance.planner.steptime import Efficiency, Profile, Split, own_time
from jaxdl.performance.planner.trial import Measured, without_experts
from jaxdl.performance.planner.workload import fixed_fields
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.step import make_train_step

LAYERS, EXPERTS, PER_TOKEN, WIDTH, HIDDEN = 8, 16, 4, 1024, 512
WEIGHTS = LAYERS * EXPERTS * 3 * WIDTH * HIDDEN
MIXTURE = Mixture(
    num_layers=LAYERS, num_experts=EXPERTS, per_token=PER_TOKEN, width=WIDTH, hidden=HIDDEN, itemsize=2, row_buffer=2.0,
    dispatch="auto", weights=WEIGHTS,
)  # fmt: skip
OF_EXPERTS = dataclasses.replace(DECODER, mixture=MIXTURE, stages=(), splits_length=False)
PARAMETERS = Parameters(
    {"experts": ("layers", "expert", "embed", "mlp"), "rest": ("layers", "embed", "mlp")},
    {
        "experts": jax.ShapeDtypeStruct((LAYERS, EXPERTS, WIDTH, 3 * HIDDEN), "float32"),
        "rest": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), "float32"),
    },
    optimizer_copies=2.0,
)
SHARDED = {"model.remat": "none", "sharding.param_sharding": "sharded", "step.microbatches": 1, "mesh.tensor": 1}


def sizes(**changes):
    return dict.fromkeys(AXES, 1) | changes


def plan(where, fixed=(), mixture=MIXTURE, **changes):
    """Layouts of a mixture on a cluster."""
    decoder = dataclasses.replace(OF_EXPERTS, mixture=mixture)
    work = workload(parameters=PARAMETERS, decoder=decoder, tensor_fits=lambda size: size == 1, **changes)
    return search(work, where, SHARDED | dict(fixed))


@pytest.mark.parametrize(("way", "remat"), [("gather", "none"), ("all_to_all", "none"), ("all_to_all", "block")])
def test_the_bytes_of_a_way_are_those_of_the_step(way, remat):
    model = SOFTMAX.replaced({"row_buffer": 2.0, "dispatch": way, "remat": remat})
    mesh = MeshConfig(replica=1, fsdp=8, tensor=1)
    step = make_plan(EXPERIMENT.replaced({"model": model, "mesh": mesh}), jax.devices())
    batch = step.splits.train.batch_shapes(16, evaluating=False)
    program = make_train_step(step.parts).lower(step.parts.state_spec.abstract(), batch)
    kinds = ("all_gather", "reduce_scatter", "all_to_all")
    sent = [one for one in wire_bytes.collectives(program) if one.kind in kinds]
    mixture = decoder_of(step).mixture
    assert (mixture.num_layers, mixture.dispatch, mixture.weights) == (2, way, 2 * 8 * 3 * 32 * 16)
    # The program has a loop over layers, whose turn is counted once.
    found = expert_cost.layer_messages(mixture, way, 8, 2 * 16, again=remat == "block")
    assert found == (sum(one.sent_bytes for one in sent), len(sent))
    # What a trial sends so is taken off, whatever else it sends.
    measured = Measured(1e9, 1.0, 1.0, {"fsdp": 2 * found.num_bytes + 77.0}, {"fsdp": 2 * found.collectives + 3.0})
    rest = without_experts(step, measured)
    assert (rest.sent, rest.messages) == ({"fsdp": 77.0}, {"fsdp": 3.0})
    tokens = expert_cost.buffer_bytes(mixture, way, 8, 2 * 16, 1, 2 if remat == "none" else 1)
    assert rest.temporary == 1e9 - tokens


def test_the_bytes_of_a_layer_on_a_closed_form():
    t, w, k, others = 100, 2 * WIDTH, PER_TOKEN, 7
    # Tokens, weights and numbers of experts go out, results come back; then the gradients of these.
    gather = expert_cost.layer_messages(MIXTURE, "gather", 8, t, again=False)
    assert gather == (others * (4 * t * w + 3 * 4 * t * k), 7)
    again = expert_cost.layer_messages(MIXTURE, "gather", 8, t, again=True)
    assert again == (gather.num_bytes + others * (t * w + 2 * 4 * t * k), 10)
    rows = 2 * t * k // 8
    rows_sent = expert_cost.layer_messages(MIXTURE, "all_to_all", 8, t, again=False)
    assert rows_sent == (others * rows * (4 * w + 4), 5)
    assert expert_cost.layer_messages(MIXTURE, "all_to_all", 8, t, again=True) == (others * rows * (6 * w + 8), 8)
    # 8 devices have as many rows as a gather has tokens: those of twice as many are fewer, as the model sees too.
    assert [MIXTURE.way(size, 800) for size in (4, 16)] == ["gather", "all_to_all"]
    assert dataclasses.replace(MIXTURE, dispatch="gather").way(16, 800) == "gather"
    assert [MIXTURE.is_spread(size) for size in (1, 2, 16, 32)] == [False, True, True, False]


def test_the_time_of_messages_inside_a_node_and_over_nodes():
    fast, slow = Link(1e-5, 1e11), Link(1e-4, 1e9)
    sent = expert_cost.Messages(8e6, 4)
    inside, over = Path(8, fast, slow), Path(8, fast, slow, of_node=4)
    for way in WAYS:
        assert inside.seconds(way, sent) == pytest.approx(4 * 7 * 1e-5 + 8e6 / 1e11)
        assert inside.node_bytes(way, 8e6) == 0
    # Around a ring one of four devices sends to the other node, at the rate of all four.
    assert over.seconds("gather", sent) == pytest.approx(4 * 7 * 1e-4 + 8e6 / 4e9)
    assert over.node_bytes("gather", 8e6) == 2e6
    # Of 7 others 4 are on the other node, and all devices send to them at once.
    assert over.seconds("all_to_all", sent) == pytest.approx(4 * 7 * 1e-4 + 8e6 * 4 / 7 / 1e9)
    assert over.node_bytes("all_to_all", 8e6) == pytest.approx(8e6 * 4 / 7)
    known = dataclasses.replace(fast, collectives={"all_to_all": Link(1e-3, 1e10)})
    assert Path(8, known, slow).seconds("all_to_all", sent) == pytest.approx(4 * 7 * 1e-3 + 8e6 / 1e10)
    assert Path(8, known, slow).seconds("gather", sent) == inside.seconds("gather", sent)


def test_the_time_of_a_step_has_the_messages_of_all_layers():
    machine = dataclasses.replace(cluster().machine, overlaps=False)
    profile = Profile(Fit(), Fit(of_example=1e-3), Fit(), fsdp_bytes=8e8, fsdp_messages=6)
    path = Path(4, machine.links["fsdp"], machine.slow)
    split = Split(OF_EXPERTS, machine.links["fsdp"], path=path, way="gather")
    found = own_time(profile, sizes(fsdp=4), 2, 3, machine, Efficiency(1.0), split=split)
    sent = expert_cost.layer_messages(MIXTURE, "gather", 4, 2 * DECODER.length, again=False)
    assert found.token_bytes == 3 * LAYERS * sent.num_bytes
    assert found.token_sec == pytest.approx(3 * LAYERS * (7 * 3 * 5e-6 + sent.num_bytes / 1e11))
    gathers = 3 * (6 * 3 * 5e-6 + 6e8 / 1e11)
    assert found.inner_sec == found.exposed_sec == pytest.approx(found.token_sec + gathers)
    assert found.exposed_slow_sec == found.slow_sec == found.node_bytes == 0
    # Over nodes the same waits for the network; gathered experts are sent as other parameters are.
    wide = dataclasses.replace(split, path=dataclasses.replace(path, of_node=2))
    over = own_time(profile, sizes(fsdp=4), 2, 3, machine, Efficiency(1.0), split=wide)
    assert over.inner_sec == 0
    assert over.slow_sec == over.exposed_slow_sec == over.exposed_sec > found.exposed_sec
    assert over.node_bytes == pytest.approx((3 * 6e8 + found.token_bytes) / 2)
    alone = dataclasses.replace(split, way=None, gathers_experts=True)
    gathered = own_time(profile, sizes(fsdp=4), 2, 3, machine, Efficiency(1.0), split=alone)
    more = 3 * 3 / 4 * WEIGHTS * (2 + 2 + 4) / 1e11  # Twice in 16 bits, and their gradients in 32.
    assert gathered.inner_sec == pytest.approx(gathers + more)
    assert gathered.token_bytes == 0


def test_the_memory_of_room_for_rows():
    t, k = 1000, PER_TOKEN
    rows = 2 * t * k
    # Of each row more than a device has with all experts: what enters and leaves, and hidden numbers.
    kept, working = 2 * (2 * WIDTH + 2 * HIDDEN), 2 * (4 * HIDDEN + 2 * WIDTH)
    gather = (rows - t * k) * (LAYERS * kept + working) + 2 * 7 * t * 2 * WIDTH
    assert expert_cost.buffer_bytes(MIXTURE, "gather", 8, t, kept_layers=LAYERS) == gather
    sent = (rows - t * k) * (kept + working) + 3 * rows * 2 * WIDTH
    assert expert_cost.buffer_bytes(MIXTURE, "all_to_all", 8, t) == sent
    assert expert_cost.kept_layers("none", LAYERS) == LAYERS
    assert expert_cost.kept_layers("block", LAYERS) == 1
    half = (rows - t * k) * 2 * (2 * WIDTH + HIDDEN + 2 * HIDDEN + 2 * WIDTH) + 2 * 7 * t * 2 * WIDTH
    assert expert_cost.buffer_bytes(MIXTURE, "gather", 8, t, tensor=2) == half
    [need] = [one for one in plan(cluster(1, 8)).candidates if one.way == "gather"]
    [other] = [one for one in plan(cluster(1, 8)).candidates if one.way == "all_to_all"]
    tokens = 64 // 8 * DECODER.length
    assert need.memory.total - other.memory.total == pytest.approx(tokens * 2 * WIDTH * (2 * 7 - 3 * 2 * k))


def test_which_ways_and_meshes_are_tried():
    where = cluster(nodes=2, gpus=4)
    work = workload(decoder=OF_EXPERTS, parameters=PARAMETERS, tensor_fits=lambda size: size <= 2)
    open_ = SHARDED | {"mesh.tensor": -1}
    every = list(choices(work, where, open_))
    tried = {(one.replica, one.fsdp, one.tensor, one.dispatch) for one in every}
    meshes = {(2, 4, 1), (2, 2, 2), (1, 8, 1), (1, 4, 2)}
    assert tried == {(*mesh, way) for mesh in meshes for way in WAYS}
    assert {one.settings["model.dispatch"] for one in every} == set(WAYS)
    # A given way, also `auto`, stays.
    for given in ("gather", "auto"):
        assert {one.dispatch for one in choices(work, where, open_ | {"model.dispatch": given})} == {""}
    # Experts that cannot be spread are gathered, which is not done over nodes.
    odd = dataclasses.replace(
        work, decoder=dataclasses.replace(OF_EXPERTS, mixture=dataclasses.replace(MIXTURE, num_experts=6))
    )
    assert {(one.replica, one.fsdp, one.dispatch) for one in choices(odd, where, SHARDED)} == {(2, 4, "")}
    whole = SHARDED | {"sharding.param_sharding": "replicated"}
    assert {(one.replica, one.fsdp, one.dispatch) for one in choices(work, where, whole)} == {(2, 4, "")}
    # No text of a dense decoder is brought anywhere.
    dense = dataclasses.replace(work, decoder=dataclasses.replace(OF_EXPERTS, mixture=None))
    assert {(one.replica, one.dispatch) for one in choices(dense, where, SHARDED)} == {(2, "")}
    few = few_layouts(work, cluster(1, 4), {"sharding.param_sharding": "sharded"}, 4)
    assert [(one.choice.tensor, one.choice.dispatch) for one in few] == [(1, way) for way in sorted(WAYS)]


@pytest.mark.parametrize("fsdp", [4, 8, 16])
def test_the_faster_way_is_the_plan_and_the_report_says_why(fsdp):
    where = cluster(1, fsdp)
    machine = dataclasses.replace(where.machine, overlaps=False)
    machine.links["fsdp"] = Link(5e-6, 1e11, {"all_to_all": Link(5e-6, 0.9e11)})
    where = dataclasses.replace(where, machine=machine, device_bytes=1e12)
    layouts = plan(where)
    t, w, others = 64 // fsdp * DECODER.length, 2 * WIDTH, fsdp - 1
    rows = math.ceil(2 * PER_TOKEN * t / fsdp)
    num_bytes = {"gather": others * (4 * t * w + 12 * t * PER_TOKEN), "all_to_all": others * rows * (4 * w + 4)}
    rate, count = {"gather": 1e11, "all_to_all": 0.9e11}, {"gather": 7, "all_to_all": 5}
    seconds = {way: LAYERS * (count[way] * others * 5e-6 + num_bytes[way] / rate[way]) for way in WAYS}
    of_way = {one.way: one.time for one in layouts.candidates}
    for way in WAYS:
        assert of_way[way].token_sec == pytest.approx(seconds[way])
        assert of_way[way].token_bytes == LAYERS * num_bytes[way]
    best = min(WAYS, key=seconds.__getitem__)
    assert best == ("all_to_all" if fsdp == 16 else "gather")
    assert layouts.best.way == best
    assert settings_of(layouts.best, EXPERIMENT)["model.dispatch"] == best
    said = why_this_way(layouts)
    assert said.startswith(
        f"tokens come to experts on {fsdp} devices by {best} ({LAYERS * num_bytes[best] / 1e9:.3g} GB "
    )
    lead = 1e3 * abs(seconds["gather"] - seconds["all_to_all"])
    assert said.endswith(f": that takes {lead:.3g} ms more")
    given = plan(where, {"model.dispatch": "gather"}, dataclasses.replace(MIXTURE, dispatch="gather"))
    assert [one.way for one in given.candidates] == ["gather"]
    assert why_this_way(given).endswith(", which is given")
    assert "model.dispatch" not in given.best.choice.settings


def test_a_mixture_that_fits_in_no_node_is_spread_over_nodes():
    state = 3 * 4 * (WEIGHTS + LAYERS * WIDTH * 4 * WIDTH)
    profiles = {"profiles": lambda *_: Profile(Fit(), Fit(of_example=1e-3), Fit())}
    roomy, tight = (plan(cluster(2, 4, device_bytes=size), **profiles) for size in (1e12, 0))
    assert (roomy.best.choice.replica, roomy.best.choice.fsdp) == (2, 4)
    need = {(one.choice.replica, one.way): one.memory for one in tight.candidates}
    assert need[1, "gather"].state == state / 8
    assert need[2, "gather"].state == state / 4
    between = 0.5 * (need[1, "gather"].total + min(need[2, way].total for way in WAYS)) / 0.9
    found = plan(cluster(2, 4, device_bytes=between), **profiles)
    assert (found.best.choice.replica, found.best.choice.fsdp) == (1, 8)
    assert "on 8 devices over 2 nodes by gather" in why_this_way(found)
    assert why_it_wins(found) == ""
    # All messages cross the network: 4 devices of a node are one link of a ring.
    assert found.best.time.node_bytes == pytest.approx(found.best.time.token_bytes / 4)
    assert found.best.time.exposed_slow_sec > 0


def test_what_a_search_that_compiles_less_leaves_out():
    asked = []

    def profiles(tensor, remat, sharding):
        asked.append(remat)
        kept, slow = {"none": (4e7, 1.0), "dots": (2e7, 1.1), "block": (1e7, 1.3)}[remat]
        return Profile(Fit(1e6, 1e8, kept), Fit(1e-4, 0.0, slow * 3e-4), Fit(1e-4))

    work = workload(profiles=profiles, remats=("none", "dots", "block"))
    for size in (8e9, 4e8, 2e8, 1.2e8):
        where, fixed = cluster(device_bytes=size), {"mesh.tensor": 1}
        every = search(work, where, fixed)
        asked.clear()
        found = search_layouts(work, where, fixed)
        assert (found.best and found.best.choice) == (every.best and every.best.choice)
        assert ("dots" in asked) == (size < 8e9)


def test_a_given_way_is_kept_by_a_plan():
    auto = EXPERIMENT.replaced({"model": SOFTMAX})
    assert "model.dispatch" not in fixed_fields(auto, ())
    assert fixed_fields(auto, ("model.dispatch",))["model.dispatch"] == "auto"
    assert fixed_fields(auto.replaced({"model.dispatch": "gather"}), ())["model.dispatch"] == "gather"
    assert "model.dispatch" not in fixed_fields(EXPERIMENT, ("model.dispatch",))
