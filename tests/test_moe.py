"""Mixtures of experts: products of groups, steps against float64 on every mesh, balance, room for rows, conversion."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import CONFIGS
from runs import MESHES, ONE_DEVICE, assert_bit_equal, saved_state
from safetensors import safe_open
from test_gpu_rules import EXPERIMENT, one_step, oracle

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.inference.convert.__main__ import main
from jaxdl.inference.convert.layouts import layout_for, layout_of
from jaxdl.inference.convert.settings import FULL, SLIDING
from jaxdl.inference.convert.to_hf import to_hf
from jaxdl.models import MixtureOfExperts, Network
from jaxdl.models.elementwise import swiglu
from jaxdl.models.network import Call
from jaxdl.optim import AdamW
from jaxdl.parallel.collectives import grouped
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.precision import FP8

SIZES = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 4, "mlp_dim": 16, "num_experts": 8}
SOFTMAX = MixtureOfExperts(**SIZES, balance="loss", balance_rate=0.5, router_z_loss=0.1, row_buffer=8.0)
SIGMOID = MixtureOfExperts(
    **SIZES, router="sigmoid", experts_per_token=3, routed_scale=2.5, normalized=False, shared_dim=24, row_buffer=8.0,
    qk_norm="all",
)  # fmt: skip


QUIET = {"report": {"curves": False, "tensorboard": False}}


# Products of groups


def random_groups(num_tokens=37, per_token=2, num_groups=5, embed=8, hidden=6):
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.normal(size=(num_tokens, embed)), jnp.float32)
    shapes = [(num_groups, embed, hidden)] * 2 + [(num_groups, hidden, embed)]
    kernels = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
    wanted = jnp.asarray(random.integers(0, num_groups + 1, num_tokens * per_token), jnp.int32)
    return tokens, kernels, wanted, jnp.asarray(random.normal(size=(wanted.size, embed)), jnp.float32)


@pytest.mark.parametrize("most", [74, 20])
def test_rows_are_taken_multiplied_and_given_back(most, monkeypatch):
    tokens, kernels, wanted, weights = random_groups()
    monkeypatch.setattr(grouped, "_BLOCK", 4)
    choice, row, sizes, lost = grouped.places(wanted, 5, most)
    # Of rows sorted by group the first have room.
    fits = np.zeros(len(wanted), bool)
    fits[np.argsort(wanted, kind="stable")[:most]] = True
    fits &= np.asarray(wanted) < 5
    assert int(lost) == (np.asarray(wanted) < 5).sum() - fits.sum()
    np.testing.assert_array_equal(sizes, [(fits & (np.asarray(wanted) == group)).sum() for group in range(5)])

    def ours(tokens, kernels):
        rows = grouped.gated_products(swiglu, False, grouped.take_rows(tokens, choice, row), *kernels, sizes)
        return (grouped.give_rows(rows, choice, row) * weights).sum()

    def plain(tokens, kernels):
        gate, up, down = (kernel[np.minimum(wanted, 4)] for kernel in kernels)
        rows = jnp.repeat(tokens, 2, axis=0)
        hidden = jax.nn.silu(jnp.einsum("nk,nkm->nm", rows, gate)) * jnp.einsum("nk,nkm->nm", rows, up)
        return (jnp.where(fits[:, None], jnp.einsum("nm,nmk->nk", hidden, down), 0) * weights).sum()

    for found, expected in zip(
        *(jax.tree.leaves(jax.value_and_grad(f, (0, 1))(tokens, kernels)) for f in (ours, plain)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


# Steps


def mixed(model, p, x, linear, mlp):
    """The experts of a block in float64, all of them for each token; `(result, losses)`."""
    logits = x @ p["router"]
    scores = jax.nn.softmax(logits) if model.router == "softmax" else jax.nn.sigmoid(logits)
    chosen = jnp.argsort(-scores, axis=-1)[..., : model.experts_per_token]
    weights = jnp.take_along_axis(scores, chosen, -1)
    weights = weights / weights.sum(-1, keepdims=True) if model.normalized else weights
    each = jax.nn.silu(jnp.einsum("bld,edf->blef", x, p["gate"])) * jnp.einsum("bld,edf->blef", x, p["up"])
    each = jnp.take_along_axis(jnp.einsum("blef,efd->bled", each, p["down"]), chosen[..., None], 2)
    result = model.routed_scale * (each * weights[..., None]).sum(2)
    if model.shared_dim:
        s = p["shared"]
        result = result + linear(jax.nn.silu(linear(x, s, "gate")) * linear(x, s, "up"), s, "down")
    share = jax.nn.one_hot(chosen, model.num_experts).mean((0, 1, 2))
    chance = (scores / scores.sum(-1, keepdims=True)).mean((0, 1))
    loss = 0.5 * model.num_experts * (jax.lax.stop_gradient(share) * chance).sum() if model.balance == "loss" else 0.0
    z = (jax.nn.logsumexp(logits, -1) ** 2).mean()
    return result, (loss + model.router_z_loss * z) / model.num_layers


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [SOFTMAX, pytest.param(SIGMOID, marks=pytest.mark.slow)], ids=["softmax", "sigmoid"])
def test_losses_and_gradients_are_those_of_float64(model, mesh, monkeypatch):
    # Each replica's loss for balance is that of its own tokens.
    replicas = MESHES[mesh].replica
    if model.balance == "loss" and replicas > 1:
        model = model.replaced({"balance": "none", "balance_rate": None})
    tokens, params, loss, gradients = one_step(EXPERIMENT.replaced({"model": model, "mesh": MESHES[mesh]}))
    wanted_loss, wanted = oracle(model, params, tokens, mixed)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    for (path, one), found in zip(jax.tree.flatten_with_path(wanted)[0], jax.tree.leaves(gradients), strict=True):
        error = np.linalg.norm(found - np.asarray(one)) / np.linalg.norm(np.asarray(one))
        assert error < 2e-5, (jax.tree_util.keystr(path), error)


def test_a_bias_evens_the_load_and_no_weight_has_it():
    model = SIGMOID.replaced({"balance_rate": 0.01, "num_layers": 1, "shared_dim": None})
    network = Network(model.build(vocab_size=32, dtype=jnp.float32))
    params, state = network.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (16, 16), 0, 32)
    # A router that prefers two experts.
    router = params["layers"]["mlp"]["router"]
    params["layers"]["mlp"]["router"] = router + jnp.zeros_like(router).at[..., :2].set(0.05) * 20

    loads = []
    call = jax.jit(lambda state: network.call(Call(train=True, materialize_logits=False), params, state, tokens))
    for _ in range(150):
        outputs, state = call(state)
        loads.append(float(outputs.remarks["experts/largest_load"]))
    bias = np.asarray(state["layers"]["mlp"]["bias"])
    assert loads[0] > 1.5 > 1.2 > loads[-1]
    steps = np.round(bias / 0.01)
    np.testing.assert_allclose(bias, steps * 0.01, atol=1e-5)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path):
    changes = {"model": SIGMOID, "mesh": MeshConfig(replica=2, fsdp=2, tensor=2), "steps": 4, "optimizer": AdamW()}
    experiment = EXPERIMENT.replaced({**changes, "checkpoint": {"every_steps": 2}})
    whole, resumed = (tmp_path / name for name in ("whole", "resumed"))
    jaxdl.train(experiment, whole, quiet=True)
    jaxdl.train(experiment, resumed, quiet=True, max_steps=2)
    jaxdl.train(experiment, resumed, quiet=True)
    assert_bit_equal(saved_state(resumed, experiment), saved_state(whole, experiment))
    assert np.abs(saved_state(whole, experiment).model_state["layers"]["mlp"]["bias"]).max() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 9}, "experts_per_token = 9: there are num_experts = 8"),
        ({"mlp": "gelu"}, "mlp = gelu: experts are `swiglu`"),
        ({"biases": "all"}, "biases = all: experts"),
        ({"scan_layers": False}, "a mixture's layers are stacked"),
        ({"balance": "none", "balance_rate": 0.1}, "balance_rate = 0.1 has no effect with balance = none"),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(ConfigError, match=message):
        SIGMOID.replaced(changes)


def test_fp8_is_refused():
    changes = {"model": SIGMOID, "mesh": ONE_DEVICE, "precision": FP8(min_size=1, emulated=True)}
    with pytest.raises(ConfigError, match="model moe has none here"):
        jaxdl.train(EXPERIMENT.replaced(changes), quiet=True, devices=jax.devices()[:1])


# Hugging Face's layouts


@pytest.mark.parametrize(
    ("layout", "changes", "name"),
    [
        ("mixtral", {}, "block_sparse_moe.experts.7.w2"),
        ("qwen3_moe", {"qk_norm": True, "normalized": False}, "mlp.experts.7.down_proj"),
        ("olmoe", {"qk_norm": "all"}, "mlp.experts.7.down_proj"),
    ],
)
def test_a_run_goes_to_a_layout_and_back(layout, changes, name, tmp_path):
    model = SOFTMAX.replaced({"router_z_loss": 0.0, "tied_embeddings": False, "norm_epsilon": 1e-6, **changes})
    experiment = EXPERIMENT.replaced({"model": model, "mesh": ONE_DEVICE, "steps": 1, **QUIET})
    jaxdl.train(experiment, tmp_path / "run", quiet=True, devices=jax.devices()[:1])
    main(["to-hf", str(tmp_path / "run"), str(tmp_path / "there")])
    config = json.loads((tmp_path / "there" / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["num_experts_per_tok"]) == (layout, 2)
    with safe_open(next((tmp_path / "there").glob("*.safetensors")), "numpy") as tensors:
        down = tensors.get_tensor(f"model.layers.1.{name}.weight")
    main(["from-hf", str(tmp_path / "there"), str(tmp_path / "back")])
    here, back = (jaxdl.restore(tmp_path / folder) for folder in ("run", "back"))
    np.testing.assert_array_equal(down, np.asarray(here.params["layers"]["mlp"]["down"])[1, 7].T)
    assert_bit_equal(here.params, back.params)
    told = back.experiment.model.replaced({"vocab_size": None, "head_size": None, "row_buffer": 8.0})
    assert told.model_dump() == model.model_dump()


def test_what_no_layout_has_is_refused(tmp_path):
    experiment = EXPERIMENT.replaced({"model": SIGMOID, "mesh": ONE_DEVICE, "steps": 1, **QUIET})
    jaxdl.train(experiment, tmp_path / "run", quiet=True, devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"no layout of Hugging Face's: \w+ has no .*router=sigmoid"):
        to_hf(tmp_path / "run", tmp_path / "there")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mixtral", {"layer_types": [SLIDING, FULL]}),
        ("mixtral", {"layer_types": [FULL] * 2}),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 28}),
    ],
)
def test_windows_that_transformers_has_otherwise_are_refused(kind, settings):
    """In 5.24 every layer of a mixture has `sliding_window`, whatever else the config says."""
    config = CONFIGS[kind] | {"sliding_window": 7} | settings
    with pytest.raises(ConfigError, match=f"sliding_window = 7, which transformers gives every layer of {kind}"):
        layout_of(config, "").model(config)


def test_a_mixture_with_windows_in_some_layers_has_no_layout():
    model = MixtureOfExperts(num_layers=2, window=4, full_layers=(1,), balance="loss")
    with pytest.raises(ConfigError, match="has no full_layers="):
        layout_for(model)
    assert layout_for(model.replaced({"full_layers": ()})).model_type == "mixtral"
