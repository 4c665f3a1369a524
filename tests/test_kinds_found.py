"""Where kinds from outside jaxdl are found again: after a restart, moved, changed, in a notebook or a package."""

import json
import sys
import types

import pytest
from foreign import MINE, forget, moved_to, write_mine

import jaxdl
from jaxdl.core import kinds
from jaxdl.core.config import ConfigError
from jaxdl.exchange import Dense
from jaxdl.train import begin
from jaxdl.training.experiment import Experiment, identity, load_experiment, read_experiment


@pytest.fixture(autouse=True)
def _forgotten():
    with kinds.forgotten():
        yield


@pytest.fixture
def mine(tmp_path):
    return write_mine(tmp_path)


def test_a_moved_file(mine, tmp_path):
    changed = load_experiment(mine).replaced({"model": "my_model"})
    text = changed.to_json()
    forget(mine)
    there = moved_to(tmp_path / "there", mine)
    with pytest.raises(
        ConfigError, match=r"mine\.py, and there is no such file\. Put it back, or load the config from"
    ):
        Experiment.from_json(text)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        ConfigError, match=rf"^\S+ cannot be used: it needs MyModel, MyRows of {mine}, .*Put it back"
    ) as it:
        read_experiment(tmp_path)
    assert "\n" not in str(it.value), "one message for a file, not one for each of its classes"
    load_experiment(there)
    with pytest.warns(UserWarning, match=r"the model was defined in .*mine\.py, which is gone; that of .*there"):
        again = Experiment.from_json(text)
    assert again.model.hidden == 32
    assert kinds.source_of(type(again.model)) == f"{there}:MyModel"
    # A run goes on where its file is now.
    assert identity(json.loads(again.to_json())) == identity(json.loads(text))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "class MyModel(Model)",
            "class Other(Model)",
            r"mine.py has no MyModel, the model\. Define it there",
        ),
        ("    hidden: int", "    width: int", "model.hidden: there is no such field. MyModel has width"),
        ("class MyModel(Model):", "class MyModel:", "MyModel: this is not the model my_model any more"),
        (
            "class MyModel(Model):",
            'class MyModel(Model, kind="m"):',
            "MyModel: this is not the model my_model any more",
        ),
        ("def config", "1 / 0\ndef config", "the model, line .*: ZeroDivisionError"),
        ("def config", "def config(\n", "the model: SyntaxError"),
    ],
)
def test_a_changed_file_is_one_message(mine, old, new, words):
    text = load_experiment(mine).replaced({"model": "my_model", "data": "digits"}).to_json()
    forget(mine)
    mine.write_text(MINE.replace(old, new))
    with pytest.raises(ConfigError, match=words):
        Experiment.from_json(text)


