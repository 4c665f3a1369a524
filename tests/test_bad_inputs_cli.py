"""Mistakes on the command line, in config files and in Python: one message each, exit code 2, no traceback."""

import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import optax
import pytest
from flax import nnx
from mistakes import refusal

import jaxdl
from jaxdl import __main__ as face
from jaxdl.core.config import Config
from jaxdl.core.fields import inner_fields
from jaxdl.core.kinds import Choice, kinds
from jaxdl.core.startup import shipped_configs
from jaxdl.data import Digits
from jaxdl.models import ResNet
from jaxdl.optim import SGD
from jaxdl.training.command import parse_command
from jaxdl.training.experiment import Experiment

ROOT = Path(__file__).parent.parent
DIGITS = str(ROOT / "configs" / "digits.py")

WITH_THE_FILE = {
    "--lr 3": ["--lr: there is no such option. Did you mean --optimizer.learning-rate?"],
    "--step.clip-norm 3x": ["--step.clip-norm 3x: not a number or None."],
    "--step.clip-norm -3": ["--step.clip-norm -3: must be greater than 0"],
    "--batch-size 0": ["--batch-size 0: must be greater than or equal to 1"],
    "--batch-size many": ["--batch-size many: not a whole number."],
    "--batch-size": ["--batch-size: needs a value, a whole number."],
    "--task.augment flop": ["--task.augment flop: not one of none, flip, crop_flip."],
    "--optimizer adamw --optimizer.momentum 0.9": [
        "optimizer adamw has no momentum; sgd, sign_sgd, lars, muon have it",
        "--optimizer.b1",
    ],
    "--optimizer.learning_rat 3": ["Did you mean --optimizer.learning-rate?"],
    "--optimzer.x 3": ["--optimzer.x: there is no part optimzer; optimizer is one"],
    "--clip-norm 3": ["--clip-norm: there is no such option. Did you mean --step.clip-norm?"],
    "--optimizer.nesterov true": ["true: not an option and not a value", "--optimizer.nesterov"],
    "--optimizer.nesterov=true": ["--optimizer.nesterov=true: it takes no value", "--optimizer.no-nesterov"],
    "--seed 3 4": ["4: not an option and not a value: --seed before it takes one value"],
    "--steps ": ["--steps '': not a whole number or None."],
    "--optimizer.learning-rate ": ["--optimizer.learning-rate '': not a number."],
    "--epochs 30 --steps 2": ["error: epochs = 30 and steps = 2: both set the length of the run."],
    "--mesh.replica 0": ["error: --mesh.replica 0: an axis has 1 or more devices"],
    "--evaluation.every-steps 2 --evaluation.every-epochs 1": [
        "error: --evaluation.every-steps 2, --evaluation.every-epochs 1: "
        "set --evaluation.every-steps or --evaluation.every-epochs, not both."
    ],
    "--optimizer.lr 3": ["--optimizer.lr: there is no such option. Did you mean --optimizer.learning-rate?"],
    "--model.kind vit": ["--model.kind: a kind is chosen by the option without .kind: --model "],
    "--stepz 3": ["--stepz: there is no such option. Did you mean --steps?"],
    "--mesh 3": ["--mesh: not an option itself; its options are --mesh.replica, --mesh.stage"],
    "--phases 3": ["--phases: not an option; phases are set in a config file"],
    f"--max-steps {'9' * 5000}": ["--max-steps 999", "give a whole number"],
    "--devices x": ["--devices x: give a whole number"],
    "--devices 0": ["--devices 0: give a whole number"],
    "--devices 1000": ["--devices 1000: a process can have at most 512"],
    "--workdir=": ["--workdir '': empty", "the folder of the run"],
    "--workdir": ["--workdir: needs a value, the folder of the run"],
    "--mesh.cpu-devices 1000": ["--mesh.cpu-devices 1000: a process can have at most 512"],
    "--model.width 100000000": ["model resnet: its parameters", "GB on all 8 devices, and this machine has"],
    "--batch-size 1000000000 --data synthetic_images --data.num-train 2000000000": [
        "--batch-size 1000000000: one batch takes 3,076.0 GB"
    ],
}  # fmt: skip


@pytest.mark.parametrize("line", WITH_THE_FILE)
def test_a_mistake_names_the_option_as_it_was_typed(line, capsys):
    message = refusal(capsys, "--config", DIGITS, *line.split(" "))
    assert not [word for word in WITH_THE_FILE[line] if word not in message], message


