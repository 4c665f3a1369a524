"""README, CONTRIBUTING and the pages of docs/: their commands run, and what they list is what there is.

Every `bash` and `python` block has a mark above it, which says what is done with it here:

- `<!-- run -->`: it is executed as it stands, in this process, in a folder whose configs/ are those of the repository,
  but for digits.py, with 5 steps, one block, no curves. What the commands leave is shared by all pages;
- `<!-- check -->`: nothing is trained or measured, but each command is read: jaxdl's own by their own parsers (or by
  the options of their help), studies of benchmarks/ by the options in their source, make by its targets;
- `<!-- shown -->`: commands of other programs, and what cannot stand alone.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import json
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import test_floors
from PIL import Image
from runs import ROOT, rows

import jaxdl
import jaxdl.train
from jaxdl.__main__ import main as commands_of_jaxdl
from jaxdl.core import files
from jaxdl.core.config import Config
from jaxdl.core.kinds import choices, forgotten, kinds
from jaxdl.data import Data
from jaxdl.parallel.cluster.exits import BROKEN, DIVERGED, HALTED, MISTAKE
from jaxdl.performance.bench.__main__ import BENCHES
from jaxdl.performance.bench.__main__ import main as bench
from jaxdl.platform.launch import __main__ as launch
from jaxdl.platform.launch import asynchronous
from jaxdl.platform.launch.learners import command_of_learner
from jaxdl.platform.search import command as searching
from jaxdl.platform.search.conduct import settings_of
from jaxdl.report.better_direction import HIGHER, LOWER
from jaxdl.training.checkpoint.items import ITEMS
from jaxdl.training.command import parse_command
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks.preferences import METRICS

sys.path.insert(0, str(ROOT / "scripts"))
import docs_site

from benchmarks.figures import draw_architecture, draw_context, draw_idea

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in
         [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]}  # fmt: skip
FENCE = re.compile(r"^(?P<mark><!-- (?:run|check|shown) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
BLOCKS = [(name, match) for name, text in PAGES.items() for match in FENCE.finditer(text)]


def cases():
    """The blocks to run; those that compile another step than README's first commands are slow."""
    for name, match in BLOCKS:
        if match["mark"] == "<!-- run -->\n":
            trains = "jaxdl.train --config configs/digits" in match["text"] or "jaxdl.train(" in match["text"]
            marks = [pytest.mark.slow] if trains and not (name == "README.md" and match["kind"] == "bash") else []
            yield pytest.param(match["kind"], match["text"], id=f"{name}-{match.start()}", marks=marks)


RUN = list(cases())


def commands(text):
    """The commands of a block as lists of words, without comments; a redirection is left in."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


CHECKED = sorted({shlex.join(words) for _, match in BLOCKS if match["mark"] == "<!-- check -->\n"
                  for words in commands(match["text"])})  # fmt: skip


def page(name):
    """The text of a page of docs/."""
    return PAGES[f"docs/{name}"]


def first_column(text):
    """The names in the first column of a page's tables, in backticks."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder in which the blocks run."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "configs").mkdir()
    for path in (ROOT / "configs").glob("*.py"):
        (folder / "configs" / path.name).symlink_to(path)
    small = folder / "configs" / "digits.py"
    small.unlink()
    changes = {"epochs": 0.2, "schedule.warmup_epochs": 0.05, "report.curves": False}
    made = f"jaxdl.load({str(ROOT / 'configs/digits.py')!r}, {changes} | {{'model': TinyResNet(depth=8, width=8)}})"
    small.write_text(f"import jaxdl\nfrom runs import TinyResNet\n\ndef config():\n    return {made}\n")
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(scope="module")
def digits_run(place):
    """The workdir of README's first command."""
    run(["python", "-m", "jaxdl.train", "--config", "configs/digits.py", "--workdir", "runs/first"])
    return place / "runs" / "first"


PROGRAMS = {"jaxdl": commands_of_jaxdl, "jaxdl.train": jaxdl.train.main, "jaxdl.launch": launch.main}


def run(words):
    """Executes one `python -m jaxdl...` command in this process, and writes what it prints where `>` says."""
    assert words[:2] == ["python", "-m"], words
    args, target = (words[3 : words.index(">")], words[words.index(">") + 1]) if ">" in words else (words[3:], None)
    printed, code = io.StringIO(), 0
    with contextlib.redirect_stdout(printed):
        try:
            PROGRAMS[words[2]](args)
        except SystemExit as ended:
            code = ended.code or 0
    assert code == 0, f"{shlex.join(words)}: exit code {code}"
    assert printed.getvalue(), words
    if target:
        Path(target).write_text(printed.getvalue())


