"""Optimizers against NumPy transcriptions of their references, optax, and their own unstacked selves."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.optim import (
    LAMB,
    LARS,
    SGD,
    AdamW,
    Constant,
    Polynomial,
    Rates,
    SignSGD,
    decay_mask,
    num_updates,
    scale_by_lars_trust_ratio,
    stacked_dims,
)

AXES = {
    "conv": {"kernel": ("height", "width", "channel_in", "channel_out")},
    "norm": {"bias": ("norm",), "scale": ("norm",)},
    "head": {"bias": ("classes",), "kernel": ("embed", "classes")},
}
SHAPES = {
    "conv": {"kernel": (3, 3, 4, 8)},
    "norm": {"bias": (8,), "scale": (8,)},
    "head": {"bias": (10,), "kernel": (8, 10)},
}
WEIGHTS = {"conv": {"kernel": True}, "norm": {"bias": False, "scale": False}, "head": {"bias": False, "kernel": True}}
NUM_STEPS = 20
LENGTH = {"total_steps": NUM_STEPS, "steps_per_epoch": 1}
CYCLE = Constant(warmup_steps=5).cycle(**LENGTH)


def learning_rate(peak: float) -> Any:
    return Polynomial(warmup_steps=5, end_fraction=0.01).build(peak=peak, **LENGTH)


def rates_at(config: Any, step: int) -> Rates:
    return Rates(learning_rate(config.learning_rate)(step), config.momentum_at(CYCLE(step)))


def random_tree(seed: int, shapes: Any = SHAPES) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: rng.normal(size=shape).astype(np.float32), shapes, is_leaf=is_shape)


def random_grads(step: int, params: Any) -> Any:
    """Gradients that depend on the parameters, so that an error does not stay where it is made."""
    noise = random_tree(1000 + step, jax.tree.map(np.shape, params))
    return jax.tree.map(lambda n, p: (0.3 * n + 0.1 * np.asarray(p, np.float32)).astype(np.float32), noise, params)


def run(config: Any, params: Any) -> Any:
    """Parameters after NUM_STEPS of an optimizer config, or of an optimizer of optax, which has its own rates."""
    optimizer = config if isinstance(config, optax.GradientTransformation) else config.build(AXES)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(NUM_STEPS):
        extra = {} if optimizer is config else {"rates": rates_at(config, step)}
        updates, state = update(random_grads(step, params), state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params


def run_numpy(rule: Any, params: Any, rates: Any, weights: Any = WEIGHTS) -> Any:
    """Steps of `rule(w, g, slots, lr, t, is_weight) -> new w` in float64, parameter by parameter."""
    leaves, treedef = jax.tree.flatten(params)
    leaves = [leaf.astype(np.float64) for leaf in leaves]
    is_weight = treedef.flatten_up_to(weights)
    slots = [SimpleNamespace(m=np.zeros_like(leaf), v=np.zeros_like(leaf)) for leaf in leaves]
    for step in range(NUM_STEPS):
        grads = jax.tree.leaves(random_grads(step, treedef.unflatten(leaves)))
        lr = float(rates(step))
        leaves = [
            rule(w, g.astype(np.float64), s, lr, step + 1, i)
            for w, g, s, i in zip(leaves, grads, slots, is_weight, strict=True)
        ]
    return treedef.unflatten(leaves)


def mlperf_lars(momentum: float, weight_decay: float, nesterov: bool, eeta: float = 0.001, epsilon: float = 0.0) -> Any:
    def rule(w, g, s, lr, t, is_weight):
        scaled_lr = lr
        if is_weight:
            w_norm, g_norm = np.linalg.norm(w.ravel()), np.linalg.norm(g.ravel())
            if w_norm > 0 and g_norm > 0:
                scaled_lr *= eeta * w_norm / (g_norm + weight_decay * w_norm + epsilon)
            g = g + weight_decay * w
        s.m = momentum * s.m - scaled_lr * g
        return w + momentum * s.m - scaled_lr * g if nesterov else w + s.m

    return rule


def assert_close(got: Any, wanted: Any, rtol: float = 2e-5) -> None:
    """Equal to `rtol` of each parameter's largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def furthest(one: Any, other: Any) -> float:
    """The largest relative difference of a parameter."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b) for a, b in pairs)


def test_masks():
    axes = {
        "stack": {"kernel": ("layers", "embed", "mlp"), "scale": ("layers", "norm")},
        "table": ("vocab", "embed"),
        "bias": ("classes",),
        "scalar": (),
    }
    mask = {"stack": {"kernel": True, "scale": False}, "table": True, "bias": False, "scalar": False}
    stacked = {"stack": {"kernel": (0,), "scale": (0,)}, "table": (), "bias": (), "scalar": ()}
    assert decay_mask(axes) == mask
    assert stacked_dims(axes) == stacked
    assert decay_mask(AXES) == WEIGHTS


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_lars_is_mlperf(nesterov, epsilon):
    params, rates = random_tree(0), learning_rate(8.0)
    lars = LARS(learning_rate=8.0, nesterov=nesterov, weight_decay=0.1, epsilon=epsilon)
    got = run(lars, params)
    assert_close(got, run_numpy(mlperf_lars(0.9, 0.1, nesterov, epsilon=epsilon), params, rates))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("make", [SGD, LARS])
def test_cycled_momentum(make, nesterov):
    """LARS has the rate inside the momentum, SGD outside; the momentum is that of the step that uses it."""
    strengths = [0.98 - 0.08 * (s + 1) / 5 for s in range(5)] + [0.9 + 0.08 * (s - 5) / 15 for s in range(5, NUM_STEPS)]

    def rule(w, g, s, lr, t, is_weight):
        m = strengths[t - 1]
        if make is SGD:
            s.m = m * s.m + g
            return w - lr * (g + m * s.m if nesterov else s.m)
        if is_weight:
            g = g * 0.001 * np.linalg.norm(w) / np.linalg.norm(g)
        s.m = m * s.m - lr * g
        return w + m * s.m - lr * g if nesterov else w + s.m

    params, rates = random_tree(0), learning_rate(0.05)
    fields = {"momentum": 0.98, "momentum_at_peak": 0.9, "nesterov": nesterov, "weight_decay": 0.0}
    got = run(make(learning_rate=0.05, **fields), params)
    assert_close(got, run_numpy(rule, params, rates))


@pytest.mark.parametrize("masked", [False, True])
def test_lars_is_not_optax_lars(masked):
    params, rates = random_tree(0), learning_rate(8.0)
    masks = {"weight_decay_mask": WEIGHTS, "trust_ratio_mask": WEIGHTS} if masked else {}
    theirs = run(optax.lars(rates, weight_decay=0.1, **masks), params)
    ours = run(LARS(learning_rate=8.0, weight_decay=0.1), params)
    assert furthest(ours["conv"], theirs["conv"]) > 1e-3
    if masked:  # Without masks theirs changes biases and normalization too; with masks only the ratio differs.
        no_decay = {"weight_decay": 0.0}
        theirs = run(optax.lars(rates, **no_decay, **masks), params)
        assert_close(run(LARS(learning_rate=8.0, **no_decay), params), theirs)
    else:
        assert furthest(ours["norm"], theirs["norm"]) > 0.1


def test_lars_without_exclusion_scales_vectors_too():
    params, rates = random_tree(0), learning_rate(8.0)
    got = run(LARS(learning_rate=8.0, weight_decay=0.1, exclude_vectors=False), params)
    everything = jax.tree.map(lambda _: True, WEIGHTS)
    assert_close(got, run_numpy(mlperf_lars(0.9, 0.1, False), params, rates, everything))


def test_lamb_is_algorithm_2():
    b1, b2, epsilon, weight_decay = 0.8, 0.95, 1e-5, 0.1

    def rule(w, g, s, lr, t, is_weight):
        s.m, s.v = b1 * s.m + (1 - b1) * g, b2 * s.v + (1 - b2) * g * g
        update = s.m / (1 - b1**t) / (np.sqrt(s.v / (1 - b2**t)) + epsilon)
        if is_weight:
            update = update + weight_decay * w
            update = update * np.linalg.norm(w.ravel()) / np.linalg.norm(update.ravel())
        return w - lr * update

    params, rates = random_tree(0), learning_rate(0.05)
    lamb = LAMB(learning_rate=0.05, b1=b1, b2=b2, epsilon=epsilon, weight_decay=weight_decay)
    assert_close(run(lamb, params), run_numpy(rule, params, rates))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("exclude_vectors", [False, True])
def test_sgd_has_coupled_decay_and_the_rate_outside_momentum(nesterov, exclude_vectors):
    def rule(w, g, s, lr, t, is_weight):
        g = g + 0.1 * w if is_weight or not exclude_vectors else g
        s.m = 0.9 * s.m + g
        return w - lr * (g + 0.9 * s.m if nesterov else s.m)

    params, rates = random_tree(0), learning_rate(0.05)
    sgd = SGD(learning_rate=0.05, nesterov=nesterov, weight_decay=0.1, exclude_vectors=exclude_vectors)
    assert_close(run(sgd, params), run_numpy(rule, params, rates))


def test_sgd_without_momentum_keeps_no_buffer():
    params, rates = random_tree(0), learning_rate(0.05)
    plain = SGD(learning_rate=0.05, momentum=0.0)
    assert_close(run(plain, params), run(optax.sgd(rates), params), rtol=1e-6)
    assert [leaf.shape for leaf in jax.tree.leaves(plain.build(AXES).init(params))] == [()]


@pytest.mark.parametrize("exclude_vectors", [False, True])
def test_adamw_is_optax_adamw(exclude_vectors):
    params, rates = random_tree(0), learning_rate(0.02)
    fields = {"b1": 0.8, "b2": 0.95, "weight_decay": 0.1}
    ours = AdamW(learning_rate=0.02, epsilon=1e-6, exclude_vectors=exclude_vectors, **fields)
    theirs = optax.adamw(rates, eps=1e-6, mask=WEIGHTS if exclude_vectors else None, **fields)
    assert_close(run(ours, params), run(theirs, params), rtol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sign_sgd_moves_every_weight_alike(momentum):
    def rule(w, g, s, lr, t, is_weight):
        s.m = momentum * s.m + g
        return w - lr * (np.sign(s.m) + (0.1 * w if is_weight else 0))

    params, rates = random_tree(0), learning_rate(0.05)
    got = run(SignSGD(learning_rate=0.05, momentum=momentum, weight_decay=0.1), params)
    assert_close(got, run_numpy(rule, params, rates))


ALL = [
    SGD(weight_decay=0.1),
    SignSGD(weight_decay=0.1),
    SignSGD(momentum=0.9),
    AdamW(weight_decay=0.1),
    LARS(weight_decay=0.1),
    LARS(exclude_vectors=False, trust_ratio_clip=(2e-4, 2e-3)),
    LARS(momentum=0.98, momentum_at_peak=0.9),
    LAMB(),
    LAMB(exclude_vectors=False),
]


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.kind)
def test_state_is_float32_arrays_like_the_parameters(config):
    params = random_tree(0)
    state = config.build(AXES).init(params)
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array)
        assert (leaf.shape in shapes and leaf.dtype == jnp.float32) or (leaf.shape == () and leaf.dtype == jnp.int32)


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.kind)
def test_stacked_layers_are_separate_layers(config):
    layer = {"kernel": ("embed", "mlp"), "scale": ("norm",)}
    num_layers, shapes = 3, {"kernel": (6, 5), "scale": (6,)}
    layers = {f"layer{i}": random_tree(i, shapes) for i in range(num_layers)}
    # Layers of different size have different ratios: 1, 10 and 100 times.
    layers = {name: jax.tree.map(lambda w, i=i: w * 10**i, tree) for i, (name, tree) in enumerate(layers.items())}
    stack = lambda trees: jax.tree.map(lambda *leaves: np.stack(leaves), *trees.values())  # noqa: E731
    optimizers = [
        config.build(axes)
        for axes in (dict.fromkeys(layers, layer), {name: ("layers", *names) for name, names in layer.items()})
    ]
    trees = [layers, stack(layers)]
    states = [optimizer.init(tree) for optimizer, tree in zip(optimizers, trees, strict=True)]
    for step in range(2):
        grads = random_grads(step, layers)
        for place, given in enumerate([grads, stack(grads)]):
            rates = rates_at(config, step)
            updates, states[place] = optimizers[place].update(given, states[place], trees[place], rates=rates)
            trees[place] = optax.apply_updates(trees[place], updates)
    assert_close(trees[1], stack(trees[0]), rtol=1e-6)


@pytest.mark.parametrize("kind", [LARS, LAMB])
@pytest.mark.parametrize("zero", ["weights", "gradients", "both"])
def test_zero_norms_have_ratio_one(kind, zero):
    params, grads = random_tree(0), random_tree(1)
    nothing = jax.tree.map(np.zeros_like, params)
    params, grads = (nothing if zero != "gradients" else params), (nothing if zero != "weights" else grads)
    optimizer = kind(learning_rate=0.5, weight_decay=0.0).build(AXES)
    updates, _ = optimizer.update(grads, optimizer.init(params), params, rates=Rates(jnp.float32(0.5)))
    # Adam's first direction is the sign of the gradient, but for epsilon.
    direction = grads if kind is LARS else jax.tree.map(lambda g: g / (np.abs(g) + 1e-6), grads)
    assert_close(updates, jax.tree.map(lambda d: -0.5 * d, direction))


def test_zero_gradient_decays_weights_fully():
    # The reference adds the decay after it has set the ratio to 1.
    params = random_tree(0)
    lars, rates = LARS(weight_decay=0.1).build(AXES), Rates(jnp.float32(0.5))
    updates, _ = lars.update(jax.tree.map(np.zeros_like, params), lars.init(params), params, rates=rates)
    np.testing.assert_allclose(updates["conv"]["kernel"], -0.05 * params["conv"]["kernel"], rtol=1e-6)
    np.testing.assert_array_equal(updates["norm"]["scale"], 0)


@pytest.mark.parametrize(("clip", "ratio"), [(None, 2.0), ((0.0, 0.5), 0.5), ((3.0, 9.0), 3.0), ((1.0, 3.0), 2.0)])
def test_clip(clip, ratio):
    params, grads = {"w": jnp.full((2, 2), 4.0)}, {"w": jnp.full((2, 2), 2.0)}
    lars = scale_by_lars_trust_ratio(1.0, 0.0, 0.0, {"w": True}, {"w": ()}, clip)
    updates, _ = lars.update(grads, lars.init(params), params)
    np.testing.assert_allclose(updates["w"], 2.0 * ratio, rtol=1e-6)
    lamb = LAMB(weight_decay=0.0, trust_ratio_clip=clip).build({"w": ("embed", "mlp")})
    updates, _ = lamb.update(grads, lamb.init(params), params, rates=Rates(jnp.float32(1)))
    wanted = 4.0 if clip is None else np.clip(4.0, *clip)  # |w| / |u| with every element of u equal to 1
    np.testing.assert_allclose(updates["w"], -wanted, rtol=1e-5)
    zero, _ = lars.update({"w": jnp.zeros((2, 2))}, lars.init(params), params)
    np.testing.assert_array_equal(zero["w"], 0)


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (SGD, {"learning_rate": 0.0}, "learning_rate"),
        (SGD, {"learning_rate": float("nan")}, "learning_rate"),
        (SGD, {"momentum": 1.0}, "momentum"),
        (SGD, {"momentum": 0.0, "nesterov": True}, "no effect at momentum = 0"),
        (SGD, {"exclude_vectors": False}, "no effect at weight_decay = 0"),
        (LARS, {"momentum_at_peak": 0.9}, "the same as momentum"),
        (AdamW, {"exclude_vectors": False, "weight_decay": 0.0}, "no effect at weight_decay = 0"),
        (AdamW, {"b2": 1.0}, "b2"),
        (SignSGD, {"exclude_vectors": False}, "no effect at weight_decay = 0"),
        (SignSGD, {"momentum": 1.0}, "momentum"),
        (LARS, {"momentum": 0.0, "nesterov": True}, "no effect at momentum = 0"),
        (LARS, {"trust_ratio_clip": (2.0, 1.0)}, "least and the greatest"),
        (LARS, {"trust_ratio_clip": (0.0, 0.0)}, "least and the greatest"),
        (LAMB, {"trust_ratio_clip": (-1.0, 1.0)}, "least and the greatest"),
        (LAMB, {"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_mistakes(make, fields, message):
    with pytest.raises(ConfigError, match=message):
        make(**fields)


def test_the_count_is_that_of_the_updates_and_the_rate_scales_each():
    learning_rate = Constant(warmup_steps=4).build(peak=1.0, total_steps=10, steps_per_epoch=1)
    sgd, params = SGD(momentum=0.0).build({"b": ("classes",)}), {"b": jnp.zeros(2)}
    state = sgd.init(params)
    seen = []
    for number in range(6):
        assert num_updates(state) == number
        rates = Rates(learning_rate(num_updates(state)))
        updates, state = sgd.update({"b": jnp.ones(2)}, state, params, rates=rates)
        seen.append(float(updates["b"][0]))
    np.testing.assert_allclose(seen, [-0.25, -0.5, -0.75, -1, -1, -1], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (SGD(), "1.trace.b 2.count"),
        (SGD(momentum=0.0), "2.count"),
        (AdamW(), "0.count 0.mu.b 0.nu.b 2.count"),
        (SignSGD(), "3.count"),
        (SignSGD(momentum=0.9), "0.trace.b 3.count"),
        (LARS(), "1.count 2.trace.b"),
        (LARS(momentum=0.98, momentum_at_peak=0.9), "1.count 2.count 2.trace.b"),
        (LAMB(), "0.count 0.mu.b 0.nu.b 3.count"),
    ],
    ids=str,
)
def test_the_names_of_the_state_are_those_of_checkpoints(config, names):
    """Runs resume by these names: one that changes makes every earlier checkpoint of its optimizer unusable."""
    state = config.build({"b": ("classes",)}).init({"b": jnp.zeros(2)})
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    assert " ".join(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat) == names
