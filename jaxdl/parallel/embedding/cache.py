"""Look-ahead caches of embedding tables: the devices have some rows in slots, the host's memory or disk has all.

The host sees the ids of the batches to come (as in Bagpipe, Agarwal et al., arXiv 2202.12429), so it plans before each
step which rows are loaded into which slots and which leave theirs. A step finds all of its rows, and no value is
stale. What is here knows neither devices nor JAX.
"""

from __future__ import annotations

import fnmatch
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pydantic

from jaxdl.core.config import Config, ConfigError

Policy = Literal["farthest", "lru", "lfu"]
_NEVER = np.iinfo(np.int64).max


class CacheConfig(Config):
    """How much of embedding tables the devices hold; the host has all rows. Without `fraction` there is no cache."""

    fraction: float | None = pydantic.Field(default=None, gt=0, lt=1)
    """Slots, as a fraction of a table's rows; None for tables that the devices hold whole."""
    tables: tuple[str, ...] = ()
    """Patterns of the names of tables that have a cache; * stands for any text. Without any, all may have one."""
    min_rows: int = pydantic.Field(default=10_000, ge=1)
    """Tables with fewer rows have none: the devices hold them whole."""
    policy: Policy = "farthest"
    """Which rows leave: those that are used again last (`farthest`), or were used longest ago (`lru`) or least often
    (`lfu`) of those that are not used within the window."""
    window: int = pydantic.Field(default=8, ge=1)
    """Batches that are looked ahead."""
    folder: str | None = None
    """Where the host keeps the rows in files that are memory-mapped; None keeps them in memory."""

    def check(self, names: Sequence[str]) -> None:
        """Raises ConfigError for patterns that no table's name matches, and for settings of a cache that is not on."""
        if self.fraction is None:
            others = [name for name in type(self).model_fields if getattr(self, name) != getattr(CacheConfig(), name)]
            if others:
                name, value = others[0], getattr(self, others[0])
                raise ConfigError(
                    f"--embedding.cache.{name.replace('_', '-')} {' '.join(value) if name == 'tables' else value}: "
                    "there is no cache, so it has no effect. Give --embedding.cache.fraction too, or leave it out."
                )
        for pattern in self.tables:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"--embedding.cache.tables {pattern}: no table has such a name; there are {', '.join(names)}."
                )

    def slots(self, name: str, rows: int) -> int | None:
        """The slots of a table; None for one without a cache."""
        if self.fraction is None or rows < self.min_rows:
            return None
        chosen = not self.tables or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.tables)
        return math.ceil(rows * self.fraction) if chosen else None


class Swap(NamedTuple):
    """What changes in the slots of a table before a step."""

    evicted: np.ndarray
    """Ids whose rows leave, int64."""
    evicted_slots: np.ndarray
    loaded: np.ndarray
    """Ids whose rows come, int64."""
    loaded_slots: np.ndarray


