"""Row-sparse values: some rows of a large array, with their ids.

Callers pass and get ``RowSparseArray``. Stores in one process and servers use this package. It
does no I/O and reads no clock; only ``update.py`` and ``row_memory.py`` use threads.
Read next: ``array.py``, then ``sums.py`` (sums of rows), ``update.py`` (optimizers on rows),
``table.py`` (how rows are stored).
"""

from __future__ import annotations

from kvstore.sparse.array import RowSparseArray

__all__ = ["RowSparseArray"]
