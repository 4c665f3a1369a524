"""Mixtures of experts of Hugging Face's layouts: in, tuned in part, and out again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from test_gpu_rules import EXPERIMENT
from test_moe import QUIET, SOFTMAX

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.inference.convert.__main__ import main
from jaxdl.inference.export.__main__ import main as export
from jaxdl.models import LoRA
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.plan.init_from import InitFrom

LAYOUTS = {"mixtral": {}, "qwen3_moe": {"qk_norm": True, "normalized": False}, "olmoe": {"qk_norm": "all"}}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def bits(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Workdirs of checkpoints in each layout, with the folders of these."""
    made = {}
    for layout, changes in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(layout)
        model = SOFTMAX.replaced({"router_z_loss": 0.0, "tied_embeddings": False, "norm_epsilon": 1e-6, **changes})
        run = EXPERIMENT.replaced({"model": model, "mesh": MeshConfig(replica=1, fsdp=1), "steps": 1, **QUIET})
        jaxdl.train(run, folder / "random", quiet=True, devices=jax.devices()[:1])
        main(["to-hf", str(folder / "random"), str(folder / "hf")])
        main(["from-hf", str(folder / "hf"), str(folder / "base")])
        made[layout] = folder
    return made


def tuned(folder, workdir, **changes):
    """A run of 2 steps that begins with a converted network, on 4 devices; the tensors of both in the layout there."""
    model = jaxdl.load(folder / "base" / "config.json").model
    run = EXPERIMENT.replaced({"model": model, "mesh": MeshConfig(replica=2, fsdp=2), "optimizer": AdamW(), **QUIET})
    run = run.replaced({"sharding.min_shard_elements": 16, **changes})
    jaxdl.train(run, workdir / "tuned", quiet=True, devices=jax.devices()[:4], init_from=InitFrom(folder / "base"))
    main(["to-hf", str(workdir / "tuned"), str(workdir / "hf")])
    before, after = bits(folder / "hf"), bits(workdir / "hf")
    assert before.keys() == after.keys()
    return {name for name, x in after.items() if not np.array_equal(x, before[name])}


@pytest.mark.parametrize(
    "layout", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "mixtral")]
)
def test_what_is_frozen_has_its_bits_and_the_rest_is_tuned(layout, bases, tmp_path):
    frozen = ("embedding", "head", "*norm*", "layers.attention.*", "layers.mlp.router", "layers.mlp.up")
    changed = tuned(bases[layout], tmp_path, **{"step.freeze": frozen})
    names = ("w1", "w2") if layout == "mixtral" else ("gate_proj", "down_proj")
    module = "block_sparse_moe" if layout == "mixtral" else "mlp"
    assert changed == {
        f"model.layers.{layer}.{module}.experts.{expert}.{name}.weight"
        for layer in range(2) for expert in range(8) for name in names
    }  # fmt: skip


def test_adapters_of_attention_are_trained_alone_and_merged(bases, tmp_path):
    lora = LoRA(rank=2, targets=("attention",))
    changed = tuned(bases["olmoe"], tmp_path, **{"model.lora": lora})
    assert changed == {f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(2) for name in ATTENTION}
    main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "back")])
    with_adapters, merged = jaxdl.restore(tmp_path / "tuned"), jaxdl.restore(tmp_path / "back")
    tokens = np.random.default_rng(0).integers(0, 40, (2, 16))
    np.testing.assert_allclose(with_adapters.logits(tokens), merged.logits(tokens), rtol=1e-4, atol=1e-5)


def test_experts_and_routers_have_no_adapters():
    for targets in (("mlp.gate",), ("mlp.router",)):
        model = SOFTMAX.replaced({"lora": LoRA(rank=2, targets=targets)})
        with pytest.raises(ConfigError, match=r"model.lora.targets mlp.\w+: no parameter has such a name"):
            model.network((), vocab_size=32, dtype=jnp.float32)
    model = SOFTMAX.replaced({"shared_dim": 8, "lora": LoRA(rank=2, targets=("*",))})
    axes = model.network((), vocab_size=32, dtype=jnp.float32).axes["layers"]
    adapted = {name.removesuffix("_lora_a") for name in axes["mlp"]["shared"] if name.endswith("_lora_a")}
    assert adapted == {"gate", "up", "down"}
    assert not [name for name in axes["mlp"] if "lora" in name]


def test_an_exported_mixture_takes_any_number_of_texts(bases, tmp_path):
    base = bases["olmoe"] / "base"
    export(["--workdir", str(base), "--to", str(tmp_path / "to"), "--format", "stablehlo"])
    function = jax.export.deserialize(bytearray((tmp_path / "to" / "predict.stablehlo").read_bytes()))
    length = function.in_avals[0].shape[1]
    tokens = np.random.default_rng(0).integers(0, 40, (3, length)).astype(np.int32)
    logits = np.asarray(jaxdl.restore(base).logits(tokens))
    for count in (3, 1):
        chances = np.asarray(function.call(tokens[:count]))
        np.testing.assert_allclose(chances, jax.nn.softmax(logits[:count]), rtol=1e-4, atol=1e-6)
