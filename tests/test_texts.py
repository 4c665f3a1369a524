"""Ways of decoding: settings of rows, several samples, beam search, a draft network; beside transformers' texts."""

import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_texts import BEAMS, CASE, EOS, FILTERS, GREEDY, LOGITS, NUM_TOKENS, PROMPTS, SEEN, recorded
from mistakes import refusal
from test_convert import TOKENIZER, WORDS, write_checkpoint

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.inference.decoding.row_sampling import draw_rows, filter_logits, penalize
from jaxdl.inference.decoding.sampling import sample
from jaxdl.inference.decoding.settings import Sampling, num_sorted, row_settings
from jaxdl.inference.decoding.speculation import Drafted, speculate
from jaxdl.inference.drafting import DraftedWriting, Drafter
from jaxdl.inference.generate.__main__ import main as generate
from jaxdl.inference.generation import Writing
from jaxdl.inference.searching import Searcher

HF = recorded()


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """The checkpoint that transformers wrote with."""
    folder = tmp_path_factory.mktemp("texts")
    source = write_checkpoint(folder / "hf", CASE)
    words = WORDS | {"vocab": {"<eos>": 0, **{f"w{n}": n for n in range(1, 32)}}}
    (source / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"model": words}))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    convert(["from-hf", str(source), str(folder / "run")])
    return jaxdl.restore(folder / "run")


def written(writing):
    texts = [[] for _ in writing.done]
    while not writing.done.all():
        for text, news in zip(texts, writing.more(), strict=True):
            text += news
    return texts


@pytest.mark.parametrize("name", GREEDY)
def test_the_likeliest_tokens_with_a_repetition_penalty_are_those_of_transformers(writer, name):
    how = Sampling(NUM_TOKENS, 0.0, repetition_penalty=GREEDY[name])
    assert written(Writing(writer.decoder, PROMPTS, how)) == HF["greedy"][name]


@pytest.mark.parametrize("name", BEAMS)
def test_beam_search_finds_what_transformers_finds(writer, name):
    how: Any = {"num_tokens": NUM_TOKENS} | BEAMS[name]
    how = Sampling(stop_tokens=tuple(EOS[how.pop("eos")]), samples=how["beams"], **how)
    found = Searcher(writer.decoder).search(PROMPTS, how)
    for hypotheses, others in zip(found, HF["beams"][name], strict=True):
        assert [tokens for tokens, _ in hypotheses] == [tokens for tokens, _ in others]
        np.testing.assert_allclose([score for _, score in hypotheses], [score for _, score in others], rtol=1e-5)


def test_the_logits_that_settings_leave_are_those_of_transformers():
    settings = [Sampling(**how) for how in FILTERS]
    rows, sort = row_settings(settings), num_sorted(settings, LOGITS.shape[1])
    seen = np.zeros(LOGITS.shape, bool)
    np.put_along_axis(seen, SEEN, True, axis=1)
    found = filter_logits(
        penalize(jnp.asarray(LOGITS), rows.repetition_penalty, jnp.asarray(seen)), rows, num_sorted=sort
    )
    expected = np.array([[-np.inf if x is None else x for x in row] for row in HF["filtered"]])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_row_is_drawn_as_it_is_alone():
    settings = [
        Sampling(),
        Sampling(temperature=0),
        Sampling(top_k=3),
        Sampling(top_p=0.5),
        Sampling(top_k=20, top_p=0.7),
    ]
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 50)).round(1) * 2)
    keys = jax.random.split(jax.random.key(1), 5)
    found = draw_rows(logits, keys, row_settings(settings), num_sorted=num_sorted(settings, 50))
    alone = [
        sample(logits[row : row + 1], keys[row : row + 1], how.temperature, top_k=how.top_k, top_p=how.top_p)[0]
        for row, how in enumerate(settings)
    ]
    assert found.tolist() == [int(token) for token in alone]


def table(odds):
    """A network whose next token depends on the last one alone: as a step, and as what reads several tokens."""
    logits = jnp.log(jnp.asarray(odds, jnp.float32))
    return lambda tokens, cache, position: (logits[tokens], cache)


