"""Mistakes in a config, on the command line and in Python: one message for each."""

import contextlib
import itertools
import re

import jax
import pytest
from test_config import DIGITS, ROOT, TEXT, images, text

import jaxdl
from jaxdl.core import fields, startup
from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import choices
from jaxdl.core.options import _flag, _options, parse
from jaxdl.data import Digits
from jaxdl.inference.generate.__main__ import main as generate
from jaxdl.optim import Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.performance.bench import step
from jaxdl.train import main
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.tasks import Classification

# Mistakes on the command line: one message on stderr, exit code 2, nothing compiled


@pytest.fixture
def compilations():
    """Every lowering and compilation that JAX reports to listeners. Tracing is not among them."""
    events = []

    def listen(name, *_, **__):
        if name.endswith(("jaxpr_to_mlir_module_duration", "backend_compile_duration")):
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compilations_are_seen_by_the_fixture(compilations):
    jax.jit(lambda x: x * 1.2345)(3.0)
    assert compilations


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--optimzer.learning-rate", "2"], ["--optimzer.learning-rate", "--optimizer.learning-rate"]),
        (["--bogus"], ["--bogus", "--help"]),
        (["--optimizer.learning-rate", "fast"], ["--optimizer.learning-rate", "fast"]),
        (["--batch-size", "3.5"], ["--batch-size", "3.5"]),
        (["--batch-size", "0"], ["--batch-size 0: must be greater than or equal to 1"]),
        (["--optimizer.learning-rate", "-1"], ["--optimizer.learning-rate -1: must be greater than 0"]),
        (["--optimizer.learning-rate"], ["--optimizer.learning-rate"]),
        (["--model.depth", "21"], ["21", "20", "32"]),
        (["--optimizer", "larz"], ["--optimizer larz", "sgd, adamw, sign_sgd, lars, lamb"]),
        (["--optimizer"], ["--optimizer", "sgd, adamw, sign_sgd, lars, lamb"]),
        (["--optimizer", "--steps", "3"], ["--optimizer", "sgd, adamw, sign_sgd, lars, lamb"]),
        (["--steps", "10", "--epochs", "3"], ["epochs = 3 and steps = 10", "--epochs None or --steps None"]),
        (
            ["--steps", "10", "--steps-within", "4", "9"],
            ["--steps-within 4 9", "it limits a length in epochs", "--epochs"],
        ),
        (["--epochs", "inf"], ["--epochs inf", "finite"]),
        (["--epochs", "1e308"], ["--epochs 1e+308", "2,147,483,647"]),
        (["--optimizer.learning-rate", "nan"], ["--optimizer.learning-rate nan", "finite"]),
        (["--seed", "4294967296"], ["--seed 4294967296", "less than 4294967296"]),
        (["--report.profile-start-step", "675"], ["--report.profile-start-step 675", "675 steps"]),
        (["--sharding.tensor-dims", "chanel_out"], ["--sharding.tensor-dims chanel_out", "channel_out, classes"]),
        (["--epochs", "None"], ["--epochs or --steps"]),
        (["--batch-size", "60"], ["--batch-size 60", "8 devices", "56 or 64"]),
        (["--step.microbatches", "3"], ["--batch-size 64", "3 micro-batches", "48 or 72"]),
        (["--evaluation.batch-size", "12"], ["--evaluation.batch-size 12", "multiple of 8"]),
        (["--mesh.replica", "16"], ["replica 16", "8 devices", "--mesh.replica"]),
        (["--mesh.replica", "4", "--mesh.fsdp", "4"], ["16 devices", "of 8", "more than there are"]),
        (["--mesh.replica", "1", "--mesh.fsdp", "4"], ["4 devices", "of 8", "idle"]),
        (["--mesh.replica", "0"], ["--mesh.replica 0", "-1"]),
        (["--mesh.replica", "-1"], ["only one axis may be -1"]),
        (["--mesh.tensor", "3"], ["tensor 3", "8 devices"]),
        (["--devices", "6", "--mesh.cpu-devices", "7"], ["--devices 6", "--mesh.cpu-devices 7"]),
        (["--devices", "6"], ["6 virtual CPU devices", "JAX_NUM_CPU_DEVICES"]),
        (["--batch-size", "2048"], ["--batch-size 2048", "1438"]),
        (["--schedule.warmup-epochs", "40"], ["--schedule.warmup-epochs 40: warm-up of 899 steps", "the run has 675"]),
        (["--schedule.warmup-steps", "40"], ["--schedule.warmup-steps 40: warmup_epochs = "]),
        (["--model", "transformer"], ["transformer", "classification", "--model", "--task"]),
        (["--data", "synthetic_text"], ["synthetic_text", "resnet", "--model", "--data"]),
        (["--precision", "tensorfloat32"], ["tensorfloat32", "cpu", "float32"]),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_message_and_exit_code_2(args, words, capsys, compilations):
    with pytest.raises(SystemExit) as exit:
        main(["--config", DIGITS, *args])
    printed = capsys.readouterr()
    message = " ".join(re.sub(r"[│╭╮╰╯─]", " ", printed.err).split())
    assert exit.value.code == 2
    assert "error" not in printed.out, "the current activity may be on stdout, the error is not"
    assert "Traceback" not in message
    assert message.count("error:") <= 1
    missing = [word for word in words if word not in message]
    assert not missing, message
    assert compilations == []


