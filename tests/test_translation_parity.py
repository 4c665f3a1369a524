"""Equal losses of the encoder-decoder on meshes, with dropout and smoothed labels; and top-k against its oracle."""

import numpy as np
import pytest
from runs import MESHES, ONE_DEVICE, tiny_translation
from test_decoder_topk import oracle_losses
from test_pairs import config_of, folder  # noqa: F401
from test_parity import losses_and_params

from jaxdl.exchange import TopK
from jaxdl.optim import SGD, AdamW
from jaxdl.parallel.mesh import MeshConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def experiment(folder):  # noqa: F811
    """Ten steps of a tiny model; the vocabulary is split over `tensor`."""
    return tiny_translation(
        config_of(folder, source_length=16, target_length=16),
        model={"num_decoder_layers": 2, "embed_dim": 32, "num_heads": 4, "mlp_dim": 32},
        optimizer=AdamW(learning_rate=2e-3),
        batch_size=16,
        steps=10,
    )


@pytest.fixture(scope="module")
def reference(experiment):
    """The losses on one device, of whole logits."""
    losses, _ = losses_and_params(experiment)
    assert losses[-1] < 0.98 * losses[0], "ten steps should have learnt something, or equality proves nothing"
    return losses


@pytest.mark.parametrize(
    ("mesh", "chunk_tokens"), [("1 device", 8), ("tensor 4 x fsdp 2", 8), ("replica 2 x fsdp 2 x tensor 2", None)]
)
def test_losses_are_equal_on_meshes(experiment, reference, mesh, chunk_tokens):
    changes = {"mesh": MESHES.get(mesh, ONE_DEVICE), "task.chunk_tokens": chunk_tokens}
    found, _ = losses_and_params(experiment.replaced(changes))
    np.testing.assert_allclose(found, reference, rtol=1e-5)


def test_top_k_trains_as_its_oracle_does(experiment):
    changes = {
        "exchange": TopK(density=0.05, method="exact", min_elements=100, wire="plain"),
        "mesh": MeshConfig(replica=2, fsdp=1, tensor=4),
        "optimizer": SGD(learning_rate=0.05, momentum=0.9),
        "model.dropout": 0.0,  # The oracle has no random keys.
    }
    found, _ = losses_and_params(experiment.replaced(changes))
    np.testing.assert_allclose(found, oracle_losses(experiment.replaced(changes)), rtol=1e-5)
