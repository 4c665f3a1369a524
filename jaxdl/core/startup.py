"""The first check of a command line, before JAX, NumPy and pydantic are imported (2 s of CPU time).

It finds and parses the config file without running it, so that most errors in a command are reported at once. Errors
that depend on values of the config are found later, in `jaxdl.core.options`. It imports the standard library alone.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from jaxdl.core.errors import ConfigError
from jaxdl.core.fields import ENTRY_POINTS, experiment_fields, fields_of_part, inner_fields, is_stock, not_of_type
from jaxdl.core.files import CONFIG_FILE
from jaxdl.core.runs import check_checkpoint, check_run, parse_which

PROG = "python -m jaxdl.train"
"""The command that trains, as messages name it."""

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
"""Option of other trainers -> the option of jaxdl with the same meaning."""

VALUED = {
    "config": "a Python file with a function config()",
    "workdir": "the folder of the run",
    "devices": "a number of virtual CPU devices",
    "max-steps": "a number of steps",
    "stage-data": "a folder on the disk of each node",
    "init-from": "the folder of another run",
    "init-step": "newest, best or the number of a step",
}
"""Options of training that are not fields of the experiment -> the value that each takes."""

OTHERS = ("explain", "print-config", "init-names", "may-change")
"""Options of training that are not fields of the experiment, without a value or with several."""

WHOLE_NUMBERS = ("devices", "max-steps")
"""The options in `VALUED` that take a whole number, 1 or more."""

MAX_CPU_DEVICES = 512
"""The most virtual CPU devices of one process. Each has its own threads; with 1000, XLA hangs or aborts."""

PROCESS_NUMBERS = ("JAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Environment variables with the index of this process in a run of several."""

COUNTS = ("JAX_NUM_PROCESSES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS", "JAXDL_DISTRIBUTED")
"""Environment variables that a process of a run of several has; others may have them too."""


