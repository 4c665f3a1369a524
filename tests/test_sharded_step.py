"""The compiled step on a mesh: what it gathers, what travels, and the table of shards."""

import math
import re

import jax
import numpy as np
import pytest
from test_sharding import TEXT

from jaxdl.data import SyntheticText
from jaxdl.models import Transformer
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.parallel.sharding import is_spec
from jaxdl.report.explanation import readable_bytes
from jaxdl.train import main
from jaxdl.training.experiment import load
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.state import param_bytes_per_device
from jaxdl.training.step import make_train_step

# The compiled step

SMALL = TEXT.replaced({"model": Transformer(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=192)})


def lowered(experiment):
    plan = make_plan(experiment)
    rows = plan.splits.train.batch(np.arange(experiment.batch_size))
    return plan, make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), rows)


def shard_shapes(shapes, shardings):
    return [s.shard_shape(x.shape) for x, s in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)]


def test_the_step_gathers_weights_and_updates_shards():
    """The optimizer, LAMB with its norms, never makes a parameter, gradient or moment whole again."""
    plan, step = lowered(SMALL.replaced({"mesh": MeshConfig(replica=2, fsdp=4)}))
    compiled = step.compile()
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
    used = [(64, 192)] * 2 + [(192, 64)] + [(64, 4, 16)] * 3 + [(4, 16, 64), (128, 64)]
    expected = sorted(",".join(map(str, shape)) for shape in used)
    # And of biases and norm scales, which are replicated, each device exchanges a share and gathers the others'.
    small = sum(
        x.size
        for x, spec in zip(
            jax.tree.leaves(plan.parts.network.param_shapes),
            jax.tree.leaves(plan.parts.state_spec.params, is_leaf=is_spec),
            strict=True,
        )
        if not len(spec)
    )
    shares = [shape for shape in gathered if math.prod(map(int, shape.split(","))) == small]
    assert len(shares) == 1
    assert sorted(set(gathered) - set(shares)) == sorted(set(expected)), "each weight of one layer and the embedding"
    assert len(gathered) == len(expected) + 1, "once; nothing of parameters after the gradients"
    # What goes in and out of the step is one device's share, and no more than donated buffers come back.
    spec, mesh = plan.parts.state_spec, plan.parts.layout.mesh
    sizes = [x.dtype.itemsize for x in jax.tree.leaves(spec.shapes)]
    shapes = shard_shapes(spec.shapes, spec.shardings)
    state_bytes = sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pytest.approx(state_bytes, rel=0.01)
    assert memory.output_size_in_bytes == pytest.approx(state_bytes, rel=0.01)
    # The exchange reports what a ring all-reduce of these shards sends: 2 (n - 1) / n times their bytes.
    state = make_initial_state(plan)
    per_device = param_bytes_per_device(state.params)
    _, metrics = compiled(state, jax.device_put(plan.splits.train.batch(np.arange(16)), batch_sharding(mesh)))
    whole_bytes = 4 * small * 3 // 4  # Of what is replicated on the four devices, each sends a quarter.
    assert metrics["exchange/bytes_sent/replica"] == 2 * (2 - 1) / 2 * (per_device - whole_bytes)
    assert metrics["exchange/residual_norm"] == 0


@pytest.mark.slow
def test_bytes_over_replica_are_those_of_the_shards():
    """The dense exchange sends each device's own shard, once, in float32: counted in the lowered step."""
    mesh = MeshConfig(replica=2, fsdp=2, tensor=2)
    plan, step = lowered(SMALL.replaced({"mesh": mesh}))
    spec = plan.parts.state_spec
    text = step.as_text()
    reduced = []
    for types in re.findall(r'"stablehlo.all_reduce"\(.*?\}\) : \((.*?)\) ->', text, flags=re.DOTALL):
        for shape, dtype in re.findall(r"tensor<((?:\d+x)*)(\w+)>", types):
            if shape:
                assert dtype == "f32"
                reduced.append(tuple(int(size) for size in shape.rstrip("x").split("x")))
    shards = shard_shapes(spec.shapes.params, spec.shardings.params)
    specs = jax.tree.leaves(spec.params, is_leaf=is_spec)
    sharded = [math.prod(shape) for shape, spec in zip(shards, specs, strict=True) if len(spec)]
    whole = [math.prod(shape) for shape, spec in zip(shards, specs, strict=True) if not len(spec)]
    # All shards in one buffer, each device's share of replicated ones in another, and the sums of losses and the like
    # with whether each gradient is finite.
    small = sum(name.startswith("sums/") for name in step.out_info[1]) + len(specs)
    assert sum(math.prod(shape) for shape in reduced) == sum(sharded) + math.ceil(sum(whole) / 4) + small


