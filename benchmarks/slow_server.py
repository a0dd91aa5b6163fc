"""Makes one server slow: ``--server-import benchmarks/slow_server.py``, for ``soak.py``.

Server 0 waits SLOW_SERVER_MS before each request of a worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from pslite.plane.interface import Buffer, Effect
from pslite.plane.server import ServerPlane
from pslite.wire.messages import Exchange

_DELAY_S = float(os.environ.get("SLOW_SERVER_MS", "0")) / 1000
_exchange = ServerPlane.exchange


def _late(
    self: ServerPlane, rank: int, epoch: int, message: Exchange, frames: Sequence[Buffer]
) -> list[Effect]:
    time.sleep(_DELAY_S)
    return _exchange(self, rank, epoch, message, frames)


if os.environ.get("DMLC_TASK_ID") == "0":
    ServerPlane.exchange = _late  # type: ignore[method-assign]
