"""The layout of the code: imports go down only, each kind of thing has one home, nothing grows too large."""

import ast
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = {path.relative_to(ROOT / "jaxdl").as_posix(): path for path in sorted((ROOT / "jaxdl").rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

# From the ground up. A room may use the floors below its own; rooms on one floor do not know each other.
FLOORS = [
    {"errors", "files", "paths", "solver", "writing"},
    {"fields", "runs", "user_code"},
    {"startup"},
    {"config", "modules", "overview", "patterns"},
    {"kinds"},
    {"reference"},
    {"mesh", "option_values"},
    {"options"},
    {"cluster"},
    {"sharding", "precision", "collectives", "guard", "compiler", "lease", "phases", "plans", "asynchrony", "trackers"},
    {"embedding", "status", "classics"},
    {"models", "optim", "exchange", "data", "decoding"},
    {"report", "agreement"},
    {"state", "tasks"},
    {"step"},
    {"checkpoint", "rounds"},
    {"evaluation"},
    {"experiment"},
    {"run"},
    {"predictor", "launch", "completion"},
    {"trained", "planner", "fleet"},
    {"generate", "translate", "score", "bench", "command", "evaluate", "export", "convert", "compare", "search"},
    {"train", "testing", "spark"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

MENTION_SHARD_MAP = {"embedding", "step", "rounds", "exchange", "collectives"}
TOUCH_THE_DISK = {
    "writing", "lease", "status", "fleet", "run", "report", "checkpoint", "launch", "data", "export", "convert",
    "trained", "compare", "search", "trackers", "spark",
}  # fmt: skip
MEASURES_FILES = {
    "bench/balance_thresholds.py", "bench/input.py", "bench/input_sides.py", "bench/roofline.py", "bench/startup.py",
    "bench/tokenize.py", "bench/trace.py",
}  # fmt: skip
KEEPS_FILES = {"asynchrony/storage.py"}
READ_FILES = {
    "paths": "what a user gives is looked for",
    "modules": "config files, and files that define kinds, are run",
    "kinds": "a file that defines a kind may have moved",
    "startup": "a config file is parsed before jax is imported",
    "fields": "the options are read off the source before jax is imported",
    "experiment": "load_experiment reads the config.json of a run",
    "predictor": "restore reads a finished run",
    "runs": "a workdir is looked at before jax is imported",
    "cluster": "the hosts compare the hashes of jaxdl's own source files",
}
HEAVY = {
    "tensorflow_datasets", "tensorflow", "sklearn", "tokenizers", "sentencepiece", "pyarrow", "datasets",
    "tensorboardX", "PIL", "cv2", "simplejpeg", "fsspec", "mlflow", "wandb", "trackio", "optuna",
}  # fmt: skip
WRITING_CALLS = {
    "open", "write_text", "write_bytes", "mkdir", "makedirs", "unlink", "remove", "rename", "rmtree", "rmdir", "touch",
    "savefig", "dump", "save", "savez", "copyfile", "copytree", "symlink_to", "NamedTemporaryFile", "mkdtemp",
}  # fmt: skip
READING_CALLS = {"read_text", "read_bytes", "open", "load", "loadtxt", "glob", "iterdir", "rglob"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def room(name):
    """The room of a module file: its folder in jaxdl, or the file itself. The package's face, __init__, has none."""
    return name.split("/")[0].removesuffix(".py")


def imported_rooms(tree):
    """(line, room) of every import of this package, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written in full"
            names = [node.module or ""]
            if node.module == "jaxdl":
                names = [f"jaxdl.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "jaxdl" and name != "jaxdl.__version__":
                yield node.lineno, [*name.split("."), "__init__"][1]


def docstrings(tree):
    """The constants that are no values: strings that stand alone, as docstrings and help texts do."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def called_names(tree):
    """(line, name) of all calls, of functions and of methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
            yield node.lineno, name


def test_imports_go_down_only():
    rooms = {room(name) for name in MODULES} - {"__init__"}
    assert rooms == FLOOR.keys(), "give each room of the package a floor in FLOORS, and no others"
    found = [
        f"{name}:{line}: {room(name)} may not import {other}, which is not below it"
        for name, tree in TREES.items()
        for line, other in imported_rooms(tree)
        if room(name) != "__init__" and other != room(name) and FLOOR.get(other, math.inf) >= FLOOR[room(name)]
    ]
    assert not found, "\n".join(found)


def test_the_check_of_imports_sees_all_forms():
    source = """
import jaxdl.step
from jaxdl.data.loader import TrainLoader
from jaxdl import sharding
def late():
    import jaxdl.run.trainer as trainer
    from jaxdl import Run
import jax, os
"""
    rooms = [other for _, other in imported_rooms(ast.parse(source))]
    assert sorted(rooms) == ["Run", "data", "run", "sharding", "step"]


def test_the_rooms_are_those_of_the_design():
    """The order that the design gives, from top to bottom."""
    order = [
        ["train"],
        ["run", "launch", "bench"],
        ["step", "evaluation", "checkpoint"],
        ["state", "tasks"],
        ["models", "optim", "exchange", "data", "report"],
        ["collectives", "sharding", "precision"],
        ["config", "mesh"],
    ]
    for upper, lower in itertools.pairwise(order):
        assert min(FLOOR[name] for name in upper) > max(FLOOR[name] for name in lower)
    assert not [name for name in MODULES if Path(name).stem in ("utils", "helpers", "common", "misc")]


def test_only_some_rooms_mention_shard_map():
    found = [
        f"{name}:{node.lineno} uses shard_map: that belongs in {MENTION_SHARD_MAP}"
        for name, tree in TREES.items()
        if room(name) not in MENTION_SHARD_MAP
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and "shard_map" in node.attr)
        or (isinstance(node, ast.Name) and "shard_map" in node.id)
        or (isinstance(node, ast.alias) and "shard_map" in node.name)
    ]
    assert not found, "\n".join(found)


def calls_to_the_disk(name):
    """The calls of a module that its room may not make."""
    own = room(name)
    if own in TOUCH_THE_DISK or name in MEASURES_FILES | KEEPS_FILES:
        return []
    forbidden = WRITING_CALLS if own in READ_FILES else WRITING_CALLS | READING_CALLS
    # The device files of GPUs; a text is loaded into a tokenizer; `jaxdl.load`; /dev/null in place of a closed stream.
    forbidden = forbidden - {"mesh": {"glob", "load"}, "bench": {"glob", "load"}, "errors": {"open"}}.get(own, set())
    return [(line, called) for line, called in called_names(TREES[name]) if called in forbidden]


def test_only_some_rooms_touch_the_disk():
    found = [
        f"{name}:{line} calls {called}, which touches the disk: that belongs in {TOUCH_THE_DISK}"
        for name in MODULES
        for line, called in calls_to_the_disk(name)
    ]
    assert not found, "\n".join(found)


def spelt_axes(tree):
    """(line, axis) of the mesh axes that a module spells out."""
    allowed = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "norm_span":
            # A user's word for what statistics are taken over: one replica (which happens to be an axis) or the mesh.
            allowed |= {
                id(part) for part in ast.walk(node) if isinstance(part, ast.Constant) and part.value == "replica"
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in ("replica", "fsdp", "tensor") and id(node) not in allowed:
            yield node.lineno, node.value


def test_axis_names_are_written_in_mesh_only():
    found = [
        f"{name}:{line} spells the mesh axis {axis}: use jaxdl.mesh.Axis"
        for name, tree in TREES.items()
        if name != "mesh.py"
        for line, axis in spelt_axes(tree)
    ]
    assert not found, "\n".join(found)


def test_nothing_grows_too_large():
    found = []
    loop = sum(MODULES[name].read_text().count("\n") for name in ("train.py", "run/trainer.py"))
    if loop >= MAX_FILE_LINES:
        found.append(f"train.py and run/trainer.py have {loop} lines together: a trainer rots by growing there")
    for name, tree in TREES.items():
        lines = MODULES[name].read_text().count("\n")
        if lines >= MAX_FILE_LINES:
            found.append(f"{name} has {lines} lines: give a part of it a room of its own")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length >= MAX_FUNCTION_LINES:
                    found.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    for path in sorted((ROOT / "tests").glob("*.py")):
        lines = path.read_text().count("\n")
        if lines >= MAX_FILE_LINES:
            found.append(f"tests/{path.name} has {lines} lines: split it along its claims")
    assert not found, "\n".join(found)


def late_attributes(tree):
    """(line, name) of the attributes of a class that first appear outside its `__init__` and its body."""
    for owner in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        declared = {node.target.id for node in owner.body if isinstance(node, ast.AnnAssign | ast.AugAssign)}
        declared |= {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
        functions = sorted(
            (node for node in owner.body if isinstance(node, ast.FunctionDef)), key=lambda node: node.name != "__init__"
        )
        for function in functions:
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "self"
                    and node.attr not in declared
                ):
                    if function.name == "__init__":
                        declared.add(node.attr)
                    else:
                        yield node.lineno, f"{owner.name}.{node.attr}"


def test_the_state_of_a_run_is_declared():
    found = [
        f"{name}:{line}: {attribute} first appears outside __init__"
        for name, tree in TREES.items()
        if room(name) == "run"
        for line, attribute in late_attributes(tree)
    ]
    assert not found, "\n".join(found)
    late = "class A:\n    def __init__(self):\n        self.a = 1\n    def f(self):\n        self.a = self.b = 2"
    assert [attribute for _, attribute in late_attributes(ast.parse(late))] == ["A.b"]


def patched_rooms(tree):
    """(line, room) of what a test replaces of the package: by `setattr`, `patch`, or an assignment to an attribute."""
    homes = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxdl":
            for alias in node.names:
                homes[alias.asname or alias.name] = [*f"{node.module}.{alias.name}".split("."), ""][1]

    def home(node):
        path = []
        while isinstance(node, ast.Attribute):
            path, node = [node.attr, *path], node.value
        if isinstance(node, ast.Constant) and str(node.value).startswith("jaxdl."):
            return node.value.split(".")[1]
        if not isinstance(node, ast.Name):
            return None
        return (path[0] if path else None) if node.id == "jaxdl" else homes.get(node.id)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("setattr", "patch", "setitem", "delattr") and node.args:
                yield node.lineno, home(node.args[0])
        elif isinstance(node, ast.Assign):
            yield from ((node.lineno, home(one.value)) for one in node.targets if isinstance(one, ast.Attribute))


def test_no_test_patches_the_loop():
    found = [
        f"{path.name}:{line} replaces a part of jaxdl.run: use on_step, shared_programs or a fault below the loop"
        for path in sorted((ROOT / "tests").glob("*.py"))
        for line, patched in patched_rooms(ast.parse(path.read_text()))
        if patched == "run"
    ]
    assert not found, "\n".join(found)
    source = """
import jaxdl
from jaxdl.run import trainer
from jaxdl.run.trainer import Trainer
monkeypatch.setattr(trainer.Trainer, "run", None)
monkeypatch.setattr(jaxdl.run.trainer, "evaluate", None)
monkeypatch.setattr("jaxdl.run.trainer.evaluate", None)
Trainer.run = None
patch(jaxdl.data, "run", None)
"""
    assert sorted(room for _, room in patched_rooms(ast.parse(source))) == ["data", "run", "run", "run", "run"]


def early_imports(tree):
    """(line, module) of the imports that run when the module itself is imported."""
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in late:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, one) for one in names)


def test_heavy_packages_are_imported_when_they_are_used():
    found = [
        f"{name}:{line} imports {module} at the top: import it in the function that needs it"
        for name, tree in TREES.items()
        for line, module in early_imports(tree)
        if module.split(".")[0] in HEAVY or module.startswith("matplotlib.pyplot")
    ]
    assert not found, "\n".join(found)


def in_a_fresh_process(code):
    """What a fresh interpreter prints as JSON on its last line."""
    environment = {"PYTHONPATH": ":".join([str(ROOT), *filter(None, sys.path)]), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_nothing_runs_when_the_package_is_imported():
    loaded = in_a_fresh_process("import sys, json, jaxdl; dir(jaxdl); print(json.dumps(sorted(sys.modules)))")
    names = {name for name in loaded if name.startswith("jaxdl")}
    assert names == {"jaxdl"}
    assert not {"jax", "jaxlib", "numpy", "flax", "pydantic"} & set(loaded)


def test_config_needs_no_jax():
    loaded = in_a_fresh_process("import sys, json, jaxdl.config; print(json.dumps(sorted(sys.modules)))")
    assert not {"jax", "jaxlib", "flax"} & set(loaded)


def test_importing_everything_starts_no_backend_and_nothing_heavy():
    code = """
import sys, json, jaxdl, jaxdl.train
from jax._src import xla_bridge
used = [getattr(jaxdl, name) for name in jaxdl.__all__ if name != "train"]
jaxdl.load("configs/digits.py").to_json()
print(json.dumps([sorted(sys.modules), xla_bridge.backends_are_initialized()]))
""".replace('"configs', f'"{ROOT.as_posix()}/configs')
    loaded, started = in_a_fresh_process(code)
    assert not started
    assert not (HEAVY - {"PIL"}) & set(loaded)  # matplotlib imports PIL.
    assert "matplotlib.pyplot" not in loaded


def test_the_face_of_the_package():
    code = """
import json, jaxdl
found = {name: [getattr(jaxdl, name).__module__, callable(getattr(jaxdl, name))] for name in jaxdl.__all__}
import jaxdl.train
found["module"] = [jaxdl.train.__name__, callable(jaxdl.train)]
try:
    jaxdl.nothing
except AttributeError as error:
    found["nothing"] = str(error)
print(json.dumps(found))
"""
    found = in_a_fresh_process(code)
    assert found.pop("nothing") == "module 'jaxdl' has no attribute 'nothing'"
    assert found["train"] == ["jaxdl.run.entry", True]
    assert found["module"] == ["jaxdl.train", True], "after its import, jaxdl.train is a module that can be called"
    assert found["load"] == ["jaxdl.experiment", True]
    assert set(found) == {
        "Arrays", "ConfigError", "Data", "ExchangeConfig", "Experiment", "FromFunctions", "FromModule", "InitFrom",
        "Interrupted", "Loss", "Model", "Optax", "Optimizer", "Predictor", "Run", "Schedule", "Task", "Tracker", "fit",
        "load", "module", "restore", "train",
    }  # fmt: skip