BROKEN_FILES = {
    "syntax": ("def config():\n    return (\n", ["line 2", "SyntaxError", "never closed"]),
    "import": (
        "import jaxdl_has_no_such_module\nfrom x import config\n",
        ["line 1", "ModuleNotFoundError", "jaxdl_has_no_such_module"],
    ),
    "name": ("\ndef config():\n    return Experimant()\n", ["line 3", "NameError", "Experimant"]),
    "no config()": ("experiment = 3\n", ["config()", "Experiment"]),
    "not a function": ("config = 3\n", ["config()", "Experiment"]),
    "wrong type": ("def config():\n    return 3\n", ["int", "not an Experiment"]),
    "wrong config": (
        "from jaxdl.optim import SGD\ndef config():\n    return SGD()\n",
        ["SGD", "not an Experiment"],
    ),
    "misspelt field": (
        "from jaxdl.optim import SGD\n\ndef config():\n    return SGD(lerning_rate=3)\n",
        ["line 4", "lerning_rate", "no such field"],
    ),
    "impossible value": (
        "from jaxdl import Experiment\n\ndef config():\n    return Experiment(batch_size=-3, steps=1)\n",
        ["line 4", "batch_size", "-3"],
    ),
    "own message": (
        "from jaxdl import ConfigError\n\ndef config():\n    raise ConfigError('the moon is not full. Wait.')\n",
        ["line 4", "the moon is not full. Wait."],
    ),
}


@pytest.mark.parametrize("name", list(BROKEN_FILES))
def test_a_broken_config_file_is_one_line_with_its_place(name, tmp_path, capsys, compilations):
    source, words = BROKEN_FILES[name]
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(SystemExit) as exit:
        main(["--config", str(file)])
    message = capsys.readouterr().err
    assert exit.value.code == 2
    assert message.startswith(f"error: --config {file}")
    assert message.count("\n") == 1
    missing = [word for word in words if word not in message]
    assert not missing, message
    assert compilations == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--config", "nowhere.py"], ["nowhere.py", "no such file", "configs/"]),
        (["--config", str(ROOT / "LICENSE")], ["not a Python file", ".py"]),
        (["--config", str(ROOT / "configs")], ["a folder", "configs/chat.py"]),
        (["--optimizer", "lars"], ["--config FILE"]),
        ([], ["--config FILE"]),
        (["--config"], ["--config"]),
    ],
)
def test_without_a_config_file_it_says_what_to_give(args, words, capsys):
    with pytest.raises(SystemExit) as exit:
        main(args)
    message = capsys.readouterr().err
    assert exit.value.code == 2
    assert not [word for word in words if word not in message], message


