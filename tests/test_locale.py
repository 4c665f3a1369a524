"""Text files in every locale, and an environment that JAX or the system refuses."""

import ast
import os
import subprocess
import sys

import pytest
from runs import ROOT

from jaxdl.core import errors
from jaxdl.core.config import ConfigError
from jaxdl.training.run.workdir.workdir import check_workdir


def without_encoding(tree):
    """The lines on which a text file, or the text of a program, is opened in the encoding of the locale."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
        owner = getattr(getattr(function, "value", None), "id", None)
        options = {one.arg: one.value for one in node.keywords}
        given = [*node.args, *options.values()]
        modes = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        is_text = any(set(mode) <= set("rwaxt+") and mode and "b" not in mode for mode in modes)
        text = (
            (name == "read_text" and not node.args)
            or (name == "write_text" and len(node.args) == 1)
            or (name in ("open", "fdopen") and is_text)
            or (name == "open" and owner is None and isinstance(function, ast.Name) and len(node.args) == 1)
            or (name == "partial" and node.args and getattr(node.args[0], "id", None) == "open")
            or any(getattr(options.get(one), "value", None) is True for one in ("text", "universal_newlines"))
        )
        if text and "encoding" not in options:
            yield node.lineno


@pytest.mark.slow
def test_text_is_utf_8_in_every_locale():
    files = [*sorted((ROOT / "jaxdl").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
    files += sorted((ROOT / "benchmarks").rglob("*.py"))
    found = [f"{path}:{line}" for path in files for line in without_encoding(ast.parse(path.read_bytes()))]
    assert not found, "give encoding=:\n" + "\n".join(found)


def test_the_options_are_read_in_ascii():
    code = "from jaxdl.core.fields import inner_fields; print('every-steps' in inner_fields())"
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=False)
    assert done.stdout.strip().endswith("True"), done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), "no new thread can be started"),
        (OSError(24, "Too many open files"), "ulimit -n"),
    ],
)
def test_a_limit_of_the_shell_is_a_message(error, said, capsys):
    with pytest.raises(SystemExit) as ended, errors.command_line():
        raise error
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_variable_that_jax_refuses_is_a_message(monkeypatch, capsys):
    monkeypatch.setenv("JAX_ENABLE_X64", "maybe")
    code = compile("raise ValueError(\"invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'\")",
                   "/somewhere/jax/_src/config.py", "exec")  # fmt: skip
    with pytest.raises(SystemExit) as ended, errors.command_line():
        exec(code)
    assert ended.value.code == 2
    assert "error: JAX_ENABLE_X64=maybe: JAX refuses it" in capsys.readouterr().err
    with pytest.raises(ValueError, match="another"), errors.command_line():
        raise ValueError("another error, 'maybe'")


def test_a_dangling_link_is_no_workdir(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for workdir in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(ConfigError, match=r"is a link to .*gone, which is not there"):
            check_workdir(workdir)