def test_a_command_without_a_usable_file_says_what_to_give(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "broken.json").write_text('{"batch_siz": 3}')
    for line, words in {
        ("configs/digits.py",): "configs/digits.py: not an option. Give --config",
        ("digits",): "Give --config digits.",
        ("start",): "start: not an option",
        ("--config", "configs/digit.py"): "no such file. Did you mean --config configs/digits.py?",
        ("--config", "digit"): "no such file. Did you mean --config digits?",
        ("--config", "configs"): "a folder, not a config file",
        ("--config", tmp_path): f"Give a file, for example --config {tmp_path}/config.json.",
        ("--config", ""): "--config '': empty",
        ("--config", "x" * 300): "not accessible: File name too long",
        ("--config", tmp_path / "broken.json"): "batch_siz: there is no such field. Did you mean batch_size?",
        ("--steps", "3"): "no --config. Give --config FILE",
    }.items():  # fmt: skip
        message = refusal(capsys, *line)
        assert words in message, message


FILES = {
    "import sys\ndef config():\n    sys.exit(3)\n": ["line 3", "it calls sys.exit or exit"],
    "exit()\ndef config():\n    pass\n": ["line 1", "it calls sys.exit or exit"],
    "def config(x):\n    return x\n": ["line 1", "`config(x)` is called without arguments. Give x a default"],
    "def confg():\n    return 3\n": ["defines no function `config()`", "It defines `confg()`"],
    "from jaxdl.optim import SGD\ndef config():\n    return SGD(lerning_rate=3)\n": [
        "line 3",
        "lerning_rate: there is no such field. Did you mean learning_rate? SGD has ",
    ],
    "from jaxdl.training.step import StepConfig\ndef config():\n    return StepConfig(clip_norm=-3)\n": [
        "line 3",
        "clip_norm: ",
    ],
}


@pytest.mark.parametrize("source", FILES)
def test_a_mistake_in_a_file_is_named_with_its_line(source, capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(source)
    message = refusal(capsys, "--config", file)
    assert not [word for word in FILES[source] if word not in message], message


OWN = """
from flax import nnx
from jaxdl import Arrays, Experiment, FromModule, Loss, Optax
def net(hidden, rngs): return nnx.Linear(1, hidden, rngs=rngs)
def data(): ...
def loss(outputs, batch): ...
def config():
    return Experiment(steps=3, model=FromModule(net, hidden=4), data=Arrays(train=data, test=data), task=Loss(loss),
                      optimizer=Optax("adam"))
"""


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--optimizer", "adamm", "choose one of sgd, adamw, sign_sgd, lars, lamb, optax, muon. Did you mean adamw?"),
        ("--optimiser", "adamw", "Did you mean --optimizer?"),
        ("--optimizer.b3", "1", "Further arguments are given as --optimizer.arguments b3=VALUE."),
        ("--optimizer.momentum", "1", "Further arguments are given as --optimizer.arguments momentum=VALUE."),
        ("--optimizer.arguments", "b2", "not NAME=VALUE pairs."),
        ("--optimizer.arguments", "b3=1", "optax.adam takes no argument b3. It takes"),
        ("--model.hiden", "3", "Did you mean --model.hidden?"),
        ("--model.hidden", "x", "x: not a number"),
        ("--model.module", "nowhere.py:net", "there is no file nowhere.py"),
        ("--model.module", "FILE:nett", "mine.py has no nett"),
        ("--data.train", "nowhere:data", "nowhere, which cannot be imported"),
    ],
)
def test_a_mistake_in_an_option_of_own_code(option, value, words, capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    value = value.replace("FILE", str(file))
    message = refusal(capsys, "--config", file, option, value)
    assert message.startswith(f"error: {option}"), message
    assert words in message


def test_a_file_that_prints_is_run_and_what_it_printed_is_shown(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("print('hello from the file')\nfrom jaxdl.optim import SGD\ndef config():\n    return SGD()\n")
    with pytest.raises(SystemExit):
        face.main(["train", "--config", str(file)])
    assert "hello from the file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (SGD, "optimizer: SGD is a class, not an object. Write SGD(...)"),
        (ResNet, "optimizer: ResNet is a class, not an object. Write ResNet(...), of one of SGD(), AdamW()"),
        (
            optax.adam,
            "optimizer: adam is not a config. Give an object of one of SGD(), AdamW(), SignSGD(), LARS(), LAMB(), "
            "Optax(), Muon()",
        ),
        ("sgd", "optimizer: 'sgd' is a string; give an object: SGD(...)"),
        (optax.sgd(0.1), "optimizer: an optax transformation cannot be written to config.json. Write Optax("),
        (3, "optimizer: an object of type builtins.int is not a config"),
    ],
)
def test_what_is_no_config_is_refused_in_python(optimizer, words):
    with pytest.raises(jaxdl.ConfigError) as error:
        Experiment(optimizer=optimizer)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", nnx.Linear, "model: Linear is a flax module. Write FromModule(Linear, ...)"),
        ("task", refusal, "task: refusal is a function. Write Loss(refusal)"),
        ("data", ([1.0], [2.0]), "data: these are data, not a config. Write Arrays(train=(x, y), test=(x, y))"),
    ],
)
def test_what_has_a_shortcut_is_told_so(field, value, words):
    with pytest.raises(jaxdl.ConfigError) as error:
        Experiment(**{field: value})
    assert words in str(error.value)