@pytest.mark.slow
def test_no_activation_of_all_data_shards_travels():
    """Nothing as large as [batch, length, embed] of a replica: not for the gradient of the embedding either."""
    model = Transformer(num_layers=1, embed_dim=32, num_heads=4, mlp_dim=64)
    data = SyntheticText(vocab_size=96, length=40, num_train=64, num_test=8)
    changes = {"mesh": MeshConfig(replica=2, fsdp=2, tensor=2), "step.microbatches": 2}
    experiment = TEXT.replaced({"model": model, "data": data, "batch_size": 64} | changes)
    _, step = lowered(experiment)
    activation = 64 // 2 // experiment.step.microbatches * 40 * 32
    collectives = r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    sizes = [
        math.prod(int(size) for size in shape.split(","))
        for types in re.findall(collectives, step.compile().as_text())
        for shape in re.findall(r"\w\[([\d,]+)\]", types)
    ]
    assert max(sizes) >= 96 * 32, "the table itself travels"
    assert max(sizes) < activation


def test_explain_prints_the_table_and_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxdl.data import SyntheticText\n"
        "from jaxdl.training.experiment import Experiment\n"
        "from jaxdl.models import Transformer\n"
        "from jaxdl.training.tasks import LanguageModelling\n"
        "def config():\n"
        "    model = Transformer(num_layers=3, embed_dim=64, num_heads=4, mlp_dim=192)\n"
        "    data = SyntheticText(vocab_size=32, length=8, num_train=64, num_test=8)\n"
        "    return Experiment(model=model, data=data, task=LanguageModelling(), batch_size=16, steps=3)\n"
    )
    args = ["--mesh.replica", "2", "--mesh.tensor", "2", "--optimizer", "lars", "--workdir", str(tmp_path / "run")]
    main(["--config", str(file), *args, "--explain"])
    printed = capsys.readouterr().out
    lines = {words[1]: " ".join(words[2:]) for line in printed.splitlines() if len(words := line.split()) > 2}
    assert "parameters on replica 2 x fsdp 2 x tensor 2" in printed
    # 3 x 64 x 192 float32, the last two dimensions split over 4 devices.
    assert lines["layers/mlp/gate"].replace("│ ", "").startswith("3 x 64 x 192 -, fsdp, tensor yes 36 KiB")
    assert lines["layers/mlp_norm/scale"].replace("│ ", "").startswith("3 x 64 whole no 768 B")
    network = make_plan(load(file)).parts.network
    names = {"/".join(key.key for key in path) for path, _ in jax.tree.leaves_with_path(network.param_shapes)}
    assert names <= set(lines)
    assert f"{sum(math.prod(x.shape) for x in jax.tree.leaves(network.param_shapes)):,}" in printed
    assert re.search(r"the compiled step needs [\d.]+ [KM]iB per device: .* of state and batch", printed)
    elements = sum(math.prod(x.shape) for x in jax.tree.leaves(network.param_shapes))
    sent = re.search(
        r"over replica a device sends ([\d.]+) KiB in an average step \(every step, dense float32\)", printed
    )
    # An all-reduce between two replicas sends what a device has of the gradients; all kernels are split over 4 devices.
    assert 1024 * float(sent[1]) == pytest.approx(elements, rel=0.02)
    assert not (tmp_path / "run").exists()


def test_readable_bytes():
    assert [readable_bytes(n) for n in (0, 999, 1000, 18432, 2**20, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "18 KiB",
        "1 MiB",
        "5 GiB",
        "3 TiB",
    ]
