"""Mixtures: the order is a pure function of (seed, position), each source has its share, and runs resume in it."""

import json
import math

import numpy as np
import pytest

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.options import parse
from jaxdl.data import Conversations, Documents, EpochShuffle, Mixture
from jaxdl.data.text.mixture import BLOCK, MixedOrder, shares, source_seed
from jaxdl.training.run.compile import shared_programs


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [1, 2, 4], [1e-9, 1], [0.3, 1e-7, 1e-7, 5]])
def test_shares_are_whole_and_near_the_weights(weights):
    found = np.array(shares(weights))
    assert found.sum() == BLOCK
    assert found.min() >= 1
    exact = np.array(weights) / sum(weights) * BLOCK
    assert (np.abs(found - exact) <= len(weights)).all()


def test_each_source_is_seen_in_its_own_shuffled_epochs():
    sizes, order = [7, 50, 400], MixedOrder([7, 50, 400], [1, 3, 0.5], 5)
    indices, epochs = order.rows(0, 3000)
    ends = np.cumsum(sizes)
    for number, size in enumerate(sizes):
        here = (indices >= ends[number] - size) & (indices < ends[number])
        own = EpochShuffle(size, source_seed(5, number))
        np.testing.assert_array_equal(indices[here] - (ends[number] - size), own.indices(0, here.sum()))
        np.testing.assert_array_equal(epochs[here], np.arange(here.sum()) // size)
        assert order.taken(number, 3000) == here.sum()
    assert abs((indices < 7).mean() - 1 / 4.5) < 0.03


def test_a_position_does_not_depend_on_how_the_stream_is_read():
    start, count = BLOCK - 500, 1200  # Across the end of a block.
    whole = MixedOrder([30, 90], [2, 1], 0).rows(start, count)
    order = MixedOrder([30, 90], [2, 1], 0)
    for first, size in ((700, 500), (0, 1), (1, 699)):  # In any order, in any pieces.
        for found, wanted in zip(order.rows(start + first, size), whole, strict=True):
            np.testing.assert_array_equal(found, wanted[first : first + size])
    assert (MixedOrder([30, 90], [2, 1], 1).rows(start, count)[0] != whole[0]).any()
    assert order.taken(0, BLOCK) + order.taken(1, BLOCK) == BLOCK
    empty = order.rows(5, 0)
    assert len(empty[0]) == len(empty[1]) == 0


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    random = np.random.default_rng(0)
    sources = {}
    for name, letters in (("code", "abc"), ("prose", "xyz")):
        texts = ["".join(random.choice(list(letters), size)) for size in random.integers(5, 60, 80)]
        (folder / f"{name}.txt").write_text("\n".join(texts))
        sources[name] = Documents(
            paths=(str(folder / f"{name}.txt"),), document="line", length=32, shards=str(folder / "shards")
        )
    return Mixture(sources=sources, weights={"code": 3, "prose": 1})


def test_rows_are_those_of_the_sources(mixture):
    splits = mixture.build()
    alone = {name: source.build() for name, source in mixture.sources.items()}
    for split in ("train", "test"):
        mixed, (code, prose) = getattr(splits, split), (getattr(one, split) for one in alone.values())
        assert len(mixed) == len(code) + len(prose)
        rows = mixed.eval_batch(np.array([len(code), 0, len(mixed)]))
        for name, values in prose.eval_batch(np.array([0])).items():
            np.testing.assert_array_equal(rows[name][:1], values)
        for name, values in code.eval_batch(np.array([0, len(code)])).items():
            np.testing.assert_array_equal(rows[name][1:], values)
    indices, _ = splits.train.order(0).rows(0, 4000)
    assert abs((indices < len(alone["code"].train)).mean() - 0.75) < 0.03
    seen = splits.train.seen(4000, 0)
    assert seen["epochs/code"] == (indices < len(alone["code"].train)).sum() / len(alone["code"].train)
    assert mixture == jaxdl.Experiment.from_json(experiment(mixture, steps=1).to_json()).data


@pytest.fixture(scope="module")
def talk(mixture, tmp_path_factory):
    """A mixture of documents and two files of conversations."""
    folder = tmp_path_factory.mktemp("talk")
    prose = mixture.sources["prose"]
    sources = {"prose": prose}
    for name, word in (("short", "yes"), ("long", "because " * 6)):
        rows = [{"instruction": f"{n}?", "output": f"{word} {n}"} for n in range(40)] + [{"instruction": "?"}]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources[name] = Conversations(paths=(str(folder / f"{name}.jsonl"),), length=32, shards=prose.shards)
    return Mixture(sources=sources, weights={"prose": 1, "short": 2, "long": 1})


def test_of_conversations_the_answers_are_learned_and_of_documents_all(talk):
    splits, alone = talk.build(), {name: source.build() for name, source in talk.sources.items()}
    first = np.cumsum([0, *(len(one.train) for one in alone.values())])
    for start, (name, one) in zip(first, alone.items(), strict=False):
        found, own = splits.train.batch(start + np.arange(2)), one.train.batch(np.arange(2))
        for key in ("tokens", "segments"):
            np.testing.assert_array_equal(found[key], own[key])
        np.testing.assert_array_equal(found["mask"], own.get("mask", np.ones((2, 32), bool)))
        if name != "prose":
            assert 0 < found["mask"].sum() < 64
    evaluated = splits.test.eval_batch(np.array([len(splits.test) - 1, len(splits.test)]))
    own = alone["long"].test.eval_batch(np.array([len(alone["long"].test) - 1]))
    np.testing.assert_array_equal(evaluated["mask"], [*own["mask"], np.zeros(32, bool)])
    spec = splits.train.spec
    shares = {"prose": 0.25, "short": 0.5, "long": 0.25}
    mean = sum(shares[name] * one.train.spec.mean_row for name, one in alone.items())
    assert (spec.masked, spec.mean_targets) == (True, pytest.approx(mean))
    assert spec.bytes_per_token == 1, "each byte is a token, and the end of a text counts as a byte"
    assert "short: They are texts by the plain chat template. 1 row is left out: 1 instruction" in splits.train.remark()
    assert talk == jaxdl.Experiment.from_json(experiment(talk, steps=1).to_json()).data
    assert talk.chat() == talk.sources["short"].chat()
    assert talk.codec().opening == talk.sources["long"].codec().opening == (0,)


def test_conversations_that_do_not_fit_are_told(talk, tmp_path):
    (tmp_path / "x.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    other = talk.sources["long"].replaced({"template": str(tmp_path / "x.jinja")})
    with pytest.raises(ConfigError, match="short and long have chat templates that differ"):
        Mixture(sources={**talk.sources, "long": other}).chat()
    windows = {name: source.replaced({"packing": False}) for name, source in talk.sources.items()}
    with pytest.raises(ConfigError, match="of short and prose one has whole texts in a row, and the other windows"):
        Mixture(sources=windows).build()


def test_a_mixture_that_does_not_fit_is_told(mixture):
    code, prose = mixture.sources.values()
    with pytest.raises(ConfigError, match=r"length: the sources have 32, 64. Give all the same"):
        Mixture(sources={"code": code, "prose": prose.replaced({"length": 64})})
    with pytest.raises(ConfigError, match=r"weights has code, and sources code, prose"):
        Mixture(sources=mixture.sources, weights={"code": 1})
    for weight, message in (
        (0, r"weights = \{'code': 0.0\}: they must be above 0"),
        (-1, "must be above 0"),
        (math.nan, "weights.code: .*finite number"),
        (math.inf, "weights.code: .*finite number"),
    ):
        with pytest.raises(ConfigError, match=message):
            Mixture(sources=mixture.sources, weights={"code": weight, "prose": 1})
    with pytest.raises(ConfigError, match="it has no sources"):
        Mixture().build()


def test_a_setting_for_one_of_the_paths_does_not_disturb_the_others(tmp_path):
    (tmp_path / "code").mkdir()
    for name in ("a.py", "b.py", "c.md"):
        (tmp_path / "code" / name).write_text("x = 1\n" * 9)
    (tmp_path / "prose.jsonl").write_text('{"body": "a text"}\n' * 9)
    paths = {"code": str(tmp_path / "code"), "prose": str(tmp_path / "prose.jsonl")}
    each = Documents(column="body", glob="*.py", length=16, shards=str(tmp_path / "shards"))
    mixture = Mixture(paths=paths, each=each)
    alone = (each.replaced({"paths": (paths[name],), other: Documents().model_dump()[other]})
             for name, other in (("code", "column"), ("prose", "glob")))  # fmt: skip
    assert len(mixture.build().train) == sum(len(one.build().train) for one in alone)
    with pytest.raises(ConfigError, match="document = 'line': it has no effect on files such as"):
        Mixture(paths={"prose": paths["prose"]}, each=each.replaced({"document": "line", "glob": "**/*"})).build()


def test_options_make_the_mixture_of_a_config_file(mixture):
    (shards,) = {source.shards for source in mixture.sources.values()}
    paths = [f"{name}={source.paths[0]}" for name, source in mixture.sources.items()]
    words = ["--data", "mixture", "--data.paths", *paths, "--data.weights", "code=3", "prose=1", "--data.each.document"]
    words += ["line", "--data.each.length", "32", "--data.each.shards", shards]
    assert parse(experiment(mixture.sources["code"]), words).data.build().content() == mixture.build().content()
    for changes, message in (
        ({"paths": {"a": "b"}}, "the files are named twice"),
        ({"each.length": 9}, "each: it has no"),
    ):
        with pytest.raises(ConfigError, match=message):
            mixture.replaced(changes)


def experiment(data, **changes):
    from jaxdl.models import Transformer
    from jaxdl.report import ReportConfig
    from jaxdl.training.evaluation import EvaluationConfig
    from jaxdl.training.tasks import LanguageModelling

    return jaxdl.Experiment(
        data=data,
        model=Transformer(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16),
        task=LanguageModelling(),
        batch_size=8,
        report=ReportConfig(every_steps=2, curves=False, tensorboard=False),
        evaluation=EvaluationConfig(batch_size=8),
        **changes,
    )


def test_a_run_resumes_in_a_mixture_of_conversations(talk, tmp_path):
    asked = experiment(talk, steps=4)
    with shared_programs():
        whole = jaxdl.train(asked, tmp_path / "whole", quiet=True)
        jaxdl.train(asked, tmp_path / "halves", max_steps=3, quiet=True)
        halves = jaxdl.train(asked, tmp_path / "halves", quiet=True)
    for left, right in zip(*(map(np.asarray, leaves(run.state.params)) for run in (whole, halves)), strict=True):
        np.testing.assert_array_equal(left, right)
    rows = [json.loads(line) for line in (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "tokens_seen" in row][-1]
    source = talk.build().train
    batch = source.batch(source.order(asked.seed).rows(0, 32)[0])
    segments = batch["segments"]
    inside = (segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])
    assert last["tokens_seen"] == (inside & batch["mask"]).sum()
    assert set(whole.metrics) > {"loss/prose", "loss/short", "loss/long"}
    assert jaxdl.restore(tmp_path / "whole").has_chat_template


@pytest.mark.slow
def test_a_run_resumes_in_the_mixture_and_counts_its_tokens(mixture, tmp_path):
    asked = experiment(mixture, steps=6)
    whole = jaxdl.train(asked, tmp_path / "whole", quiet=True)
    jaxdl.train(asked, tmp_path / "halves", max_steps=4, quiet=True)
    halves = jaxdl.train(asked, tmp_path / "halves", quiet=True)
    for left, right in zip(*(map(np.asarray, leaves(run.state.params)) for run in (whole, halves)), strict=True):
        np.testing.assert_array_equal(left, right)
    rows = [json.loads(line) for line in (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "tokens_seen" in row][-1]
    splits = mixture.build()
    order = splits.train.order(asked.seed)
    batch = splits.train.batch(order.rows(0, 48)[0])
    segments = batch["segments"]
    assert last["tokens_seen"] == ((segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])).sum()
    assert last["epochs/code"] == splits.train.seen(48, asked.seed)["epochs/code"]
    assert last["step"] == 6
    targets = {name: one.num_targets for name, one in splits.test.parts.items()}
    losses = sum(whole.metrics[f"loss/{name}"] * count for name, count in targets.items())
    assert whole.metrics["loss"] == pytest.approx(losses / sum(targets.values()), rel=1e-6)
    assert whole.metrics["loss/code"] != whole.metrics["loss/prose"]


def leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_made_up_windows_stand_in_for_documents_that_are_not_there():
    windows = Documents(paths=("missing",), length=32, packing=False)
    for data in (windows, Mixture(sources={"code": windows, "prose": windows})):
        stand_in = data.stand_in(1000)
        spec = stand_in.build().train.spec
        assert (spec.length, spec.vocab_size) == (32, 1000)
        assert data.stand_in(None) is None
    assert windows.replaced({"packing": True}).stand_in(1000) is None