def test_a_field_cannot_be_assigned_and_the_message_says_what_to_do():
    experiment = Experiment(steps=3)
    with pytest.raises(jaxdl.ConfigError, match=r"steps: a config is frozen.*replaced\(\{'steps': \.\.\.\}\)"):
        experiment.steps = 4
    with pytest.raises(jaxdl.ConfigError, match=r"replaced\(\{'optimizer.learning_rate': 0.1\}\)"):
        experiment.optimizer.learning_rate = 3
    with pytest.raises(jaxdl.ConfigError, match=r"^stepss: there is no such field. Did you mean steps\?"):
        experiment.stepss = 4
    with pytest.raises(jaxdl.ConfigError, match="steps: a config is frozen"):
        del experiment.steps
    assert experiment.steps == 3


def test_fields_are_given_by_name():
    with pytest.raises(jaxdl.ConfigError, match=r"SGD takes its arguments by name, .*: SGD\(learning_rate=0.1\)"):
        SGD(0.1)  # pyright: ignore[reportCallIssue]


def test_train_takes_the_file_too_and_refuses_what_is_no_experiment(tmp_path):
    with pytest.raises(jaxdl.ConfigError, match=r"no such file\. Did you mean"):
        jaxdl.train(str(ROOT / "configs" / "digit.py"))
    with pytest.raises(jaxdl.ConfigError, match="3: not an Experiment"):
        jaxdl.train(3)
    for rubbish in (3, None, {}):
        with pytest.raises(jaxdl.ConfigError, match="is not a path"):
            jaxdl.load(rubbish)
    with pytest.raises(jaxdl.ConfigError, match="max_steps=0: give a whole number"):
        jaxdl.train(Experiment(steps=3, data=Digits()), max_steps=0)
    with pytest.raises(jaxdl.ConfigError, match="workdir=3: not a path"):
        jaxdl.train(DIGITS, 3)
    with pytest.raises(jaxdl.ConfigError, match="overrides: None: give a dictionary"):
        jaxdl.load(DIGITS, None)
    with pytest.raises(jaxdl.ConfigError, match="is a single string"):
        jaxdl.load(DIGITS, "--steps 3")


def test_the_word_none_is_no_text():
    command = parse_command(["--config", DIGITS, "--data", "image_folder", "--data.photos.cache.disk", "None"])
    assert command.experiment.data.photos.cache.disk is None


def test_a_config_with_an_experiment_of_its_own_has_options_of_its_own(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxdl.training.experiment import Experiment\nclass Mine(Experiment):\n    moon: int = 3\n"
        "\ndef config():\n    return Mine(steps=3)\n"
    )
    assert parse_command(["--config", str(file), "--moon", "4"]).experiment.moon == 4
    assert "--moon x: not a whole number" in refusal(capsys, "--config", file, "--moon", "x")


