"""Kinds from outside jaxdl: defined in a config file, a notebook or a package, switched, dumped and found again."""

import json
import sys

import pytest
from foreign import MINE, forget, write_mine
from mistakes import refusal

import jaxdl
from jaxdl.core import kinds
from jaxdl.core.config import Config, ConfigError
from jaxdl.models import Model, ResNet
from jaxdl.optim import SGD
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.train import main
from jaxdl.training.experiment import Experiment, as_experiment, load_experiment

PARTS = {
    "model": ("my_model", "hidden", 8),
    "data": ("my_rows", "num_rows", 9),
    "task": ("my_task", "extra", 0.25),
    "optimizer": ("mine", "decay", 0.1),
    "schedule": ("my_schedule", "late", 2.0),
    "exchange": ("my_exchange", "loud", True),
    "precision": ("my_precision", "exact", False),
}


@pytest.fixture(autouse=True)
def _forgotten():
    with kinds.forgotten():
        yield


@pytest.fixture
def mine(tmp_path):
    return write_mine(tmp_path)


@pytest.mark.parametrize("part", PARTS)
def test_a_kind_in_a_config_file_is_as_one_of_jaxdl(mine, part):
    name, field, value = PARTS[part]
    load_experiment(mine)
    assert name in kinds.choices(Experiment)[part]
    option = [f"--{part}", name]
    if value is not True and value is not False:
        typed = jaxdl.load(mine, [*option, f"--{part}.{field}", str(value)])
    else:
        typed = jaxdl.load(mine, [*option, f"--{part}.{field}" if value else f"--{part}.no-{field}"])
    changed = load_experiment(mine).replaced({part: name, f"{part}.{field}": value})
    assert typed.to_json() == changed.to_json()
    chosen = getattr(changed, part)
    assert (type(chosen).__qualname__, getattr(chosen, field)) == (type(chosen).__name__, value)
    # Other overrides keep it, and JSON says where it is defined.
    assert getattr(changed.replaced({"seed": 1, part: name}), part) == chosen
    dumped = json.loads(changed.to_json())[part]
    assert dumped["kind"] == name
    assert dumped["class"] == f"{mine}:{type(chosen).__name__}"
    assert Experiment.from_json(changed.to_json()) == changed
    text = changed.to_json()
    forget(mine)
    again = Experiment.from_json(text)
    assert again.to_json() == text
    assert type(getattr(again, part)) is not type(chosen)


def test_help_lists_kinds_and_fields_of_a_config_file(mine, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--config", str(mine), "--model", "my_model", "--help"])
    assert end.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--model my_model (or " in printed
    assert "--data my_rows (or " in printed
    assert "--model.hidden" in printed
    assert "Hidden units" in printed
    for name, _, _ in PARTS.values():
        assert name in printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "my_modle"], ["--model my_modle: there is no such kind", "resnet", "my_model"]),
        (["--model", "my_model", "--model.hidden", "0"], ["--model.hidden 0: must be greater than or equal to 1"]),
        (["--model", "my_model", "--model.hiden", "3"], ["--model.hiden", "Did you mean --model.hidden?"]),
        (["--model.hidden", "3"], ["model resnet has no hidden; my_model has it"]),
    ],
)
def test_mistakes_are_one_message(mine, capsys, args, words):
    said = refusal(capsys, "--config", mine, *args)
    assert not [word for word in words if word not in said], said


# Names


def test_a_name_of_jaxdl_is_refused():
    with pytest.raises(ConfigError, match=r'resnet is the name of jaxdl\'s own model\. Name yours: .*kind="my_resnet"'):

        class Resnet(Model):
            pass


@pytest.mark.parametrize("line", ["kind: Annotated[Literal['mine'], 0] = 'mine'", "kind = 'mine'"])
def test_a_kind_is_not_named_by_a_field(line):
    with pytest.raises(
        ConfigError, match=r'Mine: name its kind in the class statement: class Mine\(\.\.\., kind="x"\)'
    ):
        exec(
            f"class Mine(Model):\n    {line}",
            {"Model": Model, "Annotated": 0, "Literal": 0} | vars(__import__("typing")),
        )


def test_two_files_that_define_one_kind(mine, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    other = other / mine.name
    other.write_text(MINE.replace("32", "64"))
    one, two = (load_experiment(path).replaced({"data": "digits"}) for path in (mine, other) if load_experiment(path))
    with pytest.raises(
        ConfigError, match=r"my_model: several models have this name: .*mine\.py:MyModel, .*Give one an"
    ):
        two.replaced({"model": "my_model"})
    # Who has one keeps it, and each is found again in its own file.
    first, second = (kinds.find(Model, "my_model", f"{path}:MyModel")() for path in (mine, other))
    assert (first.hidden, second.hidden) == (32, 64)
    for made in (first, second):
        changed = one.replaced({"model": made})
        assert changed.replaced({"model": "my_model", "model.hidden": 3}).model == made.replaced({"hidden": 3})
        assert Experiment.from_json(changed.to_json()) == changed
    assert kinds.source_of(type(first)) == f"{mine}:MyModel"
    other.unlink()
    load_experiment(mine)
    assert one.replaced({"model": "my_model"}).model.hidden == 32


def test_a_class_without_build():
    class Empty(Model):
        pass

    assert "empty" not in kinds.choices(Experiment)["model"]
    for make in (Empty, lambda: Experiment(steps=3).replaced({"model": "empty"})):
        with pytest.raises(ConfigError, match=r"Empty does not define build\(\), which every model needs"):
            make()


# Subclasses


def test_a_subclass_of_a_stock_kind_keeps_its_class_and_its_build():
    class MyNet(ResNet):
        def build(self, **sizes):
            return "mine"

    for experiment in (Experiment(model=MyNet(), steps=3), Experiment(steps=3).replaced({"model": MyNet(depth=20)})):
        for overrides in ({"model.width": 16}, {"seed": 3}, {"model": "my_net", "model.width": 16}):
            changed = experiment.replaced(overrides)
            assert type(changed.model) is MyNet
            assert changed.model.make(num_classes=3) == "mine"
            assert changed.model.depth == experiment.model.depth
    assert as_experiment(changed) is changed


def test_a_class_without_a_kind_of_its_own_comes_back(monkeypatch):
    class Quiet(SGD, kind=None):
        volume: int = 1

    monkeypatch.setattr(sys.modules[__name__], "Quiet", Quiet, raising=False)
    Quiet.__qualname__ = "Quiet"
    experiment = Experiment(optimizer=Quiet(), steps=3).replaced({"optimizer.volume": 3})
    assert experiment.optimizer == Quiet(volume=3)
    assert Experiment.from_json(experiment.to_json()) == experiment


def test_a_subclass_where_there_are_no_kinds_is_refused():
    class MyMesh(MeshConfig):
        speed: int = 1

    with pytest.raises(
        ConfigError, match="mesh: MyMesh is a subclass of MeshConfig, and this field takes no subclasses"
    ):
        Experiment(mesh=MyMesh(), steps=3)

    class Fixed(Config):
        optimizer: SGD = SGD()

    class MySGD(SGD):
        pass

    with pytest.raises(ConfigError, match="optimizer: MySGD is a subclass of SGD"):
        Fixed(optimizer=MySGD())