def test_every_block_says_how_it_is_checked():
    unmarked = [f"{name}: {match['text'][:60]!r}" for name, match in BLOCKS if not match["mark"]]
    assert not unmarked, "put <!-- run -->, <!-- check --> or <!-- shown --> above:\n" + "\n".join(unmarked)
    assert {match["kind"] for _, match in BLOCKS} == {"bash", "python"}
    assert len(RUN) > 15


@pytest.mark.parametrize(("kind", "text"), RUN)
def test_what_is_marked_run(kind, text, place):
    if kind == "bash":
        for words in commands(text):
            run(words)
        return
    found = {"__name__": "docs"}
    with forgotten():
        exec(compile(text, "a page", "exec"), found)
    if "config" in found:
        assert isinstance(found["config"](), Experiment)


def check(words):
    """Reads one command without running it."""
    words = [word for word in words if "=" not in word or not word[0].isupper()]  # Variables in front.
    words = words[: words.index(">")] if ">" in words else words
    words = words[1:] if words[0] == "sudo" else words
    if words[0] == "make":
        targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets[1].split())
    elif words[1] == "-m" and not (words[2].startswith("benchmarks.") and "argparse" in source_of(words[2])):
        check_module(words[2], words[3:])
    else:
        fronts = {"scripts/reproduce_dawnbench.py": "benchmarks.dawnbench.reproduce"}
        source = source_of(fronts.get(words[1], words[2]))
        given = [word for word in words[2:] if word.startswith("--") and word != "--help"]
        assert not [one for one in given if f'"{one}"' not in source], words


def source_of(module):
    """The text of a module."""
    return (ROOT / f"{module.replace('.', '/')}.py").read_text()


def check_module(module, args):
    """Reads the arguments of one of jaxdl's programs by its own parser."""
    if module == "jaxdl.train":
        assert parse_command(args).experiment
    elif module == "jaxdl.search":
        settings_of(searching.parse_command(args, module))
    elif module == "jaxdl.launch" and args[0] in launch.HERE:
        kind = {"local": launch.Local, "netns": launch.Netns}[args[0]]
        check(launch.parse_command(kind, args[0], args[1:])[1])
    elif module == "jaxdl.launch" and args[0] in launch.ASYNCHRONOUS:
        _, command = asynchronous.parse(args[0], args[1:])
        if command:
            check(command_of_learner(command, 0))
    elif module == "jaxdl.launch":
        run(["python", "-m", module, *args])
    elif module == "jaxdl.bench" and hasattr(inspect.getmodule(BENCHES[args[0]][1]), "parse_command"):
        assert inspect.getmodule(BENCHES[args[0]][1]).parse_command(args[1:])
    else:
        imported: Any = importlib.import_module(module)
        own = getattr(imported, "main", None) or importlib.import_module(f"{module}.__main__").main
        main = bench if module == "jaxdl.bench" else own
        options = [word for word in args if word.startswith("--")]
        with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
            main([*args, "--help"])
        assert not ended.value.code
        assert not [one for one in options if one not in printed.getvalue()]


@pytest.mark.parametrize("command", CHECKED)
def test_what_is_marked_check(command, place):
    check(shlex.split(command))


def test_files_in_the_text_exist():
    found = [
        f"{name}: {path}"
        for name, text in PAGES.items()
        for path, new in re.findall(
            r"`((?:jaxdl|tests|scripts|benchmarks|configs|notebooks|docs)/[\w./]+\.\w+)`( \(new\))?", text
        )
        if not new and not (ROOT / path).exists()
    ]
    assert not found, "\n".join(found)


def test_names_of_the_api_exist():
    names = re.findall(r"^::: (\S+)$", page("reference/api.md"), re.M)
    for module, _, name in (one.rpartition(".") for one in names):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    assert len(names) > 20


