"""A node's buffers: pooled, and shared with the peers on the same machine where that works.

A buffer comes from a *segment*, a stretch of memory that another process of the same machine
can map. A frame that lies in one travels to such a peer as a descriptor (which segment, where,
how long), and the peer reads the sender's memory itself. To everybody else, and to layers
above, it is a frame like any other.

What that asks of a buffer's sender: not to change it until the *receiver is done with
it*, not only until the message is accepted. For a push that is its answer; for an answer, its
acceptance, since a worker copies values out before it accepts.

``freelist.py`` is pure; ``segment.py`` asks the operating system; ``heap.py`` makes buffers;
``sharing.py`` knows who can read what.
"""

from __future__ import annotations

from pslite.memory.heap import Bytes, Heap
from pslite.memory.sharing import Sharing

__all__ = ["Bytes", "Heap", "Sharing"]
