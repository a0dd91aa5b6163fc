"""Values wait while much waits for the connection, and are sent soon after."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from kvstore.server import install
from kvstore.stores.dist.store import create_dist
from pslite import Postoffice
from pslite.protocol.send_window import LOOK_S
from pslite.testing.simulator import Simulation

FULL_S = 0.41
"""Timers would end a wait, too, but not within 0.05 s."""


@pytest.mark.parametrize("sender", ["worker", "server"])
def test_a_full_connection_is_looked_at_again(sender: str) -> None:
    simulation = Simulation(1, 1, 1, prepare=install, shm=False)
    took_s: list[float] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store: Any = create_dist("dist_sync", "dist_sync", node=node)
        yield store.init_async("w", np.zeros(1000))
        full = node if sender == "worker" else simulation.servers[0]
        began = simulation.now

        def has_room(peer: str, now: float) -> bool:
            return now >= began + FULL_S

        full.links.has_room = has_room  # type: ignore[method-assign]
        out = np.zeros(1000)
        yield store.pushpull_async("w", np.ones(1000), out)
        took_s.append(simulation.now - began)
        assert (out == 1.0).all()
        yield node.leave()

    simulation.run(script, limit_s=30.0)
    assert FULL_S <= took_s[0] <= FULL_S + LOOK_S + 0.05
