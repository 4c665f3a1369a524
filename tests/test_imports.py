"""What is imported when: nothing runs at the import of the package, heavy packages are imported where they are used."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {
    "tensorflow_datasets", "tensorflow", "sklearn", "tokenizers", "sentencepiece", "pyarrow", "datasets",
    "tensorboardX", "PIL", "cv2", "simplejpeg", "fsspec", "mlflow", "wandb", "trackio", "optuna", "jinja2",
}  # fmt: skip


def early_imports(node):
    """(line, module) of the imports that run when the module itself is imported."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        yield from ((node.lineno, one) for one in names)
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if not isinstance(node, ast.FunctionDef | ast.expr):
        for inner in ast.iter_child_nodes(node):
            yield from early_imports(inner)


def test_heavy_packages_are_imported_when_they_are_used():
    named = re.compile(rf"\b({'|'.join([*HEAVY, 'pyplot'])})\b")
    texts = {path: path.read_text() for path in sorted((ROOT / "jaxdl").rglob("*.py"))}
    found = [
        f"{path}:{line} imports {module} at the top: import it in the function that needs it"
        for path, text in texts.items()
        if named.search(text)
        for line, module in early_imports(ast.parse(text))
        if module.split(".")[0] in HEAVY or module.startswith("matplotlib.pyplot")
    ]
    assert not found, "\n".join(found)
    early = ast.parse("try:\n import PIL\nfinally:\n pass\ndef f():\n import cv2\nclass A:\n import wandb\n")
    assert [module for _, module in early_imports(early)] == ["PIL", "wandb"]


def in_a_fresh_process(code):
    """What a fresh interpreter prints as JSON on its last line."""
    environment = {"PYTHONPATH": ":".join([str(ROOT), *filter(None, sys.path)]), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_nothing_runs_when_the_package_is_imported():
    loaded = in_a_fresh_process("import sys, json, jaxdl; dir(jaxdl); print(json.dumps(sorted(sys.modules)))")
    names = {name for name in loaded if name.startswith("jaxdl")}
    assert names == {"jaxdl", "jaxdl.core", "jaxdl.core.lazy", "jaxdl.core.moved"}
    assert not {"jax", "jaxlib", "numpy", "flax", "pydantic"} & set(loaded)


def test_config_needs_no_jax():
    loaded = in_a_fresh_process("import sys, json, jaxdl.core.config; print(json.dumps(sorted(sys.modules)))")
    assert not {"jax", "jaxlib", "flax"} & set(loaded)


@pytest.fixture(scope="module")
def everything():
    """What a process finds that imports all of the package: its face, what is loaded then, and the earlier paths."""
    return in_a_fresh_process(
        """
import importlib, json, sys, warnings, jaxdl
face = {name: [getattr(jaxdl, name).__module__, callable(getattr(jaxdl, name))] for name in jaxdl.__all__}
import jaxdl.train
face["module"] = [jaxdl.train.__name__, callable(jaxdl.train)]
try:
    jaxdl.nothing
except AttributeError as error:
    face["nothing"] = str(error)
from jax._src import xla_bridge
jaxdl.load("ROOT/configs/digits.py").to_json()
loaded, started = sorted(sys.modules), xla_bridge.backends_are_initialized()

from jaxdl.core.moved import MOVED, is_kept, new_path
warnings.simplefilter("always")
paths = {}
for name in sorted(MOVED):
    with warnings.catch_warnings(record=True) as caught:
        module = importlib.import_module(f"jaxdl.{name}")
    new = importlib.import_module(new_path(f"jaxdl.{name}"))
    paths[name] = [module is new, module.__spec__.name == new.__name__, len(caught), is_kept(f"jaxdl.{name}")]
print(json.dumps({"face": face, "loaded": loaded, "started": started, "paths": paths}))
""".replace("ROOT", ROOT.as_posix())
    )


def test_importing_everything_starts_no_backend_and_nothing_heavy(everything):
    assert not everything["started"]
    assert not (HEAVY - {"PIL"}) & set(everything["loaded"])  # matplotlib imports PIL.
    assert "matplotlib.pyplot" not in everything["loaded"]


def test_the_face_of_the_package(everything):
    found = dict(everything["face"])
    assert found.pop("nothing") == "module 'jaxdl' has no attribute 'nothing'"
    assert found["train"] == ["jaxdl.training.run.train", True]
    assert found["module"] == ["jaxdl.train", True], "after its import, jaxdl.train is a module that can be called"
    assert found["load"] == ["jaxdl.training.experiment", True]
    assert found["search"] == ["jaxdl.platform.search.function", True]
    assert set(found) == {
        "Arrays", "ConfigError", "Data", "ExchangeConfig", "Experiment", "FromFunctions", "FromModule", "InitFrom",
        "Interrupted", "Loss", "Model", "Optax", "Optimizer", "Predictor", "Run", "Schedule", "Task", "Tracker", "fit",
        "load", "module", "restore", "search", "train",
    }  # fmt: skip


def test_earlier_paths_are_the_same_modules(everything):
    found = everything["paths"]
    assert len(found) > 100
    # A package whose name stays gives no warning; all others give one, of their own.
    assert {name: kept for name, kept in found.items() if kept[:2] != [True, True]} == {}
    assert {name: kept[2] for name, kept in found.items() if kept[2] != (0 if kept[3] else 1)} == {}
    with pytest.raises(ModuleNotFoundError, match=re.escape("jaxdl.run.nothing")):
        importlib.import_module("jaxdl.run.nothing")


def test_a_package_has_one_pin_for_each_python():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [re.fullmatch(r"([\w.-]+)==[\w.+]+( ; python_version (?:<|>=) '3\.12')?", line) for line in lines]
    assert all(pins), [line for line, pin in zip(lines, pins, strict=True) if pin is None]
    named = [(re.sub(r"[-_.]+", "-", pin[1]).lower(), pin[2]) for pin in pins if pin]
    assert sorted(set(named)) == sorted(named), [name for name in named if named.count(name) > 1]
