"""Members of a group in one process, whose rings are connected; their steps in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pslite.collective.shared_memory_algorithms import Array, RingCalls, Steps
from pslite.errors import UsageError
from pslite.memory.ring import Ring


def connected(size: int, slot_bytes: int = 4096) -> list[Ring]:
    """Return the rings of a group; close them."""
    rings = [Ring(slot_bytes) for _ in range(size)]
    tickets = [ring.ticket for ring in rings]
    for rank, ring in enumerate(rings):
        ring.connect(rank, tickets)
    return rings


def total(contributions: Sequence[Array], out: Array) -> None:
    """Add up, left to right."""
    out[:] = contributions[0]
    for contribution in contributions[1:]:
        np.add(out, contribution, out)


def mismatch(rank: int, call: bytes, other: int, other_call: bytes) -> UsageError:
    """The error of two ranks that call different things."""
    return UsageError(
        f"rank {rank} calls {call.decode()}; rank {other} calls {other_call.decode()}"
    )


class Members:
    """A group whose members take their steps when ``run`` says so, in a random order."""

    def __init__(self, size: int, slot_bytes: int = 4096, seed: int = 0) -> None:
        self.size = size
        self.rings = connected(size, slot_bytes)
        self.calls = [RingCalls(ring, size, mismatch) for ring in self.rings]
        self._random = random.Random(seed)

    def close(self) -> None:
        for ring in self.rings:
            ring.close()

    def run(self, begin: Callable[[int, RingCalls], Steps]) -> list[Any]:
        """Each member's call: its error, or None."""
        steps = {rank: begin(rank, calls) for rank, calls in enumerate(self.calls)}
        awaited: dict[int, tuple[int, int]] = {}
        ends: list[Any] = [None] * self.size
        while steps:
            ready = [
                rank
                for rank in steps
                if rank not in awaited or self.rings[rank].has_reached(*awaited[rank])
            ]
            assert ready, f"all wait: {awaited}"
            rank = self._random.choice(ready)
            try:
                awaited[rank] = next(steps[rank])
            except StopIteration:
                del steps[rank]
            except Exception as error:
                ends[rank] = error
                del steps[rank]
        return ends
