"""Configs: the round trip through JSON, overrides, options and help."""

import operator
import os
import re
from pathlib import Path

import pytest

import jaxdl
from jaxdl.core.config import Config
from jaxdl.core.kinds import choices
from jaxdl.core.modules import load_file
from jaxdl.data import MovieLens, Pairs, SyntheticImages, SyntheticPreferences, SyntheticText, Table
from jaxdl.models import DLRM, EncoderDecoder, ResNet, TableMLP, Transformer
from jaxdl.optim import LARS, SGD, Polynomial
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.precision import Float16
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.train import main
from jaxdl.training.command import parse_command
from jaxdl.training.experiment import Experiment, as_experiment
from jaxdl.training.tasks import Binary, LanguageModelling, Preferences, TableTask, Translation

ROOT = Path(__file__).parent.parent
DIGITS = str(ROOT / "configs" / "digits.py")
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if not path.stem.endswith("_common"))
GOLDEN = Path(__file__).parent / "golden"
KINDS = [
    (path, name)
    for path, kinds in choices(Experiment).items()
    for name, kind in kinds.items()
    if not any(field.is_required() for field in kind.model_fields.values())
]
TEXT = {
    "model": Transformer(num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64),
    "data": SyntheticText(vocab_size=32, length=16, num_train=64, num_test=8),
    "task": LanguageModelling(),
}
FITTING = {"text": TEXT, "pairs": {"model": EncoderDecoder(), "data": Pairs(), "task": Translation()}}
FITTING["table"] = {"model": DLRM(), "data": MovieLens(), "task": Binary()}
FITTING["preferences"] = {"model": Transformer(), "data": SyntheticPreferences(), "task": Preferences()}
FITTING["columns"] = {"model": TableMLP(), "data": Table(), "task": TableTask()}
IMAGES = {"model": ResNet(depth=8, width=8), "data": SyntheticImages(height=8, width=8, num_train=64, num_test=8)}


def text(**changes):
    return Experiment(**{**TEXT, "batch_size": 16, "steps": 3, **changes})


def images(**changes):
    return Experiment(**{**IMAGES, "batch_size": 16, "steps": 3, **changes})


def leaf_fields(config, prefix=""):
    """Dotted names of all fields that are options, with their values."""
    for name, value in config:
        if isinstance(value, Config):
            yield from leaf_fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# JSON and golden files


def test_every_choice_of_the_design_is_there():
    named = {path: list(kinds) for path, kinds in choices(Experiment).items()}
    assert named["optimizer"] == ["sgd", "adamw", "sign_sgd", "lars", "lamb", "optax", "muon"]
    assert named["exchange"][0] == "dense"
    inner = {"embedding.optimizer", "embedding.scheme"}
    outer = {"model", "data", "task", "optimizer", "schedule", "exchange", "agreement", "precision", "plan"}
    assert set(named) == outer | inner


@pytest.mark.parametrize(("path", "name"), KINDS)
def test_every_kind_comes_back_equal_from_json(path, name):
    choice = choices(Experiment)[path][name]()
    assert type(choice).from_json(choice.to_json()) == choice
    whole = FITTING.get(getattr(choice, "modality", "images"), {})
    experiment = Experiment(**{**whole, path: choice} if "." not in path else whole, steps=3)
    experiment = experiment.replaced({path: choice})
    again = Experiment.from_json(experiment.to_json())
    assert again == experiment
    assert type(operator.attrgetter(path)(again)) is type(choice)


