"""Parts of the parameters that are merged at different steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdl.exchange.base import PIECE, GradientLayout
from jaxdl.exchange.cost import Gradients


class Piece(NamedTuple):
    """A parameter, or some of its layers at equal distances."""

    name: str
    """The parameter's."""
    start: int = 0
    stride: int = 0
    """Layers start, start + stride...; 0 is the whole parameter."""

    @property
    def key(self) -> str:
        """Its own name."""
        return f"{self.name}{PIECE}{self.start}of{self.stride}" if self.stride else self.name


@dataclass(frozen=True)
class Fragments:
    """The fragments: the pieces of each. A piece has no parameter in common with another, and all have them all."""

    pieces: tuple[tuple[Piece, ...], ...]

    def of(self, leaves: Mapping[str, Any], number: int, lead: int = 0) -> dict[str, Any]:
        """The pieces of a fragment, by their own names; `lead` dimensions come before that of the layers."""
        return {
            piece.key: leaves[piece.name][_layers(piece, lead)] if piece.stride else leaves[piece.name]
            for piece in self.pieces[number]
        }

    def put(self, leaves: Mapping[str, Any], number: int, values: Mapping[str, Any], lead: int = 0) -> dict[str, Any]:
        """`leaves` with the pieces of a fragment replaced."""
        new_leaves = dict(leaves)
        for piece in self.pieces[number]:
            value = values[piece.key]
            new_leaves[piece.name] = (
                new_leaves[piece.name].at[_layers(piece, lead)].set(value) if piece.stride else value
            )
        return new_leaves

    def shapes(self, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of all pieces."""
        return {
            piece.key: jax.ShapeDtypeStruct(_shape(piece, leaves[piece.name].shape), leaves[piece.name].dtype)
            for pieces in self.pieces
            for piece in pieces
        }

    def each(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """For all pieces, what belongs to their parameters."""
        return {piece.key: values[piece.name] for pieces in self.pieces for piece in pieces if piece.name in values}

    def layout(self, layout: GradientLayout) -> GradientLayout:
        """What an exchange may know of the pieces of parameters whose layout this is."""
        stacked = self.each(dict.fromkeys(layout.stacked))
        return GradientLayout(self.each(layout.specs), layout.inner, stacked=frozenset(stacked), at_once=True)

    def keys(self, number: int) -> set[str]:
        """The names of a fragment's pieces."""
        return {piece.key for piece in self.pieces[number]}


def _layers(piece: Piece, lead: int) -> tuple[slice, ...]:
    return (*[slice(None)] * lead, slice(piece.start, None, piece.stride))


def _shape(piece: Piece, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (len(range(piece.start, shape[0], piece.stride)), *shape[1:]) if piece.stride else shape


def make_fragments(shapes: Mapping[str, Any], stacked: Collection[str], number: int) -> Fragments:
    """`number` fragments of about the same size, of parameters of these shapes (arrays or shape structs).

    Of those in `stacked`, whose leading dimension counts layers, fragment f of n takes layers f, f + n, ... (the
    strided pattern of Streaming DiLoCo, arXiv 2501.18512, section 3.1); the others go, the largest first, to the
    fragment that has the fewest elements so far.
    """
    if number == 1:
        return Fragments((tuple(Piece(name) for name in shapes),))
    pieces: list[list[Piece]] = [[] for _ in range(number)]
    sizes = [0] * number

    def add(piece: Piece, fragment: int) -> None:
        pieces[fragment].append(piece)
        sizes[fragment] += math.prod(_shape(piece, shapes[piece.name].shape))

    divided = [name for name, x in shapes.items() if name in stacked and x.shape[0] >= number]
    for name in divided:
        for fragment in range(number):
            add(Piece(name, fragment, number), fragment)
    whole = [name for name in shapes if name not in divided]
    for name in sorted(whole, key=lambda name: -math.prod(shapes[name].shape)):
        add(Piece(name), sizes.index(min(sizes)))
    return Fragments(tuple(map(tuple, pieces)))


def divided(gradients: Gradients, number: int) -> list[Gradients]:
    """What one device exchanges of each fragment, by the sizes of its own shards."""
    if number == 1:
        return [gradients]
    shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in gradients.shapes.items()}
    fragments = make_fragments(shapes, gradients.layout.stacked, number)
    pieces, layout = fragments.shapes(shapes), fragments.layout(gradients.layout)
    each = [{piece.key: pieces[piece.key].shape for piece in part} for part in fragments.pieces]
    return [Gradients(part, gradients.num_replicas, layout) for part in each if part]
