"""`jaxdl.bench train`, PyTorch beside it, `benchmarks.optim`: what they count, against closed forms; that they run."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import TinyResNet

from benchmarks import optim
from benchmarks.first_losses import compare
from benchmarks.pytorch import training as torch_side
from benchmarks.pytorch.decoder import decoder, set_params
from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticImages, SyntheticText
from jaxdl.models import ResNet, Transformer
from jaxdl.models.rotary import RopeScaling
from jaxdl.optim import LARS, SGD, AdamW
from jaxdl.parallel.collectives.grouped import gated_products
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.performance.bench import train
from jaxdl.performance.bench.flops import count, step_flops
from jaxdl.performance.planner.trial import resident
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Classification, LanguageModelling

ONE = MeshConfig(replica=1, fsdp=1)


def flops_of(function, *shapes):
    return count(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)).jaxpr)


def test_products_and_convolutions_are_counted():
    assert flops_of(lambda a, b: a @ b, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert flops_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (4, 3, 5), (4, 5, 7)) == 2 * 4 * 3 * 5 * 7
    assert flops_of(jax.jit(lambda a: jnp.sin(a) + a), (3, 5)) == 0

    def repeated(a, b):
        return jax.lax.scan(lambda x, _: (jax.checkpoint(jnp.tanh)(x @ b), None), a, length=6)[0]

    assert flops_of(repeated, (3, 5), (5, 5)) == 6 * 2 * 3 * 5 * 5

    def convolved(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=2)

    # 4 x 4 places, 6 channels out, each of 3 x 3 places and the 2 channels in of its group.
    assert flops_of(convolved, (1, 8, 8, 4), (3, 3, 2, 6)) == 2 * 4 * 4 * 6 * 3 * 3 * 2


@pytest.mark.slow
def test_resnet50_has_the_published_operations():
    """torchvision documents 4.09 billion multiplications for ResNet-50 at 224 pixels."""
    data = SyntheticImages(height=224, width=224, num_classes=1000, num_train=16, num_test=8)
    plan = make_plan(Experiment(model=ResNet(), data=data, batch_size=8, steps=1, mesh=ONE), jax.devices()[:1])
    assert step_flops(plan) == pytest.approx(3 * 8 * 2 * 4.09e9, rel=2e-3)


def test_transformer_has_the_usual_operations():
    """Six for each weight of a product and token (Kaplan et al., arXiv 2001.08361), besides attention."""
    model = Transformer(num_layers=3, embed_dim=32, num_heads=4, mlp_dim=64, tied_embeddings=False)
    data = SyntheticText(vocab_size=48, length=16, num_train=64, num_test=16)
    experiment = Experiment(model=model, data=data, task=LanguageModelling(), batch_size=4, steps=1, mesh=ONE)
    plan = make_plan(experiment, jax.devices()[:1])
    sizes = jax.tree.map(lambda x, axes: x.size if len(axes) > 1 and "norm" not in axes else 0,
                         plan.parts.network.param_shapes, plan.parts.network.axes,
                         is_leaf=lambda node: isinstance(node, tuple))  # fmt: skip
    weights = sum(jax.tree.leaves(sizes)) - 48 * 32  # The table of embeddings is read, not multiplied.
    attention = 2 * 3 * 2 * 16 * 16 * 32
    wanted = 4 * (6 * weights * 16 + 3 * attention)
    assert step_flops(plan) == pytest.approx(wanted, rel=0.02)


@pytest.mark.slow
def test_train(tmp_path, capsys):
    path = tmp_path / "figures.json"
    data = "jaxdl.data.SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=64, num_test=16)"
    config = tmp_path / "tiny.py"
    config.write_text(
        "import jaxdl.data\nfrom jaxdl.training.experiment import Experiment\nfrom runs import TinyPerceptron\n"
        f"def config():\n    return Experiment(data={data}, model=TinyPerceptron(), batch_size=16, epochs=3)\n"
    )
    train.main(["--config", str(config), "--num-steps", "2", "--num-repeats", "2", "--json", str(path)])
    found = json.loads(path.read_text())
    assert {name: len(times) for name, times in found["times"].items()} == {"jaxdl": 2, "update alone": 2}
    assert found["units_per_step"] == 16
    assert found["flops_per_step"] > 0
    assert found["peak_flops_per_sec"] > 1e8
    text = capsys.readouterr().out
    assert "images/s" in text
    assert "% of a step" in text


def test_photographs_are_made_up(tmp_path):
    experiment = resident(Experiment(data={"kind": "tfds", "photos": {"size": 64}}, batch_size=4, epochs=1), None)
    assert isinstance(experiment.data, SyntheticImages)
    assert (experiment.data.height, experiment.data.num_classes) == (64, 1000)
    assert not experiment.phases


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-steps", "0"], "--num-steps 0"),
        (["--image-size", "64"], "--image-size 64: the images of this data have a fixed size"),
    ],
)
def test_train_mistakes(args, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        train.parse_command(["--config", "configs/digits.py", *args])


def against_torch(**changes):
    data = SyntheticImages(height=32, width=32, channels=1, num_classes=4, num_train=64, num_test=16)
    model = ResNet(depth=18, width=4)
    return Experiment(**({"data": data, "model": model, "batch_size": 8, "steps": 1, "optimizer": SGD()} | changes))


def test_pytorch_trains_the_same_network():
    pytest.importorskip("torch")
    experiment = against_torch(
        optimizer=LARS(learning_rate=1.0, weight_decay=1e-3, nesterov=True),
        step=StepConfig(microbatches=2, clip_norm=1.0, ema_decay=0.9),
    )
    steps, about = torch_side.make_torch_step(experiment, experiment.data.build().train.spec)
    steps(2)
    assert "a transcription" in about
    model = torch_side._transcribed(experiment.model, 4, 1)
    plan = make_plan(experiment.replaced({"mesh": ONE}), jax.devices()[:1])
    sizes = jax.tree.leaves(jax.tree.map(lambda x: x.size, plan.parts.network.param_shapes))
    assert sorted(one.numel() for one in model.parameters()) == sorted(sizes)
    decayed, kept = torch_side._optimizer(experiment, model).param_groups
    assert {one.ndim for one in decayed["params"]} == {2, 4}
    assert {one.ndim for one in kept["params"]} == {1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (1e-3, 0.0)


def test_rows_that_fill_blocks_up_do_not_count():
    sizes = jnp.array([300, 0, 100])
    shapes = [(400, 16), (3, 16, 8), (3, 16, 8), (3, 8, 16)]
    product = flops_of(lambda x, *kernels: gated_products(jnp.add, False, x, *kernels, sizes), *shapes)
    assert product == 3 * 2 * 400 * 16 * 8


TEXT = {"data": SyntheticText(vocab_size=48, length=12, num_train=64, num_test=16), "task": LanguageModelling()}
GPT2 = {"norm": "layer", "mlp": "gelu", "biases": "all", "positions": "learned", "max_length": 12}
QWEN = {"head_size": 6, "qk_norm": True, "biases": "qkv", "rope_scaling": RopeScaling(factor=4, original_length=8)}


@pytest.mark.parametrize("fields", [{"num_kv_heads": 2}, GPT2, QWEN], ids=["Llama", "GPT-2", "Qwen"])
def test_the_decoder_of_pytorch_is_the_same_network(fields):
    torch = pytest.importorskip("torch")
    config = Transformer(num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, **fields)
    experiment = Experiment(model=config, optimizer=AdamW(), batch_size=4, steps=1, **TEXT)
    plan = make_plan(experiment.replaced({"mesh": ONE}), jax.devices()[:1])
    network, tokens = plan.parts.network, np.random.default_rng(0).integers(0, 48, (4, 12))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    params = jax.tree.map(lambda x: 0.5 * jax.random.normal(next(keys), x.shape), network.param_shapes)
    model = decoder(config, 48, torch.float32)
    set_params(model, params)
    wanted = network.apply(params, {}, tokens.astype(np.int32), train=False)[0]
    np.testing.assert_allclose(model(torch.tensor(tokens)).detach().numpy(), wanted, rtol=1e-4, atol=1e-4)
    steps, about = torch_side.make_torch_step(experiment, plan.parts.data_spec)
    steps(2)
    assert "AdamW" in about


def test_the_first_losses_are_those_of_pytorch():
    pytest.importorskip("torch")
    config = Transformer(num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, tied_embeddings=False)
    optimizer = AdamW(learning_rate=0.02, weight_decay=0.3)
    experiment = Experiment(model=config, optimizer=optimizer, batch_size=8, steps=9, mesh=ONE, **TEXT)
    experiment = experiment.replaced({"step": StepConfig(clip_norm=0.5, microbatches=2)})
    losses = compare(experiment, jax.devices()[:1])
    assert losses["torch"][-1] < 0.98 * losses["torch"][0]
    np.testing.assert_allclose(losses["jaxdl"], losses["torch"], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": AdamW()}, "the optimizer is adamw"),
        ({"task": Classification(mixup=0.2)}, "mixes no images"),
        ({"model": ResNet(depth=8)}, "only ResNet-18 to 152"),
        ({"model": Transformer(window=4), "optimizer": AdamW(), **TEXT}, "has no window"),
    ],
)
def test_what_cannot_be_compared_with_pytorch_is_refused(changes, message):
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=message):
        torch_side.make_torch_step(against_torch(**changes), against_torch().data.build().train.spec)


@pytest.mark.parametrize("name", list(optim.MODELS))
def test_optim_models_have_the_sizes_that_they_are_said_to(name):
    mesh = make_mesh(MeshConfig(replica=1, fsdp=8))
    parts = optim._parts(name, optim.SIDES["a part on each"], mesh)
    size = sum(x.size for x in jax.tree.leaves(parts.network.param_shapes))
    assert size == pytest.approx({"resnet50": 25_557_032, "transformer": 345e6}[name], rel=0.003)


@pytest.mark.slow
def test_optim(tmp_path, capsys, monkeypatch):
    experiment, spec = optim.MODELS["resnet50"]
    model, images = TinyResNet(depth=8, width=32), dataclasses.replace(spec, height=32, width=32)
    small = {"resnet50": (experiment.replaced({"model": model}), images)}
    monkeypatch.setattr(optim, "MODELS", small)
    path = tmp_path / "figures.json"
    optim.main(["--models", "resnet50", "--num-repeats", "2", "--json", str(path)])
    found = json.loads(path.read_text())["resnet50"]
    whole, split = (found[side] for side in optim.SIDES)
    assert (whole["norm_all_reduces"], whole["all_gathers"]) == (0, 0)
    assert split["norm_all_reduces"] == 1
    assert split["all_gathers"] >= 1
    assert 6 < whole["optimizer_bytes"] / split["optimizer_bytes"] <= 8
    for side in (whole, split):
        assert len(side["one device"]) == len(side["all at once"]) == 2
        assert np.all(np.array(side["one device"]) > 0)
    assert "a part on each" in capsys.readouterr().out
