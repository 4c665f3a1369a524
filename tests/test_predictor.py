"""Prediction from a workdir: as the run itself predicts, on any mesh, without the data; and text as it is sampled."""

import itertools
import shutil

import jax
import numpy as np
import pytest
from runs import tiny_experiment

import jaxdl
from jaxdl import sample
from jaxdl.config import ConfigError
from jaxdl.data import Codec, TextFiles
from jaxdl.files import step_dir, step_folder
from jaxdl.mesh import MeshConfig
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.step import apply_network
from jaxdl.tasks import LanguageModelling

LENGTH = 16
MESH = MeshConfig(replica=2, fsdp=2)


def make_oracle(run, params=None):
    """A function of a batch: the network's predictions with the state that the run returned."""
    parts, state = run.plan.parts, run.state

    @jax.jit
    def outputs(params, model_state, batch):
        return apply_network(parts, parts.layout, params, model_state, batch, train=False)[0]

    params = state.eval_params if params is None else params
    return lambda batch: np.asarray(parts.task.predictions(outputs(params, state.model_state, batch)))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """(run, held-out images): a few steps with a moving average."""
    experiment = tiny_experiment(steps=4, checkpoint={"every_steps": 2}, mesh=MESH)
    run = jaxdl.train(experiment, tmp_path_factory.mktemp("images"), quiet=True, devices=jax.devices()[:4])
    return run, run.plan.splits.test.batch(np.arange(24))["image"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A run on text files that are gone by now."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(4):
        (folder / f"{number}.txt").write_text("".join(f"{number} fish, {word} fish\n" for word in ("red", "blue") * 20))
    experiment = tiny_experiment(
        data=TextFiles(paths=(str(folder),), glob="*.txt", length=LENGTH, test_fraction=0.25),
        model=Transformer(num_layers=1, embed_dim=32, num_heads=2, mlp_dim=64, scan_layers=False),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=0.02),
        batch_size=8,
        steps=6,
        mesh=MESH,
        evaluation={"every_steps": 6},
        checkpoint={"every_steps": 6},
    )
    run = jaxdl.train(experiment, tmp_path_factory.mktemp("text"), quiet=True, devices=jax.devices()[:4])
    shutil.rmtree(folder)
    return run


@pytest.fixture(scope="module")
def writer(text):
    return jaxdl.restore(text.workdir)


def test_the_throughput_of_text_is_in_tokens(text):
    examples, tokens = (np.asarray(text.history[f"{unit}_per_sec"]) for unit in ("examples", "tokens"))
    assert np.nanmin(examples) > 0
    np.testing.assert_allclose(tokens, LENGTH * examples)


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("mesh", [None, MeshConfig(replica=2, fsdp=2, tensor=2)])
def test_predicts_what_the_run_does(images, mesh):
    run, pictures = images
    expected = make_oracle(run)({"image": pictures})
    before = files_of(run.workdir)
    predictor = jaxdl.restore(run.workdir, mesh=mesh)
    assert files_of(run.workdir) == before, "a run may still be writing there"
    assert predictor.step == 4
    assert predictor.experiment.optimizer == run.plan.experiment.optimizer
    for count in (24, 5, 1, 0):  # Most of these do not divide a mesh of 8.
        found = predictor.predict(pictures[:count])
        assert found.shape == (count, 4)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected[:count], rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    assert np.ptp(expected, axis=0).max() > 5e-4, "the pictures are told apart"


def test_predicts_with_the_moving_average(images):
    run, pictures = images
    averaged, last = (
        make_oracle(run, params)({"image": pictures}) for params in (run.state.ema_params, run.state.params)
    )
    found = jaxdl.restore(run.workdir).predict(pictures)
    assert np.abs(found - averaged).max() < 1e-4 < np.abs(found - last).max()


@pytest.mark.parametrize(
    ("pictures", "problem"),
    [
        (np.zeros((2, 8, 8, 1), np.float32), r"float32 \[2, 8, 8, 1\]; this network reads uint8 \[batch, 8, 8, 1\]"),
        (np.zeros((2, 8, 9, 1), np.uint8), r"uint8 \[2, 8, 9, 1\]"),
        (np.zeros((8, 8, 1), np.uint8), r"uint8 \[8, 8, 1\]"),
    ],
)
def test_refuses_other_images(images, pictures, problem):
    with pytest.raises(ConfigError, match=problem):
        jaxdl.restore(images[0].workdir).predict(pictures)


def test_refuses_the_other_kind_of_network(images, writer):
    with pytest.raises(ConfigError, match=r"reads images; use predict"):
        jaxdl.restore(images[0].workdir).generate("a")
    with pytest.raises(ConfigError, match=r"reads text; use generate"):
        writer.predict(np.zeros((1, 8, 8, 1), np.uint8))
    with pytest.raises(ConfigError, match=r"temperature -1"):
        writer.generate("a", temperature=-1)
    with pytest.raises(ConfigError, match=r"num_tokens -1"):
        writer.generate("a", num_tokens=-1)


def test_a_damaged_checkpoint_is_told_and_left_where_it_is(images, tmp_path):
    run, pictures = images
    shutil.copytree(run.workdir, tmp_path, dirs_exist_ok=True)
    for path in (step_dir(tmp_path, 4) / "model").rglob("d/*"):
        path.unlink()
    before = files_of(tmp_path)
    with pytest.warns(UserWarning, match=rf"{step_folder(4)} is damaged .*; {step_folder(2)} is used"):
        predictor = jaxdl.restore(tmp_path)
    assert predictor.step == 2
    assert np.abs(predictor.predict(pictures) - make_oracle(run)({"image": pictures})).max() > 1e-4
    assert files_of(tmp_path) == before


