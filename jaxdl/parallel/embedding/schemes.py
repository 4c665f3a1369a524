"""How a table is spread over the devices of a mesh: the kinds of schemes.

Each is three groups of mesh axes: those over which whole tables are assigned (`outer`), those over which each table is
cut by rows or by columns (`inner`), and the rest, on which each device has a copy. The names are those of Neo (Mudigere
et al., arXiv 2104.05158) and TorchRec, but for `replicated`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal

import pydantic

from jaxdl.core.kinds import Choice
from jaxdl.parallel.mesh import Axis

_ALL = tuple(axis.value for axis in Axis)
_SLOW = (Axis.REPLICA.value,)
_INSIDE = tuple(name for name in _ALL if name not in _SLOW)


@dataclass(frozen=True)
class Spread:
    """The mesh axes over which a table is spread, in the order of the mesh."""

    outer: tuple[str, ...] = ()
    """Whole tables are assigned to the devices, or groups of devices, along these."""
    inner: tuple[str, ...] = ()
    """A table is cut over these."""
    cut: Literal["rows", "columns"] = "rows"
    """Along which of its dimensions it is cut over `inner`."""

    @property
    def owners(self) -> tuple[str, ...]:
        """The axes on which devices hold different rows or columns."""
        return tuple(name for name in _ALL if name in self.outer + self.inner)

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes on which devices hold the same."""
        return tuple(name for name in _ALL if name not in self.owners)


class Scheme(Choice):
    """How a table is spread over the devices. `replica` is the slow axis; the others are inside a node."""

    @property
    @abc.abstractmethod
    def spread(self) -> Spread:
        """The mesh axes that it uses, and for what."""

    @property
    def assigned(self) -> bool:
        """Whether whole tables are assigned to devices or nodes, so that a plan chooses which."""
        return bool(self.spread.outer)

    @property
    def dense_gradient(self) -> bool:
        """Whether the gradient of the whole table is summed over the copies, in place of touched rows."""
        return False

    @property
    def message_room(self) -> float:
        """Where copies exchange touched rows, the room for them in a message, as a fraction of a batch's ids."""
        return 1.0

    def with_room(self, room: float) -> Scheme:
        """The scheme with another `message_room`; itself where messages have no touched rows."""
        del room
        return self

    @property
    def sum_groups(self) -> int:
        """Into how many groups the ids of a table fall whose vectors are summed apart, and then together.

        On as many devices, or on a number that divides it, pooled vectors have the same bits. A power of two.
        """
        return 1


class TableWise(Scheme, kind="table_wise"):
    """Each table is on one device, to which ids are sent, and which sends pooled vectors back.

    Over the slow axis the pooled vectors are sent once in each direction. Bit-equal to one device.
    """

    @property
    def spread(self) -> Spread:
        """Tables over all devices."""
        return Spread(outer=_ALL)


class RowWise(Scheme, kind="row_wise"):
    """The rows of each table are spread over all devices; each sends a partial sum of each pooled vector.

    For tables larger than a device. Over the slow axis it sends as many times more than `table_wise` as there are
    nodes; `table_row_wise` does not. Bit-equal on 1, 2, 4 and 8 devices.
    """

    @property
    def sum_groups(self) -> int:
        """A sum of partial sums has other bits than one sum, so it is one everywhere."""
        return 8

    @property
    def spread(self) -> Spread:
        """Rows over all devices."""
        return Spread(inner=_ALL)


class ColumnWise(Scheme, kind="column_wise"):
    """Each table is on one node, and each device of the node has some of its columns."""

    @property
    def spread(self) -> Spread:
        """Tables over nodes, columns inside."""
        return Spread(outer=_SLOW, inner=_INSIDE, cut="columns")


class TableRowWise(Scheme, kind="table_row_wise"):
    """Each table is on one node, and its rows are spread over the devices of the node."""

    @property
    def spread(self) -> Spread:
        """Tables over nodes, rows inside."""
        return Spread(outer=_SLOW, inner=_INSIDE)


class DataParallel(Scheme, kind="data_parallel"):
    """Each device has the whole table; gradients of the whole table are summed over all devices. For small tables."""

    @property
    def spread(self) -> Spread:
        """Copies alone."""
        return Spread()

    @property
    def dense_gradient(self) -> bool:
        """Yes."""
        return True


class Replicated(Scheme, kind="replicated"):
    """Each node has the whole table, its rows spread over the node's devices; nodes exchange touched rows alone.

    A node sums the gradients of each row that its examples touched, and sends (row, sum) to the others. That is exact:
    all nodes make the same update. It sends less than `table_wise` where few rows are touched often.
    """

    room: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Room for touched rows in a message, as a fraction of the ids of the node's batch. A batch that touches more is
    sent in a message with room for all: slower, but the same update."""

    @property
    def message_room(self) -> float:
        """As given."""
        return self.room

    def with_room(self, room: float) -> Scheme:
        """With this room."""
        return Replicated(room=room)

    @property
    def spread(self) -> Spread:
        """Rows inside a node."""
        return Spread(inner=_INSIDE)
