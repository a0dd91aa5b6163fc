"""Growing tables: rows with any 64-bit ids, created on first use.

This package does no I/O, starts no threads and reads no clock. A store in one process keeps a
table as one ``TableShare``; of several servers each keeps one share. ``kvstore/stores/tables.py``
describes what a table guarantees. Read next: ``shard.py`` (creates and removes rows), then
``hash_index.py`` (maps ids to places), ``ages.py`` (finds the oldest rows), ``admission.py``
(decides which ids get rows), ``initial_rows.py`` (initial values).
"""

from __future__ import annotations

from kvstore.sparse.tables.shard import TableStatistics

__all__ = ["TableStatistics"]
