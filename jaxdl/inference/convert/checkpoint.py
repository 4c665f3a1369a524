"""A checkpoint of Hugging Face in a folder, checked against its config, whose parameters can be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import one_message
from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert import (  # noqa: F401  (these register their layouts)
    HF_CONFIG,
    bert,
    distilbert,
    gemma,
    gpt2,
    gpt_neox,
    llama,
    modernbert,
    moe,
    olmo,
    phi,
    roberta,
    smollm,
)
from jaxdl.inference.convert.layouts import HFLayout, Tensor, layout_of
from jaxdl.inference.convert.tensors import Stored, find_tensors
from jaxdl.inference.convert.torch_bin import READERS
from jaxdl.models import Transformer

_SHOWN = 3
"""How many names a message has."""
_TABLES = {"embedding": 0, "head": 1}
"""The parameters with a vector for each token, and in which dimension its tokens are."""
_ROWS = 4096
"""Rows of a table that are compared at a time."""
Progress = Callable[[int, int], None]
"""Called with how much is done, and how much there is, both in bytes or both in numbers."""


@dataclass(frozen=True)
class Place:
    """A tensor of a checkpoint, and the parameters of the network that it holds."""

    name: str
    tensor: Tensor
    paths: tuple[tuple[str, ...], ...]
    """The path of each parameter in the network's."""
    index: tuple[int, ...]
    """Its layer, where the parameters are stacked over layers, and its expert, where it is of one."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the parameters, of one layer and one expert."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.tensor.shape(self.shapes)


def places(layout: HFLayout, model: Transformer, params: Mapping[str, Any]) -> Iterator[Place]:
    """Every tensor of a model, in the order of its layers; `params` are its parameters, or their shapes."""
    every = list(layout.tensors(model))
    first = next(number for number, tensor in enumerate(every) if tensor.in_layers)
    last = next(number for number, tensor in enumerate(every) if number > first and not tensor.in_layers)

    def of(tensor: Tensor, layer: int | None) -> Iterator[Place]:
        if tensor.after_first and layer == 0:
            return
        stacked = layer is not None and model.scan_layers
        head = () if layer is None else ("layers",) if stacked else (f"layer_{layer}",)
        paths = tuple((*head, *name.split("/")) for name in tensor.params)
        shapes = [tuple(at(params, path).shape)[stacked:] for path in paths]
        index = () if layer is None or not stacked else (layer,)
        if not tensor.in_experts:
            yield Place(tensor.name.format(layer), tensor, paths, index, tuple(shapes))
            return
        for expert in range(shapes[0][0]):
            name = tensor.name.format(layer, expert=expert)
            yield Place(name, tensor, paths, (*index, expert), tuple(shape[1:] for shape in shapes))

    for tensor in every[:first]:
        yield from of(tensor, None)
    for layer in range(model.num_layers):
        for tensor in every[first:last]:
            yield from of(tensor, layer)
    for tensor in every[last:]:
        yield from of(tensor, None)


def at(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf of nested dictionaries at a path."""
    for name in path:
        tree = tree[name]
    return tree


class Checkpoint:
    """A checkpoint of Hugging Face; its tensors are read when `params` is called.

    Attributes:
      config: the content of its config.json.
      layout: its layout.
      model: the model that computes what it does.
      vocab_size: rows of its embedding table.
      length: how many tokens the network can read.
      longest: how many at most, if more are asked for.
      notes: what a user should know of its tensors, once they are read.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder without a whole checkpoint, and for a network that jaxdl cannot compute."""
        self.folder, self.config = folder, _config(folder)
        where = str(folder / HF_CONFIG)
        self.layout = layout_of(self.config, where)
        try:
            self.layout.check(self.config)
            with one_message():
                self.model = self.layout.model(self.config)
            self.vocab_size, self.length = int(self.config["vocab_size"]), self.layout.length(self.config)
            self.longest = self.layout.longest(self.config)
        except KeyError as error:
            raise ConfigError(f"{where}: it has no {error}. Fetch the file again.") from None
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        self._stored, self.notes = find_tensors(folder, READERS), ()
        self._new: tuple[int, ...] = ()

    def grow(self, vocab_size: int, new: Collection[int] = ()) -> int:
        """Gives the network as many rows of tokens as the tokenizer has tokens; returns how many are added.

        The matrices of the embedding and the output layer get them: each the mean of the rows that are there, as
        `resize_token_embeddings` of transformers draws them around it (`mean_resizing`). Such a token means nothing
        before it is trained. So do the tokens `new`, whose numbers may be those of rows that no token had.
        """
        self._new = tuple(new)
        added = max(0, vocab_size - self.vocab_size)
        if added:
            self.model = self.model.replaced({"vocab_size": vocab_size})
        return added

    def params(self, shapes: Mapping[str, Any], progress: Progress = lambda done, every: None) -> dict[str, Any]:
        """The parameters, float32, of the network whose parameters have these shapes; one array at a time is copied.

        Raises ConfigError, with all names, for tensors that are missing, unexpected or of another shape; and for a
        matrix of the output layer that is not the embedding table although the config says so.
        """
        there = {
            **shapes,
            **{name: self._as_stored(shapes[name], dim) for name, dim in _TABLES.items() if name in shapes},
        }
        wanted = list(places(self.layout, self.model, there))
        arranged, self.notes = self.layout.arranged(self._stored, {place.name: place.shape for place in wanted})
        stored = _match(self.folder, wanted, arranged, self.layout)
        params = _params(there, wanted, stored, progress)
        return params | {
            name: _grow_table(params[name], shapes[name].shape[dim], dim, self._new)
            for name, dim in _TABLES.items()
            if name in params
        }

    def _as_stored(self, shape: Any, dim: int) -> Any:
        """The shape of a matrix with a row, or column, for each token of the config."""
        size = tuple(self.vocab_size if number == dim else x for number, x in enumerate(shape.shape))
        return jax.ShapeDtypeStruct(size, shape.dtype)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / HF_CONFIG
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give the folder of a checkpoint of Hugging Face.") from None
    except ValueError:
        raise ConfigError(f"{path}: not JSON. Fetch the file again.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not the config of a checkpoint. Fetch the file again.")
    return config