def test_a_class_of_a_notebook(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    cell = "from jaxdl import Model\nclass Cell(Model):\n    width: int = 3\n    def build(self): ..."
    exec(cell, vars(main))
    text = Experiment(model=main.Cell(width=5), steps=3).to_json()
    assert json.loads(text)["model"]["class"] == "__main__:Cell"
    first = main.Cell
    exec(cell, vars(main))  # The cell runs again.
    assert kinds.choices(Experiment)["model"]["cell"] is main.Cell is not first
    assert Experiment.from_json(text).model == main.Cell(width=5)
    forget("")
    del main.Cell
    with pytest.raises(ConfigError, match="in a notebook or at a prompt: define it again first, or put it into a file"):
        Experiment.from_json(text)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a class in its face and one in a module, on sys.path, and the metadata of an installed one."""
    face = "from jaxdl import Model\nfrom netsy import deep\nclass Face(Model):\n    def build(self): ...\n"
    inner = "from jaxdl import Model\nclass Deep(Model):\n    def build(self): ...\n"
    (tmp_path / "netsy").mkdir()
    (tmp_path / "netsy" / "__init__.py").write_text(face)
    (tmp_path / "netsy" / "deep.py").write_text(inner)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("netsy", "netsy.deep"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("name", "source"), [("face", "netsy:Face"), ("deep", "netsy.deep:Deep")])
def test_a_class_of_a_package(package, name, source):
    import netsy  # pyright: ignore[reportMissingImports]

    made = {"face": netsy.Face, "deep": netsy.deep.Deep}[name]()
    text = Experiment(model=made, steps=3).to_json()
    assert json.loads(text)["model"]["class"] == source
    for module in ("netsy", "netsy.deep"):
        forget(sys.modules[module].__file__)
    assert Experiment.from_json(text).model.kind == name
    for module in ("netsy", "netsy.deep"):
        forget(sys.modules[module].__file__)
    sys.path.remove(str(package))
    with pytest.raises(ConfigError, match=r"netsy.*cannot be imported .*Install its package, or add its folder to"):
        Experiment.from_json(text)


def install(folder, name, value):
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[jaxdl.kinds]\n{name} = {value}\n")


def test_kinds_of_an_installed_package(package, monkeypatch, capsys):
    install(package, "netsy", "netsy")
    install(package, "broken", "broken_module")
    monkeypatch.setattr(kinds, "_loaded_installed", False)
    with pytest.warns(UserWarning, match="broken_module, which an installed package names in jaxdl.kinds, cannot be"):
        assert {"face", "deep"} <= kinds.choices(Experiment)["model"].keys()
    # The first look at a command line, which knows jaxdl's own options alone, refuses nothing then.
    begin(["--config", "digits", "--model", "deep", "--step.clip-nor", "3"], "prog")
    package.joinpath("netsy-1.0.dist-info", "entry_points.txt").unlink()
    package.joinpath("broken-1.0.dist-info", "entry_points.txt").unlink()
    with pytest.raises(ConfigError, match=r"Did you mean step\.clip_norm"):
        begin(["--config", "digits", "--model", "deep", "--step.clip-nor", "3"], "prog")


OWN_EXPERIMENT = '''
from jaxdl.training.experiment import Experiment
class MyExperiment(Experiment):
    note: str = "none"
    """A note of the user."""
def config():
    return MyExperiment(steps=3, note="first")
'''


def test_a_subclass_of_experiment(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_EXPERIMENT)
    experiment = jaxdl.load(path, ["--note", "second"])
    assert experiment.note == "second"
    text = experiment.to_json()
    assert Experiment.from_json(text) == experiment
    forget(path)
    again = Experiment.from_json(text)
    assert (type(again).__name__, again.to_json()) == ("MyExperiment", text)
    # Its file may move, too.
    there = moved_to(tmp_path / "there", path)
    forget(path)
    with pytest.raises(ConfigError, match=r"the experiment is defined in .*own\.py, and there is no such file"):
        Experiment.from_json(text)
    moved = load_experiment(there).replaced({"note": "second"})
    with pytest.warns(UserWarning, match=r"the experiment was defined in .*own\.py, which is gone"):
        assert Experiment.from_json(text) == moved
    assert identity(json.loads(moved.to_json())) == identity(json.loads(text))
    there.write_text(OWN_EXPERIMENT.replace("(Experiment)", ""))
    text = moved.to_json()
    forget(there)
    with pytest.raises(ConfigError, match="MyExperiment: this is no subclass of Experiment any more"):
        Experiment.from_json(text)


def test_what_processes_compare_has_no_places(mine, tmp_path):
    """Hosts may have the file at different paths, but not with different settings."""
    one = load_experiment(mine)
    forget(mine)
    two = load_experiment(moved_to(tmp_path / "there", mine))
    dumped = [experiment.model_dump(mode="json") for experiment in (one, two)]
    assert dumped[0] != dumped[1]
    assert kinds.without_source(dumped[0]) == kinds.without_source(dumped[1])
    other = two.replaced({"data.num_rows": 3}).model_dump(mode="json")
    assert kinds.without_source(other) != kinds.without_source(dumped[0])


def test_the_first_look_leaves_foreign_options_alone(mine, tmp_path, capsys):
    """A config that loads another one, and the config.json of a run, may have classes with options of their own."""
    loads = tmp_path / "loads.py"
    loads.write_text(f"import jaxdl\ndef config():\n    return jaxdl.load({str(mine)!r}, ['--model', 'my_model'])\n")
    kept = tmp_path / "config.json"
    kept.write_text(jaxdl.load(loads).to_json())
    for path in (loads, kept):
        begin(["--config", str(path), "--step.clip-nor", "3"], "prog")
    kept.write_text(Experiment(exchange=Dense(), steps=3).to_json())
    with pytest.raises(ConfigError, match="there is no such option"):
        begin(["--config", str(kept), "--step.clip-nor", "3"], "prog")
