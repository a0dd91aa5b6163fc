"""``Lineage``: the exports that a table was loaded from.

They decide which deltas it can load.

Every table counts its marks from 1, so a mark does not say whose it is. A line is a random id and
the last mark that counts as of it. A table draws an id when it is made, and another one whenever it
loads a file: what it exports from then on are marks of its own. An export has all lines up to its
mark, so a table that resumed from a file of another one continues with that one's deltas. Pure but
for the random numbers. Read next: ``checkpoint/tables.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

_MOST_CHARACTERS = 64
_MOST_MARK = 2**31 - 2


class Line(NamedTuple):
    """The marks up to ``mark`` that belong to the table ``id``.

    Those of the line before are not included.
    """

    id: str
    mark: int


Lines = tuple[Line, ...]
"""Ascending by mark."""


class Lineage(NamedTuple):
    """The origin of a table: its chain of exports."""

    loaded: Lines
    """Those of the file that was loaded last; none before the first, and while one is loaded."""
    own: str
    """The id of the marks that the table makes itself."""

    @property
    def at(self) -> Line | None:
        """Where the file that was loaded last has ended."""
        return self.loaded[-1] if self.loaded else None

    def until(self, mark: int) -> Lines:
        """Return the lineage of an export with this new mark."""
        return (*self.loaded, Line(self.own, mark))


def new_lineage(loaded: Lines = ()) -> Lineage:
    """Return the lineage of a new table, or of one that loaded these lines."""
    return Lineage(loaded, secrets.token_hex(16))


def line_of(lines: Lines, mark: int) -> str | None:
    """Return the id of the table that made this mark; None if it is above all lines."""
    return next((line.id for line in lines if mark <= line.mark), None)


def agreed(shares: Sequence[Lineage]) -> Lineage:
    """Return a table's lineage by those of its shares, which draw their own ids.

    Once one has been given to all of them (``checkpoint/tables.py``) it is that. Shares
    that have not loaded the same have loaded nothing together.
    """
    first = shares[0]
    if all(lineage == first for lineage in shares):
        return first
    is_same = all(lineage.loaded == first.loaded for lineage in shares)
    return new_lineage(first.loaded if is_same else ())


# -- as plain data, for files and messages --------------------------------------------------


def lines_to_plain(lines: Lines) -> list[list[Any]]:
    """Return pairs of an id and a mark."""
    return [[line.id, line.mark] for line in lines]


def lines_from_plain(data: object) -> Lines:
    """Parse the output of ``lines_to_plain``. Raises ``ValueError``."""
    if not isinstance(data, (list, tuple)):
        raise ValueError(f"expected a list as the lineage, got {data!r:.60}")
    for pair in data:
        if not isinstance(pair, (list, tuple)) or [type(each) for each in pair] != [str, int]:
            raise ValueError(f"expected pairs of an id and a mark in the lineage, got {pair!r:.60}")
        if not 0 < len(pair[0]) <= _MOST_CHARACTERS or not 0 <= pair[1] <= _MOST_MARK:
            raise ValueError(
                f"expected an id of 1 to {_MOST_CHARACTERS} characters and a mark from 0 to "
                f"{_MOST_MARK} in the lineage, got {pair!r:.60}"
            )
    lines = tuple(Line(*pair) for pair in data)
    if any(before.mark >= line.mark for before, line in pairwise(lines)):
        raise ValueError(f"expected increasing marks in the lineage, got {data!r:.60}")
    return lines