# Mistakes in Python


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"optimizer.learning_rat": 1},
            "optimizer.learning_rat: there is no such field; choose one of exclude_vectors",
        ),
        ({"optimizr.learning_rate": 1}, "'optimizr' has no fields of its own"),
        ({"batch_size.x": 1}, "'batch_size' has no fields of its own"),
        ({"optimizer": "larz"}, "larz: there is no such kind; choose one of sgd, adamw, sign_sgd, lars, lamb"),
        ({"optimizer": {"kind": "larz"}}, "optimizer: there is no such kind (got 'larz'); choose one of sgd, adamw"),
        ({"optimizer.kind": "lars"}, "set optimizer = 'lars' instead"),
        ({"optimizer": 3}, "optimizer: "),
        ({"optimizer.learning_rate": "fast"}, "optimizer.learning_rate: Input should be a valid number"),
        ({"data.test_fraction": 2}, "data.test_fraction: Input should be less than 1 (got 2)"),
        ({"mesh.replica": "x"}, "mesh.replica: Input should be a valid integer"),
        ({"mesh.replica": 0}, "mesh: replica = 0"),
        ({"mesh": "replica"}, "mesh: 'replica' is not a config. Give an object of its class, such as MeshConfig(...)"),
        ({"optimizer": {"kind": "lars", "lr": 1}}, "optimizer.lr: there is no such field. Did you mean learning_rate?"),
        ({"optimizer": {"kind": "lars", "nestrov": True}}, "optimizer.nestrov: there is no such field"),
    ],
)
def test_a_wrong_override_is_one_line(overrides, message):
    with pytest.raises(ConfigError) as error:
        jaxdl.load(DIGITS, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value), "one mistake, one line: not one for every kind of the choice"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--optimizer.lr", "2"], ["--optimizer.lr", "--optimizer.learning-rate"]),
        (["--batch-size", "many"], ["--batch-size", "many"]),
        (["--batch-size", "0"], ["--batch-size 0", "greater than or equal to 1"]),
        (["--optimizer", "larz"], ["sgd, adamw, sign_sgd, lars, lamb"]),
    ],
    ids=" ".join,
)
def test_wrong_arguments_from_python_are_a_config_error_too(args, words, capsys):
    with pytest.raises(ConfigError) as error:
        jaxdl.load(DIGITS, args)
    assert not [word for word in words if word not in str(error.value)], error.value
    assert not re.search(r"[│╭╮╰╯─\n]", str(error.value))
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_is_one_line_and_exit_code_130(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxdl.training.command.print_plan", interrupted)
    monkeypatch.setattr("jaxdl.core.runs.begin_command", interrupted)
    for end in (lambda: main(["--config", DIGITS, "--explain"]), lambda: generate(["--workdir", "anywhere"])):
        with pytest.raises(SystemExit) as exit:
            end()
        assert exit.value.code == 130
        assert capsys.readouterr().err == "interrupted\n"


def test_a_measurement_takes_the_options_of_the_experiment():
    args = ["--config", DIGITS, "--num-steps", "3", "--optimizer", "lars", "--mesh.replica", "4"]
    command = step.parse_command(args)
    assert (command.num_steps, command.num_repeats) == (3, 7)
    assert command.experiment == jaxdl.load(DIGITS, {"optimizer": "lars", "mesh.replica": 4})
    with pytest.raises(ConfigError, match=r"epochs=3\.0: .* num_steps"):
        step.parse_command([*args, "--epochs", "3"])
    with pytest.raises(ConfigError, match=r"steps=3: .* num_steps"):
        step.parse_command([*args, "--steps", "3"])
    with pytest.raises(ConfigError, match="num_repeats=0: "):
        step.parse_command([*args, "--num-repeats", "0"])


def test_several_mistakes_are_a_line_each():
    with pytest.raises(ConfigError) as error:
        Experiment.from_json('{"batch_size": 0, "seed": -1, "optimizer": {"kind": "lars", "momentum": 2, "x": 1}}')
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["optimizer.momentum", "optimizer.x", "batch_size", "seed"]


def test_json_that_is_no_config():
    with pytest.raises(ConfigError, match="JSON"):
        Experiment.from_json("{")
    with pytest.raises(ConfigError, match="batch_siz: there is no such field"):
        Experiment.from_json('{"batch_siz": 3}')
    with pytest.raises(
        ConfigError, match=r"learning_rate: there is no such field\. Did you mean optimizer\.learning_rate\?"
    ):
        Experiment.from_json('{"learning_rate": 3}')


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: images(epochs=1), ["epochs = 1", "steps = 3", "None"]),
        (lambda: images(steps=None), ["epochs or steps"]),
        (lambda: images(model=TEXT["model"]), ["transformer", "classification"]),
        (lambda: images(data=TEXT["data"]), ["synthetic_text", "resnet"]),
        (lambda: text(data=Digits()), ["digits", "transformer"]),
        (lambda: images(batch_size=72), ["batch_size=72", "64 training examples"]),
        (lambda: images(batch_size=12), ["batch_size=12", "8 or 16"]),
        (lambda: images(batch_size=4), ["batch_size=4", "such as 8."]),
        (lambda: images(schedule=Cosine(warmup_steps=4)), ["4", "the run has 3"]),
        (lambda: images(mesh=MeshConfig(replica=3)), ["replica 3", "8 devices"]),
        (lambda: images(mesh=MeshConfig(cpu_devices=4)), ["4 virtual CPU devices", "8 cpu devices"]),
        (lambda: text(mesh=MeshConfig(tensor=8), sharding=ShardingConfig(tensor_dims=("heads",))), ["tensor=8", "4"]),
        (lambda: images(mesh=MeshConfig(tensor=2), sharding=ShardingConfig(tensor_dims=())), ["tensor=2", "none"]),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_before_anything_is_compiled(make, words, compilations):
    with pytest.raises(ConfigError) as error:
        make_plan(make())
    assert not [word for word in words if word not in str(error.value)], error.value
    assert compilations == []


