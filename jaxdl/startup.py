"""The first look at a command line, before jax, numpy and pydantic are imported (2 s of CPU time).

It finds the config file, reads it without running it, and refuses what cannot be meant: most mistakes in a command are
answered at once. What has to be known to say more - the fields of the configs - comes later, in `jaxdl.options`.
Nothing but the standard library is imported here.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxdl.errors import ConfigError

PROG = "python -m jaxdl.train"
"""How the command that trains is started."""

USUAL_NAMES = {
    "lr": "optimizer.learning-rate",
    "learning-rate": "optimizer.learning-rate",
    "wd": "optimizer.weight-decay",
    "weight-decay": "optimizer.weight-decay",
    "momentum": "optimizer.momentum",
    "bs": "batch-size",
    "batch": "batch-size",
    "num-epochs": "epochs",
    "num-steps": "steps",
    "max-epochs": "epochs",
    "gpus": "mesh.fsdp",
    "num-gpus": "mesh.fsdp",
    "out": "workdir",
    "output": "workdir",
    "output-dir": "workdir",
    "logdir": "workdir",
    "amp": "precision",
    "dtype": "precision",
    "resume": "workdir",
}
"""Options of other trainers -> those of jaxdl that mean the same."""

VALUED = {
    "config": "a Python file with a function config()",
    "workdir": "the folder of the run",
    "devices": "a number of virtual CPU devices",
    "max-steps": "a number of steps",
}
"""The options of training that are no fields of the experiment and take a value: what that is."""

WHOLE_NUMBERS = ("devices", "max-steps")
"""Those that take a whole number of 1 or more."""

PROCESS_NUMBERS = ("JAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Environment variables with the number of this process in a run of several."""


def shipped_folder() -> Path:
    """The folder of the configs that come with jaxdl: `jaxdl/configs` when installed, `configs` in a checkout."""
    package = Path(__file__).parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def shipped_configs() -> dict[str, str]:
    """Name -> first line of the docstring, of the configs that come with jaxdl; what they share is left out."""
    found = {}
    for path in sorted(shipped_folder().glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "config" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def find_config(given: str | Path) -> tuple[Path, str]:
    """The file that `--config FILE`, `FILE:FUNCTION` or the name of a shipped config means, and its function.

    A name counts only where there is no such file. Raises ConfigError when there is none.
    """
    path, function = Path(given), "config"
    if not str(given).strip():
        raise ConfigError(f"--config '': no file. {_advice(path)}")
    if not path.exists() and ":" in path.name:
        name, function = path.name.rsplit(":", 1)
        if not name or not function.isidentifier():
            raise ConfigError(
                f"--config {given}: neither a file nor FILE:NAME, a file and the name of a function in it."
            )
        path = path.with_name(name)
    if path.is_dir():
        inside = sorted(path.glob("*.py")) or sorted(path.glob("config.json"))
        advice = f"Give a file, for example --config {inside[0]}." if inside else _advice(path)
        raise ConfigError(f"--config {given}: a folder, not a config file. {advice}")
    if not path.exists():
        shipped = shipped_folder() / f"{path}.py"
        if path.name != str(path) or path.suffix or not shipped.is_file():
            raise ConfigError(f"--config {given}: no such file. {_advice(path)}")
        path = shipped
    if path.suffix not in (".py", ".json"):
        raise ConfigError(f"--config {given}: not a Python file (its name must end in .py), nor a run's config.json.")
    return path, function


def _advice(path: Path) -> str:
    """What to give instead of a file that is not there: the nearest names, or all shipped configs."""
    folder = path.parent if path.parent.is_dir() else Path()
    files = {one.name: str(one) for one in sorted(folder.glob("*.py"))} | {name: name for name in shipped_configs()}
    near = difflib.get_close_matches(path.name, files, n=1) or difflib.get_close_matches(path.stem, files, n=1)
    if near:
        return f"Did you mean --config {files[near[0]]}?"
    return f"Give a file, or the name of an example from configs/: {', '.join(shipped_configs())}."


def check_source(given: str | Path) -> None:
    """Raises ConfigError for a Python config that cannot be parsed, or has no function that takes no arguments."""
    path, function = find_config(given)
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"--config {given}: cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"--config {given}{line}: {type(error).__name__}: {what}") from None
    made = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    if not made and not {function, "*"} & set(_bound(tree)):
        others = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        near = difflib.get_close_matches(function, others, n=1)
        raise ConfigError(
            f"--config {given}: defines no function `{function}()` that returns an Experiment."
            + (f" It defines `{near[0]}()`." if near else "")
        )
    if made:
        check_arguments(given, made[-1])


def check_arguments(given: str | Path, function: ast.FunctionDef) -> None:
    """Raises ConfigError when a config's function cannot be called without arguments."""
    positional = [*function.args.posonlyargs, *function.args.args]
    required = positional[: len(positional) - len(function.args.defaults)]
    required += [
        one for one, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if default is None
    ]
    if required:
        names = ", ".join(one.arg for one in required)
        raise ConfigError(
            f"--config {given}, line {function.lineno}: `{function.name}({names})` is called without arguments. Give "
            f"{names} a default, or remove it."
        )


def _bound(tree: ast.Module) -> Iterator[str]:
    """The names that a module binds outside of functions and classes, `*` for an import of everything."""
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
        for inner in ast.walk(node)
        if inner is not node
    }
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def first_look(args: Sequence[str], prog: str) -> dict[str, str]:
    """The values of the options in `VALUED`, of a command line of training; `config` is there.

    Raises ConfigError for what can be seen to be a mistake.
    """
    values: dict[str, str] = {}
    rest = list(args)
    _check_first(rest, prog)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        if not flag.startswith("--"):
            continue  # A value of the option before, or a mistake that is seen when all options are known.
        if name in USUAL_NAMES:
            raise ConfigError(f"{flag}: there is no such option. Did you mean --{USUAL_NAMES[name]}?")
        if name not in VALUED:
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag}: needs a value, {VALUED[name]}.")
            value = rest.pop(0)
        values[name] = value
    for name, value in values.items():
        if not value.strip():
            raise ConfigError(f"--{name} '': empty. Give {VALUED[name]}, or leave it out.")
        if name in WHOLE_NUMBERS and not (value.isdecimal() and int(value) > 0):
            raise ConfigError(f"--{name} {value}: give a whole number, 1 or more, or leave it out.")
    if "config" not in values:
        raise ConfigError(no_config(prog))
    return values


