"""PyTorch's side of `bench rows`: `EmbeddingBag` with sparse gradients, for each table or one for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.pytorch import load_torch

if TYPE_CHECKING:
    from benchmarks.embedding.rows import RowsBench

EACH, ONE = "PyTorch, bags", "PyTorch, one bag"
"""An EmbeddingBag for each table, and one with the rows of all."""
_OPTIMIZERS: dict[str, str] = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "SparseAdam"}
"""Kinds of row optimizers -> PyTorch's that do the same to sparse gradients."""


def has(optimizer: str) -> bool:
    """Whether PyTorch has this optimizer for sparse gradients."""
    return optimizer in _OPTIMIZERS


def sides(
    command: RowsBench, optimizer: str, batches: Sequence[np.ndarray], grads: np.ndarray, rate: float
) -> dict[str, Callable[[int], None]]:
    """Functions that run this many steps over the batches in turn, and wait for their end.

    Raises ConfigError where PyTorch cannot be loaded.
    """
    return {name: _Side(command, optimizer, batches, grads, rate, apart).run for name, apart in _KINDS.items()}


def trained(
    command: RowsBench, optimizer: str, batches: Sequence[np.ndarray], grads: np.ndarray, rate: float, first: np.ndarray
) -> dict[str, np.ndarray]:
    """The rows of all tables after a step of each batch, from the rows `first`, of both ways."""
    rows = {}
    for name, apart in _KINDS.items():
        side = _Side(command, optimizer, batches, grads, rate, apart)
        side.set(first)
        side.run(len(batches))
        rows[name] = side.rows()
    return rows


_KINDS = {EACH: True, ONE: False}


class _Side:
    """The tables, their ids and optimizer."""

    def __init__(
        self,
        command: RowsBench,
        optimizer: str,
        batches: Sequence[np.ndarray],
        grads: np.ndarray,
        rate: float,
        apart: bool,
    ) -> None:
        """`apart`: with a bag for each table, else with one whose rows are those of all tables."""
        torch = load_torch()
        torch.sparse.check_sparse_tensor_invariants.disable()  # Said, it warns no more.
        self._torch, self._device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        bags, rows = (command.num_tables, command.rows) if apart else (1, command.num_tables * command.rows)
        make = functools.partial(torch.nn.EmbeddingBag, mode="sum", sparse=True, device=self._device)
        self._bags = [make(rows, command.columns) for _ in range(bags)]
        self._batches = [self._ids(command, ids, apart) for ids in batches]
        self._shape = grads.shape if apart else (-1, command.columns)
        self._grads = torch.from_numpy(grads.copy()).to(self._device).reshape(self._shape)
        self._optimizer = getattr(torch.optim, _OPTIMIZERS[optimizer])(
            [bag.weight for bag in self._bags], lr=rate, **({} if optimizer == "sgd" else {"eps": 1e-8})
        )

    def _ids(self, command: RowsBench, ids: np.ndarray, apart: bool) -> list[Any]:
        """int64 `[batch, ids]` of each table, or `[batch times tables, ids]` of all of them."""
        tables = np.split(ids.astype(np.int64), command.num_tables, axis=1)
        if not apart:
            moved = [table + number * command.rows for number, table in enumerate(tables)]
            tables = [np.stack(moved, axis=1).reshape(-1, command.num_ids)]
        return [self._torch.from_numpy(np.ascontiguousarray(table)).to(self._device) for table in tables]

    def set(self, first: np.ndarray) -> None:
        """Gives all rows these values."""
        with self._torch.no_grad():
            for bag, part in zip(self._bags, np.split(first, len(self._bags)), strict=True):
                bag.weight.copy_(self._torch.from_numpy(part.copy()))

    def run(self, number: int) -> None:
        """So many steps, over the batches in turn."""
        for step in range(number):
            self._optimizer.zero_grad(set_to_none=True)
            ids = self._batches[step % len(self._batches)]
            pooled = [bag(table_ids) for bag, table_ids in zip(self._bags, ids, strict=True)]
            vectors = self._torch.cat(pooled, dim=1) if len(pooled) > 1 else pooled[0]
            vectors.backward(self._grads)
            self._optimizer.step()
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def rows(self) -> np.ndarray:
        """The rows of all tables, one after the other."""
        return np.concatenate([bag.weight.detach().cpu().numpy() for bag in self._bags])