@pytest.mark.parametrize("how", [{"temperature": 1.0}, {"temperature": 1.4, "min_p": 0.2, "repetition_penalty": 1.5}])
def test_drafted_texts_have_the_distribution_of_the_network(how):
    """The first three tokens after token 0, of 5: the frequencies of all 125 triples, by chi-square."""
    rng, count, how = np.random.default_rng(5), 40_000, Sampling(**how)
    large, small = rng.dirichlet(np.ones(5), 5), rng.dirichlet(np.ones(5), 5)
    rows = row_settings([how] * count)
    zeros, seen = jnp.zeros(count, jnp.int32), jnp.zeros((count, 5), bool).at[:, 0].set(True)
    penalized = how.repetition_penalty != 1
    keys = jax.random.key_data(jax.random.split(jax.random.key(2), count))
    start = Drafted((), (), zeros, zeros, zeros, zeros + 3, keys, seen if penalized else None)
    draw = jax.jit(lambda start: speculate(
        table(large), table(small), start, rows, jnp.array([-1]), num_drafted=2, rounds=3, num_sorted=0
    ))  # fmt: skip
    after, tokens, accepted = jax.device_get(draw(start))
    texts = np.array([row[row >= 0] for row in tokens])
    assert texts.shape == (count, 3)
    assert (after.positions == 3).all()
    assert 0.2 * count < accepted.sum() < 2 * count, "some drafts are kept, and some are not"

    def odds(last, seen):
        logits = np.log(large[last])
        if penalized:
            logits = np.where(seen, logits * how.repetition_penalty, logits)  # All are negative.
        weights = np.exp(logits / how.temperature)
        weights = np.where(weights < (how.min_p or 0) * weights.max(), 0, weights)
        return weights / weights.sum()

    expected = np.zeros((5, 5, 5))
    for a, b, c in np.ndindex(5, 5, 5):
        chance, seen = 1.0, np.arange(5) == 0
        for last, token in ((0, a), (a, b), (b, c)):
            chance *= odds(last, seen)[token]
            seen = seen | (np.arange(5) == token)
        expected[a, b, c] = chance * count
    found = np.zeros((5, 5, 5))
    np.add.at(found, tuple(texts.T), 1)
    assert not found[expected == 0].any()
    likely = expected > 5
    chi_square = np.sum((found - expected)[likely] ** 2 / expected[likely])
    degrees = likely.sum() - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


@pytest.fixture(scope="module")
def draft(writer, tmp_path_factory):
    """The network with other weights in its last layer: it drafts many tokens right, and not all."""
    workdir = tmp_path_factory.mktemp("draft") / "run"
    shutil.copytree(writer.workdir, workdir)
    found = jaxdl.restore(workdir)
    found.params["layers"] = jax.tree.map(lambda x: x.at[-1].multiply(0.9), found.params["layers"])
    return found


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_draft_changes_no_likeliest_text_beyond_the_context_too(writer, draft, penalty):
    """Beyond 64 tokens the network goes on from its last half."""
    options = {"num_tokens": 80, "temperature": 0, "repetition_penalty": penalty, "stop_at_end": False}
    prompts = ["w3 w9 w4", "w11", " ".join(["w5 w8"] * 30)]
    plain = list(writer.complete(prompts, **options))
    assert list(writer.complete(prompts, draft=draft, draft_tokens=3, **options)) == plain
    drafter = writer.texts.drafters[id(draft.decoder), 3]
    assert 0.1 < drafter.num_kept / drafter.num_checked < 0.95
    options |= {"stop": [plain[0].text[20:30]]}
    assert list(writer.complete(prompts, draft=draft, draft_tokens=3, **options)) == list(
        writer.complete(prompts, **options)
    )


