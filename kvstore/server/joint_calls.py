"""``JointCallCoordinator``: calls that all workers of a store make together.

Each rank numbers its calls. The deciding rank (the lowest live one) carries a call out once every
live rank has made it; the call ends for all ranks when the deciding rank has reported back. Ranks
whose calls differ get an error, and if one rank cannot take part, all get its error. Pure, except
that it sends answers; part of the directory, on the scheduler's I/O thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.protocol.requests import CLOSING, pack
from pslite.errors import UsageError
from pslite.ids import rank_of
from pslite.node.customer import Incoming

_MOST_SAID = 16
"""How many texts are remembered, for a process that repeats the call of a lost one."""


@dataclass(slots=True)
class _JointCall:
    """One call: the ranks that have made it, and the rank that carries it out."""

    name: str
    """The call with its arguments; the error text quotes it when another rank's call differs."""
    arrived: dict[int, Incoming] = field(default_factory=dict)
    carried_out_by: int | None = None
    error: BaseException | None = None
    """The ranks' calls differ, or one cannot take part; later ranks get this error too."""

    def returned(self, rank: int) -> None:
        """Forget that a rank has made the call: another process will make it again."""
        self.arrived.pop(rank, None)
        if self.carried_out_by == rank:
            self.carried_out_by = None


class JointCallCoordinator:
    """The calls of one store that are not over yet."""

    def __init__(self) -> None:
        self._open: dict[int, _JointCall] = {}
        #: The highest number of a call that is over. Only calls without waiting callers may have a
        #: lower number and be open.
        self._last = 0
        #: What was said in the last calls, by their numbers.
        self._said: dict[int, str] = {}

    def state(self) -> list[Any] | None:
        """Return all as plain data, for ``resume``; None if a call is open."""
        return None if self._open else [self._last, list(map(list, self._said.items()))]

    def resume(self, state: Sequence[Any]) -> None:
        """Go on from what ``state`` has returned."""
        self._last, said = state
        self._said = dict(said)

    def said(self, call: int) -> str:
        """Return the text of a call that is over; empty if it is forgotten."""
        return self._said.get(call, "")

    def is_over(self, call: int) -> bool:
        """Return whether a call has ended for all ranks."""
        return call <= self._last and call not in self._open

    def returned(self, rank: int) -> None:
        """Go on with another process of a lost worker, which repeats its open call."""
        for joint_call in self._open.values():
            joint_call.returned(rank)

    def arrive(
        self,
        call: int,
        name: str,
        incoming: Incoming,
        live: Sequence[int],
        error: BaseException | None = None,
    ) -> None:
        """Handle a rank's ``call``-th call; ``error`` says why that rank cannot take part."""
        joint_call = self._open.setdefault(call, _JointCall(name))
        rank = rank_of(incoming.sender)
        if not joint_call.arrived:
            joint_call.name = name
        if joint_call.error is None and joint_call.name != name:
            joint_call.error = UsageError(
                f"worker {rank} called {name}, but worker {min(joint_call.arrived)} called "
                f"{joint_call.name}; make the same calls with the same arguments in the same order "
                "on all workers"
            )
        joint_call.error = joint_call.error or error
        joint_call.arrived[rank] = incoming
        self._look_at(call, joint_call, live)

    def departed(self, live: Sequence[int]) -> None:
        """Stop waiting for a rank that has left; another may have to carry out its calls."""
        for call, joint_call in list(self._open.items()):
            if joint_call.carried_out_by is not None and joint_call.carried_out_by not in live:
                joint_call.carried_out_by = None
            self._look_at(call, joint_call, live)

    def fail(self, error: UsageError, live: Sequence[int]) -> None:
        """Fail all open calls: some ranks will never make them.

        Calls of ``close`` are kept: no worker waits for them, and all workers may still make them.
        """
        for call, joint_call in list(self._open.items()):
            if joint_call.carried_out_by is None and joint_call.name != CLOSING:
                joint_call.error = joint_call.error or error
                self._look_at(call, joint_call, live)

    def done(self, call: int, news: bytes, error: BaseException | None, said: str = "") -> str:
        """Record that the deciding rank has finished or failed; return the call's name.

        ``said`` is the text for all ranks, which the news have.
        """
        if said:
            self._said[call] = said
            if len(self._said) > _MOST_SAID:
                del self._said[next(iter(self._said))]
        joint_call = self._open.pop(call, None)
        self._last = max(self._last, call)
        if joint_call is None:
            return ""
        for rank, incoming in joint_call.arrived.items():
            if rank == joint_call.carried_out_by:
                continue
            if error is not None:
                incoming.fail(error)
            else:
                incoming.respond(pack(False, news))
        return joint_call.name

    def _look_at(self, call: int, joint_call: _JointCall, live: Sequence[int]) -> None:
        """Let the deciding rank proceed once all ranks have called, or fail the call."""
        all_there = bool(live) and joint_call.arrived.keys() >= set(live)
        if joint_call.error is not None:
            for incoming in joint_call.arrived.values():  # a request is answered only once
                incoming.fail(joint_call.error)
            if all_there:
                del self._open[call]
                self._last = max(self._last, call)
        elif joint_call.carried_out_by is None and all_there:
            joint_call.carried_out_by = min(live)
            joint_call.arrived[min(live)].respond(pack(True, b""))
