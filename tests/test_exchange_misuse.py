"""What users of the exchanges get wrong, and what they are told; and the choice of an exchange that a run keeps."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from runs import TinyPerceptron, tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.files import CHOICE_FILE
from jaxdl.exchange import Auto, Dense, GradientLayout, PowerSGD, Quantized, TopK
from jaxdl.optim import SGD
from jaxdl.parallel.mesh import MeshConfig, batch_sharding, make_mesh
from jaxdl.parallel.precision import Float16
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.workdir.records import Workdir, choice_file

REPLICAS = MeshConfig(replica=8, fsdp=1)
tiny = functools.partial(tiny_experiment, model=TinyPerceptron())
GIVEN = Auto(bandwidth_gbps=1.0, latency_us=20.0)


def gradients(config, *, varying, check_vma=True):
    """One exchange of gradients of a quadratic, of parameters that vary over the axis or do not."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    exchange = config.build()

    def step(params, x):
        if varying:
            params = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
        return exchange.update(grads, exchange.init(grads), axis="data", key=jax.random.key(0))[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)}
    x = jnp.asarray(rng.normal(size=(16, 6)), jnp.float32)
    return jax.jit(mapped)(params, x), {"w": 2 * x.T @ x @ params["w"] / 8}


@pytest.mark.parametrize("config", [Dense(), TopK(density=1, wire="plain", min_elements=0)])
def test_gradients_that_are_summed_already_are_refused(config):
    with pytest.raises(ValueError, match=r"gradient w: it is the same on all devices of 'data'.*pcast"):
        gradients(config, varying=False)
    mean, expected = gradients(config, varying=True)
    np.testing.assert_allclose(mean["w"], expected["w"], rtol=1e-5)
    untyped, _ = gradients(config, varying=False, check_vma=False)  # There jax.grad does not sum.
    np.testing.assert_allclose(untyped["w"], mean["w"], rtol=1e-6)