def test_a_draft_beyond_the_last_learned_position_changes_nothing(tmp_path):
    """Drafts near the end of the context have tokens without a position, whose vectors must not reach the others."""
    source = write_checkpoint(tmp_path / "hf", "gpt2")
    (source / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    convert(["from-hf", str(source), str(tmp_path / "run")])
    found = jaxdl.restore(tmp_path / "run")
    prompts = [[3, 9, 4], [11] * 12]
    plain = written(Writing(found.decoder, prompts, Sampling(40, 0.0)))
    assert len({token for text in plain for token in text} - {0}) > 1
    drafter = Drafter(found.decoder, found.decoder, 3)
    assert written(DraftedWriting(drafter, prompts, Sampling(40, 0.0))) == plain
    assert drafter.num_kept > 0.5 * drafter.num_checked


def test_samples_of_a_prompt_are_its_own_and_the_first_is_what_one_would_be(writer):
    options = {"num_tokens": 8, "temperature": 1.0, "seed": 3}
    alone = list(writer.complete(["w1 w2", "w3"], **options))
    several = list(writer.complete(["w1 w2", "w3"], samples=3, batch_size=4, **options))
    assert [(one.prompt, one.sample) for one in several] == [(p, s) for p in ("w1 w2", "w3") for s in range(3)]
    assert [one for one in several if one.sample == 0] == alone
    assert len({one.text for one in several}) == 6


def test_beams_as_completions(writer):
    best = list(
        writer.complete(["w3 w9 w4"], beams=4, samples=2, num_tokens=NUM_TOKENS, stop_tokens=[6], stop_at_end=False)
    )
    assert [(one.sample, one.num_tokens) for one in best] == [
        (place, len(tokens)) for place, (tokens, _) in enumerate(HF["beams"]["four"][0][:2])
    ]
    assert [one.score for one in best] == pytest.approx([score for _, score in HF["beams"]["four"][0][:2]])
    with pytest.warns(UserWarning, match="ends after 5 tokens, where"):
        (one,) = writer.complete([" ".join(["w5"] * 60)], beams=2, num_tokens=20, stop_at_end=False)
    assert one.num_tokens == 5
    (none,) = writer.complete(["w3"], beams=2, num_tokens=0)
    assert (none.text, none.num_tokens, none.score) == ("", 0, None)
    (cut, whole) = (
        next(writer.complete(["w3 w9 w4"], beams=4, num_tokens=NUM_TOKENS, stop=stop, stop_at_end=False))
        for stop in ((best[0].text.split()[1],), ("never",))
    )
    assert (cut.ended, cut.score) == ("text", None)
    assert whole.score is not None


def test_of_a_long_prompt_what_is_read_alone_is_penalized(writer):
    """The context is 64 tokens."""
    how, read = Sampling(4, 0.0, repetition_penalty=9.0), [3, 9] * 32
    alone = written(Writing(writer.decoder, [read], how))
    assert written(Writing(writer.decoder, [[*alone[0], *read]], how)) == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-p", "0"], "--min-p 0.0: give a number above 0, at most 1"),
        (["--repetition-penalty", "nan"], "--repetition-penalty nan: give a number above 0"),
        (["--samples", "0"], "--samples 0: give a whole number, 1 or more"),
        (["--beams", "2", "--samples", "3"], "--samples 3: a search with --beams 2 has no more than 2 best texts"),
        (["--length-penalty", "2"], "--length-penalty 2.0: it has no effect without --beams"),
        (["--beams", "2", "--length-penalty", "inf"], "--length-penalty inf: give a number"),
        (["--beams", "2", "--top-k", "3"], "--top-k 3: it has no effect with --beams"),
        (["--beams", "2", "--temperature", "1.5"], "--temperature 1.5: it has no effect with --beams"),
        (["--samples", "2", "--temperature", "0"], "--samples 2: with --temperature 0 they would be equal"),
        (["--min-p", "0.1", "--temperature", "0"], "--min-p 0.1: it has no effect with --temperature 0"),
        (["--draft", "nowhere"], "--draft nowhere: there is no run in this folder"),
        (["--draft-tokens", "3"], "--draft-tokens 3: it has no effect without --draft"),
        (["--draft", "RUN", "--draft-tokens", "0"], "--draft-tokens 0: give a whole number, 1 or more"),
        (["--draft", "RUN", "--beams", "2"], "--draft: it has no effect with --beams 2"),
    ],
)
def test_mistakes_of_the_command(writer, capsys, options, message):
    options = [one.replace("RUN", str(writer.workdir)) for one in options]
    assert message in refusal(capsys, "--workdir", str(writer.workdir), *options, run=generate)


def test_drafts_that_do_not_fit(writer, tmp_path):
    other = write_checkpoint(tmp_path / "hf", "qwen2_window")
    shutil.copy(writer.workdir.parent / "hf" / "tokenizer.json", other)
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    convert(["from-hf", str(other), str(tmp_path / "window")])
    source = writer.workdir.parent / "hf"
    convert(["from-hf", str(source), str(tmp_path / "short"), "--length", "32"])
    with pytest.raises(ConfigError, match=r"attention sees the last 3 tokens alone"):
        list(writer.generate("w3", num_tokens=8, draft=tmp_path / "window"))
    with pytest.raises(ConfigError, match=r"reads 32 tokens at a time, and the network 64"):
        list(writer.generate("w3", draft=tmp_path / "short"))
    bare = write_checkpoint(tmp_path / "bare", CASE)
    words = WORDS | {"vocab": {"<eos>": 0, **{f"v{n}": n for n in range(1, 32)}}}
    (bare / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"model": words}))
    convert(["from-hf", str(bare), str(tmp_path / "other")])
    with pytest.raises(ConfigError, match=r"it has another tokenizer than"):
        list(writer.generate("w3", draft=tmp_path / "other"))
