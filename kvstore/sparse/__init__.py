"""Row-sparse values: selected rows of a large array, by their ids.

``RowSparseArray`` is what callers pass and get. Everything in this package is pure: no I/O, no
clock, and of threads those of ``update.py`` alone; stores in one process and servers use it.
Read next: ``array.py``, then ``sums.py`` (adding up), ``update.py`` (optimizers on rows),
``table.py`` (what is stored).
"""

from __future__ import annotations

from kvstore.sparse.array import RowSparseArray

__all__ = ["RowSparseArray"]