def _match(folder: Path, wanted: list[Place], stored: Mapping[str, Stored], layout: HFLayout) -> dict[str, Stored]:
    """Name of each tensor -> where it is. Raises ConfigError, with all names, for missing, unexpected or other ones."""
    prefix, output = layout.prefix, layout.head
    full = any(name.startswith(prefix) for name in stored)  # Older files lack it.
    there = dict(stored) if full else {name if name == output else prefix + name: x for name, x in stored.items()}
    by_name = {place.name: place for place in wanted}
    table = next(place.name for place in wanted if place.tensor.params == ("embedding",))
    again = None if output in by_name else there.pop(output, None)
    if again is not None:
        there.setdefault(table, again)  # A shared tensor is stored once, under either name.
    unexpected = [name for name in there if name not in by_name and not name.endswith(layout.ignored)]
    missing = [name for name in by_name if name not in there]
    other = [
        f"{name} is {list(there[name].shape)}, and {list(place.shape)} by its config"
        for name, place in by_name.items()
        if name in there and there[name].shape != place.shape
    ]
    problems = [
        f"{what}: {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", other))
        if names
    ]
    if problems:
        raise ConfigError(
            f"{folder}: its tensors are not those of {layout.model_type} by its config.json. {'; '.join(problems)}."
        )
    if again is not None:
        _check_tied(folder, again, output, table, there[table])
    return {name: there[name] for name in by_name}


def _check_tied(folder: Path, head: Stored, output: str, name: str, table: Stored) -> None:
    """Raises ConfigError unless the matrix of the output layer is the embedding table."""
    why = f"is {list(head.shape)}, and {name} is {list(table.shape)}" if head.shape != table.shape else ""
    if not why:
        pairs = zip(_rows(head.read()), _rows(table.read()), strict=True)
        differ = sum(int(np.any(row != other, axis=1).sum()) for row, other in pairs)
        why = f"differs from {name} in {differ:,} of {head.shape[0]:,} rows" if differ else ""
    if why:
        raise ConfigError(
            f"{folder}: by its config.json the output layer is the embedding table (tie_word_embeddings is true), but "
            f'{output} {why}. Write "tie_word_embeddings": false there if the network was trained with its own output '
            f"layer, as transformers reads it; or save the checkpoint again without {output}."
        )


def _grow_table(table: jax.Array, size: int, dim: int, new: Sequence[int] = ()) -> jax.Array:
    """A table with means of its vectors added, until there are `size`; those at `new` are the mean of the others."""
    num = table.shape[dim]
    spare = [number for number in new if number < num]
    others = jnp.delete(table, jnp.array(spare, int), axis=dim, assume_unique_indices=True) if spare else table
    mean = jnp.mean(others, axis=dim, keepdims=True)
    if spare:
        table = table.at[(slice(None),) * dim + (jnp.array(spare),)].set(mean if dim == 0 else mean[..., :])
    return jnp.concatenate([table, jnp.repeat(mean, size - num, axis=dim)], axis=dim) if size > num else table


def _rows(table: np.ndarray) -> Iterator[np.ndarray]:
    """Parts of a table, in float32, that compares alike in all dtypes."""
    return (table[first : first + _ROWS].astype(np.float32) for first in range(0, len(table), _ROWS))


def _params(
    shapes: Mapping[str, Any], wanted: list[Place], stored: Mapping[str, Stored], progress: Progress
) -> dict[str, Any]:
    """The parameters, float32: each array is made when its last tensor has been read."""
    every = sum(int(np.prod(place.shape)) for place in wanted)
    left = {path: sum(path in place.paths for place in wanted) for place in wanted for path in place.paths}
    half: dict[tuple[str, ...], np.ndarray] = {}
    params: dict[str, Any] = {}
    device, done = jax.devices()[0], 0
    # By parameter, not by layer, so that one stacked array at a time is incomplete.
    for place in sorted(wanted, key=lambda place: place.paths):
        for path, x in zip(place.paths, place.tensor.to_params(stored[place.name].read(), place.shapes), strict=True):
            shape = at(shapes, path).shape
            array = half.setdefault(path, np.empty(shape, np.float32))
            array[place.index] = x
            left[path] -= 1
            if not left[path]:
                inner = params
                for name in path[:-1]:
                    inner = inner.setdefault(name, {})
                inner[path[-1]] = jax.device_put(half.pop(path), device)
        done += int(np.prod(place.shape))
        progress(done, every)
    return jax.tree.map(lambda shape, x: x, shapes, params)