def shipped_folder() -> Path:
    """The folder of the configs that come with jaxdl: `jaxdl/configs` when installed, `configs` in a checkout."""
    package = Path(__file__).parent.parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def shipped_configs() -> dict[str, str]:
    """Name -> first line of the docstring, for the configs that come with jaxdl; not for modules that they share."""
    configs = {}
    for path in sorted(shipped_folder().glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # The user may be editing it.
        if any(isinstance(node, ast.FunctionDef) and node.name == "config" for node in tree.body):
            configs[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return configs


def find_config(given: str | Path) -> tuple[Path, str]:
    """(path, function) of `--config FILE`, `FILE:FUNCTION`, or the name of a config that comes with jaxdl.

    A file takes precedence over a name. Raises ConfigError when there is neither, or the path cannot be read.
    """
    try:
        return _find(given)
    except OSError as error:  # A name too long for the file system, or a folder without permission.
        shown = str(given) if len(str(given)) <= 100 else f"{str(given)[:97]}..."
        raise ConfigError(
            f"--config {shown}: not accessible: {error.strerror}. Give a file that this user may read, or the "
            f"name of an example from configs/: {', '.join(shipped_configs())}."
        ) from None


def _find(given: str | Path) -> tuple[Path, str]:
    """Like `find_config`, but may also raise OSError."""
    path, function = Path(given), "config"
    if not str(given).strip():
        raise ConfigError(f"--config '': no file. {_advice(path)}")
    if not path.exists() and ":" in path.name:
        name, function = path.name.rsplit(":", 1)
        if not name or not function.isidentifier():
            raise ConfigError(
                f"--config {given}: neither a file nor FILE:NAME (a file and the name of a function in it)."
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
    """What to give instead of a missing file: the nearest name, or all configs that come with jaxdl."""
    folder = path.parent if path.parent.is_dir() else Path()
    files = {path.name: str(path) for path in sorted(folder.glob("*.py"))} | {name: name for name in shipped_configs()}
    near = difflib.get_close_matches(path.name, files, n=1) or difflib.get_close_matches(path.stem, files, n=1)
    if near:
        return f"Did you mean --config {files[near[0]]}?"
    return f"Give a file, or the name of an example from configs/: {', '.join(shipped_configs())}."


def check_source(given: str | Path) -> None:
    """Raises ConfigError for a Python config that cannot be parsed, or without a function to call without arguments."""
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
        check_arguments(given, made[-1])  # A decorator or a second assignment could supply the arguments.


def check_arguments(given: str | Path, function: ast.FunctionDef) -> None:
    """Raises ConfigError when the function of a config file cannot be called without arguments."""
    positional = [*function.args.posonlyargs, *function.args.args]
    required = positional[: len(positional) - len(function.args.defaults)]
    required += [
        argument
        for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        if default is None
    ]
    if required:
        names = ", ".join(argument.arg for argument in required)
        raise ConfigError(
            f"--config {given}, line {function.lineno}: `{function.name}({names})` is called without arguments. Give "
            f"{names} a default value, or remove it."
        )


def _bound(tree: ast.Module) -> Iterator[str]:
    """The names that a module binds outside of functions and classes; `*` for a star import."""
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


def split_options(args: Sequence[str], names: Collection[str] = tuple(VALUED)) -> tuple[dict[str, str], list[str]]:
    """(name -> value of these options of `VALUED`, the other arguments) of a command line.

    Raises ConfigError for a value that is missing, empty, or not a number although the option takes one.
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


def training_options(words: Sequence[str]) -> list[str] | None:
    """The options of a training command; None for any other.

    It may be `python -m jaxdl.train`, `python -m jaxdl train` or `jaxdl train`, with any words before it.
    """
    for end in range(2, len(words) + 1):
        before, last = words[end - 2 : end]
        if (before, last) == ("-m", "jaxdl.train") or (Path(before).name, last) == ("jaxdl", "train"):
            return list(words[end:])
    return None


def check_cpu_devices(count: int, option: str) -> None:
    """Raises ConfigError if `option` asks for more virtual CPU devices than XLA can run in one process."""
    if count > MAX_CPU_DEVICES:
        raise ConfigError(
            f"{option} {count}: a process can have at most {MAX_CPU_DEVICES} virtual CPU devices, since each has "
            f"its own threads; this machine has {os.cpu_count()} cores. Give fewer."
        )


def first_look(args: Sequence[str], prog: str) -> dict[str, str]:
    """Name -> value of the options in `VALUED` of a training command; always has `config`.

    Raises ConfigError for errors that do not depend on the config file.
    """
    _check_first(args, prog)
    values, _ = split_options(args)
    if "config" not in values:
        raise ConfigError(no_config(prog))
    if "init-from" in values:
        which = parse_which(values.get("init-step", "newest"), "--init-step")
        if is_alone():
            check_checkpoint(check_run(values["init-from"], "--init-from"), which, "--init-from")
    return values


def find_config_option(args: Sequence[str]) -> str | None:
    """The value of the last `--config`; None without one. Raises ConfigError when its value is missing."""
    return split_options(args, ("config",))[0].get("config")


def no_config(prog: str) -> str:
    """The message for a command without `--config`."""
    return f"no --config. Give --config FILE, for example --config {example_config()}. See {prog} --help."


def check_names(args: Sequence[str], given: str) -> None:
    """Raises ConfigError for an option that no experiment has, or a value that should be a number but is not.

    The fields are read from the source (`jaxdl.core.fields`), without knowing which kind each part has. Nothing is
    checked if there may be classes with other fields: of the config, see `jaxdl.core.fields.is_stock`, or of an
    installed package.
    """
    if not is_stock(find_config(given)[0], set()):
        return
    try:
        _check_names(args)
    except ConfigError:
        if not _may_have_kinds():
            raise


def _may_have_kinds() -> bool:
    """Whether an installed package may name kinds of its own. `importlib.metadata` alone takes as long as this module.

    A zip on the path is not opened: it may.
    """
    for place in map(Path, sys.path):
        if place.is_file():
            return True
        for file in (*place.glob("*.dist-info/entry_points.txt"), *place.glob("*.egg-info/entry_points.txt")):
            if f"[{ENTRY_POINTS}]" in file.read_text("utf-8", errors="replace"):
                return True
    return False


def _check_names(args: Sequence[str]) -> None:
    """`check_names`, for an experiment of jaxdl's own classes."""
    fields = experiment_fields()
    for arg, following in itertools.zip_longest(args, args[1:], fillvalue="--"):
        flag, equals, value = arg.partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        if not arg.startswith("--") or name in {*VALUED, *OTHERS}:
            continue
        if name.partition(".")[0] not in fields:
            _check_unknown(flag, name, fields)
        elif equals or not following.startswith("--"):
            _check_field(flag, name, fields, value if equals else following)
        else:
            _check_field(flag, name, fields, None)


def _check_field(flag: str, name: str, fields: Mapping[str, str], value: str | None) -> None:
    """Raises ConfigError for an option of the experiment or a part of it that does not exist, or not with this value.

    A name in a part is refused only if some config has a similar one. `value` is None if the option has none.
    """
    group, dot, rest = name.partition(".")
    before, inner_dot, last = rest.rpartition(".")
    types = inner_fields().get(last.removeprefix("no-")) if dot else {fields[group]}
    if types is not None:
        wanted = None if value is None else not_of_type(types, value)
        if wanted:
            raise ConfigError(f"{flag} {value or repr('')}: not {wanted}.")
        return
    # What has fields of its own inside, or no similar one here, is for the parser to say, which knows the kinds.
    known = set() if before else fields_of_part(fields[group])
    usual = USUAL_NAMES.get(last, "").removeprefix(f"{group}.")
    near = [usual] if usual in known else difflib.get_close_matches(last, sorted(known), n=1)
    if near and last != "kind":
        raise ConfigError(f"{flag}: there is no such option. Did you mean --{group}.{before}{inner_dot}{near[0]}?")


def _check_unknown(flag: str, name: str, fields: Mapping[str, str]) -> None:
    """Raises ConfigError for an option of no part of the experiment, unless it may be one of another program."""
    if name in USUAL_NAMES:
        raise ConfigError(f"{flag}: there is no such option. Did you mean --{USUAL_NAMES[name]}?")
    group, dot, rest = name.partition(".")
    # A part without a dot, such as --step, is not an option.
    meant = [name for name, type_ in fields.items() if dot or not (fields_of_part(type_) or type_.startswith("tuple"))]
    near = difflib.get_close_matches(group, meant, n=1)
    if dot and near and rest not in fields_of_part(fields[near[0]]):
        return  # The parser knows whether the chosen kind has it.
    if dot or near:
        advice = f"Did you mean --{near[0]}{dot}{rest}?" if near else f"Options begin with --{', --'.join(fields)}."
        raise ConfigError(f"{flag}: there is no such option. {advice}")


def _check_first(args: Sequence[str], prog: str) -> None:
    """Raises ConfigError for a command line whose first word is not an option, such as a file."""
    if not args or args[0].startswith("-"):
        return
    first = args[0]
    if first.endswith((".py", ".json")) or (shipped_folder() / f"{first}.py").is_file():
        raise ConfigError(f"{first}: not an option. Give --config {first}.")
    raise ConfigError(f"{first}: not an option. Options begin with --, such as --config FILE; see {prog} --help.")


def example_config() -> str:
    """What to give for `--config` in an example."""
    file = Path("configs/digits.py")
    return str(file) if file.is_file() else file.stem


def is_alone() -> bool:
    """Whether this is certainly no process of several, which must agree on what they find on their disks.

    One that ended here would let the others wait for it.
    """
    return not any(os.environ.get(name) for name in (*PROCESS_NUMBERS, *COUNTS))


def is_first_process() -> bool:
    """Whether this is the first process of the run according to its environment; the others print nothing."""
    return not any(os.environ.get(name, "0").strip() not in ("", "0") for name in PROCESS_NUMBERS)