def likeliest(run, tokens, count):
    """`tokens` continued by hand: each time the likeliest token after (at most) the last LENGTH."""
    tokens, oracle = list(tokens), make_oracle(run)
    for _ in range(count):
        window = tokens[-LENGTH:]
        batch = np.zeros((8, LENGTH + 1), np.int32)  # A row for each part of the run's mesh.
        batch[:, : len(window)] = window
        tokens.append(int(np.argmax(oracle({"tokens": batch})[0, len(window) - 1])))
    return bytes(tokens)


@pytest.mark.parametrize("prompt", ["1 f", "so long that it does not fit: 2 fish, r"])
def test_temperature_0_takes_the_likeliest(text, writer, prompt):
    # Both go on beyond LENGTH, so the window slides.
    pieces = list(writer.generate(prompt, num_tokens=LENGTH + 3, temperature=0))
    assert prompt + "".join(pieces) == likeliest(text, prompt.encode(), LENGTH + 3).decode(errors="replace")
    assert pieces == list(writer.generate(prompt, num_tokens=LENGTH + 3, temperature=0, seed=1))


def test_a_seed_decides_the_text(writer):
    texts = ["".join(writer.generate("2 ", num_tokens=30, temperature=1, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    again = "".join(writer.generate("", num_tokens=9, temperature=0))
    assert again == "".join(writer.generate("\0", num_tokens=9, temperature=0)), "no prompt: a new document begins"
    assert list(writer.generate("2 ", num_tokens=0)) == []


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_samples_have_the_models_distribution(text, writer, temperature):
    tokens = np.zeros((8, LENGTH + 1), np.int32)
    tokens[:, :3] = list(b"1 f")
    weights = make_oracle(text)({"tokens": tokens})[0, 2].astype(np.float64) ** (1 / temperature)
    expected = weights / weights.sum()
    keys = jax.random.split(jax.random.key(3), 20_000)
    state = (writer.params, writer.model_state)
    draw = jax.vmap(lambda key: writer._sampled_token(*state, {"tokens": tokens[:1]}, 2, temperature, key))
    counts = np.bincount(np.asarray(jax.jit(draw)(keys)), minlength=256)
    error = np.abs(counts / len(keys) - expected)
    assert np.all(error < 5 * np.sqrt(expected / len(keys)) + 1e-3)
    assert error.sum() < np.abs(expected - 1 / 256).sum() / 2


def scripted(monkeypatch, writer, tokens):
    """The writer, which samples these tokens."""
    stream = itertools.chain(tokens)
    monkeypatch.setattr(writer, "_next_token", lambda *_: next(stream))


def test_characters_come_whole(monkeypatch, writer):
    whole = "é€𝄞a"
    scripted(monkeypatch, writer, whole.encode())
    assert list(writer.generate("x", num_tokens=len(whole.encode()))) == ["é", "€", "𝄞", "a"]
    # What never becomes a character is shown as U+FFFD once that is sure; half of one at the end is left out.
    scripted(monkeypatch, writer, b"\xe2\x82a\xff\xc3\xa9\xe2\x82")
    assert list(writer.generate("x", num_tokens=8)) == ["\ufffda", "\ufffdé"]


def test_a_space_before_the_first_word_is_kept(monkeypatch, writer, tmp_path):
    import tokenizers

    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁red": 0, "▁fish": 1, "</s>": 2}, unk_token="</s>"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    encoder.decoder = tokenizers.decoders.Metaspace()
    encoder.save(str(tmp_path / "words.json"))
    codec = Codec(str(tmp_path / "words.json"))
    assert codec.encode("red fish") == [0, 1]
    assert codec.separator == [2]
    scripted(monkeypatch, writer, [1, 0])
    assert list(writer._continued(codec, codec.encode("red"), 2, 1.0, 0)) == [" fish", " red"]


def test_the_command_prints_prompt_and_text(writer, text, capsys):
    sample.main(["--workdir", str(text.workdir), "--prompt", "1 f", "--num-tokens", "20", "--seed", "4"])
    expected = "1 f" + "".join(writer.generate("1 f", num_tokens=20, temperature=0.7, seed=4)) + "\n"
    assert capsys.readouterr().out == expected


def test_mistakes_of_the_command(images, text, tmp_path, capsys):
    shutil.copy(text.workdir / "config.json", tmp_path)
    (tmp_path / "early").mkdir()
    for name in ("config.json", "data.json"):
        shutil.copy(text.workdir / name, tmp_path / "early")
    for workdir, problem in (
        (tmp_path / "nowhere", "there is no run in this folder (no config.json)"),
        (tmp_path, "there is no run in this folder (no data.json)"),
        (tmp_path / "early", "the run has no checkpoint yet"),
        (images[0].workdir, "reads images; use predict(images)"),
    ):
        with pytest.raises(SystemExit) as stopped:
            sample.main(["--workdir", str(workdir)])
        assert stopped.value.code == 2
        shown = capsys.readouterr()
        assert shown.err.startswith("error: ")
        assert problem in shown.err
        assert not shown.out
    assert sorted(path.name for path in (tmp_path / "early").iterdir()) == ["config.json", "data.json"]