def test_unusual_values_come_back_equal_from_json():
    experiment = images(
        optimizer=LARS(learning_rate=0.1 + 0.2, epsilon=5e-324, trust_ratio_clip=(0, 10)),
        schedule=Polynomial(power=1.5, warmup_epochs=1 / 3, decay_steps=7),
        precision=Float16(max_scale=2.0**120),
        sharding=ShardingConfig(tensor_dims=()),
        mesh=MeshConfig(replica=-1, fsdp=2, cpu_devices=8),
    )
    again = Experiment.from_json(experiment.to_json())
    assert again == experiment
    assert again.precision.max_scale == 2.0**120
    assert again.sharding.tensor_dims == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_resolved_config_is_its_golden_file(path):
    """A changed default shows as a changed line here. JAXDL_UPDATE_GOLDEN=1 rewrites the files."""
    experiment, golden = load_file(path), GOLDEN / f"{path.stem}.json"
    if os.environ.get("JAXDL_UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(experiment.to_json() + "\n")
    advice = "If the change is meant, run this test with JAXDL_UPDATE_GOLDEN=1 and commit the difference."
    assert golden.is_file(), f"{golden.name} is missing. {advice}"
    assert (experiment.to_json() + "\n").splitlines() == golden.read_text().splitlines(), advice
    assert Experiment.from_json(golden.read_text()) == experiment


def test_there_is_no_golden_file_without_a_config():
    assert {golden.stem for golden in GOLDEN.glob("*")} == {path.stem for path in CONFIGS}


# Overrides


def test_overrides_by_mapping():
    base = jaxdl.load(DIGITS)
    changed = jaxdl.load(DIGITS, {"optimizer.learning_rate": 0.3, "mesh.replica": 4, "epochs": None, "steps": 10})
    assert (changed.optimizer.learning_rate, changed.mesh.replica, changed.steps, changed.epochs) == (0.3, 4, 10, None)
    untouched = {"optimizer.learning_rate": 0.2, "mesh.replica": 2, "epochs": 30, "steps": None}
    assert changed.replaced(untouched) == base
    assert base.optimizer.learning_rate == 0.2, "the original is frozen"


def test_a_length_that_is_given_replaces_that_of_the_config():
    def lengths(given):
        """(epochs, steps, tokens, steps_within)."""
        asked = jaxdl.load(ROOT / "configs" / "tabular.py", given)
        return asked.epochs, asked.steps, asked.tokens, asked.steps_within

    assert lengths({}) == (100, None, None, (400, 10_000))
    assert lengths({"epochs": 5}) == lengths(["--epochs", "5"]) == (5, None, None, None)
    assert lengths({"steps": 50}) == lengths(["--epochs", "None", "--steps", "50"]) == (None, 50, None, None)
    assert lengths(["--tokens", "9"]) == (None, None, 9, None)
    assert lengths(["--epochs", "5", "--steps-within", "4", "9"]) == (5, None, None, (4, 9))
    assert lengths({"steps_within": (4, 9)}) == lengths(["--steps-within", "4", "9"]) == (100, None, None, (4, 9))
    assert lengths(["--steps", "50", "--epochs", "5", "--steps", "None"]) == (5, None, None, None)
    for given in (["--epochs", "None", "--steps", "50", "--steps-within", "4", "9"], {"epochs": None}):
        with pytest.raises(jaxdl.ConfigError, match="it limits a length in epochs, and none is set"):
            lengths(given)
    with pytest.raises(jaxdl.ConfigError, match="epochs = 5 and steps = 50: both set"):
        lengths({"epochs": 5, "steps": 50})


def test_gpus_choose_the_mesh_of_a_config_before_the_command_line_changes_it():
    replica_4 = {"mesh.replica": 4}
    assert jaxdl.load(DIGITS, replica_4, gpus=True).mesh == MeshConfig(replica=4)
    assert jaxdl.load(DIGITS, replica_4, gpus=False).mesh == MeshConfig(replica=4, cpu_devices=8)
    here = jaxdl.load(DIGITS)
    assert here.mesh == MeshConfig(replica=2, cpu_devices=8)
    assert as_experiment(load_file(DIGITS)) == here == jaxdl.load(DIGITS, gpus=False)


def test_a_choice_by_mapping_is_a_name_an_object_or_a_dictionary():
    base = jaxdl.load(DIGITS)
    by_name = base.replaced({"optimizer": "lars", "optimizer.learning_rate": 2})
    assert by_name.optimizer == LARS(learning_rate=2)
    assert base.replaced({"optimizer.learning_rate": 2, "optimizer": "lars"}) == by_name, "the order does not matter"
    assert base.replaced({"optimizer": LARS(learning_rate=2)}) == by_name
    assert base.replaced({"optimizer": {"kind": "lars", "learning_rate": 2}}) == by_name
    assert base.replaced({"exchange": "dense"}) == base, "a choice of one kind is a choice"
    assert base.replaced({"optimizer": "sgd"}) == base, "the kind that is there keeps its values"
    assert base.replaced({"optimizer": "sgd", "optimizer.momentum": 0.8}) == base.replaced({"optimizer.momentum": 0.8})


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--optimizer", "lars", "--optimizer.learning-rate", "2"], {"optimizer": LARS(learning_rate=2)}),
        (["--optimizer.learning-rate", "2", "--optimizer", "lars"], {"optimizer": LARS(learning_rate=2)}),
        (["--optimizer=lars", "--optimizer.learning-rate=2"], {"optimizer": LARS(learning_rate=2)}),
        (["--optimizer=lars"], {"optimizer": LARS()}),
        (["--optimizer", "sgd"], {}),
        (["--optimizer=sgd", "--optimizer.momentum", "0.8"], {"optimizer.momentum": 0.8}),
        (["--exchange", "dense"], {}),
        (["--epochs", "None", "--steps", "10"], {"epochs": None, "steps": 10}),
        (["--steps", "10"], {"epochs": None, "steps": 10}),
        (["--batch-size", "32", "--mesh.cpu-devices", "None"], {"batch_size": 32, "mesh.cpu_devices": None}),
        (["--batch_size", "32"], {"batch_size": 32}),
        (["--mesh.replica", "-1", "--mesh.fsdp", "4"], {"mesh.replica": -1, "mesh.fsdp": 4}),
        (["--optimizer.no-nesterov"], {"optimizer.nesterov": False}),
        (["--optimizer.nesterov"], {}),
        (["--sharding.tensor-dims", "mlp", "heads"], {"sharding.tensor_dims": ("mlp", "heads")}),
        (["--model.stem", "patch2"], {"model.stem": "patch2"}),
        (
            ["--model", "transformer", "--data", "synthetic_text", "--task=language_modelling"],
            {"model": "transformer", "data": "synthetic_text", "task": "language_modelling"},
        ),
    ],
)
def test_overrides_by_command_line(args, expected):
    assert jaxdl.load(DIGITS, args) == jaxdl.load(DIGITS, expected)
    assert parse_command(["--config", DIGITS, *args]).experiment == jaxdl.load(DIGITS, expected)


