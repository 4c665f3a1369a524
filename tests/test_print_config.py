"""`--print-config`: the resolved config as JSON, and what the options changed in the file's."""

import json

import pytest
from mistakes import refusal

import jaxdl
from jaxdl.core import kinds
from jaxdl.core.config import differences
from jaxdl.train import main
from jaxdl.training.experiment import Experiment


def printed(capsys, *args):
    """(stdout, the lines on stderr) of the command."""
    main(["--config", "digits", "--print-config", *args])
    found = capsys.readouterr()
    return found.out, found.err.splitlines()


def test_the_json_is_the_experiment_and_can_be_given_again(capsys, tmp_path):
    out, changes = printed(capsys, "--optimizer.learning-rate", "0.3", "--mesh.replica=4", "--devices", "4")
    expected = jaxdl.load(
        "digits", {"optimizer.learning_rate": 0.3, "mesh.replica": 4, "mesh.cpu_devices": 4}, gpus=False
    )
    assert Experiment.from_json(out) == expected
    before = jaxdl.load("digits", gpus=False)
    assert changes == [
        f"optimizer.learning_rate: {before.optimizer.learning_rate} -> 0.3",
        f"mesh.replica: {before.mesh.replica} -> 4",
        f"mesh.cpu_devices: {before.mesh.cpu_devices} -> 4",
    ]
    saved = tmp_path / "mine.json"
    saved.write_text(out)
    main(["--config", str(saved), "--print-config"])
    again = capsys.readouterr()
    assert (again.out, again.err) == (out, f"no option changes {saved}\n")


def test_another_kind_is_compared_with_its_defaults(capsys):
    out, changes = printed(
        capsys, "--optimizer", "lars", "--optimizer.momentum", "0.8", "--evaluation.every-steps", "7"
    )
    assert json.loads(out)["optimizer"]["kind"] == "lars"
    kind = jaxdl.load("digits", gpus=False).optimizer.kind
    assert changes[:2] == [f"optimizer: {kind} -> lars", "optimizer.momentum: 0.9 -> 0.8"]
    assert "evaluation.every_steps: None -> 7" in changes
    assert len(changes) == 3


def test_differences_name_exactly_the_fields_that_were_replaced():
    before = jaxdl.load("digits", gpus=False)
    overrides = {"batch_size": 32, "step.clip_norm": 1.0, "report.tensorboard": False, "mesh.tensor": 2}
    found = differences(before, before.replaced(overrides))
    assert {line.partition(":")[0] for line in found} == set(overrides)
    assert differences(before, before) == []
    plain = jaxdl.load("python_lm", gpus=False)
    adapted = plain.replaced({"model.lora.rank": 4})  # A field that JSON leaves out at its default.
    assert differences(plain, adapted) == ["model.lora.rank: 0 -> 4"]
    assert differences(adapted, plain) == ["model.lora.rank: 4 -> 0"]


OWN = """
from flax import nnx
from jaxdl import Arrays, Experiment, FromModule, Loss, Model
def net(hidden, rngs): return nnx.Linear(1, hidden, rngs=rngs)
def data(): ...
def loss(outputs, batch): ...
class Mine(Model):
    width: int = 3
    def build(self): ...
def config():
    return Experiment(steps=3, model=FromModule(net, hidden=4), data=Arrays(train=data, test=data), task=Loss(loss))
def other(): return config().replaced({"model": Mine()})
"""


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [("mine.py", [], []), ("mine.py", ["--model.hidden", "8"], ["model.hidden: 4 -> 8"]), ("mine.py:other", [], []),
     ("mine.py:other", ["--model.width", "8"], ["model.width: 3 -> 8"])],
)  # fmt: skip
def test_a_file_with_functions_and_classes(capsys, tmp_path, name, args, expected):
    """Each time the file runs, its functions and classes are others."""
    (tmp_path / "mine.py").write_text(OWN)
    with kinds.forgotten():
        main(["--config", str(tmp_path / name), "--print-config", *args])
    assert capsys.readouterr().err.splitlines() == (expected or [f"no option changes {tmp_path / name}"])


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--print-config", "--explain"], "--print-config and --explain: give one of them"),
        (["--print-config=yes"], "--print-config=yes: it takes no value"),
        (["--print-config", "--batch-size", "x"], "--batch-size x: not a whole number"),
    ],
)
def test_mistakes(capsys, args, problem):
    assert problem in refusal(capsys, "--config", "digits", *args)
