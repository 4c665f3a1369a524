"""Low-rank adapters: what is trained, what it computes, and what becomes of it when it is merged."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import assert_bit_equal
from safetensors import safe_open
from test_convert import bits, write_checkpoint

import jaxdl
from jaxdl.core.files import INIT_FILE
from jaxdl.data import SyntheticText
from jaxdl.exchange import TopK, by_name
from jaxdl.inference.convert.__main__ import main
from jaxdl.inference.export.__main__ import main as export
from jaxdl.inference.scoring import Scorer
from jaxdl.models import LoRA, Transformer
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report.facts import plan_facts
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import add_initial, make_initial_state, make_plan
from jaxdl.training.run.plan.init_from import InitFrom, beginning, reading_spec
from jaxdl.training.run.workdir.records import Workdir
from jaxdl.training.tasks import LanguageModelling

FINETUNE = Path(__file__).parent.parent / "configs" / "lm_finetune.py"
TARGETS = ("attention", "mlp.down")
EIGHT = MeshConfig(replica=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The workdir of a converted Qwen 3 of 2 layers, without a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    main(["from-hf", str(write_checkpoint(folder / "hf", "qwen3")), str(folder / "run")])
    return folder / "run"


def experiment(base, **changes):
    """A run that tunes adapters of the converted network."""
    model = jaxdl.load(base / "config.json").model.replaced({"lora": LoRA(rank=2, alpha=4, targets=TARGETS)})
    return Experiment(
        model=model,
        data=SyntheticText(vocab_size=32, length=12, num_train=64, num_test=16),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=0.01),
        batch_size=8,
        steps=4,
        report={"curves": False, "tensorboard": False},
        checkpoint={"every_steps": 2},
        sharding={"min_shard_elements": 16},
    ).replaced(changes)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """A finished run on 8 devices, with top-k."""
    top = TopK(density=0.5, min_elements=16)
    return jaxdl.train(
        experiment(base, mesh=EIGHT, exchange=top), tmp_path_factory.mktemp("tuned") / "run", quiet=True, init_from=base
    )


@pytest.mark.slow
def test_only_adapters_are_trained(base, tuned):
    """Counts by hand: embed 16, 4 heads of 8, 2 of keys and values, mlp 24; rank 2, 2 layers."""
    plan, params = tuned.plan, tuned.state.params
    count = 2 * 2 * ((16 + 32) + 2 * (16 + 16) + (32 + 16) + (24 + 16))
    trained = plan.parts.trainable.of(plan.parts.network.param_shapes)
    assert sum(np.prod(x.shape) for x in jax.tree.leaves(trained)) == count
    moments = [x for x in jax.tree.leaves(tuned.state.opt_state) if x.ndim]
    assert sum(x.nbytes for x in moments) == 2 * 4 * count
    names = {name.rpartition("_lora_")[2] for name in by_name(plan.parts.state_spec.grads)}
    assert names == {"a", "b"}, "nothing else has a gradient, or is exchanged"
    residual = [x for x in jax.tree.leaves(tuned.state.exchange_state) if x.ndim > 1]
    assert sum(x.size for x in residual) <= 2 * count + 8 * 16, "one residual of each replica, filled up"
    before = jaxdl.restore(base).params
    after = {name: x for name, x in by_name(params).items() if "_lora_" not in name}
    assert_bit_equal(after, by_name(before))
    assert all(np.asarray(x).any() for name, x in by_name(params).items() if name.endswith("_lora_b"))


def test_the_run_says_what_is_trained(tuned):
    assert dict(plan_facts(tuned.plan, 4))["trained"] == (
        "10 of 23 arrays, 800 of 6,800 parameters (the others are frozen); optimizer state 6,408 bytes"
    )


def test_it_computes_the_sum_and_its_gradient(base, tuned):
    """The oracle: the adapters' gradient is that of the network whose matrices are the sums."""
    plan = tuned.plan
    lora, network = plan.experiment.model.lora, plan.parts.network
    plain = plan.experiment.model.replaced({"lora": LoRA()}).network((), vocab_size=32, dtype=jnp.float32)
    params = jax.tree.map(np.asarray, tuned.state.params)
    tokens = plan.splits.test.batch(np.arange(2))["tokens"][:, :-1]
    trained = plan.parts.trainable.of(params)

    def of_adapters(trained):
        logits = network.apply(plan.parts.trainable.merged(trained, params), {}, tokens, train=True)[0]
        return jnp.sum(jnp.sin(logits)), logits

    def of_sums(trained):
        logits = plain.apply(lora.merged(plan.parts.trainable.merged(trained, params)), {}, tokens, train=True)[0]
        return jnp.sum(jnp.sin(logits)), logits

    (grads, logits), (wanted, expected) = (jax.jit(jax.grad(f, has_aux=True))(trained) for f in (of_adapters, of_sums))
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    for name, x in by_name(wanted).items():
        np.testing.assert_allclose(by_name(grads)[name], x, atol=1e-4 * np.abs(x).max(), err_msg=name)


