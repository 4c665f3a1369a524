"""benchmarks/studies/large_batch.py: what its variants are, what it refuses, and that no run is made twice."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from mistakes import refusal
from runs import ROOT, TinyPerceptron, tiny_experiment

import jaxdl
from benchmarks.studies import large_batch
from jaxdl.parallel.mesh import MeshConfig


def test_variants_differ_in_the_optimizer_and_share_the_rest():
    found = {
        name: tiny_experiment().replaced(large_batch.Variant(name, 64).changes(0.5, 16))
        for name in ("SGD", "LARS", "LARS no masks")
    }
    assert {one.optimizer.learning_rate for one in found.values()} == {0.5 * 0.2 * 64 / 256}
    assert {(one.batch_size, one.model.norm_span, one.optimizer.weight_decay) for one in found.values()} == {
        (64, 16, large_batch.WEIGHT_DECAY)
    }
    names = [one.name for one in large_batch.variants(256, [2048, 8192])]
    assert names == ["SGD, 256", "SGD, 2,048", "LARS, 2,048", "LARS no masks, 2,048", "SGD, 8,192", "LARS, 8,192"]
    assert [one.optimizer.kind for one in found.values()] == ["sgd", "lars", "lars"]
    assert [one.optimizer.exclude_vectors for one in found.values()][1:] == [True, False]


@pytest.mark.slow
def test_a_run_that_finished_or_diverged_is_not_made_again(tmp_path, monkeypatch):
    one = {"mesh": MeshConfig(), "steps": 4, "model": TinyPerceptron()}
    fine = tiny_experiment().replaced(one)
    wild = fine.replaced({"optimizer.learning_rate": 1e30, "guard.rollback_after": 1, "guard.max_rollbacks": 0})
    train, count = jaxdl.train, []
    monkeypatch.setattr(jaxdl, "train", lambda *args, **more: count.append(args) or train(*args, **more))
    first = [large_batch.accuracy(tmp_path / name, each) for name, each in (("fine", fine), ("wild", wild))]
    assert first[0]["final"] > 0
    assert first[1] == {"final": 0.0, "course": []}
    assert [large_batch.accuracy(tmp_path / "fine", fine), large_batch.accuracy(tmp_path / "wild", wild)] == first
    assert len(count) == 3


def test_the_table_and_the_picture(tmp_path, capsys):
    args = SimpleNamespace(workdir=tmp_path, config="tiny.py", factors=[0.5, 1.0, 2.0])
    course = [(1.0, 0.5), (2.0, 0.75)]
    found = {
        name: {
            "variant": {},
            "tuned": {0.5: low, 1.0: 0.8, 2.0: 0.7},
            "learning_rate": 0.2,
            "runs": [{"final": final, "course": course} for final in (0.7, 0.8 + shift)],
        }
        for name, low, shift in (("SGD, 256", 0.9, 0.0), ("LARS, 2,048", 0.0, 0.1))
    }
    large_batch.report(args, found)
    text = capsys.readouterr().out
    assert "diverged" in text
    assert text.count("(edge)") == 1
    assert "+5.00 points" in text
    assert (tmp_path / "large_batch.png").stat().st_size > 5_000


LENGTHS = """
import jax, jaxdl
from jaxdl.core.kinds import kinds
from jaxdl.optim import Schedule, Steps
from jaxdl.platform.search.config import Lengths

base = jaxdl.load("digits", {"data": "synthetic_images", "data.num_train": 960, "steps": 13, "epochs": None})
lengths = Lengths(base, [])
schedules = [kind(milestones_epochs=(0.2, 0.4)) if kind is Steps else kind() for kind in kinds(Schedule).values()]
assert Steps(milestones_epochs=(0.2, 0.4)) in schedules
for one in schedules:
    Lengths(base.replaced({"schedule": one}), []).check([{}])
jax.config.update("jax_num_cpu_devices", 3)  # An error when JAX has its devices.
print(lengths.of({}), jax.device_count())
"""


@pytest.mark.slow
def test_a_search_leaves_the_devices_to_its_trials():
    """The script trains in this process after it has searched: the search must not have started JAX's devices."""
    done = subprocess.run([sys.executable, "-c", LENGTHS], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "13 3\n", done.stderr


def test_only_a_trial_that_finished_or_diverged_has_an_accuracy(tmp_path):
    def outcome(state, reason="", value=None):
        return large_batch.outcome(tmp_path, {"number": 3, "state": state, "reason": reason, "value": value})

    assert outcome("finished", value=0.75) == 0.75
    assert outcome("failed", "diverged: the loss is nan") == 0.0
    with pytest.raises(jaxdl.ConfigError, match=r"trial 3: to be resumed: halt file; the same call resumes it\.$"):
        outcome("to be resumed", "halt file")
    with pytest.raises(jaxdl.ConfigError, match=r"trial 3: failed: x: no such folder\.$"):
        outcome("failed", "x: no such folder.")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--large", "300"], "multiples of --small 256"),
        (["--", "--optimizer.momentum", "0.5"], "--optimizer.momentum: the script sets that itself"),
        (["--", "--model.norm", "group"], "batch norm"),
    ],
)
def test_mistakes_are_one_message(tmp_path, monkeypatch, capsys, args, message):
    def run(line):
        monkeypatch.setattr(sys, "argv", ["large_batch.py", *line])
        large_batch.main()

    config = ROOT / "configs/fashion_mnist.py"
    assert message in refusal(capsys, "--config", config, "--workdir", tmp_path, *args, run=run)
