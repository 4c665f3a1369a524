"""Text of a trained language model: the likeliest by hand, seeds, batches, what ends it; and the command."""

import json
import shutil
import warnings

import jax
import numpy as np
import pytest
from mistakes import refusal
from runs import tiny_experiment
from test_predictor import make_oracle

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.runs import command_of_run
from jaxdl.data import Codec, TextFiles
from jaxdl.inference.decoding.text import TextStream
from jaxdl.inference.generate.__main__ import main
from jaxdl.inference.generate.command import Generate, read_prompts
from jaxdl.inference.generation import Decoder, Sampling, Writing
from jaxdl.inference.trained import parse_command, restore_network
from jaxdl.inference.translate.__main__ import main as translate
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.bench.generate import main as bench
from jaxdl.training.tasks import LanguageModelling

LENGTH = 16
PROMPTS = ["1 f", "", "2 fish, ", "blue", "0 fish, red"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A run on text files that are gone by now."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(4):
        (folder / f"{number}.txt").write_text("".join(f"{number} fish, {word} fish\n" for word in ("red", "blue") * 20))
    experiment = tiny_experiment(
        data=TextFiles(paths=(str(folder),), glob="*.txt", length=LENGTH, test_fraction=0.25),
        model=Transformer(num_layers=1, embed_dim=32, num_heads=2, mlp_dim=64),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=0.02),
        batch_size=8,
        steps=6,
        mesh=MeshConfig(replica=2, fsdp=2),
        evaluation={"every_steps": 6},
        checkpoint={"every_steps": 6},
    )
    run = jaxdl.train(experiment, tmp_path_factory.mktemp("text"), quiet=True, devices=jax.devices()[:4])
    shutil.rmtree(folder)
    return run


@pytest.fixture(scope="module")
def writer(text):
    return jaxdl.restore(text.workdir)


@pytest.mark.slow
def test_the_throughput_of_text_is_in_tokens(text):
    examples, tokens = (np.asarray(text.history[f"{unit}_per_sec"]) for unit in ("examples", "tokens"))
    assert np.nanmin(examples) > 0
    np.testing.assert_allclose(tokens, LENGTH * examples)


@pytest.mark.slow
def test_a_network_of_text_predicts_no_images(writer):
    with pytest.raises(ConfigError, match=r"reads text; use generate"):
        writer.predict(np.zeros((1, 8, 8, 1), np.uint8))


@pytest.fixture(scope="module")
def oracle(text):
    return make_oracle(text)