def test_no_gradient_of_a_matrix_is_computed(base):
    """In the program of the gradients of two layers no array is like a frozen matrix but the matrix itself."""
    model = experiment(base).model
    network = model.network((), vocab_size=32, dtype=jnp.float32)
    plan = make_plan(experiment(base), jax.devices()[:1])
    trainable = plan.parts.trainable
    tokens = np.zeros((2, 7), np.int32)

    def loss(trained, params):
        return jnp.sum(network.apply(trainable.merged(trained, params), {}, tokens, train=True)[0])

    shapes = network.param_shapes
    text = jax.jit(jax.grad(loss)).lower(trainable.of(shapes), shapes).compile().as_text()
    made = [line for line in text.splitlines() if " dot(" in line or "add(" in line or "dynamic-update-slice(" in line]
    frozen = ("f32[16,4,8]", "f32[16,32]", "f32[2,16,4,8]", "f32[16,24]", "f32[2,16,24]", "f32[32,16]{")
    assert made
    assert not [line for line in made if line.split(" = ")[1].startswith(frozen)]


@pytest.mark.slow
def test_resumed_it_ends_with_the_same_bits(base, tuned, tmp_path):
    run = tuned.plan.asked
    jaxdl.train(run, tmp_path / "run", quiet=True, max_steps=2, init_from=base)
    again = jaxdl.train(run, tmp_path / "run", quiet=True)
    assert_bit_equal(again.state, tuned.state)


@pytest.mark.slow
def test_merged_it_computes_the_same(tuned, tmp_path, capsys):
    predictor = jaxdl.restore(tuned.workdir)
    merged = predictor.merged()
    tokens = np.arange(24).reshape(2, 12)
    np.testing.assert_allclose(merged.logits(tokens), predictor.logits(tokens), atol=2e-5)
    assert not merged.experiment.model.lora.rank
    assert merged.merged() is merged
    main(["to-hf", str(tuned.workdir), str(tmp_path / "hf")])
    assert not [name for name in bits(tmp_path / "hf") if "lora" in name]
    main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "run")])
    np.testing.assert_array_equal(jaxdl.restore(tmp_path / "run").logits(tokens), merged.logits(tokens))
    export(["--workdir", str(tuned.workdir), "--to", str(tmp_path / "export")])
    function = jax.export.deserialize(bytearray((tmp_path / "export" / "predict.stablehlo").read_bytes()))
    assert function.platforms == ("cpu", "cuda")
    found = function.call(jnp.int32(tokens))
    np.testing.assert_allclose(found, jax.nn.softmax(predictor.logits(tokens)), atol=1e-5)
    with safe_open(tmp_path / "export" / "params.safetensors", framework="numpy") as file:
        assert not [name for name in file.keys() if "lora" in name]  # noqa: SIM118


@pytest.mark.slow
def test_tuned_with_shorter_texts_the_network_reads_as_many_tokens(base, tuned, tmp_path):
    """The converted network reads 64 tokens; the rows of its tuning have 12."""
    predictor = jaxdl.restore(tuned.workdir)
    assert (predictor.parts.data_spec.length, Scorer(predictor).context) == (64, 64)
    assert json.loads((tuned.workdir / "data.json").read_text())["length"] == 12
    main(["to-hf", str(tuned.workdir), str(tmp_path / "back")])
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (base.parent / "hf", tmp_path / "back")
    )
    assert after["max_position_embeddings"] == before["max_position_embeddings"] == 64


@pytest.mark.slow
def test_the_context_goes_on_from_run_to_run_where_positions_mean_the_same(base, tuned, tmp_path):
    def context(workdir, names=(), **changes):
        plan = make_plan(experiment(base, **changes), None)
        found, _ = beginning(
            None, InitFrom(workdir, names), False, plan.parts.state_spec.abstract(), model=plan.experiment.model
        )
        return found.context

    assert context(tuned.workdir) == 64, "and not 12"
    assert context(base, **{"model.lora": LoRA()}) == 64
    assert context(base, names=("layers",), **{"model.lora": LoRA()}) is None
    assert context(base, **{"model.lora": LoRA(), "model.rope_theta": 5e5}) is None
    kinds = [Transformer(positions="learned", max_length=size) for size in (16, 16, 32)]
    assert [kinds[0].reads_as(other) for other in (*kinds, Transformer())] == [True, True, False, False]
    longer = json.loads((tuned.workdir / "data.json").read_text()) | {"length": 128}
    (tmp_path / "data.json").write_text(json.dumps(longer))
    (tmp_path / "init.json").write_text((tuned.workdir / "init.json").read_text())
    assert reading_spec(tmp_path).length == 128, "the larger of both"
    older = json.loads((tuned.workdir / "init.json").read_text())
    del older["context"]
    (tmp_path / "init.json").write_text(json.dumps(older))
    (tmp_path / "data.json").write_text((tuned.workdir / "data.json").read_text())
    assert reading_spec(tmp_path).length == 12, "of an older run it is not known"