class SlotPlan:
    """Which ids are in which slots of one table, batch after batch.

    Where processes share the rows of a table, each id has a home: the process that holds its row, whose devices have
    the slots of the same home. An id is in slots of its home alone, so no row is ever sent between processes.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        slots: int,
        policy: Policy,
        num_homes: int = 1,
        home_of: Callable[[np.ndarray], np.ndarray] = np.zeros_like,
        *,
        size_option: str = "--batch-size",
    ) -> None:
        """`home_of` gives the homes, from 0 to `num_homes` - 1, of slots and of ids; `size_option` is for messages."""
        self._name, self._policy, self._home_of, self._size_option = name, policy, home_of, size_option
        self._home_of_slot = home_of(np.arange(slots))
        self._room = np.bincount(self._home_of_slot, minlength=num_homes)
        self.slot_of = np.full(rows, -1, np.int32)
        """Of each id its slot, -1 for none."""
        self.id_of = np.full(slots, -1, np.int64)
        """Of each slot its id, -1 for none."""
        self._used_at = np.full(slots, -1, np.int64)
        self._count = np.zeros(slots, np.int64)
        self._clock = 0
        self.num_hits = self.num_lookups = 0

    def planned(self, now: np.ndarray, ahead: Sequence[np.ndarray]) -> Swap:
        """What changes before a batch with the distinct ids `now`; `ahead` are those of the batches after it, in order.

        Raises ConfigError for a batch with more ids than there are slots, in all or of one home.
        """
        homes = self._home_of(now)
        self._check_room(homes)
        self._clock += 1
        slots = self.slot_of[now]
        absent = slots < 0
        missing = now[absent]
        self.num_lookups += len(now)
        self.num_hits += len(now) - len(missing)
        places = self._places(slots[~absent], homes[absent], ahead)
        old = self.id_of[places]
        left = old >= 0
        self.slot_of[old[left]] = -1
        self.id_of[places], self.slot_of[missing] = missing, places
        self._count[places] = 0
        mine = self.slot_of[now]
        self._used_at[mine] = self._clock
        self._count[mine] += 1
        return Swap(old[left], places[left], missing, places)

    def _check_room(self, homes: np.ndarray) -> None:
        touched = np.bincount(homes, minlength=len(self._room))
        fullest = int((touched - self._room).argmax())
        count, room = int(touched[fullest]), int(self._room[fullest])
        if count <= room:
            return
        least = math.ceil(1e4 * count * len(touched) / len(self.slot_of)) / 1e4
        where = "" if len(touched) == 1 else f" for rows of process {fullest} of the {len(touched)} that share it"
        more = f"--embedding.cache.fraction {least:g} or more"
        if least >= 1:
            more = f"--embedding.cache.min-rows {len(self.slot_of) + 1}, which leaves this table whole"
        raise ConfigError(
            f"table {self._name}: a batch touches {count:,} of its rows, and its cache has {room:,} slots{where}. Give "
            f"{more}, or a smaller {self._size_option}. A run that has checkpoints resumes from the newest with these "
            "changed."
        )

    def _places(self, kept: np.ndarray, homes: np.ndarray, ahead: Sequence[np.ndarray]) -> np.ndarray:
        """A slot for each new row, of these homes: free ones, then those whose rows are missed least; never `kept`."""
        places = np.zeros(len(homes), np.int64)
        free = np.flatnonzero(self.id_of < 0)
        candidates: np.ndarray | None = None
        for home in np.unique(homes):
            wanted = np.flatnonzero(homes == home)
            mine = free[self._home_of_slot[free] == home][: len(wanted)]
            if len(mine) < len(wanted):
                if candidates is None:
                    candidates = self._by_loss(kept, ahead)
                others = candidates[self._home_of_slot[candidates] == home]
                mine = np.concatenate([mine, others[: len(wanted) - len(mine)]])
            places[wanted] = mine
        return places

    def _by_loss(self, kept: np.ndarray, ahead: Sequence[np.ndarray]) -> np.ndarray:
        """Slots with a row, but for those `kept`, beginning with those whose rows are missed least."""
        next_use = np.full(len(self.id_of), _NEVER)
        for step in range(len(ahead) - 1, -1, -1):
            here = self.slot_of[ahead[step]]
            next_use[here[here >= 0]] = step
        history = self._count if self._policy == "lfu" else self._used_at
        # What is needed soonest comes last; among those that are not needed within the window, history decides.
        soon = next_use if self._policy == "farthest" else np.where(next_use == _NEVER, _NEVER, 0)
        allowed = self.id_of >= 0
        allowed[kept] = False
        candidates = np.flatnonzero(allowed)
        return candidates[np.lexsort((candidates, history[candidates], -soon[candidates]))]


class Window:
    """Batches of ids, and those that follow: the plan of each, with ids replaced by slots.

    The plan follows from the ids of whole batches, so that of every process is the same.
    """

    def __init__(self, plans: Mapping[str, SlotPlan], columns: Mapping[str, np.ndarray], size: int) -> None:
        """`plans` and the columns of ids, of each table with a cache."""
        self._plans, self._columns, self._size = plans, columns, size
        self._batches: deque[tuple[np.ndarray, dict[str, np.ndarray]]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether the next batch can be planned with the whole window."""
        return len(self._batches) > self._size

    @property
    def num_lookups(self) -> int:
        """Distinct rows of all batches so far."""
        return sum(plan.num_lookups for plan in self._plans.values())

    @property
    def num_hits(self) -> int:
        """Those of them that were in a slot."""
        return sum(plan.num_hits for plan in self._plans.values())

    def add(self, ids: np.ndarray, whole: np.ndarray) -> None:
        """A further batch, int32 `[examples, ids]`: `ids` are those of this process, `whole` those of all."""
        distinct = {}
        for name, columns in self._columns.items():
            distinct_ids = np.unique(whole[:, columns])
            distinct[name] = distinct_ids[distinct_ids >= 0].astype(np.int64)
        self._batches.append((ids, distinct))

    def planned(self) -> tuple[np.ndarray, dict[str, Swap]]:
        """The ids of this process in the first batch with slots in their place, and what changes before it.

        Raises ConfigError for a batch that does not fit, and where its ids are not those of the whole batch.
        """
        ids, now = self._batches.popleft()
        swaps, slots = {}, ids.copy()
        for name, plan in self._plans.items():
            swaps[name] = plan.planned(now[name], [others[name] for _, others in self._batches])
            mine = ids[:, self._columns[name]]
            id_slots = np.where(mine >= 0, plan.slot_of[np.maximum(mine, 0)], -1)
            if ((id_slots < 0) & (mine >= 0)).any():
                raise ConfigError(
                    f"table {name}: the data has other ids for an example in its batch than where ids are read alone. "
                    "A source of your own that changes `batch` changes `ids` too, and both return the same each time."
                )
            slots[:, self._columns[name]] = id_slots
        return slots, swaps
