"""`--plan auto`: what stays as given, the plan of a run on these devices, and how it is kept."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest
from runs import TinyPerceptron, tiny_experiment
from test_planner import cluster, workload

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.files import CHOICE_FILE, PLAN_FILE
from jaxdl.data import Clicks, SyntheticText
from jaxdl.exchange.cost import NOMINAL_SPEEDS, Link, Machine
from jaxdl.models import DLRM, Transformer
from jaxdl.parallel.compiler.collectives import usual_collectives
from jaxdl.parallel.embedding import DataParallel, EmbeddingConfig, RowWise, TableWise
from jaxdl.parallel.embedding.traffic import axis_bytes
from jaxdl.parallel.mesh import AXES, RARE_AXES, MeshConfig
from jaxdl.performance.planner import auto, trials
from jaxdl.performance.planner.few import all_fit, fastest_of, few_layouts
from jaxdl.performance.planner.mesh_tables import tables_on_meshes
from jaxdl.performance.planner.search import search, with_other_tables
from jaxdl.performance.planner.table_bytes import compiled_step
from jaxdl.performance.planner.table_report import measured_workload
from jaxdl.performance.planner.tables import costs_of
from jaxdl.performance.planner.trial import Setting, measure_step, table_sec
from jaxdl.performance.planner.trials import Trials, trial_plan
from jaxdl.performance.planner.workload import fixed_fields
from jaxdl.training.command import parse_command
from jaxdl.training.experiment import identity
from jaxdl.training.plans import PlanAuto
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.run.plan.layout import Planned
from jaxdl.training.run.workdir.records import Workdir, choice_file
from jaxdl.training.tasks import Binary, LanguageModelling

ONE = {axis: 1 for axis in AXES if axis not in RARE_AXES}
"""The sizes of a mesh of one device, as a run gives them."""
MESH = MeshConfig()
GIVEN = PlanAuto(devices_per_node=1, network="1gbit", timed=2)
SIZES = dict.fromkeys(AXES, 1) | {"replica": 2, "fsdp": 4}


def clicks(**changes):
    data = Clicks(rows=(900, 40, 7, 2000), num_ids=(1, 1, 2, 1), train_examples=256, test_examples=64)
    model = DLRM(columns=8, bottom=(8,), top=(8,))
    values = {"data": data, "model": model, "task": Binary(), "steps": 4, "batch_size": 64}
    return jaxdl.Experiment(**(values | changes))


def test_what_differs_from_its_default_is_fixed():
    experiment = tiny_experiment(mesh=MESH)
    assert fixed_fields(experiment, ()) == {}
    assert fixed_fields(experiment, ("mesh.tensor", "step.microbatches")) == {"mesh.tensor": 1, "step.microbatches": 1}
    changed = experiment.replaced({"mesh.replica": 2, "step.microbatches": 2, "sharding.param_sharding": "replicated"})
    wanted = {"mesh.replica": 2, "step.microbatches": 2, "sharding.param_sharding": "replicated"}
    assert fixed_fields(changed, ("mesh.fsdp",)) == wanted  # -1 is planned.


def test_options_of_the_command_line_are_kept():
    line = ["--config", "digits", "--plan", "auto", "--mesh.tensor", "1", "--step.microbatches=1", "--batch-size", "32"]
    assert parse_command(line).experiment.plan == PlanAuto(keep=("mesh.tensor", "step.microbatches"))
    same = parse_command(["--config", "digits", "--mesh.tensor", "1"]).experiment
    assert same.plan.kind == "none"
    dumped = [one.model_dump(mode="json") for one in (same, parse_command(line[:-2]).experiment)]
    assert identity(dumped[0]) == identity(dumped[1])  # A run may resume with a plan, and without.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": ("batch_size",)}, "nothing that a plan decides: mesh.replica"),
        ({"latency_us": 5.0}, "without network"),
        ({"network": "fast", "devices_per_node": 1}, r"plan\.network"),
        ({"devices_per_node": 3}, "does not divide the 2 devices"),
    ],
)
def test_what_cannot_take_effect_is_one_message(changes, message):
    with pytest.raises(ConfigError, match=message):
        jaxdl.train(
            tiny_experiment(mesh=MeshConfig(tensor=1), plan=PlanAuto(**changes)), quiet=True, devices=jax.devices()[:2]
        )


def test_a_plan_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"nothing fits: the least memory is .* of a device's 0\.001"):
        auto.to_planned(search(workload(), cluster(device_bytes=1e6), {}), tiny_experiment())
    best = auto.to_planned(search(workload(), cluster(), {"mesh.tensor": 2}), tiny_experiment())
    assert best.settings["mesh.tensor"] == 2
    assert best.exchange is None  # It was not left open.


def test_the_fastest_of_the_layouts_that_were_timed_is_taken():
    found = search(workload(), cluster(), {})
    first, second, third = (one.choice for one in found.candidates[:3])
    times = {first: [2e-3] * 3, second: [1e-3] * 3, third: [math.inf]}
    chosen = auto.to_planned(found, tiny_experiment(), times)
    assert chosen.settings == second.settings
    [line] = [one for one in chosen.reasons if one.startswith("timed: ")]
    assert [part.rpartition(", ")[2] for part in line.split("; ")] == ["1 ms", "2 ms", "not: too large"]
    with pytest.raises(ConfigError, match=r"all 1 layouts that should fit need more by XLA's plan than 90 % "):
        auto.to_planned(found, tiny_experiment(), {first: [math.inf]})
    # In two rounds of four the first is as fast.
    noisy = {first: [2e-3, 2e-3, 1e-3, 1e-3], second: [1e-3] * 4}
    hidden = auto.to_planned(found, tiny_experiment(), noisy)
    assert hidden.settings == first.settings
    assert any("noise does not tell" in one for one in hidden.reasons)


def test_few_layouts_are_timed_at_once():
    work, where = workload(), cluster(nodes=1)
    found = few_layouts(work, where, {}, 4)
    assert [one.choice.param_sharding for one in found] == ["replicated", "sharded"]
    assert {(one.choice.microbatches, one.choice.remat, one.choice.tensor) for one in found} == {(1, "none", 1)}
    assert few_layouts(work, where, {}, 1) == []
    open_ = jaxdl.load("digits", {"exchange": "auto"}).exchange
    for changes in ({"exchange": open_}, {"tables": lambda *_: None}):  # What is chosen needs a prediction.
        assert few_layouts(workload(**changes), where, {}, 4) == []
    given = few_layouts(work, where, {"mesh.tensor": 2, "step.microbatches": 2, "model.remat": "block"}, 4)
    assert {(one.choice.microbatches, one.choice.remat, one.choice.tensor) for one in given} == {(2, "block", 2)}
    best, reasons = fastest_of(found, [[1.1, 1.1, 1.1, 0.9, 1.0], [1.0] * 5])
    assert best == found[0]
    assert "simplest of those that noise does not tell" in reasons[-1]
    assert fastest_of(found, [[2.0] * 4, [1.0] * 4])[0] == found[1]
    assert all_fit([[1.0], [2.0]])
    assert not all_fit([[1.0], [math.inf]])


def test_of_the_choices_of_tables_that_were_timed_the_fastest_is_taken():
    experiment = clicks()
    tables = tables_on_meshes(experiment, SIZES, machine, ())
    work = dataclasses.replace(workload(), tables=tables, batch_size=64)
    small = dataclasses.replace(cluster(), machine=machine())
    found = search(work, small, {})
    others = with_other_tables(work, small, found.best, 2)
    assert len(others) == 2
    every = [one.tables.schemes for one in (found.best, *others)]
    assert all(one != other for one, other in itertools.combinations(every, 2))
    assert [one.choice for one in others] == [found.best.choice] * 2
    times = [[2e-3] * 3, [1e-3] * 3, [math.inf]]
    chosen = auto.to_planned(found, experiment, {}, list(zip((found.best, *others), times, strict=True)))
    assert dict(chosen.settings["embedding.schemes"]).keys() == set(every[1])
    kinds = {scheme["kind"] for scheme in dict(chosen.settings["embedding.schemes"]).values()}
    assert kinds == {one.kind for one in every[1].values()}
    [line] = [one for one in chosen.reasons if one.startswith("timed with these schemes of tables: ")]
    assert [part.rpartition(": ")[2] for part in line.split("; ")] == ["2 ms", "1 ms", "too large"]
    kept = tables_on_meshes(experiment, SIZES, machine, ("embedding.scheme",))
    fixed = dataclasses.replace(work, tables=kept)
    assert with_other_tables(fixed, small, search(fixed, small, {}).best, 2) == []


def test_only_training_plans_and_only_what_it_knows():
    experiment = tiny_experiment(mesh=MESH, plan=GIVEN)
    with pytest.raises(ConfigError, match="only a training run plans"):
        make_plan(experiment, jax.devices()[:2])
    other = experiment.replaced({"agreement": "periodic"})
    with pytest.raises(ConfigError, match="agree in every step"):
        jaxdl.train(other, quiet=True, devices=jax.devices()[:2])
    odd = experiment.replaced({"mesh.replica": 3})
    with pytest.raises(ConfigError, match=r"no layout: .*mesh\.replica 3"):
        jaxdl.train(odd, quiet=True, devices=jax.devices()[:2])


@pytest.mark.slow
def test_a_run_plans_once_for_its_devices(tmp_path, monkeypatch):
    planned, found = auto.plan, []

    def counted(experiment, devices, start):
        found.append(planned(experiment, devices, start))
        return found[-1]

    monkeypatch.setattr(auto, "plan", counted)
    experiment = tiny_experiment(mesh=MESH, plan=GIVEN.replaced({"timed": 1}), model=TinyPerceptron())
    first = jaxdl.train(experiment, tmp_path / "a", quiet=True, devices=jax.devices()[:2], max_steps=4)
    assert first.plan.mesh_sizes == ONE | {"replica": 2}
    kept = json.loads((tmp_path / "a" / PLAN_FILE).read_text())
    assert kept["settings"] == found[0].settings
    assert "none is predicted" in kept["reasons"][0]  # There is one layout.
    assert kept["reasons"][1].startswith("timed: 2 x 1 x 1, 1 micro-batches, ")

    def refused(*_):
        raise AssertionError("planned again")

    monkeypatch.setattr(auto, "plan", refused)
    resumed = jaxdl.train(experiment, tmp_path / "a", quiet=True, devices=jax.devices()[:2])
    layout = experiment.replaced({**found[0].settings, "plan": "none"})
    whole = jaxdl.train(layout, quiet=True, devices=jax.devices()[:2])
    assert resumed.metrics == whole.metrics
    pairs = zip(jax.tree.leaves(resumed.state.params), jax.tree.leaves(whole.state.params), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)

    other = Planned({"mesh.replica": 1, "mesh.fsdp": 1, "mesh.tensor": 1}, ("made up",))
    monkeypatch.setattr(auto, "plan", lambda *_: other)
    longer = experiment.replaced({"steps": 16})
    again = jaxdl.train(longer, tmp_path / "a", quiet=True, devices=jax.devices()[:1])
    assert again.plan.mesh_sizes == ONE
    assert again.summary["steps"] == 16
    [note] = [one for one in again.plan.reasons if "planned again" in one]
    assert "the run has 1 devices" in note
    assert "was made for 2 devices" in note
    (tmp_path / "a" / PLAN_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="this is no plan"):
        jaxdl.train(longer, tmp_path / "a", quiet=True, devices=jax.devices()[:1])


@pytest.mark.slow
def test_a_run_takes_stages_where_the_network_is_too_slow_for_gradients():
    asked = PlanAuto(devices_per_node=1, network="100kbit", timed=1)
    experiment = jaxdl.Experiment(
        data=SyntheticText(vocab_size=8, length=4, num_train=64, num_test=16),
        model=Transformer(num_layers=2, embed_dim=32, num_heads=2),
        task=LanguageModelling(),
        mesh=MESH,
        plan=asked,
        batch_size=4,
        steps=2,
    )
    run = jaxdl.train(experiment, quiet=True, devices=jax.devices()[:2])
    assert run.plan.mesh_sizes == ONE | {"stage": 2}
    assert run.plan.experiment.step.microbatches >= 2
    assert run.summary["steps"] == 2
    assert any("fewer than the Q* = " in line and "2 stages wait" in line for line in run.plan.kept.reasons)


def test_the_exchange_of_a_plan_is_kept(monkeypatch, tmp_path):
    layout = {"mesh.replica": 2, "mesh.fsdp": 1, "mesh.tensor": 1, "step.microbatches": 2}
    exchange, seen = jaxdl.load("digits", {"exchange": "topk"}).exchange, []

    def plan(experiment, devices, start):
        seen.append(experiment.exchange)
        return Planned(layout, ("made up",), exchange if len(seen) == 1 else None)

    monkeypatch.setattr(auto, "plan", plan)
    open_ = jaxdl.load("digits", {"exchange": "auto"}).exchange
    experiment = tiny_experiment(mesh=MESH, plan=GIVEN, exchange=open_)
    workdir = Workdir(tmp_path)
    first = make_plan(experiment, jax.devices()[:2], workdir=workdir)
    assert first.experiment.exchange == exchange
    assert first.experiment.step.microbatches == 2
    assert first.asked == experiment
    # The next plan, on other devices, is made around it.
    changed = experiment.replaced({"plan.network": "2gbit"})
    (tmp_path / PLAN_FILE).write_text(first.kept.to_json())
    (tmp_path / CHOICE_FILE).write_bytes(choice_file(tmp_path, exchange, ())[CHOICE_FILE])
    again = make_plan(changed, jax.devices()[:2], workdir=workdir)
    assert seen == [open_, exchange]
    assert again.experiment.exchange == exchange
    assert any("other settings are given" in one for one in again.reasons)
    same = make_plan(experiment, jax.devices()[:2], workdir=workdir)
    assert len(seen) == 2
    assert same.kept == first.kept
    assert same.experiment.exchange == exchange


def machine(slow=1e8):
    links = {"replica": Link(2e-5, slow), "fsdp": Link(5e-6, 1e11), "tensor": Link(5e-6, 1e11)}
    return Machine(links, NOMINAL_SPEEDS["gpu"])


def test_tables_are_planned_for_each_mesh():
    experiment = clicks()
    work = measured_workload(experiment, SIZES)
    on_mesh = tables_on_meshes(experiment, SIZES, machine, ())
    found = on_mesh(SIZES, 1e9)
    assert {one.name for one in work.tables} == set(found.schemes)
    assert found.costs == costs_of(work, found.embedding, machine())
    assert found.costs.slow_bytes > 0
    whole = tables_on_meshes(clicks(embedding=EmbeddingConfig(scheme=DataParallel())), SIZES, machine, ())
    rows = sum(one.rows for one in work.tables)
    assert whole(SIZES, 1e9).costs.device_bytes == rows * 9 * 4  # 8 columns and a number of row-wise AdaGrad.
    split = tables_on_meshes(clicks(embedding=EmbeddingConfig(scheme=RowWise())), SIZES, machine, ())
    assert split(SIZES, 1e9).costs.device_bytes < whole(SIZES, 1e9).costs.device_bytes / 7
    # Of 8 columns: gradients of the 4 vectors of 8 examples; 5 ids each with 4 numbers; those of all rows and a mark,
    # before and after their sum; and a copy of what nodes reduce of them, a quarter each.
    wanted = 8 * 4 * 8 + 8 * 5 * (8 + 4) + 2 * rows * 9 + math.ceil(rows * 9 / 4)
    assert whole(SIZES, 1e9).costs.update_bytes == pytest.approx(4 * wanted, rel=1e-3)
    assert split(SIZES, 1e9).costs.update_bytes < whole(SIZES, 1e9).costs.update_bytes / 3
    assert whole(SIZES, 1e9).costs.vector_bytes == 0 < split(SIZES, 1e9).costs.vector_bytes
    with pytest.raises(ConfigError, match="the tables need"):
        on_mesh(SIZES, 1e3)
    assert tables_on_meshes(tiny_experiment(), SIZES, machine, ()) is None


def jagged_clicks(most=2000, **changes):
    data = Clicks(rows=(900, 40, 7, most), num_ids=(1, 12, 8, 6), jagged=True, train_examples=256, test_examples=64)
    return clicks(data=data, **changes)


def test_jagged_tables_send_the_bytes_of_the_compiled_step():
    base, sent = EmbeddingConfig(scheme=RowWise()), {}
    for one in (base, base.replaced({"jagged": True})):
        found = tables_on_meshes(jagged_clicks(embedding=one), SIZES, machine, ())(SIZES, 1e9)
        sent[one.jagged] = found.costs.slow_bytes
    plan = make_plan(jagged_clicks(embedding=one, mesh=MeshConfig(replica=2, fsdp=4)), jax.devices())
    counted = usual_collectives(compiled_step(plan.parts.tables, 64, 27), SIZES)
    assert sent[True] == sum(axis_bytes(*one, SIZES, "replica") for one in counted) < sent[False]
    assert table_sec(plan, machine()) == pytest.approx(found.costs.total_sec)


@pytest.mark.slow
def test_what_a_step_needs_besides_its_tables_is_the_same_for_all_of_them(monkeypatch):
    monkeypatch.setattr(trials, "_TABLE_BYTES", 2**42)  # They are compiled alone, so they may be whole.
    setting, found = Setting(2, 2, 16, None, "replicated"), []
    for most, options in ((2000, {}), (60_000_000, {"scheme": RowWise(), "jagged": True})):
        embedding = EmbeddingConfig(**options)
        one = jagged_clicks(most, embedding=embedding).replaced({"sharding.min_shard_elements": 1})
        found.append(measure_step(trial_plan(Trials(one), setting, jax.devices())))
    assert found[0].sent["fsdp"] > 0
    assert (found[0].sent, found[0].messages) == (found[1].sent, found[1].messages)
    # The kernels of the large table would take 0.6 ms more.
    assert found[1].other == pytest.approx(found[0].other, abs=2e-4)


def test_schemes_that_are_given_stay():
    names = [one.name for one in measured_workload(clicks(), SIZES).tables]
    some = EmbeddingConfig(schemes=((names[0], RowWise()), (names[1], TableWise())), places=((names[1], 3),))
    found = tables_on_meshes(clicks(embedding=some), SIZES, machine, ())(SIZES, 1e9)
    assert found.schemes[names[0]] == RowWise()
    assert dict(found.embedding.places)[names[1]] == 3
    kept = tables_on_meshes(clicks(), SIZES, machine, ("embedding.scheme",))(SIZES, 1e9)
    assert kept.embedding == EmbeddingConfig()
    one = dict.fromkeys(SIZES, 1)
    assert tables_on_meshes(clicks(), one, machine, ())(one, 1e9).embedding == EmbeddingConfig()


def test_nodes_are_processes_or_as_given():
    devices = jax.devices()
    assert auto.nodes_of(PlanAuto(), devices) == (1, 8)
    assert auto.nodes_of(PlanAuto(devices_per_node=2), devices) == (4, 2)
    one = dataclasses.make_dataclass("One", ["process_index"])
    with pytest.raises(ConfigError, match="1 and 2 devices"):
        auto.nodes_of(PlanAuto(), [one(0), one(0), one(1)])
    assert math.isclose(auto.network_rate("8mbit", "--plan.network"), 1e6)
