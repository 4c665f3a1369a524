"""Sampling from logits, and the loop that writes sequences: NumPy on small cases, and rows on their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.inference.decoding.loop import Rows, row_keys, write_on
from jaxdl.inference.decoding.sampling import mask_logits, sample

ODDS = np.array([[0.05, 0.4, 0.25, 0.2, 0.1], [0.3, 0.1, 0.2, 0.15, 0.25]])


def kept(top_k=None, top_p=None):
    """The tokens of each row that may be drawn."""
    found = mask_logits(jnp.log(ODDS), top_k=top_k, top_p=top_p)
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in np.asarray(found)]


def test_top_k_and_top_p_leave_the_likeliest():
    assert kept() == kept(top_k=9) == kept(top_p=1.0) == [set(range(5))] * 2
    assert kept(top_k=2) == [{1, 2}, {0, 4}]
    assert kept(top_p=0.6) == [{1, 2}, {0, 4, 2}]
    assert kept(top_p=0.0) == [{1}, {0}], "the likeliest is always there"
    # After top-k 3 the odds are 40, 25, 20 of 85: two reach 0.7. Of the first row alone they would not.
    assert kept(top_k=3, top_p=0.7)[0] == {1, 2}
    assert kept(top_p=0.7)[0] == {1, 2, 3}


def kept_by_hand(odds, top_k, top_p):
    """The tokens of one row that top-k leaves, with those as likely as its last, and of these top-p."""
    left = {token for token in range(len(odds)) if sum(odds > odds[token]) < top_k}
    mass = sum(odds[list(left)])
    return {one for one in left if sum(odds[other] for other in left if odds[other] > odds[one]) < top_p * mass}


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 0.613), (12, 0.503), (40, 0.807)])
def test_top_p_of_top_k_with_tokens_that_are_equally_likely(top_k, top_p):
    counts = np.random.default_rng(4).integers(1, 9, (16, 40)).astype(np.float64)
    found = mask_logits(jnp.log(counts), top_k=top_k, top_p=top_p)
    kept_tokens = [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in np.asarray(found)]
    assert kept_tokens == [kept_by_hand(row, top_k, top_p) for row in counts]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_have_the_distribution_of_the_kept_logits(temperature):
    count = 20_000
    keys = jax.random.split(jax.random.key(3), count)
    draw = jax.jit(lambda keys: sample(jnp.log(jnp.tile(ODDS[:1], (count, 1))), keys, temperature, top_k=4))
    found = np.bincount(np.asarray(draw(keys)), minlength=5) / count
    weights = np.where(ODDS[0] > 0.05, ODDS[0], 0) ** (1 / temperature)
    expected = weights / weights.sum()
    assert found[0] == 0
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected / count) + 1e-9)


def test_temperature_0_takes_the_likeliest_and_the_lowest_of_equal_ones():
    logits = jnp.array([[0.0, 2.0, 2.0], [3.0, -1.0, 3.0]])
    assert sample(logits, jax.random.split(jax.random.key(0), 2), 0.0, top_p=0.5).tolist() == [1, 0]


def counting(tokens, cache, position):
    """A decoder whose likeliest token is the sum of all tokens so far and the position, of 7."""
    sums = cache[0] + tokens
    return jax.nn.one_hot((sums + position) % 7, 7), sums[None]


def written(firsts, num_tokens, stop=(), most=6):
    @jax.jit
    def run(firsts, num_tokens):
        count = len(firsts)
        rows = Rows(
            cache=jnp.zeros((1, count), jnp.int32), tokens=firsts, positions=jnp.arange(count),
            counts=jnp.zeros(count, jnp.int32), done=jnp.zeros(count, bool),
            keys=row_keys(jax.random.key(0), jnp.arange(count)),
        )  # fmt: skip
        draw = lambda logits, keys: sample(logits, keys, 0.0)  # noqa: E731
        return write_on(counting, draw, rows, num_tokens, most=most, stop=jnp.array([*stop, -1]))

    rows, tokens = run(jnp.array(firsts), num_tokens)
    return jax.tree.map(np.asarray, rows._replace(keys=0)), np.asarray(tokens).tolist()


def by_hand(first, position, count):
    tokens = [first]
    for _ in range(count):
        tokens.append((sum(tokens) + position) % 7)
        position += 1
    return tokens[1:]


def test_the_loop_writes_what_a_list_does_and_stops_where_it_should():
    rows, tokens = written([3, 1], 4)
    assert tokens == [[*by_hand(3, 0, 4), -1, -1], [*by_hand(1, 1, 4), -1, -1]]
    assert rows.positions.tolist() == [4, 5]
    assert rows.counts.tolist() == [4, 4]
    assert rows.tokens.tolist() == [tokens[0][3], tokens[1][3]]
    end = by_hand(3, 0, 6)[1]
    assert end not in by_hand(1, 1, 6), "only the first row meets the stop token"
    rows, stopped = written([3, 1], 6, stop=[end])
    assert stopped[0] == [*by_hand(3, 0, 2), -1, -1, -1, -1], "the stop token is the last one"
    assert stopped[1] == by_hand(1, 1, 6), "the other goes on"
    assert rows.done.tolist() == [True, False]
    assert rows.positions.tolist() == [2, 7]
