"""``Meetings``: calls that all workers of a store make together.

Each rank numbers its calls. The deciding rank (the lowest live one) carries a call out once every
live rank has made it; the call ends for all ranks when the deciding rank has reported back. Ranks
whose calls differ get an error, and if one rank cannot take part, all get its error. Pure, except
that it sends answers; part of the directory, on the scheduler's I/O thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.protocol.requests import CLOSING, pack
from pslite.errors import UsageError
from pslite.ids import rank_of
from pslite.node.customer import Incoming


@dataclass(slots=True)
class _Meeting:
    """One call: the ranks that have made it, and the rank that carries it out."""

    name: str
    """The call with its arguments; the error text quotes it when another rank's call differs."""
    arrived: dict[int, Incoming] = field(default_factory=dict)
    carried_out_by: int | None = None
    error: BaseException | None = None
    """The ranks' calls differ, or one cannot take part; later ranks get this error too."""


class Meetings:
    """The calls of one store that are not over yet."""

    def __init__(self) -> None:
        self._open: dict[int, _Meeting] = {}

    def arrive(
        self,
        call: int,
        name: str,
        incoming: Incoming,
        live: Sequence[int],
        error: BaseException | None = None,
    ) -> None:
        """Handle a rank's ``call``-th call; ``error`` says why that rank cannot take part."""
        meeting = self._open.setdefault(call, _Meeting(name))
        rank = rank_of(incoming.sender)
        if meeting.error is None and meeting.name != name:
            meeting.error = UsageError(
                f"worker {rank} called {name}, but worker {min(meeting.arrived)} called "
                f"{meeting.name}; make these calls in the same order on all workers"
            )
        meeting.error = meeting.error or error
        meeting.arrived[rank] = incoming
        self._look_at(call, meeting, live)

    def departed(self, live: Sequence[int]) -> None:
        """Stop waiting for a rank that has left; another may have to carry out its calls."""
        for call, meeting in list(self._open.items()):
            if meeting.carried_out_by is not None and meeting.carried_out_by not in live:
                meeting.carried_out_by = None
            self._look_at(call, meeting, live)

    def fail(self, error: UsageError, live: Sequence[int]) -> None:
        """Fail all open calls: some ranks will never make them.

        Calls of ``close`` are kept: no worker waits for them, and all workers may still make them.
        """
        for call, meeting in list(self._open.items()):
            if meeting.carried_out_by is None and meeting.name != CLOSING:
                meeting.error = meeting.error or error
                self._look_at(call, meeting, live)

    def done(self, call: int, news: bytes, error: BaseException | None) -> str:
        """Record that the deciding rank has finished or failed; return the call's name."""
        meeting = self._open.pop(call, None)
        if meeting is None:
            return ""
        for rank, incoming in meeting.arrived.items():
            if rank == meeting.carried_out_by:
                continue
            if error is not None:
                incoming.fail(error)
            else:
                incoming.respond(pack(False, news))
        return meeting.name

    def _look_at(self, call: int, meeting: _Meeting, live: Sequence[int]) -> None:
        """Let the deciding rank proceed once all ranks have called, or fail the call."""
        all_there = bool(live) and meeting.arrived.keys() >= set(live)
        if meeting.error is not None:
            for incoming in meeting.arrived.values():  # a request is answered only once
                incoming.fail(meeting.error)
            if all_there:
                del self._open[call]
        elif meeting.carried_out_by is None and all_there:
            meeting.carried_out_by = min(live)
            meeting.arrived[min(live)].respond(pack(True, b""))