@pytest.mark.slow
def test_what_the_replicas_differ_by_does_not_pile_up_in_powersgd():
    """Each replica keeps what its own product left out: with gradients that cancel, this stays bounded."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    exchange = PowerSGD(rank=1, min_elements=0).build()
    shape = {"w": jax.ShapeDtypeStruct((12, 10), jnp.float32)}
    place = {"replica": {"residual": {"w": P("data")}}, "shard": {"factor": {"w": P()}}}

    def step(grads, state):
        own = {"w": grads["w"][0]}
        inner = {"replica": jax.tree.map(lambda x: x[0], state["replica"]), "shard": state["shard"]}
        _, new, _ = exchange.update(own, inner, axis="data", key=jax.random.key(0))
        return {"replica": jax.tree.map(lambda x: x[None], new["replica"]), "shard": new["shard"]}

    update = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P("data"), place), out_specs=place))
    state = exchange.init(shape)
    state["replica"] = jax.tree.map(lambda x: jnp.stack([x, x]), state["replica"])
    rng, norms = np.random.default_rng(0), []
    for _ in range(200):
        common, apart = rng.normal(size=(2, 12, 10)).astype(np.float32)
        state = update({"w": jnp.stack([common + 3 * apart, common - 3 * apart])}, state)
        residual = np.asarray(state["replica"]["residual"]["w"])
        norms.append(np.linalg.norm(residual - residual.mean(axis=0)))
    assert np.mean(norms[150:]) < 1.5 * np.mean(norms[20:50])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TopK(dense_names=("nothing/*",), min_elements=0), r"exchange.dense_names nothing/\*: no gradient has such"),
        (Quantized(min_elements=10**9), "exchange.min_elements=1000000000: no gradient would be compressed"),
        (TopK(dense_names=("*",), min_elements=0), r"exchange.dense_names \*: no gradient would be compressed"),
    ],
)
def test_options_without_effect(config, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(tiny(exchange=config, mesh=REPLICAS))


@pytest.mark.slow
def test_the_choice_is_kept_with_the_run(tmp_path):
    """Chosen by given figures; kept when the run goes on, though the network may be another one by then."""
    experiment = tiny(exchange=GIVEN, mesh=REPLICAS, steps=2)
    run = jaxdl.train(experiment, tmp_path, quiet=True)
    kept = json.loads((tmp_path / "exchange.json").read_text())
    assert kept["exchange"] == run.plan.experiment.exchange.model_dump()
    assert kept["reasons"] == list(run.plan.reasons)
    assert run.plan.reasons
    assert json.loads((tmp_path / "config.json").read_text())["exchange"] == GIVEN.model_dump(mode="json")

    kept["exchange"] = Dense(wire_dtype="bfloat16").model_dump()
    (tmp_path / "exchange.json").write_text(json.dumps(kept))
    assert Workdir(tmp_path).read_exchange() == Dense(wire_dtype="bfloat16")
    plan = make_plan(experiment, workdir=Workdir(tmp_path))
    assert plan.experiment.exchange == Dense(wire_dtype="bfloat16")
    assert plan.reasons == ("exchange: dense bfloat16, as chosen when the run began",)

    (tmp_path / "exchange.json").write_text("{")
    with pytest.raises(ConfigError, match="not a choice of an exchange"):
        Workdir(tmp_path).read_exchange()


def test_with_one_replica_nothing_is_measured():
    plan = make_plan(tiny(exchange=Auto(), mesh=MeshConfig(replica=1, fsdp=8)))
    assert plan.experiment.exchange == Dense()
    assert "one replica exchanges nothing" in plan.reasons[0]


def test_one_replica_says_that_nothing_is_exchanged(tmp_path):
    """Also of a choice that was made for several: its state has to survive until there are several again."""
    one = {"mesh": MeshConfig(replica=1, fsdp=8)}

    def said(exchange, **changes):
        return make_plan(tiny(exchange=exchange, **one), **changes)

    [note] = said(TopK(min_elements=0, delay_steps=1)).reasons
    assert "exchange topk: this mesh has one replica, so nothing is exchanged" in note
    assert "no effect but for --exchange.delay-steps 1" in note
    assert "--exchange has no effect. It takes effect with --mesh.replica 2" in said(Dense(bucket_mib=1.0)).reasons[0]
    assert said(Dense()).reasons == said(Dense(delay_steps=1)).reasons == ()
    (tmp_path / CHOICE_FILE).write_bytes(choice_file(tmp_path, TopK(min_elements=0), ())[CHOICE_FILE])
    chosen = said(Auto(), workdir=Workdir(tmp_path))
    assert chosen.experiment.exchange == TopK(min_elements=0)
    assert [reason.split(":")[0] for reason in chosen.reasons] == ["exchange", "exchange topk"]
    assert "residual" in chosen.parts.state_spec.shapes.exchange_state["replica"]


@pytest.mark.slow
def test_a_choice_on_one_replica_is_not_kept(tmp_path):
    """Begun on one replica and resumed on several, the run chooses then."""
    experiment = tiny(exchange=GIVEN, mesh=MeshConfig(replica=1, fsdp=8), steps=2)
    jaxdl.train(experiment, tmp_path, quiet=True)
    assert Workdir(tmp_path).read_exchange() is None
    assert json.loads((tmp_path / "config.json").read_text())["exchange"]["kind"] == "auto"


def test_auto_takes_no_exchange_that_would_compress_nothing():
    layout = GradientLayout()
    choice = Auto(bandwidth_gbps=0.001, latency_us=1.0, candidates=("quantized",)).choose(
        {"w": (10, 10)}, layout, make_mesh(REPLICAS, jax.devices()[:8])
    )
    assert choice.best == Dense()


@pytest.mark.parametrize("kind", [TopK, Quantized])
def test_a_warm_up_longer_than_the_run(kind):
    message = rf"the warm-up of exchange {kind.kind} \(12 steps\) is not shorter than the run"
    with pytest.raises(ConfigError, match=message):
        make_plan(tiny(exchange=kind(dense_warmup_steps=12, min_elements=0), mesh=REPLICAS, steps=12))


def test_powersgd_of_too_high_a_rank():
    with pytest.raises(ConfigError, match=r"exchange.rank=64: no gradient would be compressed"):
        make_plan(tiny(exchange=PowerSGD(rank=64, min_elements=0), mesh=REPLICAS))


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_momentum_of_the_exchange_is_that_of_sgd(num_replicas):
    """Until entries are sent and their momentum restarts, corrected momentum is plain momentum: of all gradients, on
    one replica too."""
    changes = {"steps": 4, "mesh": MeshConfig(replica=num_replicas, fsdp=1)}
    sgd = {"learning_rate": 0.05, "weight_decay": 0.0, "nesterov": False}
    devices = jax.devices()[:num_replicas]
    base = tiny(**changes, optimizer=SGD(momentum=0.9, **sgd))
    corrected = TopK(density=1, wire="plain", momentum_correction=0.9, dense_warmup_steps=3, min_elements=64)
    other = tiny(**changes, optimizer=SGD(momentum=0.0, **sgd), exchange=corrected)
    runs = [jaxdl.train(experiment, quiet=True, devices=devices) for experiment in (base, other)]
    for ours, theirs in zip(*(jax.tree.leaves(run.state.params) for run in runs), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_residuals_do_not_depend_on_the_loss_scale():
    """With float16: residual and momentum are those of the gradients, and a skipped step leaves them bit-equal."""
    exchange = TopK(density=0.05, momentum_correction=0.9, min_elements=64)
    changes = {"precision": Float16(), "exchange": exchange, "optimizer": SGD(momentum=0.0, nesterov=False)}
    plan = make_plan(tiny(**changes, mesh=MeshConfig(replica=2, fsdp=2)), jax.devices()[:4])
    batch = jax.device_put(plan.splits.train.batch(np.arange(16)), batch_sharding(plan.parts.layout.mesh))
    step = compile_train_step(plan)

    def after(scale):
        state = make_initial_state(plan)
        state = state.replace(loss_scale=state.loss_scale | {"scale": jnp.full_like(state.loss_scale["scale"], scale)})
        before = jax.device_get(state.exchange_state)
        state, metrics = step(state, batch)
        return before, jax.device_get(state.exchange_state), float(metrics["skipped_steps"])

    (_, one, skipped), (_, other, _) = after(2.0**8), after(2.0**13)
    assert not skipped
    for kind in ("residual", "momentum"):
        for ours, theirs in zip(*(jax.tree.leaves(x["replica"][kind]) for x in (one, other)), strict=True):
            # Rounding of float16 chooses other entries here and there, and those are 0 in one and not in the other.
            np.testing.assert_allclose(np.linalg.norm(ours), np.linalg.norm(theirs), rtol=0.05, atol=1e-5)
    before, unchanged, skipped = after(2.0**40)
    assert skipped == 1
    jax.tree.map(np.testing.assert_array_equal, before, unchanged)


def test_momentum_is_added_up_once():
    with pytest.raises(ConfigError, match=r"exchange.momentum_correction = 0.9 and optimizer.momentum = 0.9"):
        tiny(exchange=TopK(momentum_correction=0.9)).replaced({"optimizer": "sgd"})
