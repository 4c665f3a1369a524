"""The first look at a command line, before jax, numpy and pydantic are imported (2 s of CPU time).

It finds the config file, reads it without running it, and refuses what cannot be meant: most mistakes in a command are
answered at once. What has to be known to say more - the fields of the configs - comes later, in `jaxdl.options`.
Nothing but the standard library is imported here.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from jaxdl.errors import ConfigError
from jaxdl.fields import experiment_fields, inner_fields, not_of_type
from jaxdl.files import CONFIG_FILE

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

MAX_CPU_DEVICES = 512
"""Virtual CPU devices of one process. Each has threads of its own; with 1000 XLA hangs or aborts."""

MAKE_CLASSES = {"type", "exec", "eval", "__import__"}
"""Names in a config file with which it can make or import a class that its source does not show."""

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
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # A file that somebody is editing.
        if any(isinstance(node, ast.FunctionDef) and node.name == "config" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def find_config(given: str | Path) -> tuple[Path, str]:
    """The file that `--config FILE`, `FILE:FUNCTION` or the name of a shipped config means, and its function.

    A name counts only where there is no such file. Raises ConfigError when there is none, or it cannot be looked up.
    """
    try:
        return _find(given)
    except OSError as error:  # A name that is too long for the file system, or a folder that may not be entered.
        shown = str(given) if len(str(given)) <= 100 else f"{str(given)[:97]}..."
        raise ConfigError(
            f"--config {shown}: cannot be looked up: {error.strerror}. Give a file that this user may read, or the "
            f"name of an example from configs/: {', '.join(shipped_configs())}."
        ) from None


def _find(given: str | Path) -> tuple[Path, str]:
    """What `find_config` returns. Raises OSError too."""
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
        inside = sorted(path.glob("*.py")) or sorted(path.glob(CONFIG_FILE))
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
    bound = list(_bound(tree))
    if not made and not {function, "*"} & set(bound):
        others = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        near = difflib.get_close_matches(function, others, n=1)
        raise ConfigError(
            f"--config {given}: defines no function `{function}()` that returns an Experiment."
            + (f" It defines `{near[0]}()`." if near else "")
        )
    if made and not made[-1].decorator_list and bound.count(function) == 1 and "*" not in bound:
        check_arguments(given, made[-1])  # A decorator, or a second assignment, may supply the arguments.


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


def own_options(args: Sequence[str], names: Collection[str] = tuple(VALUED)) -> tuple[dict[str, str], list[str]]:
    """(the values of these options of `VALUED`, by name, and the other arguments) of a command line.

    Raises ConfigError when a value is missing, empty or no number where one is needed.
    """
    values: dict[str, str] = {}
    others: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        if not flag.startswith("--") or name not in names:
            others.append(word)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag}: needs a value, {VALUED[name]}.")
            value = rest.pop(0)
        values[name] = value
    for name, value in values.items():
        if not value.strip():
            raise ConfigError(f"--{name} '': empty. Give {VALUED[name]}, or leave it out.")
        if name in WHOLE_NUMBERS and not (value.isdecimal() and len(value) <= 18 and int(value) > 0):
            raise ConfigError(f"--{name} {value[:50]}: give a whole number, 1 or more, or leave it out.")
    if "devices" in values:
        check_cpu_devices(int(values["devices"]), "--devices")
    return values, others


def check_cpu_devices(count: int, option: str) -> None:
    """Raises ConfigError for more virtual CPU devices, asked for by this option, than XLA can run in one process."""
    if count > MAX_CPU_DEVICES:
        raise ConfigError(
            f"{option} {count}: a process can have at most {MAX_CPU_DEVICES} virtual CPU devices, since each has "
            f"threads of its own, and this machine has {os.cpu_count()} cores. Give fewer."
        )


def first_look(args: Sequence[str], prog: str) -> dict[str, str]:
    """The values of the options in `VALUED`, of a command line of training; `config` is there.

    Raises ConfigError for what can be seen to be a mistake whatever the config file has.
    """
    _check_first(args, prog)
    values, _ = own_options(args)
    if "config" not in values:
        raise ConfigError(no_config(prog))
    return values


def given_config(args: Sequence[str]) -> str | None:
    """What the last `--config` gives, None where there is none. Raises ConfigError when its value is missing."""
    return own_options(args, ("config",))[0].get("config")


def no_config(prog: str) -> str:
    """What to say to a command without `--config`."""
    return f"which experiment? Give --config FILE, for example --config {_example()}. {prog} --help says more."


def check_names(args: Sequence[str], given: str) -> None:
    """Raises ConfigError for an option that no experiment has, or a word where a number belongs.

    The fields are read off the source (`jaxdl.fields`): which of them a part has is known later. Nothing is checked
    where the config may have an Experiment with other fields, see `_is_stock`.
    """
    if not _is_stock(find_config(given)[0], set()):
        return
    fields = experiment_fields()
    inner: dict[str, set[str]] = {}
    for number, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        if not arg.startswith("--") or name in {*VALUED, "explain"}:
            continue
        if not equals and number + 1 < len(args) and not args[number + 1].startswith("--"):
            equals, value = "=", args[number + 1]
        group, dot, rest = name.partition(".")
        if group in fields:
            if not dot:
                wanted = not_of_type({fields[group]}, value) if equals else None
            else:
                inner = inner or inner_fields()
                types = inner.get(rest.rpartition(".")[2].removeprefix("no-"))
                if types is None:
                    _check_inner(flag, group, rest, inner)
                    continue
                wanted = not_of_type(types, value) if equals else None
            if wanted:
                raise ConfigError(f"{flag} {value or repr('')}: not {wanted}.")
            continue
        if name in USUAL_NAMES:
            raise ConfigError(f"{flag}: there is no such option. Did you mean --{USUAL_NAMES[name]}?")
        # A part without a dot, such as --step, is no option.
        meant = [one for one, type_ in fields.items() if dot or not (type_ == "group" or type_.startswith("tuple"))]
        near = difflib.get_close_matches(group, meant, n=1)
        if dot or near:
            advice = f"Did you mean --{near[0]}{dot}{rest}?" if near else f"Options begin with --{', --'.join(fields)}."
            raise ConfigError(f"{flag}: there is no such option. {advice}")


def _check_inner(flag: str, group: str, rest: str, inner: Mapping[str, set[str]]) -> None:
    """Raises ConfigError for the option of a part, `rest`, that no part of any experiment has, if a name is near it."""
    before, dot, last = rest.rpartition(".")
    usual = USUAL_NAMES.get(last, "").removeprefix(f"{group}.")
    near = [usual] if usual in inner else difflib.get_close_matches(last, inner, n=1)
    if near and last not in ("kind", *inner):
        raise ConfigError(f"{flag}: there is no such option. Did you mean --{group}.{before}{dot}{near[0]}?")


def _is_stock(path: Path, seen: set[Path]) -> bool:
    """Whether a config file can have no Experiment but jaxdl's: it defines no class, and all its imports are known.

    Known are jaxdl, the standard library, and files next to it of which the same holds. `seen` are those looked at.
    """
    if path.suffix != ".py" or path in seen:
        return True
    seen.add(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.Name) and node.id in MAKE_CLASSES):
            return False
        imported = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            imported = ["." * node.level + (node.module or "")]
        for name in imported:
            root = name.partition(".")[0]
            if root == "jaxdl":
                continue
            beside = path.with_name(f"{root or '.'}.py")
            if beside.is_file():
                if not _is_stock(beside, seen):
                    return False
            elif path.with_name(root or ".").is_dir() or root not in sys.stdlib_module_names - {"importlib", "runpy"}:
                return False
    return True


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
