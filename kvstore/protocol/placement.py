"""Cut keys into chunks, and place each part of a store on a server.

Pure arithmetic: the same arguments give the same answer on every node; nothing here keeps
state. Decided once, when keys are initialized, by ``kvstore/server/directory.py``, which calls
``place``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.arrays.dtypes import accumulation_dtype
from pslite import Config

CHUNK_BYTES = 1 << 20
"""The largest size of a part. Larger messages are slower, and so are many small ones."""


def chunk_ranges(
    num_elements: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES
) -> list[tuple[int, int]]:
    """Return the parts of a flat array as ``(start, stop)`` element ranges, in order.

    All but the last hold ``chunk_bytes // itemsize`` elements (at least one). The borders
    depend only on these arguments, never on the number of servers, so sums, states and versions
    mean the same in any cluster. An empty array has one empty part, so it is in rounds like any
    other key.
    """
    step = _step(itemsize, chunk_bytes)
    starts = range(0, max(num_elements, 1), step)
    return [(start, min(start + step, num_elements)) for start in starts]


def num_chunks(num_elements: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return how many parts ``chunk_ranges`` returns, without making them."""
    step = _step(itemsize, chunk_bytes)
    return max(-(-num_elements // step), 1)


def _step(itemsize: int, chunk_bytes: int) -> int:
    return max(chunk_bytes // itemsize, 1)


def message_bytes(config: Config, *, by_tcp: bool) -> int:
    """Return the best size of messages with many small values.

    Over TCP larger ones are slower.
    """
    return min((2 if by_tcp else 8) * config.chunk_bytes, config.max_message_bytes)


def most_group_bytes(config: Config) -> int:
    """Return the most bytes of values in one message between local processes.

    Such a message only has the positions of the values in shared memory.
    """
    return min(16 * config.chunk_bytes, config.max_message_bytes)


def may_be_relayed(dtype: np.dtype[Any]) -> bool:
    """Return whether a relay may add up pushes of this type for their owner.

    Sums of 16-bit numbers are made in 32 bits, and would lose some of these on the way.
    """
    return accumulation_dtype(dtype) == dtype


def place(
    parts: Sequence[int], loads: Sequence[int], shares: Sequence[float] | None = None
) -> list[int]:
    """Return the server index of each part, in proportion to ``shares``.

    ``parts`` are sizes in bytes, in the order of keys; ``loads`` the bytes that each server
    holds already; ``shares`` the wanted proportions (equal ones when None; a share of 0 gets
    nothing). Returns one server index for each part; a server's parts are neighbours in the
    list, so that small keys can travel and lie together.

    Servers are filled up to a common level of load per share, those with the most room first.
    A server below the level ends within one part (the largest of ``parts``) of it; one above
    it gets nothing. So after a first call every server is within one part of its share.
    Later calls stay there too, except that very unequal shares and many small calls can add
    up to a few parts.
    """
    shares = [1.0] * len(loads) if shares is None else list(shares)
    filling = sorted(
        (server for server in range(len(loads)) if shares[server] > 0),
        key=lambda server: (loads[server] / shares[server], server),
    )
    room = _room_below_level(sum(parts), loads, shares, filling)
    # A server without room must not catch parts by rounding.
    order = [server for server in filling if room[server] > 0] or filling[:1]
    order.sort(key=lambda server: (-room[server], server))
    placed: list[int] = []
    position = 0.0
    turn = 0
    border = room[order[0]]
    for size in parts:
        # A part goes to the server whose range contains the part's middle, so both ends of a
        # range are off by at most half a part.
        while turn + 1 < len(order) and position + size / 2 >= border:
            turn += 1
            border += room[order[turn]]
        placed.append(order[turn])
        position += size
    return placed


def _room_below_level(
    num_bytes: int, loads: Sequence[int], shares: Sequence[float], filling: Sequence[int]
) -> list[float]:
    """Return the bytes that bring all servers to one level of load per share.

    ``filling`` holds the servers with a share, by rising load per share: water reaches them
    in this order.
    """
    level = 0.0
    held = float(num_bytes)
    share = 0.0
    for server in filling:
        if share > 0 and loads[server] / shares[server] >= level:
            break
        held += loads[server]
        share += shares[server]
        level = held / share
    return [max(level * shares[server] - loads[server], 0.0) for server in range(len(loads))]