def test_an_experiment_from_elsewhere_has_options_of_its_own(tmp_path, capsys, monkeypatch):
    """It has a field for the momentum that jaxdl's own experiment refuses."""
    package = tmp_path / "their_experiments"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from jaxdl.training.experiment import Experiment\nclass Mine(Experiment):\n    momentum: float = 0.9\n"
    )
    (tmp_path / "config").mkdir()
    beside = tmp_path / "mine.py"
    beside.write_text("from their_experiments import Mine\ndef config():\n    return Mine(steps=3)\n")
    installed = tmp_path / "config" / "mine.py"
    installed.write_text(beside.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    for file in (beside, installed):
        assert "--momentum x: not a number" in refusal(capsys, "--config", file, "--momentum", "x")
    assert "Did you mean --optimizer.momentum?" in refusal(capsys, "--config", DIGITS, "--momentum", "x")


@pytest.mark.parametrize(
    "source",
    [
        "def config(n):\n    return Experiment(steps=n)\nconfig = functools.partial(config, 3)\n",
        "def three(f):\n    return lambda: f(3)\n\n@three\ndef config(n):\n    return Experiment(steps=n)\n",
    ],
)
def test_a_function_that_is_given_its_arguments_is_called(source, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import functools\nfrom jaxdl.training.experiment import Experiment\n" + source)
    assert jaxdl.load(file).steps == 3


def test_a_run_is_repeated_from_its_config_json(tmp_path):
    experiment = jaxdl.load(DIGITS, {"optimizer.learning_rate": 0.07})
    (tmp_path / "config.json").write_text(experiment.to_json())
    assert jaxdl.load(tmp_path / "config.json") == experiment


def test_the_name_of_a_shipped_config_will_do_where_there_is_no_such_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "digits" in shipped_configs()
    assert "imagenet_common" not in shipped_configs(), "it has no config()"
    assert jaxdl.load("digits") == jaxdl.load(DIGITS)
    assert jaxdl.load("digits:config") == jaxdl.load(DIGITS)


def test_a_flag_that_this_xla_does_not_have_is_named(capsys, monkeypatch):
    """XLA itself would abort the process."""
    known = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 {known} --xla_no_such_flag=3")
    assert "this jaxlib has no flag --xla_no_such_flag." in refusal(capsys, "--config", DIGITS)
    for flag in ("--cpu_multi_thread_eigen=3", "--v=3", "--xla_cpu", "--xla_force_host"):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_multi_thread_eigen=true {flag}")
        name = flag.partition("=")[0]
        assert f"this jaxlib has no flag {name}." in refusal(capsys, "--config", DIGITS)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=abc")
    assert "device_count=abc: not a whole number" in refusal(capsys, "--config", DIGITS)
    monkeypatch.setenv("XLA_FLAGS", "no-such-file")
    assert "XLA_FLAGS=no-such-file: neither a list of flags" in refusal(capsys, "--config", DIGITS)


@pytest.mark.slow
def test_a_platform_that_is_not_there_is_named():
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    command = [sys.executable, "-m", "jaxdl", "train", "--config", "digits", "--mesh.cpu-devices", "None"]
    environment |= {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert "error: JAX_PLATFORMS=cuda: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_mistaken_command_imports_nothing_heavy():
    code = """
import contextlib, io, json, sys
from jaxdl.train import main
codes = []
digits = ["--config", "configs/digits.py"]
for line in (["--config", "configs/digit.py"], [*digits, "--lr", "3"], [],
             ["--devices", "x"], [*digits, "--workdir", ""], [*digits, "--batch-size", "x"],
             [*digits, "--devices", "1000"], [*digits, "--optimizer.learning-rate", "x"],
             [*digits, "--mesh.replica", "two"], ["--version"], ["--help"]):
    try:
        main(line)
    except SystemExit as end:
        codes.append(end.code)
heavy = {"jax", "jaxlib", "numpy", "flax", "pydantic", "tyro", "rich"} & set(sys.modules)
print()
print(json.dumps([codes, sorted(heavy)]))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    codes, heavy = json.loads(ended.stdout.splitlines()[-1])
    assert codes == [2] * 9 + [0, 0]
    assert heavy == []


def test_help_leads_somewhere_and_the_first_words_name_file_and_workdir(capsys):
    for line, words in {
        ("--help",): ["train", "generate", "bench", "launch", "data", "--config digits"],
        ("--version",): [f"jaxdl {jaxdl.__version__}"],
        ("train", "--help"): ["--workdir FOLDER", "--optimizer NAME", *shipped_configs(), "--config FILE --help"],
    }.items():
        with pytest.raises(SystemExit) as end:
            face.main(list(line))
        printed = capsys.readouterr().out
        assert end.value.code == 0
        assert not [word for word in words if word not in printed], printed
    refusal(capsys, "trian", run=face.main)
    with pytest.raises(SystemExit):
        face.main(["train", "--config", DIGITS, "--workdir", "runs/x", "--mesh.fsdp", "0"])
    assert capsys.readouterr().out == f"jaxdl {jaxdl.__version__}: {DIGITS} -> runs/x, loading JAX\n"


def test_the_other_processes_of_a_run_leave_the_first_words_to_the_first(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    refusal(capsys, "--config", DIGITS, "--mesh.fsdp", "x")
    with pytest.raises(SystemExit):
        face.main(["train", "--config", DIGITS, "--mesh.fsdp", "x"])
    assert capsys.readouterr().out == ""


def test_the_source_shows_every_option_of_every_kind():
    """Otherwise the first check would refuse an existing option."""
    known, seen = inner_fields(), set()

    def walk(config):
        if config in seen:
            return
        seen.add(config)
        for name, field in config.model_fields.items():
            assert name.replace("_", "-") in known, f"{config.__name__}.{name}"
            annotations = [field.annotation]
            while annotations:
                one = annotations.pop()
                if isinstance(one, type) and issubclass(one, Config):
                    for kind in kinds(one).values() if issubclass(one, Choice) and not one.kind else (one,):
                        walk(kind)
                annotations += typing.get_args(one)

    walk(Experiment)
    assert len(seen) > 40
    assert known["learning-rate"] == {"float"}
