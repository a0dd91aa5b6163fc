"""The transport layer: moves frames between named nodes over TCP or inside one process.

``base.py`` is the contract. ``van/zmq/van.py`` keeps it over TCP, ``testing/inproc.py`` without
sockets for tests and the simulator, and ``faulty.py`` wraps either and loses, repeats and delays
messages on purpose. A van may not know the protocol above it. Importing this package imports no
transport library; read ``base.py`` next.
"""

from __future__ import annotations

from pslite.van.base import (
    Buffer,
    Connected,
    Denied,
    Disconnected,
    Received,
    TurnedAway,
    Van,
    VanEvent,
)

__all__ = [
    "Buffer",
    "Connected",
    "Denied",
    "Disconnected",
    "Received",
    "TurnedAway",
    "Van",
    "VanEvent",
]
