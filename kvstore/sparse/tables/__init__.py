"""Growing tables: rows by any 64-bit id, made on first use.

All in this package is pure: no I/O, no threads, no clock. A store of one process keeps a table as
one ``TableShare``, and servers keep a share each; ``kvstore/stores/tables.py`` says what a table
promises. Read next: ``shard.py`` (rows come and go), and below it ``hash_index.py`` (from ids to
places), ``ages.py`` (which row goes first), ``admission.py`` (which id gets a row),
``initial_rows.py``.
"""

from __future__ import annotations

from kvstore.sparse.tables.shard import TableStatistics

__all__ = ["TableStatistics"]
