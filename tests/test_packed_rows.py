"""Packed documents: rows hold each of their tokens once, and losses are those of the documents alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.data import TextSpec
from jaxdl.data.text.packing import PackedRows, pack
from jaxdl.models import Network, Transformer
from jaxdl.training.tasks import LanguageModelling

BEGIN, LENGTH, VOCAB = 1, 12, 30
SPEC = TextSpec(vocab_size=VOCAB, length=LENGTH, bytes_per_token=1.0, packed=True)


class Store:
    """Documents in memory."""

    content = "store"

    def __init__(self, documents):
        self.documents = documents
        self.num_tokens = np.array([len(one) for one in documents])

    def read(self, documents, places):
        return np.array([self.documents[one][place] for one, place in zip(documents, places, strict=True)], np.int32)


def documents(sizes, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(2, VOCAB, size) for size in sizes]


def packed(sizes, chosen=None, seed=0, length=LENGTH):
    store = Store(documents(sizes))
    spec = dataclasses.replace(SPEC, length=length)
    return store, PackedRows(store, np.arange(len(sizes)) if chosen is None else chosen, spec, begin=BEGIN, seed=seed)


def parts_of(rows):
    """The segments of rows, each with its tokens."""
    found = []
    for tokens, segments in zip(rows["tokens"], rows["segments"], strict=True):
        assert (np.diff(segments[segments > 0]) >= 0).all()
        assert not tokens[segments == 0].any()
        numbers = sorted(set(segments.tolist()) - {0})
        assert numbers == list(range(1, len(numbers) + 1))
        found += [tokens[segments == number].tolist() for number in numbers]
    return found


def expected_parts(document, length):
    """The parts of a document, written as a loop: a start or the token before, then up to `length` tokens."""
    parts, before = [], BEGIN
    for start in range(0, len(document), length):
        piece = document[start : start + length].tolist()
        parts.append([before, *piece])
        before = piece[-1]
    return parts


@pytest.mark.parametrize("length", [1, 5, 12, 40])
def test_rows_hold_each_part_of_each_document_once(length):
    sizes = np.random.default_rng(1).integers(1, 40, 60)
    store, rows = packed(sizes, chosen=np.arange(3, 60), length=length)
    found = parts_of(rows.batch(np.arange(len(rows))))
    wanted = [part for one in store.documents[3:] for part in expected_parts(one, length)]
    assert sorted(found) == sorted(wanted)
    assert rows.num_targets == sum(sizes[3:])
    total = sum(map(len, wanted))
    assert rows.efficiency == total / (len(rows) * (length + 1))
    some = np.array([len(rows) - 1, 0, len(rows) // 2])
    every = rows.batch(np.arange(len(rows)))
    for name, values in rows.batch(some).items():
        np.testing.assert_array_equal(values, every[name][some])


def best_fit(sizes, room):
    """Best fit decreasing, one part after the other; the room that is left in each row."""
    left = []
    for size in sorted(sizes, reverse=True):
        fits = [free for free in left if free >= size]
        if fits:
            left.remove(min(fits))
            left.append(min(fits) - size)
        else:
            left.append(room - size)
    return left


def test_packing_is_as_dense_as_best_fit():
    sizes = np.random.default_rng(2).integers(1, 100, 400)
    packing = pack(sizes, 64, 0)
    filled = np.add.reduceat(packing.num_targets + 1, packing.first[:-1])
    assert filled.max() <= 65
    parts = [min(64, size - start) + 1 for size in sizes for start in range(0, size, 64)]
    assert sum(parts) == filled.sum()
    assert len(filled) <= len(best_fit(parts, 65)) + 1
    assert len(filled) <= 1.02 * math.ceil(sum(parts) / 65)


def test_packing_depends_on_the_seed_alone():
    _, rows = packed([5] * 40)
    assert rows.content() == packed([5] * 40)[1].content() != packed([5] * 40, seed=1)[1].content()
    every = np.arange(len(rows))
    first, again, other = (
        made[1].batch(every)["tokens"] for made in (packed([5] * 40), packed([5] * 40), packed([5] * 40, seed=1))
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.fixture(scope="module")
def network():
    model = Transformer(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=16, tied_embeddings=False)
    found = Network(model.build(vocab_size=VOCAB, dtype=jnp.float32))
    return found, found.init(jax.random.key(0))


def sums(network, params, state, batch, train=False):
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    outputs, _ = network.apply(params, state, *SPEC.inputs(batch), train=train)
    return LanguageModelling().sums(outputs, batch, train=train)


def test_losses_of_packed_documents_are_those_of_each_alone(network):
    network, (params, state) = network
    store, rows = packed([3, 4, 2, 1, 6, 5, 20])
    one = jax.jit(lambda batch: sums(network, params, state, batch))
    together = [
        one({name: x[None] for name, x in row.items()}) for row in unstacked(rows.eval_batch(np.arange(len(rows))))
    ]
    alone = []
    for document in store.documents:
        for part in expected_parts(document, LENGTH):
            tokens, mask = np.zeros((1, LENGTH + 1), np.int32), np.zeros((1, LENGTH), bool)
            tokens[0, : len(part)], mask[0, : len(part) - 1] = part, True
            alone.append(one({"tokens": tokens, "mask": mask}))
    for name in ("loss", "weight", "correct"):
        np.testing.assert_allclose(sum(x[name] for x in together), sum(x[name] for x in alone), rtol=1e-6)
    assert sum(x["weight"] for x in together) == sum(store.num_tokens)


def unstacked(rows):
    return [{name: x[i] for name, x in rows.items()} for i in range(len(rows["tokens"]))]


@pytest.mark.slow
def test_nothing_flows_between_documents(network):
    network, (params, state) = network
    segments = jnp.array([[1] * 4 + [2] * 6 + [0] * 3])
    tokens = jnp.array([[1, 20, 21, 22] + [1, 3, 4, 5, 6, 7] + [0] * 3])

    def second(params, tokens):
        only = jnp.where(segments == 2, segments, 0)  # The targets of the second document alone count.
        outputs, _ = network.apply(params, state, tokens[:, :-1], segments[:, :-1], train=False)
        return LanguageModelling().sums(outputs, {"tokens": tokens, "segments": only}, train=False)["loss"]

    loss, gradient = jax.jit(jax.value_and_grad(second))(params, tokens)
    table = np.abs(gradient["embedding"]).sum(axis=1)
    assert table[3:7].all()
    assert not table[20:23].any(), "the first document's tokens have a gradient"
    assert loss == jax.jit(second)(params, jnp.where(segments == 1, 25, tokens))


def test_the_weight_leaves_out_starts_and_padding():
    batch = {"tokens": jnp.zeros((2, 5), int), "segments": jnp.array([[1, 1, 2, 2, 2], [1, 1, 1, 0, 0]])}
    assert LanguageModelling().weight(batch) == 5
    assert LanguageModelling().weight(batch | {"mask": jnp.array([[True] * 4, [False] * 4])}) == 3
