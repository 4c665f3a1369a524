"""One host of `python -m benchmarks.peer.compare`, PyTorch's side: DistributedDataParallel over Gloo, with its hooks.

The network is jaxdl's, transcribed; parameters at the start and batches are those that jaxdl has exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch.nn.functional import cross_entropy  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

from benchmarks.peer.hooks import SIDES
from benchmarks.peer.steps import FIRST_STEPS, LOCAL, timed
from benchmarks.pytorch.decoder import decoder
from jaxdl.core.config import ConfigError
from jaxdl.performance.bench.cluster.requests import serve
from jaxdl.training.experiment import Experiment


def load(model: Any, params: dict[str, np.ndarray], embed_dim: int) -> None:
    """Gives a transcription the parameters of jaxdl's Transformer with tied embeddings, whose names these are."""
    shapes = {"query": (embed_dim, -1), "key": (embed_dim, -1), "value": (embed_dim, -1), "out": (-1, embed_dim)}
    weights = {"embedding.weight": params["embedding"], "head.weight": params["embedding"]}
    for name, x in params.items():
        layer, _, rest = name.partition("/")
        place, leaf = layer.replace("layer_", "layers."), rest.rpartition("/")[2]
        if leaf == "scale":
            weights[f"{place}.{rest.replace('/', '.')}"] = x
        elif rest:
            weights[f"{place}.{leaf}.weight"] = x.reshape(shapes.get(leaf, x.shape)).T
    model.load_state_dict({name: torch.tensor(np.ascontiguousarray(x)) for name, x in weights.items()})


class Worker:
    """The requests that a host answers: its public methods."""

    def __init__(self) -> None:
        self._batches: list[Any] = []
        self._models: dict[str, tuple[Any, Any]] = {}
        self._taken: dict[str, int] = {}

    def setup(
        self, experiment: str, names: Sequence[str], folder: str, rank: int, world: int, address: str, threads: int
    ) -> dict[str, Any]:
        """Joins the other hosts, and makes the model and optimizer of every side (all if no name is given)."""
        if unknown := [name for name in names if name not in (LOCAL, *SIDES)]:
            listed = ", ".join(f'"{name}"' for name in (LOCAL, *SIDES))
            raise ConfigError(f"--torch-sides {unknown[0]!r}: there is no such side. Choose from {listed}.")
        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
        whole: Any = Experiment.from_json(experiment)
        tokens = torch.from_numpy(np.load(f"{folder}/tokens.npy")).long()  # [batches, global batch, length + 1]
        share = tokens.shape[1] // world
        self._batches = list(tokens[:, rank * share : (rank + 1) * share])
        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
        params, count = dict(np.load(f"{folder}/params.npz")), 0
        for name in names or (LOCAL, *SIDES):
            model = decoder(whole.model, whole.data.vocab_size, torch.float32)
            load(model, params, whole.model.embed_dim)
            count = sum(x.numel() for x in model.parameters())
            if name != LOCAL:
                side = SIDES[name]
                more = {} if side.bucket_mb is None else {"bucket_cap_mb": side.bucket_mb}
                model = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False, **more)
                side.register(model)
            rate, momentum = whole.optimizer.learning_rate, whole.optimizer.momentum
            self._models[name] = model, torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
            self._taken[name] = 0
        about = f"PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s)"
        return {"num_parameters": count, "names": list(self._models), "about": about}

    def first(self, name: str) -> list[float]:
        """The losses of the first steps of a side, of this host's share of the batch."""
        return self.turn(name, FIRST_STEPS, together=False)["losses"]

    def turn(self, name: str, num_steps: int, warm_up: int = 0, together: bool = True) -> dict[str, Any]:
        """`steps.timed` of a side; all hosts begin together, or only this one takes part."""
        model, optimizer = self._models[name]

        def step() -> float:
            tokens = self._batches[self._taken[name] % len(self._batches)]
            self._taken[name] += 1
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return loss.item()

        if together:
            dist.barrier()
        return timed(step, num_steps, warm_up)


if __name__ == "__main__":
    serve(Worker())