def likeliest(oracle, tokens, count):
    """`tokens` continued by hand: each time the likeliest token after the text, read from its start.

    Of a text that is longer than LENGTH the last LENGTH are read, and from the next token on its last half.
    """
    text, tokens = tokens[-LENGTH:], list(tokens)
    for _ in range(count):
        batch = np.zeros((8, LENGTH + 1), np.int32)  # A row for each part of the run's mesh.
        batch[:, : len(text)] = list(text)
        tokens.append(int(np.argmax(oracle({"tokens": batch})[0, len(text) - 1])))
        text = bytes(tokens)[-len(text) - 1 :]
        text = text[-(LENGTH // 2) :] if len(text) > LENGTH else text
    return bytes(tokens)


LONG = "so long that it does not fit: 2 fish, r"


@pytest.mark.filterwarnings("ignore:the prompt")
@pytest.mark.parametrize("prompt", [pytest.param("1 f", marks=pytest.mark.slow), LONG])
def test_temperature_0_takes_the_likeliest(oracle, writer, prompt):
    # Both go on beyond LENGTH.
    pieces = list(writer.generate(prompt, num_tokens=2 * LENGTH, temperature=0))
    assert prompt + "".join(pieces) == likeliest(oracle, prompt.encode(), 2 * LENGTH).decode(errors="replace")
    assert pieces == list(writer.generate(prompt, num_tokens=2 * LENGTH, temperature=0, seed=1))


def test_of_a_long_prompt_the_end_is_read_and_the_user_told(writer):
    with pytest.warns(UserWarning, match=r"the prompt 'so long that it does'... has 39 tokens; .* the last 16"):
        next(writer.generate(LONG))


def test_a_seed_decides_the_text(writer):
    texts = ["".join(writer.generate("2 ", num_tokens=30, temperature=1, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    again = "".join(writer.generate("", num_tokens=9, temperature=0))
    assert again == "".join(writer.generate("\0", num_tokens=9, temperature=0)), "no prompt: a new document begins"
    assert list(writer.generate("2 ", num_tokens=0)) == []


@pytest.mark.slow
def test_a_batch_writes_what_each_prompt_alone_does(writer):
    options = {"num_tokens": 2 * LENGTH, "temperature": 1.0, "top_k": 200, "seed": 5, "stop_at_end": False}
    together = list(writer.complete(PROMPTS, batch_size=3, **options))
    assert together == list(writer.complete(PROMPTS, batch_size=1, **options))
    assert [one.prompt for one in together] == PROMPTS
    assert {(one.num_tokens, one.ended) for one in together} == {(2 * LENGTH, "length")}
    assert together[0].text == "".join(writer.generate(PROMPTS[0], **options))


@pytest.mark.slow
def test_without_a_cache_and_on_a_mesh_it_writes_the_same(text, writer):
    codec, how = writer.codec, Sampling(num_tokens=LENGTH + 4, temperature=0.0)
    prompts = [codec.encode(one) or codec.separator for one in PROMPTS]
    other = jaxdl.restore(text.workdir, mesh=MeshConfig(replica=2, fsdp=2, tensor=2))
    decoders = [writer.decoder, Decoder(writer, LENGTH, 256, cached=False), other.decoder]
    found = []
    for decoder in decoders:
        writing, texts = Writing(decoder, prompts, how), [[] for _ in prompts]
        while not writing.done.all():
            for one, news in zip(texts, writing.more(), strict=True):
                one += news
        found.append(texts)
    assert found[0] == found[1] == found[2]
    assert [decoder.cached for decoder in decoders] == [True, False, True]


def test_tokens_and_texts_that_end_it(writer):
    (whole,) = writer.complete(["1 f"], num_tokens=12, temperature=0)
    assert whole.num_tokens == 12
    written = whole.text
    (cut,) = writer.complete(["1 f"], num_tokens=12, temperature=0, stop=[written[4:7], written[6:8]])
    end = min(written.index(written[4:7]), written.index(written[6:8]))
    assert (cut.text, cut.ended) == (written[:end], "text")
    assert cut.num_tokens < 12
    assert "".join(writer.generate("1 f", num_tokens=12, temperature=0, stop=[written[4:7]])) == written[:end]
    token = ord(written[5])
    (cut,) = writer.complete(["1 f"], num_tokens=12, temperature=0, stop_tokens=[token])
    assert (cut.text, cut.ended) == (written[: written.index(chr(token))], "token")
    assert cut.num_tokens == written.index(chr(token)) + 1


def streamed(tokens, stop=(), codec=None, prompt=b"x"):
    stream = TextStream((codec or Codec(None)).decode, list(prompt), stop)
    return [piece for token in tokens if (piece := stream.add(token))], stream.rest()


def test_characters_come_whole():
    assert streamed("é€𝄞a".encode()) == (["é", "€", "𝄞", "a"], "")
    # What never becomes a character is shown as U+FFFD once that is sure; half of one at the end is left out.
    assert streamed(b"\xe2\x82a\xff\xc3\xa9\xe2\x82") == (["\ufffda", "\ufffdé"], "")
    long = "né€" * 100
    assert "".join(streamed(long.encode())[0]) == long, "only the newest tokens are decoded again"


def test_what_may_be_a_stop_text_waits():
    assert streamed(b"a\nb\n\nc", ["\n\n"]) == (["a", "\nb"], "")
    assert streamed(b"a\n", ["\n\n"]) == (["a"], "\n")
    assert streamed(b"abcabd", ["abd", "x"]) == (["abc"], "")


def test_a_space_before_the_first_word_is_kept(tmp_path):
    import tokenizers

    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁red": 0, "▁fish": 1, "</s>": 2}, unk_token="</s>"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    encoder.decoder = tokenizers.decoders.Metaspace()
    encoder.save(str(tmp_path / "words.json"))
    codec = Codec(str(tmp_path / "words.json"))
    assert codec.encode("red fish") == [0, 1]
    assert codec.separator == [2]
    assert streamed([1, 0], codec=codec, prompt=codec.encode("red"))[0] == [" fish", " red"]


def test_a_prompt_begins_with_what_the_tokenizer_puts_before_a_text(tmp_path):
    import tokenizers

    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, unk_token="b"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found = []
    for single in ("$A", "<s> $A", "<s> $A </s>"):
        special = [("<s>", 2), ("</s>", 3)]
        encoder.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
        encoder.save(str(tmp_path / "words.json"))
        codec = Codec(str(tmp_path / "words.json"))
        found.append((codec.prompt("b a"), codec.prompt("")))
    assert found == [([1, 0], [3]), ([2, 1, 0], [2]), ([2, 1, 0], [2])]


def test_the_command_prints_prompt_and_text(writer, text, capsys):
    options = ["--prompt", "1 f", "--num-tokens", "20", "--seed", "4", "--no-stop-at-end"]
    main(["--workdir", str(text.workdir), *options])
    pieces = writer.generate("1 f", num_tokens=20, temperature=0.7, seed=4, stop_at_end=False)
    expected = "1 f" + "".join(pieces) + "\n"
    printed = capsys.readouterr()
    assert printed.out == expected
    assert printed.err.startswith("20 tokens in ")
    assert "tokens/s" in printed.err


def test_the_command_writes_json_lines_for_many(writer, text, tmp_path, capsys):
    options = ["--workdir", str(text.workdir), "--num-tokens", "9", "--temperature", "0"]
    main([*options, "--prompt", "1 f", "--prompt", "2 "])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = list(writer.complete(["1 f", "2 "], num_tokens=9, temperature=0))
    assert [(line["prompt"], line["text"]) for line in lines] == [(one.prompt, one.text) for one in expected]
    assert lines[0] | {"text": ""} == {"prompt": "1 f", "text": "", "tokens": 9, "ended": "length"}
    (tmp_path / "plain.txt").write_bytes("1\u2028f\r\n\n2 \n".encode())
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 f"}\n{"text": "2 "}\n')
    assert read_prompts(tmp_path / "plain.txt") == ("1\u2028f", "2 ")
    main([*options, "--prompts", str(tmp_path / "rows.jsonl"), "--to", str(tmp_path / "to")])
    assert [json.loads(line) for line in (tmp_path / "to").read_text().splitlines()] == lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "--temperature -1.0: give a number, 0 or more"),
        (["--temperature", "nan"], "--temperature nan: give a number, 0 or more"),
        (["--num-tokens", "-1"], "--num-tokens -1: it must not be negative"),
        (["--top-k", "0"], "--top-k 0: give a whole number, 1 or more"),
        (["--seed", str(2**63)], "--seed 9223372036854775808: it has more than 64 bits"),
        (["--stop-tokens", "9", "256"], "--stop-tokens 256: there is no such token; they are numbered from 0 to 255"),
        (["--devices", "0"], "--devices 0: give a whole number, 1 or more"),
        (["--devices", "8", "--mesh.cpu-devices", "4"], "--devices 8 and --mesh.cpu-devices 4 mean the same"),
        (["--mesh.replica", "3"], "mesh replica 3 x fsdp 2 x tensor 1 = 6 devices, of 8: the others would be idle"),
        (["--prompts", "FOLDER/rows.jsonl", "--to", "no/where"], "--to no/where: there is no folder no"),
        (["--top-p", "1.5"], "--top-p 1.5: give a number above 0, at most 1"),
        (["--prompt", "a", "b", "--batch-size", "0"], "--batch-size 0: give a whole number, 1 or more"),
        (["--top-k", "3", "--temperature", "0"], "--top-k 3: it has no effect with --temperature 0"),
        (["--top-p", "0.5", "--temperature", "0"], "--top-p 0.5: it has no effect with --temperature 0"),
        (["--prompt", "\udcff"], "--prompt '\\udcff': not UTF-8"),
        (["--stop", "\udcff"], "--stop '\\udcff': not UTF-8"),
        (["--prompts", "FOLDER/half.jsonl"], "half.jsonl: line 1 '\\ud83d': not UTF-8"),
        (["--stop", "a", "--stop", ""], "--stop ('a', ''): give texts that are not empty"),
        (["--prompt", "a", "--prompts", "x"], "--prompt and --prompts: give one of them"),
        (["--prompts", "nowhere"], "--prompts nowhere: No such file or directory"),
        (["--prompts", "FOLDER/rows.jsonl"], 'line 3 has no "prompt" that is a text: {"promt": "a"}'),
        (["--to", "x"], "--to x: it is for several prompts"),
        (["--promt", "x"], "--promt: there is no such option. Did you mean --prompt"),
        (["--average", "5"], "--average 5: the workdir has 1 checkpoint"),
    ],
)
def test_mistakes_of_the_command(text, tmp_path, capsys, options, message):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 f"}\n\n{"promt": "a"}\n')
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud83d"}\n')
    options = [one.replace("FOLDER", str(tmp_path)) for one in options]
    assert message in refusal(capsys, "--workdir", str(text.workdir), *options, run=main)


@pytest.mark.parametrize(
    ("options", "as_trained", "sizes"),
    [
        pytest.param([], False, (1, 1, 1), marks=pytest.mark.slow),
        ([], True, (1, 8, 1)),  # The run had 4 devices.
        pytest.param(["--devices", "8"], False, (1, 8, 1), marks=pytest.mark.slow),
        (["--mesh.tensor", "2"], False, (2, 2, 2)),
    ],
)
def test_a_command_runs_on_the_devices_that_are_here(text, capsys, options, as_trained, sizes):
    args = ["--workdir", str(text.workdir), *options]
    predictor = restore_network(parse_command(Generate, args, "generate"), args, as_trained=as_trained)
    shape = predictor.parts.layout.mesh.shape
    assert (shape["replica"], shape["fsdp"], shape["tensor"]) == sizes
    told = "note: the run's mesh replica 2 x fsdp 2 x tensor 1 = 4 devices, of 8: the others would be idle. fsdp 8 is"
    assert capsys.readouterr().err.startswith(told) == (sizes == (1, 8, 1))


def test_warnings_are_lines(text, capsys):
    with command_of_run(["--workdir", str(text.workdir)], "prog"):
        warnings.warn("a shard is damaged", stacklevel=1)
    assert capsys.readouterr().err == "warning: a shard is damaged\n"


@pytest.mark.slow
def test_workdirs_that_write_no_text(tiny_run, text, tmp_path, capsys):
    shutil.copy(text.workdir / "config.json", tmp_path)
    (tmp_path / "early").mkdir()
    for name in ("config.json", "data.json"):
        shutil.copy(text.workdir / name, tmp_path / "early")
    for workdir, problem in (
        (tmp_path / "nowhere", "there is no run in this folder (no config.json)"),
        (tmp_path, "there is no run in this folder (no data.json)"),
        (tmp_path / "early", "the run has no checkpoint yet"),
        (tiny_run.workdir, "reads images; use predict(images)"),
    ):
        assert problem in refusal(capsys, "--workdir", str(workdir), run=main)
    assert sorted(path.name for path in (tmp_path / "early").iterdir()) == ["config.json", "data.json"]


def test_a_language_model_does_not_translate(text, capsys):
    for args in (["--split", "test"], ["--input", "nowhere.txt"]):
        message = refusal(capsys, "--workdir", str(text.workdir), *args, run=translate)
        assert message.startswith("error: translate: this network does not translate. Take one that was trained on")


@pytest.mark.slow
def test_the_measurement_compares_the_cache_with_the_whole_text(text, tmp_path, capsys):
    bench(["--workdir", str(text.workdir), "--num-tokens", "18", "--batch-size", "3", "--num-repeats", "1",
           "--json", str(tmp_path / "rates.json")])  # fmt: skip
    rates = json.loads((tmp_path / "rates.json").read_text())
    assert list(rates) == ["cache, 1 prompt", "whole text, 1 prompt", "cache, 3 prompts"]
    assert all(len(each) == 1 and each[0] > 0 for each in rates.values())
    assert "whole text, 1 prompt" in capsys.readouterr().out
