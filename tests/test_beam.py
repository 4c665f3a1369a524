"""Beam search against searches in plain Python: over all sequences, with as few beams, and greedy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.inference.decoding import beam_search

VOCAB, LENGTH, START, END = 4, 4, 0, 3


def made_step(table):
    """A decoder whose logits depend on all tokens so far: the cache holds a hash of them."""

    def step(tokens, cache, position):
        hashed = (cache["hash"][0, :, 0] * 5 + tokens * 3 + position) % len(table)
        return table[hashed], {"hash": hashed[None, :, None]}

    return step


def log_probs_of(table, first, tokens):
    """The log-probability of each token of a sequence, by a loop."""
    logged = np.asarray(jax.nn.log_softmax(table))
    hashed, before, found = first, START, []
    for position, token in enumerate(tokens):
        hashed = (hashed * 5 + before * 3 + position) % len(table)
        found.append(logged[hashed, token])
        before = token
    return found


def score(table, first, tokens, penalty):
    return sum(log_probs_of(table, first, tokens)) / ((5 + len(tokens)) / 6) ** penalty


def plain_search(table, first, num_beams, penalty):
    """[(tokens, score)] of a row: the algorithm of the docstring, with lists."""
    alive, ended = [()], []
    while alive and len(ended) < num_beams and len(alive[0]) < LENGTH:
        longer = [(*one, token) for one in alive for token in range(VOCAB)]
        longer.sort(key=lambda one: -sum(log_probs_of(table, first, one)))
        ended += [one for one in longer[:num_beams] if one[-1] == END]
        alive = [one for one in longer if one[-1] != END][:num_beams]
    rank = lambda one: -score(table, first, one, penalty)  # noqa: E731
    best = sorted(ended, key=rank)[:num_beams] + sorted(alive, key=rank)
    return [(one, score(table, first, one, penalty)) for one in best[:num_beams]]


def exhaustive(table, first, num, penalty):
    """The best of all sequences that end, then those of full length that do not."""
    every = [one for n in range(1, LENGTH + 1) for one in itertools.product(range(VOCAB), repeat=n)]
    whole = [one for one in every if END not in one[:-1]]
    rank = lambda one: -score(table, first, one, penalty)  # noqa: E731
    ended = sorted((one for one in whole if one[-1] == END), key=rank)
    full = sorted((one for one in whole if one[-1] != END and len(one) == LENGTH), key=rank)
    return [(one, score(table, first, one, penalty)) for one in (ended + full)[:num]]


def found(table, firsts, num_beams, penalty):
    """The same form by `beam_search`, for each row."""

    @jax.jit
    def search(table, firsts):
        cache = {"hash": firsts[None, :, None]}
        return beam_search(
            made_step(table), cache, num_rows=len(firsts), num_beams=num_beams, start=START, end=END,
            max_length=LENGTH, length_penalty=penalty,
        )  # fmt: skip

    tokens, scores = map(np.asarray, search(table, jnp.asarray(firsts)))
    assert tokens.shape == (len(firsts), num_beams, LENGTH)
    return [[(cut(one), value) for one, value in zip(*row, strict=True)] for row in zip(tokens, scores, strict=True)]


def cut(tokens):
    """A sequence to its first END; behind it there is nothing else."""
    tokens = tuple(int(one) for one in tokens)
    length = tokens.index(END) + 1 if END in tokens else len(tokens)
    assert set(tokens[length:]) <= {END}
    return tokens[:length]


def assert_same(rows, expected):
    for row, wanted in zip(rows, expected, strict=True):
        assert [one for one, _ in row] == [one for one, _ in wanted]
        np.testing.assert_allclose([value for _, value in row], [value for _, value in wanted], rtol=1e-5)


@pytest.fixture(scope="module")
def table():
    return jax.random.normal(jax.random.key(7), (11, VOCAB)) * 1.5


@pytest.mark.parametrize("penalty", [0.0, 1.3])
def test_with_a_beam_for_each_sequence_it_finds_the_best_of_all(table, penalty):
    beams = sum(3**n for n in range(LENGTH)) + 3**LENGTH  # Those that end, and those that do not.
    rows = found(table, [1, 4], beams, penalty)
    assert_same(rows, [exhaustive(table, first, beams, penalty) for first in (1, 4)])


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_few_beams_keep_what_a_plain_search_keeps_and_rows_do_not_touch(table, beams):
    firsts = list(range(8))
    rows = found(table, firsts, beams, 0.6)
    assert_same(rows, [plain_search(table, first, beams, 0.6) for first in firsts])
    assert len({len(row[0][0]) for row in rows}) > 1, "rows end at different steps"


def test_one_beam_is_greedy(table):
    logged = np.asarray(table)
    for first, row in enumerate(found(table, list(range(8)), 1, 0.6)):
        hashed, before, tokens = first, START, []
        while len(tokens) < LENGTH and before != END:
            hashed = (hashed * 5 + before * 3 + len(tokens)) % len(logged)
            before = int(logged[hashed].argmax())
            tokens.append(before)
        assert row[0][0] == tuple(tokens)
