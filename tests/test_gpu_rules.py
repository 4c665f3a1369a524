"""What a step of a decoder computes with the rules for GPUs, on four meshes, against a decoder in float64.

The rules are those that CPUs do not take: layers without a loop, sums of rows by products, the loss in one pass, finite
checks from sums of squares. The oracle has none of jaxdl's code.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from runs import MESHES

from jaxdl.data import SyntheticText
from jaxdl.models import Transformer, loop
from jaxdl.optim import SGD, Constant
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.tasks import LanguageModelling

RATE = 64.0
LLAMA = Transformer(num_layers=3, embed_dim=32, num_heads=8, num_kv_heads=4, mlp_dim=48, tied_embeddings=False)
GPT2 = Transformer(
    num_layers=3, embed_dim=32, num_heads=4, mlp_dim=48, norm="layer", mlp="gelu", biases="all",
    positions="learned", max_length=16,
)  # fmt: skip
EXPERIMENT = Experiment(
    data=SyntheticText(vocab_size=40, length=16, num_train=64, num_test=8),
    model=LLAMA,
    task=LanguageModelling(),
    # After one step the parameters tell the gradients.
    optimizer=SGD(learning_rate=RATE, momentum=0.0),
    schedule=Constant(),
    sharding={"min_shard_elements": 16},
    batch_size=16,
    steps=2,
)


def take_gpu_rules(monkeypatch):
    def choose(*operands, default=None, cuda=None, cpu=None):
        del cpu
        return (cuda or default)(*operands)

    monkeypatch.setattr(lax, "platform_dependent", choose)
    monkeypatch.setattr(loop, "_loop_costs", lambda layout, remat: True)


def one_step(experiment):
    """`(tokens, parameters, loss, gradients)` of the first step."""
    plan = make_plan(experiment)
    state = make_initial_state(plan)
    before = jax.device_get(state.params)
    with plan.batches(plan.timeline.segments[0], 0, 1) as batches:
        batch = next(batches)
    state, metrics = compile_train_step(plan)(state, batch)
    moved = jax.tree.map(lambda old, new: (np.float64(old) - new) / RATE, before, jax.device_get(state.params))
    return np.asarray(batch["tokens"]), before, float(metrics["sums/loss"] / metrics["sums/weight"]), moved


def oracle(model, params, tokens, mixture=None):
    """`(loss, gradients)`, all in float64; `mixture` computes the experts of a block, and their loss."""
    heads, keys, size = model.num_heads, model.kv_heads, model.head_dim

    def norm(x, p):
        x = x - x.mean(-1, keepdims=True) if "bias" in p else x
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p.get("bias", 0.0)

    def linear(x, p, name):
        kernel = p[name].reshape(x.shape[-1], -1)
        return x @ kernel + p.get(f"{name}_bias", 0.0)

    def rotated(x):
        if model.positions == "learned":
            return x
        angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(size // 2) / (size // 2))
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        one, two = x[..., : size // 2], x[..., size // 2 :]
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    def attention(x, p):
        q, k, v = (linear(x, p, name).reshape(*x.shape[:2], -1, size) for name in ("query", "key", "value"))
        if model.qk_norm == "all":
            q, k = (norm(z.reshape(*x.shape[:2], -1), {"scale": p[f"{name}_norm"]}).reshape(z.shape)
                    for name, z in (("query", q), ("key", k)))  # fmt: skip
        q, k = rotated(q), jnp.repeat(rotated(k), heads // keys, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        masked = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(masked), jnp.repeat(v, heads // keys, 2))
        return linear(mixed.reshape(*x.shape[:2], -1), p, "out")

    def mlp(x, p):
        up = linear(x, p, "up")
        if model.mlp == "swiglu":
            return linear(jax.nn.silu(linear(x, p, "gate")) * up, p, "down")
        cubic = jnp.tanh((2 / jnp.pi) ** 0.5 * (up + 0.044715 * up**3))
        return linear(0.5 * up * (1 + cubic), p, "down")

    def loss(params):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = params["embedding"][inputs]
        if model.positions == "learned":
            x = x + params["position_embedding"][: inputs.shape[1]]
        more = 0.0
        for index in range(model.num_layers):
            p = jax.tree.map(lambda stack, index=index: stack[index], params["layers"])
            x = x + attention(norm(x, p["attention_norm"]), p["attention"])
            hidden = norm(x, p["mlp_norm"])
            added, loss_of_layer = (
                (mlp(hidden, p["mlp"]), 0.0) if mixture is None else mixture(model, p["mlp"], hidden, linear, mlp)
            )
            x, more = x + added, more + loss_of_layer
        head = params["embedding"].T if model.tied_embeddings else params["head"]
        chances = jax.nn.log_softmax(norm(x, params["final_norm"]) @ head)
        return more - jnp.take_along_axis(chances, targets[..., None], -1).mean()

    with jax.enable_x64(True):
        return jax.value_and_grad(loss)(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_losses_and_gradients_are_those_of_float64(model, mesh, monkeypatch):
    take_gpu_rules(monkeypatch)
    tokens, params, loss, gradients = one_step(EXPERIMENT.replaced({"model": model, "mesh": MESHES[mesh]}))
    wanted_loss, wanted = oracle(model, params, tokens)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    # That of the keys' bias is zero: it adds the same to all scores of a token.
    least = 1e-2 * np.sqrt(sum(float((one**2).sum()) for one in jax.tree.leaves(wanted)))
    for (path, one), found in zip(jax.tree.flatten_with_path(wanted)[0], jax.tree.leaves(gradients), strict=True):
        size = max(least, float(jnp.linalg.norm(one)))
        assert np.linalg.norm(found - np.asarray(one)) < 1e-5 * size, jax.tree_util.keystr(path)
