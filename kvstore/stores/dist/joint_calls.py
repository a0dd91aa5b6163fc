"""Calls that all workers of a store make together, and its optimizer.

Every worker numbers its joint calls. When all workers have made a call, the directory
(``server/joint_calls.py``) has the deciding rank carry it out, and sends the result to the others.
Runs on the caller's thread, which waits; work after an answer runs on the node's I/O thread.

The optimizer is set on the servers and read back from there: any worker may set it and rank 0's
call takes effect, so this worker's copy may be out of date. Calls that return futures may come from
any thread; the others wait. Read next: ``control_client.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from kvstore.arrays.keys import Key
from kvstore.errors import OptimizerMismatch, UnknownOptimizerError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.serialize import to_plain
from kvstore.stores.dist.control_client import Servers
from kvstore.stores.dist.in_flight import InFlight
from pslite import Future
from pslite.errors import PSError
from pslite.future import completed, settled

T = TypeVar("T")


class JointCalls:
    """The joint calls of one store on one worker."""

    def __init__(self, servers: Servers, wait: Callable[[Future[Any]], Any]) -> None:
        self._servers = servers
        self._wait = wait
        self.count = 0
        """How many calls this worker has made; the same on all workers."""

    def begin(self) -> int:
        """Return the number of the next call."""
        self.count += 1
        return self.count

    def prepare(self, name: str, act: Callable[[], T]) -> T:
        """Do this rank's own work before the call ``name``; all ranks get its error."""
        try:
            return act()
        except BaseException as error:
            with suppress(PSError):  # the directory answers with the same error
                self._wait(self._servers.meet(self.begin(), name, error))
            raise

    def make(
        self, name: str, act: Callable[[int], Sequence[Key]], say: Callable[[], str] = str
    ) -> tuple[int, bytes]:
        """Wait for all workers, then let the lowest rank ``act``; all ranks get its error.

        ``act`` gets the number of this call and returns the keys that it has deleted; then ``say``
        returns a text for all ranks. Returns the number and the news for ``Servers.news_of``.
        """
        call = self.begin()
        meeting = self._servers.meet(call, name)
        try:
            news: bytes | None = self._wait(meeting)
        except BaseException as error:
            self._withdraw(call, meeting, error)
            raise
        if news is None:
            try:
                deleted = act(call)
                said = say()
            except BaseException as error:
                self._servers.report(call, error=error)
                raise
            news = self._wait(self._servers.report(call, deleted, said))
        return call, news

    def _withdraw(self, call: int, meeting: Future[bytes | None], error: BaseException) -> None:
        """Stop waiting; if this rank is chosen to decide, report ``error`` to the others."""

        def answered(done: Future[bytes | None]) -> None:
            if done.error() is None and done.result(0) is None:
                self._servers.report(call, error=error)

        meeting.on_done(answered)


#: Another worker's ``set_optimizer`` may reach the servers between two answers.
_READ_BACK_TRIES = 20


class Repeats(Protocol):
    """Whether this process repeats calls of a lost one (``kept_steps.py``)."""

    is_repeating: bool
    catches_up: bool
    """Whether they are from before its step, and have long been made."""


class DistOptimizer:
    """One worker's view of the optimizer on a store's servers."""

    def __init__(
        self,
        servers: Servers,
        pushes: InFlight,
        wait: Callable[[Future[Any]], Any],
        repeats: Repeats,
    ) -> None:
        """``pushes`` are the pushes of this worker."""
        self.repeats = repeats
        self._servers = servers
        self._pushes = pushes
        self._wait = wait
        self.known: Optimizer | None = None
        """The optimizer that this worker set or loaded last."""
        self.is_set = False
        """Whether the servers surely have one; this process may not know its class."""
        self.num_calls = 0
        """How many times it was set, by this worker's count."""

    @property
    def scope(self) -> str:
        """The unit that parts of new keys must keep whole (``SCOPES``)."""
        return "element" if self.known is None else self.known.scope

    def set(self, optimizer: Optimizer) -> Future[None]:
        """Set the optimizer for later pushes; earlier ones still use the current one."""
        plain = to_plain(optimizer)  # first: a call that raises here gets no number
        self.num_calls += 1
        call = self.num_calls
        if self.repeats.catches_up:
            return completed(None).map(lambda _: self._note(optimizer))
        pushed = settled(self._pushes.of())
        repeats = self.repeats.is_repeating
        done = pushed.then(lambda _: self._servers.set_optimizer(plain, call, may_be_over=repeats))
        return done.map(lambda _: self._note(optimizer))

    def _note(self, optimizer: Optimizer | None) -> None:
        self.known = optimizer
        self.is_set = self.is_set or optimizer is not None

    def look(self) -> bool:
        """Ask whether the servers have an optimizer. Waits."""
        self.is_set = self._wait(self._servers.has_optimizer())
        return self.is_set

    def adopt(self) -> None:
        """Note the optimizer that the deciding rank may have loaded. Waits."""
        self.known = None  # if its class is unknown here, it stays None
        with suppress(UnknownOptimizerError):
            self._note(self._wait(self._servers.declared_optimizer()))

    def in_use(self) -> Optimizer | None:
        """Return the optimizer of all servers. Waits. Raises ``OptimizerMismatch``."""
        for _ in range(_READ_BACK_TRIES):
            found = self._wait(self._servers.optimizers())
            if all(optimizer == found[0] for optimizer in found):
                return found[0] if found else None
        raise OptimizerMismatch(f"the servers use different optimizers: {found}")