def test_the_config_reference_has_every_config_class_and_field():
    # The options of a program of its own; its --help has them.
    programs = (
        "jaxdl.parallel.asynchrony.", "jaxdl.inference.evaluate.", "jaxdl.inference.export.", "jaxdl.inference.trained",
        "jaxdl.inference.translate.", "jaxdl.performance.bench", "jaxdl.platform.launch", "jaxdl.platform.search",
        "jaxdl.platform.spark.",  # It needs pyspark, and has no configs.
    )  # fmt: skip
    for one in pkgutil.walk_packages(jaxdl.__path__, "jaxdl."):
        if not one.name.endswith("__main__") and not one.name.startswith(programs):
            importlib.import_module(one.name)
    classes = [Config]
    for one in classes:
        classes += one.__subclasses__()
    # Bases of others have no section of their own, and tests and pages may define classes.
    ours = [one for one in classes if one.__module__.startswith("jaxdl.") and not one.__module__.startswith(programs)]
    leaves = [one for one in ours if not one.__subclasses__() and not inspect.isabstract(one)]
    text = "\n".join(docs_site.pages().values())
    for one in leaves:
        section = text.split(f"`{one.__module__}.{one.__name__}`.", 1)
        assert len(section) == 2, f"{one.__name__} is not in the reference"
        table = section[1].split("\n## ")[0]
        for name in one.model_fields:
            assert name == "kind" or f"`{name}`" in table, f"{one.__name__}.{name}"
            assert name == "kind" or docs_site.help_text(one, name).split()[0] in table
    assert len(leaves) > 35
    assert "`batch_size` | `int` | `128` | >=&nbsp;1 | Examples per step, over all devices. |" in text
    parts = {path.partition(".")[0] for path in choices(Experiment)}
    assert parts <= {Path(name).stem for name in docs_site.pages()}


ELSEWHERE = {
    **{f"{when}/{name}": "training/tasks/preferences.py" for when in ("train", "eval") for name in METRICS[2:]},
    **dict.fromkeys(("eval/rmse", "eval/mae", "eval/r2"), "training/tasks/regression.py"),
    "train/agreement/wait_sec": "training/run/learners/learning.py", "checkpoint/table_bytes": "training/run/saver.py",
    "train/agreement/merges": "training/run/learners/learning.py", "train/bits_per_byte": "training/tasks/language.py",
    "eval/balanced_accuracy": "training/tasks/classification.py", "eval/bits_per_byte": "training/tasks/language.py",
    "train/agreement/bad_replicas": "training/rounds/merge.py", "train/agreement/distance": "training/rounds/merge.py",
    "train/agreement/staleness": "training/step/program.py", "eval/bits_per_byte/NAME": "training/tasks/language.py",
    "checkpoint/table_bytes_whole": "training/run/saver.py", "train/experts/largest_load/LAYER": "models/experts.py",
    "train/normalized_entropy": "training/tasks/binary.py", "eval/normalized_entropy": "training/tasks/binary.py",
    "eval/replicas/loss": "training/run/evaluation.py", "eval/lm_eval/TASK/METRIC": "training/measures.py",
    "train/experts/largest_load": "models/experts.py", "train/perplexity": "training/tasks/language.py",
    "train/skipped_steps": "training/step/update.py", "eval/experts/largest_load": "models/experts.py",
    "eval/perplexity": "training/tasks/language.py", "train/calibration": "training/tasks/binary.py",
    "tokens_per_sec": "training/tasks/language.py", "eval/calibration": "training/tasks/binary.py",
    "train/loss_scale": "training/step/update.py", "eval/loss/NAME": "training/run/inference.py",
    "train/agreement/loss": "report/fetching.py", "eval/auc_error": "training/tasks/binary.py",
    "train/experts/entropy": "models/experts.py", "train/momentum": "training/step/update.py",
    "train/empty_steps": "report/consumed.py", "input/per_sec/STAGE": "report/inputs.py",
    "train/experts/lost": "models/experts.py", "eval/auc": "training/tasks/binary.py",
    "epochs/NAME": "data/text/mixture.py", "tokens/NAME": "data/text/mixture.py", "tokens_seen": "report/consumed.py",
    "input/hits/TIER": "report/inputs.py",
}  # fmt: skip
"""Metrics that a small run on digits does not write -> where they are made."""


def test_the_page_of_metrics_has_what_a_run_writes_and_nothing_else(digits_run):
    documented = first_column(page("reference/metrics.md"))
    patterns = {name: re.sub(r"[A-Z]{3,}", "[a-z_]+", name) for name in documented}
    written = {name for row in rows(digits_run) if "event" not in row for name in row} - {"step", "epoch"}
    known = {name: [doc for doc, pattern in patterns.items() if re.fullmatch(pattern, name)] for name in written}
    assert not [name for name, found in known.items() if not found]
    assert documented - {one for found in known.values() for one in found} == ELSEWHERE.keys()
    for name, path in ELSEWHERE.items():
        word = next(part for part in reversed(name.split("/")) if part.islower()).removesuffix("_per_sec")
        assert word in (ROOT / "jaxdl" / path).read_text(), name