def test_configs_are_frozen():
    with pytest.raises(ConfigError, match="frozen"), jaxdl.core.config.one_message():
        Classification().label_smoothing = 0.3


def test_parse_gives_the_class_it_was_given():
    assert parse(MeshConfig(fsdp=2), ["--replica", "3"]) == MeshConfig(fsdp=2, replica=3)


def test_each_suggestion_of_the_first_look_is_an_option():
    """One letter of each field of each part with one class is changed; the fields are compared with the classes."""
    options = fields.experiment_fields()
    for part, type_ in options.items():
        if not (known := fields.fields_of_part(type_)):
            continue
        real = {
            name.replace("_", "-") for name in Experiment.model_fields[part.replace("-", "_")].annotation.model_fields
        }
        assert known <= real
        for name, place in [(one, place) for one in known for place in range(len(one)) if one[place] != "-"]:
            typo = f"--{part}.{name[:place]}{'x' if name[place] != 'x' else 'y'}{name[place + 1 :]}"
            with pytest.raises(ConfigError, match=r"no such option") as raised:
                startup._check_field(typo, typo.removeprefix("--"), options, None)
            suggested = re.search(r"Did you mean (?:--)?([\w-]+)\.([\w-]+)", str(raised.value))
            assert suggested is not None
            assert suggested[1].replace("_", "-") == part
            assert suggested[2].replace("_", "-") in real


def test_each_suggestion_for_a_kind_is_an_option_of_that_kind():
    """One letter of a field of any kind is changed, and some kind is chosen. The first look leaves it to the parser."""
    known, words = fields.experiment_fields(), []
    for part, kinds in choices(Experiment).items():
        chosen = []
        for kind in kinds:
            with contextlib.suppress(ConfigError):  # Other parts would have to be of its modality.
                chosen.append((text if part == "exchange" else images)().replaced({part: kind}))
        every = sorted({name.replace("_", "-") for cls in kinds.values() for name in cls.model_fields if len(name) > 3})
        for name, experiment in zip(every, itertools.cycle(chosen), strict=False):
            typo = f"--{part}.{name[:-2]}{'x' if name[-2] != 'x' else 'y'}{name[-1]}"
            startup._check_field(typo, typo.removeprefix("--"), known, "2")
            with pytest.raises(ConfigError, match=r"no such option|has no|not an option") as raised:
                parse(experiment, [typo, "2"])
            suggested = re.findall(r"--[\w.-]+", str(raised.value).partition("Did you mean")[2].partition("?")[0])
            options = {_flag(path, type_) for path, type_ in _options(Experiment, experiment).items()}
            assert {*suggested} <= {*options, *(f"--{one}" for one in choices(Experiment))}
            words += suggested
    assert len(words) > 40


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--exchange.fraction", "Those of --exchange are --exchange.delay-steps,"),  # Not --embedding.cache.fraction.
        ("--optimizer.beta", "Those of --optimizer are --optimizer.learning-rate,"),  # Not --optimizer.nesterov.
        ("--modell.units", "there is no part modell; model is one, with --model."),
        ("--optimiser.XXX", "there is no part optimiser; optimizer is one, with --optimizer.learning-rate,"),
        ("--optimiser.momentum", "Did you mean --optimizer.momentum?"),
        ("--optimizer.momentun", "Did you mean --optimizer.momentum?"),
        ("--embedding.cach.fraction", "Did you mean --embedding.cache.fraction?"),
        ("--embedding.fraction", "Did you mean --embedding.cache.fraction?"),
        ("--chekpoint.keeep", "there is no part chekpoint; checkpoint is one, with --checkpoint."),
        ("--xyzzy.momentum", "Did you mean --optimizer.momentum?"),
    ],
)
def test_a_suggestion_stays_in_the_part_that_was_typed(flag, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        parse(images(), [flag, "2"])
    assert str(raised.value).startswith(f"{flag}: ")


def test_a_part_that_is_set_in_a_file_is_not_suggested():
    startup._check_field("--phases.sizee", "phases.sizee", fields.experiment_fields(), "2")
    startup._check_unknown("--phase.size", "phase.size", fields.experiment_fields())


def test_a_field_of_another_part_is_not_suggested():
    """`content` is a field of data; --mesh.content is no option."""
    startup._check_field("--mesh.context", "mesh.context", fields.experiment_fields(), "2")
