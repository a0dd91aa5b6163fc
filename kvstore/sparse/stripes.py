"""Which part of a row-sparse key a row lies in: rows are dealt out to the parts in turn.

Row r is row r // n of part r % n, of n parts; so every part has as many rows as any other, give or
take one, and so it is with rows that are touched often, which in most tables follow each other
(``docs/decisions/0020-rows-over-servers.md``). Pure arithmetic. Read next: ``payload.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvstore.sparse.ids import Ids


class Share(NamedTuple):
    """What one part gets of some ids."""

    at: Any
    """An index of their places among the ids: a slice, or an array."""
    ids: Ids
    """They themselves, as the part numbers its rows; sorted if the ids are."""


class Stripes(NamedTuple):
    """The rows of a key, dealt out to its parts."""

    num_rows: int
    num_parts: int

    def rows_of(self, part: int) -> int:
        """How many rows a part has."""
        return max(self.num_rows - part + self.num_parts - 1, 0) // self.num_parts

    def split(self, ids: Ids) -> list[Share]:
        """The share of each part of sorted ids."""
        n = self.num_parts
        if n == 1:
            return [Share(slice(None), ids)]
        if len(ids) == self.num_rows:  # all, since they are different
            return [Share(slice(p, None, n), np.arange(self.rows_of(p))) for p in range(n)]
        rows, parts = np.divmod(ids, n)
        shares = []
        for part in range(n):
            at = np.flatnonzero(parts == part)
            shares.append(Share(at, rows[at]))
        return shares

    def ids_of(self, part: int, rows: Ids) -> Ids:
        """The ids of rows that a part numbers itself."""
        return rows if self.num_parts == 1 else rows * self.num_parts + part
