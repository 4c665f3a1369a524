"""The layout of the code: imports go down only, each kind of thing has one home, nothing grows too large."""

import ast
import functools
import math
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = {path.relative_to(ROOT / "jaxdl").as_posix(): path for path in sorted((ROOT / "jaxdl").rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

# From the ground up. A room may use the floors below its own; rooms on one floor do not know each other.
FLOORS = [
    {"core"},
    {"parallel"},
    {"exchange", "models", "data", "optim"},
    {"report"},
    {"training"},
    {"inference"},
    {"platform"},
    {"performance"},
    {"train"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

MENTION_SHARD_MAP = (
    "exchange", "parallel/collectives", "parallel/embedding", "training/rounds", "training/step",
)  # fmt: skip
TOUCH_THE_DISK = (
    "core/files.py", "core/inside.py", "core/programs.py", "data", "inference/convert", "inference/export",
    "inference/trained.py", "parallel/lease",
    "platform/fleet", "platform/launch", "platform/page", "platform/search", "platform/spark", "report",
    "training/checkpoint",
    "training/run",
)  # fmt: skip
MEASURES_FILES = {
    f"performance/bench/{name}.py"
    for name in ("balance/balance_thresholds", "input", "input_sides", "roofline", "trace")
}
KEEPS_FILES = {"parallel/asynchrony/storage.py"}
READ_FILES = {
    "core/paths.py": "what a user gives is looked for",
    "core/modules.py": "config files, and files that define kinds, are run",
    "core/kinds.py": "a file that defines a kind may have moved",
    "core/startup.py": "a config file is parsed before jax is imported",
    "core/fields.py": "the options are read off the source before jax is imported",
    "core/runs.py": "a workdir is looked at before jax is imported",
    "training/experiment.py": "load_experiment reads the config.json of a run",
    "inference/predictor.py": "restore reads a finished run",
    "inference/generation.py": "tokenizers are loaded",
    "parallel/cluster": "the hosts compare the hashes of jaxdl's own source files",
}
WRITING_CALLS = {
    "open", "write_text", "write_bytes", "mkdir", "makedirs", "unlink", "remove", "rename", "rmtree", "rmdir", "touch",
    "savefig", "dump", "save", "savez", "copyfile", "copytree", "symlink_to", "NamedTemporaryFile", "mkdtemp",
}  # fmt: skip
READING_CALLS = {"read_text", "read_bytes", "open", "load", "loadtxt", "glob", "iterdir", "rglob"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


@functools.cache
def nodes_of(tree):
    """All nodes of a module: most tests go through them."""
    return list(ast.walk(tree))


def room(name):
    """The room of a module file: its folder in jaxdl, or the file itself. The package's face, __init__, has none."""
    return name.split("/")[0].removesuffix(".py")


def lies_in(name, places):
    """Whether a module file is one of the places, or inside of one: `parallel/cluster`, `core/paths.py`."""
    return any(name == place or name.startswith(f"{place}/") for place in places)


def imported_rooms(tree):
    """(line, room) of every import of this package, wherever it stands."""
    for node in nodes_of(tree):
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
        id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def called_names(tree):
    """(line, name) of all calls, of functions and of methods."""
    for node in nodes_of(tree):
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
import jaxdl.training.step
from jaxdl.data.loader import TrainLoader
from jaxdl.parallel import sharding
def late():
    import jaxdl.training.run.trainer as trainer
    from jaxdl import Run
import jax, os
"""
    rooms = [other for _, other in imported_rooms(ast.parse(source))]
    assert sorted(rooms) == ["Run", "data", "parallel", "training", "training"]


def circles(arrows):
    """The sets of nodes that reach each other: the strongly connected parts of a graph, of more than one node."""
    arrows, left = set(arrows), set()
    while arrows != left:  # What nothing imports, and what imports nothing, is in no circle.
        left, starts, ends = arrows, {start for start, _ in arrows}, {end for _, end in arrows}
        arrows = {(start, end) for start, end in left if start in ends and end in starts}
    reached = {node: {node} for arrow in arrows for node in arrow}
    grown = True
    while grown:
        grown = False
        for start, end in arrows:
            if not reached[end] <= reached[start]:
                reached[start] |= reached[end]
                grown = True
    found = {frozenset(end for end in reached[node] if node in reached[end]) for node in reached}
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def module_arrows():
    """(module, imported module) of all imports, wherever they stand; packages are named by their folder."""
    known = {name.removesuffix(".py").removesuffix("/__init__"): name for name in MODULES}
    for name, tree in TREES.items():
        for node in nodes_of(tree):
            if isinstance(node, ast.ImportFrom):
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            else:
                continue
            for one in imported:
                path = one.removeprefix("jaxdl.").replace(".", "/")
                found = path if path in known else path.rpartition("/")[0]
                start = name.removesuffix(".py").removesuffix("/__init__")
                if one.startswith("jaxdl.") and found in known and found != start:
                    yield start, found


def test_no_modules_import_each_other():
    arrows = {pair for pair in module_arrows() if "__init__" not in pair}
    assert circles(arrows) == []
    for depth in (2, 3):
        rooms = {("/".join(start.split("/")[:depth]), "/".join(end.split("/")[:depth])) for start, end in arrows}
        assert circles({(start, end) for start, end in rooms if start != end}) == []
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [["a", "b", "c"]]


def test_the_checks_that_users_call_depend_on_no_measurement():
    needed, arrows = {"exchange/testing"}, set(module_arrows())
    while more := {end for start, end in arrows if start in needed} - needed:
        needed |= more
    assert len(needed) > 20
    assert not [name for name in needed if name.startswith("performance")]


def test_the_package_imports_nothing_of_the_checkout():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if module.split(".")[0] in ("benchmarks", "scripts", "tests")
    ]
    assert not found, "\n".join(found)


def test_no_name_says_nothing():
    assert not [name for name in MODULES if Path(name).stem in ("utils", "helpers", "common", "misc")]


def test_only_some_rooms_mention_shard_map():
    found = [
        f"{name}:{node.lineno} uses shard_map: that belongs in {MENTION_SHARD_MAP}"
        for name, tree in TREES.items()
        if not lies_in(name, MENTION_SHARD_MAP)
        for node in nodes_of(tree)
        if (isinstance(node, ast.Attribute) and "shard_map" in node.attr)
        or (isinstance(node, ast.Name) and "shard_map" in node.id)
        or (isinstance(node, ast.alias) and "shard_map" in node.name)
    ]
    assert not found, "\n".join(found)


def calls_to_the_disk(name):
    """The calls of a module that its room may not make."""
    if lies_in(name, TOUCH_THE_DISK) or name in MEASURES_FILES | KEEPS_FILES:
        return []
    forbidden = WRITING_CALLS if lies_in(name, READ_FILES) else WRITING_CALLS | READING_CALLS
    # The device files of GPUs; a text is loaded into a tokenizer; `jaxdl.load`; /dev/null in place of a closed stream.
    forbidden = forbidden - {"parallel/mesh.py": {"glob"}, "core/errors.py": {"open"}}.get(name, {"load"})
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
    for node in nodes_of(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "norm_span":
            # A user's word for what statistics are taken over: one replica (which happens to be an axis) or the mesh.
            allowed |= {
                id(part) for part in ast.walk(node) if isinstance(part, ast.Constant) and part.value == "replica"
            }
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and node.value in ("replica", "fsdp", "tensor") and id(node) not in allowed:
            yield node.lineno, node.value
        # Only the slow axis is a notion of its own. What is asked of the others is a property.
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) == "Axis"
            and node.attr not in ("REPLICA", "value")
        ):
            yield node.lineno, node.attr


def test_axis_names_are_written_in_mesh_only():
    """Besides the rules, which say what an axis splits."""
    found = [
        f"{name}:{line} names the mesh axis {axis}: ask for a property, such as jaxdl.parallel.mesh.BATCH_AXES"
        for name, tree in TREES.items()
        if name not in ("parallel/mesh.py", "parallel/sharding.py")
        for line, axis in spelt_axes(tree)
    ]
    assert not found, "\n".join(found)


def test_nothing_grows_too_large():
    found = []
    loop = sum(MODULES[name].read_text().count("\n") for name in ("train.py", "training/run/trainer.py"))
    if loop >= MAX_FILE_LINES:
        found.append(f"train.py and trainer.py have {loop} lines together: a trainer rots by growing there")
    for name, tree in TREES.items():
        lines = MODULES[name].read_text().count("\n")
        if lines >= MAX_FILE_LINES:
            found.append(f"{name} has {lines} lines: give a part of it a room of its own")
        for node in nodes_of(tree):
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
    for owner in [node for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]:
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
        if name.startswith("training/run/")
        for line, attribute in late_attributes(tree)
    ]
    assert not found, "\n".join(found)
    late = "class A:\n    def __init__(self):\n        self.a = 1\n    def f(self):\n        self.a = self.b = 2"
    assert [attribute for _, attribute in late_attributes(ast.parse(late))] == ["A.b"]


def patched_rooms(tree):
    """(line, room) of what a test replaces of the package: by `setattr`, `patch`, or an assignment to an attribute."""
    homes = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxdl":
            for alias in node.names:
                homes[alias.asname or alias.name] = f"{node.module}.{alias.name}".removeprefix("jaxdl.")

    def home(node):
        path = []
        while isinstance(node, ast.Attribute):
            path, node = [node.attr, *path], node.value
        if isinstance(node, ast.Constant) and str(node.value).startswith("jaxdl."):
            return node.value.removeprefix("jaxdl.")
        if not isinstance(node, ast.Name):
            return None
        return ".".join(path) if node.id == "jaxdl" else homes.get(node.id)

    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("setattr", "patch", "setitem", "delattr") and node.args:
                yield node.lineno, home(node.args[0])
        elif isinstance(node, ast.Assign):
            yield from ((node.lineno, home(one.value)) for one in node.targets if isinstance(one, ast.Attribute))


def test_no_test_patches_the_loop():
    found = [
        f"{path.name}:{line} replaces a part of the loop: use on_step, shared_programs or a fault below the loop"
        for path in sorted((ROOT / "tests").glob("*.py"))
        if re.search(r"training(\.| import .*)run", text := path.read_text())  # Others cannot, and need no parsing.
        for line, patched in patched_rooms(ast.parse(text))
        if (patched or "").startswith("training.run.")
    ]
    assert not found, "\n".join(found)
    source = """
import jaxdl
from jaxdl.training.run import trainer
from jaxdl.training.run.trainer import Trainer
monkeypatch.setattr(trainer.Trainer, "run", None)
monkeypatch.setattr(jaxdl.training.run.trainer, "evaluate", None)
monkeypatch.setattr("jaxdl.training.run.trainer.evaluate", None)
Trainer.run = None
patch(jaxdl.data, "run", None)
"""
    loop = "training.run.trainer"
    assert sorted(str(place) for _, place in patched_rooms(ast.parse(source))) == [
        "data", loop, loop, f"{loop}.Trainer", f"{loop}.evaluate",
    ]  # fmt: skip