def test_the_page_of_files_has_what_a_run_writes(digits_run):
    written = {path.name for path in digits_run.iterdir()}
    assert {"config.json", "metrics.jsonl", "summary.json", "checkpoints"} <= written
    constants = {value for name, value in vars(files).items() if name.isupper() and not name.startswith("_")}
    assert not [name for name in constants | written | set(ITEMS) if name not in page("reference/workdir.md")]


def test_the_page_of_exit_codes_has_those_of_the_code():
    codes = re.findall(r"^\| (\d+) \|", page("reference/exit-codes.md"), re.M)
    assert {BROKEN, MISTAKE, DIVERGED, HALTED, 0, 1, 130, 141, 143} == {int(code) for code in codes}


def test_the_page_of_searches_has_the_metrics_whose_direction_is_known():
    found = re.search(
        r"Whether higher is better is known for(.*?)\(lower\)(.*?)\(higher\)", page("howto/search.md"), re.S
    )
    assert found
    assert tuple(tuple(re.findall(r"`(\w+)`", words)) for words in found.groups()) == (LOWER, HIGHER)


def test_the_page_of_staged_data_names_every_kind_that_has_files():
    table = re.search(r"\| data \| what is copied \|.*?\n\n", page("platform.md"), re.S)
    assert table
    named = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table[0].splitlines() if line))
    assert sorted(named) == sorted(name for name, cls in kinds(Data).items() if cls.staged is not Data.staged)


def test_the_architecture_names_every_room():
    table = re.search(r"\| room \|.*?\n\n", page("architecture.md"), re.S)
    assert table
    assert first_column(table[0]) == set(test_floors.FLOOR)
    drawn = described("floors")
    assert drawn == draw_architecture.layout(), "the floors have changed: python -m benchmarks.figures.draw_docs floors"


def described(name):
    """The description in a picture of docs/."""
    with Image.open(ROOT / f"docs/{name}.png") as picture:
        return json.loads(picture.info["Description"])


def test_the_drawings_say_what_their_source_says():
    figures = {"step": draw_architecture.step(), "idea": draw_idea.draw(), "context": draw_context.context()}
    stale = [name for name, figure in figures.items() if described(name) != draw_idea.texts(figure)]
    assert not stale, "python -m benchmarks.figures.draw_docs step context; python -m benchmarks.figures.draw_idea"


def where_is_what():
    """(concept, file, name) of the tables in architecture.md."""
    for table in re.findall(r"\| concept \|.*?\n\n", page("architecture.md"), re.S):
        for line in table.splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 3:
                yield cells[0], cells[1].strip("`"), cells[2].strip("`")


def names_of_files():
    """(file, name) elsewhere in architecture.md: "`file` (`name`: why, `name`)", "`name` in `file`", the stages."""
    text, file = page("architecture.md"), r"`((?:jaxdl|tests)/[\w/]+\.py)`"
    for path, names in re.findall(rf"{file} \(([^)]*)\)", text):
        yield from ((path, name) for name in re.findall(r"`([A-Za-z_.]+)`", names))
    yield from ((path, name) for name, path in re.findall(rf"`([A-Za-z_.]+)` in {file}", text))
    yield from ((path, name) for name, path in re.findall(rf"\| `([A-Za-z_.]+)` \| {file} \|", text))


@functools.cache
def defined_names(path):
    """The functions, classes, variables and fields of a file."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def missing_names(path, name):
    """Those parts of a dotted name that a file does not define."""
    return [part for part in name.split(".") if part not in defined_names(path)]


def test_where_is_what():
    for concept, path, name in where_is_what():
        assert not missing_names(path, name), f"{concept}: {path} has no {name}"
    concepts = " ".join(concept for concept, _, _ in where_is_what())
    assert len(list(where_is_what())) > 100
    for word in ("top-k selects", "residual is saved", "rollback is decided", "image is cached", "speed is measured"):
        assert word in concepts


def test_the_common_changes_and_the_stages_of_a_run_name_what_there_is():
    found = set(names_of_files())
    assert not [f"{path} has no {name}" for path, name in sorted(found) if missing_names(path, name)]
    assert {name for _, name in found} >= {"step_metrics", "Timeline.scheduled", "Schedule.build", "open_data", "train"}


def test_numbers_of_the_readme_are_measured():
    table = re.search(r"\| what \| result \|.*?\n\n", PAGES["README.md"], re.S)
    assert table
    results = (ROOT / "RESULTS.md").read_text()
    numbers = re.findall(r"\d[\d.,]*\d|1e-5", table[0])
    assert not [number for number in numbers if number not in results]
    assert len(numbers) > 15
