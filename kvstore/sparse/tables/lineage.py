"""``Lineage``: the exports that a table was loaded from.

It decides which deltas (files of changed rows) the table can load.

Every table numbers its exports from 1; such a number is a mark. So a mark alone does not identify
the table. A line is a random id and the last mark that belongs to it. A table draws an id when it
is created, and a new one when it loads a file; its own exports from then on belong to that id. An
export has all lines up to its mark. So a table that loaded another table's file can continue with
that table's deltas. Pure except for the random numbers. Read next: ``checkpoint/tables.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

_MOST_CHARACTERS = 64
_MOST_MARK = 2**31 - 2


class Line(NamedTuple):
    """The marks that belong to ``id``: those above the previous line, up to ``mark``."""

    id: str
    mark: int


Lines = tuple[Line, ...]
"""Ascending by mark."""


class Lineage(NamedTuple):
    """The origin of a table: the chain of exports that it was loaded from."""

    loaded: Lines
    """The lines of the last file loaded; empty before the first, and while a file is loading."""
    own: str
    """The id of the table's own exports."""

    @property
    def at(self) -> Line | None:
        """The last line of the last file loaded; None if there is none."""
        return self.loaded[-1] if self.loaded else None

    def until(self, mark: int) -> Lines:
        """Return the lineage of an export with this new mark."""
        return (*self.loaded, Line(self.own, mark))


def new_lineage(loaded: Lines = ()) -> Lineage:
    """Return the lineage of a new table, or of one that loaded these lines."""
    return Lineage(loaded, secrets.token_hex(16))


def line_of(lines: Lines, mark: int) -> str | None:
    """Return the id that this mark belongs to; None if it is above all lines."""
    return next((line.id for line in lines if mark <= line.mark), None)


def agreed(shares: Sequence[Lineage]) -> Lineage:
    """Return the lineage of a table from the lineages of its shares.

    If all are equal (``checkpoint/tables.py`` sets the same one in all shares), return that one.
    Otherwise return a new one, with the loaded lines if all shares have the same lines.
    """
    first = shares[0]
    if all(lineage == first for lineage in shares):
        return first
    is_same = all(lineage.loaded == first.loaded for lineage in shares)
    return new_lineage(first.loaded if is_same else ())


# -- as plain data, for files and messages --------------------------------------------------


def lines_to_plain(lines: Lines) -> list[list[Any]]:
    """Return the lines as pairs of an id and a mark."""
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
