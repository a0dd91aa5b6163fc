"""Growing tables: rows by any 64-bit id, made on first use.

``Table`` is what ``KVStore.create_table`` returns. All else in this package is pure: no I/O but the
files that a caller names, no threads, no clock; a store of one process keeps a table as one
``TableShare``, and servers can keep a share each. Read next: ``base.py`` for what a table
promises, then ``shard.py`` (rows come and go), and below it ``hash_index.py`` (from ids to places),
``eviction.py`` (which row goes first), ``admission.py`` (which id gets a row), ``initial_rows.py``.
"""

from __future__ import annotations

from kvstore.tables.base import Table, TableStatistics

__all__ = ["Table", "TableStatistics"]
