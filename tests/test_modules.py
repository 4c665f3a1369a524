"""Files of users import the files beside them, whenever the statement runs and whatever else was imported."""

import importlib
import os
import sys
import types

import pytest

from jaxdl.core.config import ConfigError
from jaxdl.core.modules import import_file

MINE = """
import helper
def lazily():
    import helper as again
    from pack.inner import name
    assert again is helper
    return again.name, again.deeper(), name
"""


@pytest.fixture
def folders(tmp_path):
    """Two folders with files of the same names."""
    for name in ("one", "other"):
        (tmp_path / name / f"pack_{name}").mkdir(parents=True)
        (tmp_path / name / f"pack_{name}" / "inner.py").write_text("name = __name__")
        (tmp_path / name / "mine.py").write_text(MINE.replace("pack", f"pack_{name}"))
        helper = f"name = {name!r}\ndef deeper():\n    import deep\n    return deep.name"
        (tmp_path / name / "helper.py").write_text(helper)
        (tmp_path / name / "deep.py").write_text("import helper\nname = helper.name + ' deep'")
    return [tmp_path / "one", tmp_path / "other"]


def test_imports_in_functions_and_files_of_the_same_name(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "helper", types.ModuleType("helper"))  # As that of a notebook.
    path = list(sys.path)
    modules = [import_file(folder / "mine.py", "it") for folder in folders]
    assert sys.path == path
    for folder, module in zip(folders, modules, strict=True):
        assert module.lazily() == (folder.name, f"{folder.name} deep", f"pack_{folder.name}.inner")
    assert sys.path == path


def test_a_file_of_the_name_of_a_module_that_it_imports(folders):
    """It imports that module, not itself."""
    (folders[0] / "json.py").write_text("import json\nfound = json.dumps(1)")
    (folders[0] / "optax.py").write_text("import optax\nfound = optax.sgd")
    for name in ("json.py", "optax.py"):
        assert import_file(folders[0] / name, "it").found


def test_what_the_program_has_imported_is_not_run_again(folders, monkeypatch):
    """The module of a notebook, whose classes its objects are of, and a library of the name of a file beside."""
    monkeypatch.syspath_prepend(folders[0])
    monkeypatch.delitem(sys.modules, "deep", raising=False)
    deep = importlib.import_module("deep")
    (folders[0] / "numpy.py").write_text("raise AssertionError")
    (folders[0] / "mine.py").write_text("import deep\nimport numpy\nones = numpy.ones(3)")
    assert import_file(folders[0] / "mine.py", "it").deep is deep
    sys.modules.pop("deep")
    sys.modules.pop("helper", None)


def test_a_file_that_was_rewritten_at_once_is_read_again(folders, monkeypatch):
    """At the same size within the same second, when Python's cache of compiled files would take it for the old one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = folders[0] / "mine.py"
    for value in (1, 2):
        path.write_text(f"value = {value}")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert import_file(path, "it").value == value
    assert not (folders[0] / "__pycache__").exists()


def test_an_error_names_the_lines_of_both_files(folders):
    (folders[0] / "deep.py").write_text("\n\n1 / 0")
    (folders[0] / "mine.py").write_text("\nimport deep")
    with pytest.raises(ConfigError, match=r"^it, line 2 \(deep\.py, line 3\): ZeroDivisionError"):
        import_file(folders[0] / "mine.py", "it")