def given_config(args: Sequence[str]) -> str | None:
    """What the last `--config` gives, None where there is none. Raises ConfigError when its value is missing."""
    found = None
    for number, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag == "--config":
            if not equals and (number + 1 == len(args) or args[number + 1].startswith("--")):
                raise ConfigError(f"--config: needs a value, {VALUED['config']}.")
            found = value if equals else args[number + 1]
    return found


def no_config(prog: str) -> str:
    """What to say to a command without `--config`."""
    return f"which experiment? Give --config FILE, for example --config {_example()}. {prog} --help says more."


def check_names(args: Sequence[str], given: str) -> None:
    """Raises ConfigError for an option whose first name is no field of an experiment, read off the class's source.

    The fields inside are known later. A config that brings classes of its own, or imports files next to it, may have
    other fields: then nothing is checked here.
    """
    path = find_config(given)[0]
    tree = ast.parse(path.read_bytes()) if path.suffix == ".py" else ast.Module([], [])
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    if any((path.parent / f"{name.split('.')[0]}.py").is_file() for name in imported) or any(
        isinstance(node, ast.ClassDef) for node in ast.walk(tree)
    ):
        return
    source = ast.parse((Path(__file__).parent / "experiment.py").read_bytes())
    known = [
        node.target.id.replace("_", "-")
        for one in source.body
        if isinstance(one, ast.ClassDef) and one.name == "Experiment"
        for node in one.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    for arg in args:
        group, dot, rest = arg.partition("=")[0].removeprefix("--").replace("_", "-").partition(".")
        near = difflib.get_close_matches(group, known, n=1)
        if arg.startswith("--") and group not in {*known, *VALUED, "explain", "no-explain"} and (dot or near):
            advice = f"Did you mean --{near[0]}{dot}{rest}?" if near else f"Options begin with --{', --'.join(known)}."
            raise ConfigError(f"{arg.partition('=')[0]}: there is no such option. {advice}")


def _check_first(args: Sequence[str], prog: str) -> None:
    """Raises ConfigError for a command line that begins without an option, such as with a file."""
    if not args or args[0].startswith("-"):
        return
    first = args[0]
    if first.endswith((".py", ".json")) or (shipped_folder() / f"{first}.py").is_file():
        raise ConfigError(f"{first}: an option is missing in front of it. Give --config {first}.")
    raise ConfigError(f"{first}: not an option. Options begin with --, the first is --config FILE; see {prog} --help.")


def _example() -> str:
    file = Path("configs/digits.py")
    return str(file) if file.is_file() else file.stem


def is_first_process() -> bool:
    """Whether this is the first process of the run, as far as its environment says: the others are silent."""
    return not any(os.environ.get(name, "0").strip() not in ("", "0") for name in PROCESS_NUMBERS)


def overview(prog: str) -> str:
    """The text of `--help` without a config: how to begin, the shipped configs, and the usual options."""
    width = max(map(len, shipped_configs()), default=0)
    configs = "\n".join(f"  {name:{width}}  {about}" for name, about in shipped_configs().items())
    return f"""usage: {prog} --config FILE [--workdir FOLDER] [OPTIONS]

Trains an experiment: a Python file with a function config(), the name of one that comes with jaxdl, or the config.json
of a run. Started again with the same --workdir, it resumes.

  {prog} --config {_example()} --workdir runs/digits

Usual options:
  --workdir FOLDER              where checkpoints, metrics and curves are kept; nothing is without it
  --devices N                   run on N virtual CPU devices
  --explain                     print how the parameters are sharded and the memory of a step, and stop
  --epochs N, --steps N         length of the run
  --batch-size N                examples in one step, over all devices
  --optimizer NAME              sgd, adamw, lars, lamb; then --optimizer.learning-rate N and its other fields
  --exchange NAME               how gradients are averaged over the slow network
  --mesh.replica N              groups of devices that exchange gradients; see also --mesh.fsdp, --mesh.tensor

With --config FILE --help: every option, with its default in that file.

Configs that come with jaxdl:
{configs}

Other commands: python -m jaxdl --help"""
