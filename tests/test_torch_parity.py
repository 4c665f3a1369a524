"""ResNet-50 v1.5 as PyTorch computes it, from the same weights: logits, loss, gradients, running statistics.

Only where PyTorch is installed; `test_models.py` has a NumPy oracle of the forward pass for everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import random_weights

from jaxdl.models import Network, ResNet

torch = pytest.importorskip("torch")
functional = pytest.importorskip("torch.nn.functional")


def to_torch(tree):
    """Kernels become [out, in, height, width]; the head's [out, in]."""

    def convert(x):
        x = np.asarray(x, np.float64)
        x = x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T
        return torch.tensor(np.ascontiguousarray(x), requires_grad=True)

    return jax.tree.map(convert, tree)


def from_torch(x):
    x = x.detach().numpy()
    return x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T


def distance(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def torch_resnet50(p, s, x, *, train):
    """The v1.5 definition, with torchvision's order of operations: stride in the 3x3 convolution."""

    def conv_norm(x, conv, norm, stride=1):
        kernel = conv["kernel"]
        x = functional.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        p_norm, s_norm = norm
        return functional.batch_norm(
            x, s_norm["norm"]["mean"], s_norm["norm"]["var"], p_norm["norm"]["scale"], p_norm["norm"]["bias"],
            training=train, momentum=0.1, eps=1e-5,
        )  # fmt: skip

    x = functional.relu(conv_norm(x, p["stem_conv"], (p["stem_norm"], s["stem_norm"]), 2))
    x = functional.max_pool2d(x, 3, 2, 1)
    for stage, count in enumerate((3, 4, 6, 3), start=1):
        for block in range(1, count + 1):
            q, r = (tree[f"stage{stage}_block{block}"] for tree in (p, s))
            stride = 2 if stage > 1 and block == 1 else 1
            y = functional.relu(conv_norm(x, q["conv1"], (q["norm1"], r["norm1"])))
            y = functional.relu(conv_norm(y, q["conv2"], (q["norm2"], r["norm2"]), stride))
            y = conv_norm(y, q["conv3"], (q["norm3"], r["norm3"]))
            if "shortcut_conv" in q:
                x = conv_norm(x, q["shortcut_conv"], (q["shortcut_norm"], r["shortcut_norm"]), stride)
            x = functional.relu(x + y)
    return functional.linear(x.mean((2, 3)), p["head"]["kernel"], p["head"]["bias"])


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
def test_resnet50_is_that_of_pytorch(train):
    network = Network(ResNet().build(num_classes=10, channels=3, dtype=jnp.float32))
    params, stats = random_weights(network, scale=0.05)
    image = np.random.default_rng(3).normal(size=(4, 64, 64, 3)).astype(np.float32)
    label = np.arange(4)

    def loss(params, stats):
        logits, state = network.apply(params, stats, image, train=train)
        return -jnp.mean(jax.nn.log_softmax(logits)[np.arange(4), label]), (logits, state)

    (value, (logits, state)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, stats)
    p, s = to_torch(params), jax.tree.map(lambda x: torch.tensor(np.asarray(x, np.float64)), stats)
    outputs = torch_resnet50(p, s, torch.tensor(image.transpose(0, 3, 1, 2), dtype=torch.float64), train=train)
    wanted = functional.cross_entropy(outputs, torch.tensor(label))
    wanted.backward()
    assert value == pytest.approx(wanted.item(), rel=1e-4)
    np.testing.assert_allclose(logits, outputs.detach().numpy(), rtol=1e-4, atol=1e-4)
    # Rounding moves rectifiers: in training PyTorch's own gradients in float32 are off by a percent.
    narrow = jax.tree.map(lambda x: x.detach().float().requires_grad_(True), p)
    s32 = jax.tree.map(lambda x: torch.tensor(np.asarray(x)), stats)
    outputs = torch_resnet50(narrow, s32, torch.tensor(image.transpose(0, 3, 1, 2)), train=train)
    functional.cross_entropy(outputs, torch.tensor(label)).backward()
    exact, in_float32 = ([from_torch(x.grad) for x in jax.tree.leaves(tree)] for tree in (p, narrow))
    allowed = max(1e-4, 3 * max(map(distance, in_float32, exact)))
    assert max(map(distance, jax.tree.leaves(grads), exact)) < allowed < 0.1
    if train:
        for name in ("stem_norm", "stage4_block3"):
            found = state[name]["norm"] if name == "stem_norm" else state[name]["norm3"]["norm"]
            other = s[name]["norm"] if name == "stem_norm" else s[name]["norm3"]["norm"]
            np.testing.assert_allclose(found["mean"], other["mean"], rtol=1e-4, atol=1e-5)