def test_a_kind_already_in_place_keeps_the_values_of_the_file():
    assert jaxdl.load(DIGITS, ["--optimizer", "sgd"]).optimizer.learning_rate == 0.2 != SGD().learning_rate


def test_options_of_the_run(tmp_path):
    command = parse_command(["--config", DIGITS, "--workdir", str(tmp_path), "--devices", "4", "--explain"])
    assert (command.workdir, command.devices, command.explain) == (str(tmp_path), 4, True)
    assert command.experiment.mesh.cpu_devices == 4


# Help


def test_help_shows_every_field_with_its_default_from_the_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(Path(DIGITS).read_text().replace("learning_rate=0.2", "learning_rate=0.0731"))
    with pytest.raises(SystemExit) as exit:
        main(["--config", str(file), "--help"])
    assert exit.value.code == 0
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for name, value in leaf_fields(jaxdl.load(file)):
        several = ("report.trackers", "evaluation.measures")
        if name in ("phases", "mesh.without_gpus", "embedding.schemes", "embedding.places", *several):
            continue
        option = f"--{name.replace('_', '-')}"
        shown = " ".join(value) if isinstance(value, tuple | dict) else str(value)
        assert re.search(rf"{re.escape(option)}[ ,](?:(?!--).|--\S*no-)*?\(default: {re.escape(shown)}\)", words), (
            option
        )
    assert "(default: 0.0731)" in words
    for path, kinds in choices(Experiment).items():
        assert re.search(rf"--{path} ({'|'.join(kinds)})", words)
        assert all(kind in words for kind in kinds)


def test_help_without_a_config_says_how_to_get_more(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    assert "--config FILE --help" in capsys.readouterr().out
