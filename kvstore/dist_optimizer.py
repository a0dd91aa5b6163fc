"""The optimizer of a distributed store: set on the servers, and read back from there.

Any worker may set it and rank 0's call counts, so this worker's own knowledge of it may be behind.
Calls that return futures may come from any thread; the others wait. Read next: ``servers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvstore.errors import OptimizerMismatch, UnknownOptimizerError
from kvstore.operation import UnderWay
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.plain import to_plain
from kvstore.servers import Servers
from pslite import Future
from pslite.future import settled

#: Another worker's ``set_optimizer`` may be on its way to the servers while this one asks.
_READ_BACK_TRIES = 20


class DistOptimizer:
    """Which optimizer the servers of one store use, as far as one worker knows."""

    def __init__(
        self, servers: Servers, pushes: UnderWay, wait: Callable[[Future[Any]], Any]
    ) -> None:
        """``pushes`` are this worker's."""
        self._servers = servers
        self._pushes = pushes
        self._wait = wait
        self.known: Optimizer | None = None
        """The one that this worker has set or loaded last."""
        self.is_set = False
        """Whether there is one for certain; another worker's may be of a class unknown here."""
        self.num_calls = 0
        """How many times it was set, by this worker's count."""

    @property
    def needs_whole_keys(self) -> bool:
        """Whether keys that are made now must not be cut in parts."""
        return self.known is not None and self.known.scope == "key"

    def set(self, optimizer: Optimizer) -> Future[None]:
        """``set_optimizer``; what was pushed before belongs to the optimizer before."""
        plain = to_plain(optimizer)  # a call that raises here is none, so it has no number
        self.num_calls += 1
        call = self.num_calls
        pushed = settled(self._pushes.of())
        done = pushed.then(lambda _: self._servers.set_optimizer(plain, call))
        return done.map(lambda _: self._note(optimizer))

    def _note(self, optimizer: Optimizer | None) -> None:
        self.known = optimizer
        self.is_set = self.is_set or optimizer is not None

    def look(self) -> bool:
        """Ask whether there is one. Waits."""
        self.is_set = self._wait(self._servers.has_optimizer())
        return self.is_set

    def adopt(self) -> None:
        """Note the one that the deciding rank may have loaded. Waits."""
        self.known = None  # where it cannot be made: asked for when it is needed
        with suppress(UnknownOptimizerError):
            self._note(self._wait(self._servers.declared_optimizer()))

    def in_use(self) -> Optimizer | None:
        """What all servers use. Waits. Raises ``OptimizerMismatch`` if that is not the same."""
        for _ in range(_READ_BACK_TRIES):
            found = self._wait(self._servers.optimizers())
            if all(optimizer == found[0] for optimizer in found):
                return found[0] if found else None
        raise OptimizerMismatch(f"the servers use different optimizers: {found}")
