"""benchmarks/peer: PyTorch's DDP beside jaxdl trains the same network, and what the table says of both."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chaos import why_no_hosts
from runs import ROOT

from benchmarks.peer import compare
from benchmarks.peer.compare import JAXDL, TORCH, Turn
from benchmarks.peer.jaxdl_host import SIDES
from benchmarks.peer.steps import LOCAL, timed
from jaxdl.core.config import ConfigError
from jaxdl.exchange import by_name
from jaxdl.training.run.plan.build import make_initial_state, make_plan

SMALL = ["--hosts", "2", "--num-layers", "1", "--embed-dim", "32", "--length", "16", "--batch-size", "8"]


def test_the_first_losses_must_be_those_of_one_network():
    losses = {JAXDL: {"dense": [3.0, 2.0]}, TORCH: {"plain": [3.0, 2.0001]}}
    assert "difference 1.0e-04 at most" in compare.compare_losses(losses)
    assert "not compared" in compare.compare_losses(losses | {TORCH: {}})
    for other in (2.1, float("nan")):
        with pytest.raises(SystemExit, match="do not train the same network"):
            compare.compare_losses(losses | {TORCH: {"plain": [3.0, other]}})


def test_rows_are_beside_the_floor_and_the_dense_exchange_of_their_framework():
    turns = {
        (TORCH, LOCAL): [Turn([1.0, 1.2], 0.0, 1.0, None), Turn([1.1, 1.1], 0.0, 1.0, None)],
        (TORCH, "plain"): [Turn([4.4, 4.4], 5e6, 1.0, None)],
        (JAXDL, "sign"): [Turn([2.0], 2e5, 1.5, 1e5)],
    }
    local, plain, sign = compare.make_rows("25mbit", turns)
    assert (local.step_sec, local.over_local_sec) == (1.1, 0.0)
    assert plain.over_local_sec == pytest.approx(3.3)
    assert local.times_faster == pytest.approx(4.0)
    assert (sign.over_local_sec, sign.times_faster, sign.counted_bytes) == (None, None, 1e5)
    assert compare.table([local, plain, sign]).row_count == 3


def test_a_warm_up_step_is_not_counted():
    losses = iter((3.0, 2.0, 1.0))
    found = timed(lambda: next(losses), 2, warm_up=1)
    assert found["losses"] == [3.0, 2.0, 1.0]
    assert len(found["seconds"]) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rates", "fast"], "fast"),
        (["--batch-size", "7"], "batch_size=7: it cannot be split over 2 hosts"),
        (["--jaxdl-sides", LOCAL], "jaxdl_sides: give one that exchanges"),
        (["--jaxdl-sides", "plain"], "jaxdl_sides 'plain': there is no such side"),
        (["--hosts", "1"], "hosts=1: too small"),
    ],
)
def test_mistakes(args, message):
    with pytest.raises(ConfigError, match=message):
        compare.parse_command([*SMALL, *args])


def test_the_transcription_has_the_same_logits():
    torch = pytest.importorskip("torch")
    from benchmarks.peer.torch_host import load
    from benchmarks.pytorch.decoder import decoder

    plan = make_plan(compare.experiment_of(compare.parse_command(SMALL), 1, 8), jax.devices()[:1])
    state, tokens = make_initial_state(plan), np.arange(32).reshape(2, 16) % 256
    model = decoder(plan.experiment.model, 256, torch.float32)
    load(model, {name: np.asarray(x) for name, x in by_name(state.params).items()}, 32)
    ours = plan.parts.network.apply(state.params, state.model_state, jnp.asarray(tokens, jnp.int32), train=False)[0]
    theirs = model(torch.from_numpy(tokens)).detach().numpy()
    np.testing.assert_allclose(theirs, ours, atol=1e-4)


@pytest.mark.parametrize("name", ["Int8", "OneBit"])
def test_codes_of_hooks_keep_their_shape_and_scale(name):
    torch = pytest.importorskip("torch")
    from benchmarks.peer import hooks

    code, x = getattr(hooks, name)(), torch.randn(2, 2 * hooks.BLOCK)
    back = code.decode(code.encode(x))
    assert back.shape == x.shape
    if name == "Int8":
        largest = x.view(2, -1, hooks.BLOCK).abs().amax(2, keepdim=True) / 127
        assert ((back - x).view(2, -1, hooks.BLOCK).abs() <= 0.51 * largest).all()
    else:
        assert (back.sign() == torch.where(x >= 0, 1.0, -1.0)).all()
        torch.testing.assert_close(back.norm(dim=1), x.norm(dim=1))


@pytest.mark.slow
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
@pytest.mark.long("six processes of two frameworks on two emulated hosts")
def test_both_frameworks_on_one_cluster(tmp_path):
    pytest.importorskip("torch")
    results = tmp_path / "peer.json"
    sides = ["--jaxdl-sides", LOCAL, "dense", "topk 1 %, threshold", "--torch-sides", LOCAL, "plain"]
    sides += ["top-k 1 %, by hand", "int8 two-phase, by hand", "1 bit two-phase, by hand"]
    short = ["--rates", "100mbit", "--num-steps", "1", "--num-rounds", "1", "--json", str(results)]
    command = [sys.executable, "-m", "benchmarks.peer.compare", *SMALL, *short, *sides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    rows = {(row["framework"], row["side"]): row for row in found["rows"]}
    assert len(rows) == 8
    parameters = 4 * found["about"][JAXDL]["num_parameters"]
    for side in ((TORCH, "plain"), (JAXDL, "dense")):
        assert parameters < rows[side]["host_bytes"] < 1.5 * parameters + 2e4
    assert rows[TORCH, "top-k 1 %, by hand"]["host_bytes"] < 0.5 * parameters
    assert set(SIDES) >= {row["side"] for row in found["rows"] if row["framework"] == JAXDL}