def test_adapters_beside_random_values_are_a_mistake(base, tuned, tmp_path):
    """Unless they are allowed; a run that has a checkpoint of its own goes on."""
    run = experiment(base)

    def begun(run, init=None, workdir=None):
        return add_initial(make_plan(run, jax.devices()[:1]), init, Workdir(workdir)).initial

    why = r"without init_from: all 13 arrays .* Give init_from=FOLDER, .* allow that with model.lora.random_base"
    with pytest.raises(jaxdl.ConfigError, match=why):
        jaxdl.train(run, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "config.json").exists()
    why = r"1 of the 13 arrays .*: embedding \(float32 \[32, 16\] there, float32 \[40, 16\] here\)"
    with pytest.raises(jaxdl.ConfigError, match=why):
        begun(run.replaced({"model.vocab_size": 40}), InitFrom(base))
    with pytest.raises(jaxdl.ConfigError, match=r"final_norm/scale \(not in InitFrom.names\)"):
        begun(run, InitFrom(base, names=["embedding", "layers/*"]))
    assert begun(run, InitFrom(base)) is not None
    assert begun(run.replaced({"model.lora.random_base": True})) is None
    copy = Path(shutil.copytree(tuned.workdir, tmp_path / "copy"))
    (copy / INIT_FILE).unlink()
    assert begun(run, workdir=copy) is None


def test_unscanned_layers_and_wrong_patterns(base):
    run = experiment(base, **{"model.scan_layers": False, "model.lora.targets": ("mlp",), "model.lora.rank": 1})
    names = {name for name in by_name(make_plan(run, jax.devices()[:1]).parts.state_spec.grads) if "layer_1" in name}
    assert names == {f"layer_1/mlp/{name}_lora_{one}" for name in ("gate", "up", "down") for one in "ab"}
    with pytest.raises(
        jaxdl.ConfigError, match=r"model.lora.targets mpl: no parameter has such a name. Did you mean mlp"
    ):
        make_plan(experiment(base, **{"model.lora.targets": ("mpl",)}), jax.devices()[:1])


@pytest.mark.slow
def test_the_whole_network_too(base):
    """`--init-from` without adapters takes every array, on a mesh."""
    run = experiment(base, mesh=EIGHT, **{"model.lora": LoRA()})
    plan = add_initial(make_plan(run, jax.devices()), InitFrom(base), Workdir())
    assert not plan.initial.left
    assert_bit_equal(make_initial_state(plan).params, jaxdl.restore(base).params)


@pytest.mark.parametrize("change", [{"alpha": 4}, {"targets": ("mlp",)}, {"random_base": True}])
def test_what_is_about_adapters_has_no_effect_without_them(change):
    (name,) = change
    with pytest.raises(jaxdl.ConfigError, match=rf"{name} = .* has no effect at rank = 0, which adds no adapters"):
        LoRA(**change)


def test_the_config_for_fine_tuning(base, monkeypatch):
    """It takes the model of the network that it is given, and its small form fits together."""
    header = FINETUNE.read_text().split('"""')[1]
    for part in ("Not run here", "\nSource: ", "\nExpected: ", "lm_finetune.py:smoke"):
        assert part in header, part
    published = jaxdl.load(FINETUNE, gpus=True)
    assert published.model.embed_dim == 2048
    lora = published.model.lora
    assert (lora.rank, lora.alpha, published.optimizer.learning_rate, published.batch_size) == (8, 16, 3e-4, 128)
    smoke = jaxdl.load(f"{FINETUNE}:smoke", {"mesh": MeshConfig()})
    assert (published.model.needs_base, smoke.model.needs_base) == (True, False)
    plan = make_plan(smoke)
    assert len(by_name(plan.parts.state_spec.grads)) == 4
    monkeypatch.setenv("BASE", str(base))
    own = jaxdl.load(FINETUNE, gpus=True).model
    assert own == jaxdl.restore(base).experiment.model.replaced({"lora": lora})


@pytest.mark.slow
def test_losses_on_a_mesh_are_those_of_one_device(base):
    """The dense exchange sends the adapters' gradients alone."""
    run = experiment(base, exchange="dense", steps=3)
    found = jaxdl.train(run.replaced({"mesh": EIGHT}), quiet=True, init_from=base)
    before, after = by_name(jaxdl.restore(base).params), by_name(found.state.params)
    assert_bit_equal({name: after[name] for name in before}, before)
    assert all(np.asarray(after[name]).any() for name in after.keys() - before.keys())
    alone = jaxdl.train(run, quiet=True, init_from=base, devices=jax.devices()[:1])
    np.testing.assert_allclose(found.history["eval/loss"][-1], alone.history["eval/loss"][-1], rtol=1e-5)
