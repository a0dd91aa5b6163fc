"""Which unit each part of a server belongs to: as few units as possible, split where need be.

Pure; used by ``server.py`` on the I/O thread. ``unit.py`` says what a unit is, and which ones may
be joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from pslite.plane.unit import Unit, joined
from pslite.wire.messages import Ints

#: So often a list of parts has to be pushed before they are kept as one.
_FAMILIAR = 2
#: At most this many lists that are not familiar yet are remembered.
_MAX_LISTS = 256


class Parts:
    """The parts that a server has, each in one unit."""

    def __init__(self) -> None:
        #: Part -> the unit that it belongs to.
        self.units: dict[int, Unit] = {}
        #: Part -> the bytes of its value.
        self.sizes: dict[int, int] = {}
        #: How often a list of parts that are no unit was pushed: those that come again are joined.
        self._lists: Counter[Ints] = Counter()

    def put(self, unit: Unit) -> None:
        """The unit of a single part: a new one, or one that is alone, which has this unit now."""
        (part,) = unit.parts
        self.units[part] = unit
        (self.sizes[part],) = unit.sizes

    def remove(self, part: int) -> None:
        """A part that is alone is gone."""
        del self.units[part], self.sizes[part]

    def distinct(self) -> Iterable[Unit]:
        """The units, each once."""
        return dict.fromkeys(self.units.values())

    def single(self, part: int) -> Unit | None:
        """The unit of this part alone; None if there is no such part."""
        unit = self.units.get(part)
        if unit is None or len(unit.parts) == 1:
            return unit
        for single in unit.split():
            self.units[single.parts[0]] = single
        return self.units[part]

    def whole(self, parts: Ints) -> Unit | None:
        """The unit of exactly these parts; made of smaller ones if they are pushed often."""
        unit = self.units.get(parts[0]) if parts else None
        if unit is None or unit.parts == parts:
            return unit
        if len(self._lists) >= _MAX_LISTS:
            self._lists.clear()
        self._lists[parts] += 1
        if self._lists[parts] <= _FAMILIAR:
            return None
        # Units that are wholly in the list, in its order, each once.
        units = list(dict.fromkeys(map(self.units.get, parts)))
        there = [unit for unit in units if unit is not None]
        if tuple(chain.from_iterable(unit.parts for unit in there)) != parts:
            return None
        whole = joined(there)
        if whole is not None:
            self.units.update(dict.fromkeys(parts, whole))
            del self._lists[parts]
        return whole
