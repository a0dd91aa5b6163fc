"""``Meetings``: calls that all workers of a store make together.

Each rank numbers its calls. A call is carried out by the deciding rank (the lowest that is there)
once every live rank has come to it, and is over for all when that rank has reported back. Ranks
whose calls differ are told so, and all hear the error of one that cannot take part. Pure but for
answering; part of the directory, on the scheduler's I/O thread.
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
    """One call: who has come, and who is carrying it out."""

    name: str
    """What it does, in words for the error of a rank that does something else."""
    arrived: dict[int, Incoming] = field(default_factory=dict)
    carried_out_by: int | None = None
    error: BaseException | None = None
    """Ranks do different things, or one cannot take part: those still to come hear of it too."""


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
        """Handle a rank's ``call``-th call; with ``error`` it cannot take part."""
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
        """Stop waiting for a rank that is gone; another may have to decide."""
        for call, meeting in list(self._open.items()):
            if meeting.carried_out_by is not None and meeting.carried_out_by not in live:
                meeting.carried_out_by = None
            self._look_at(call, meeting, live)

    def fail(self, error: UsageError, live: Sequence[int]) -> None:
        """Fail all open meetings: some ranks will never come.

        No worker waits for the end of a store, which its workers may reach still.
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
        """Let the deciding rank proceed once all are there, or drop failed calls."""
        all_there = bool(live) and meeting.arrived.keys() >= set(live)
        if meeting.error is not None:
            for incoming in meeting.arrived.values():  # without effect where it is not the first
                incoming.fail(meeting.error)
            if all_there:
                del self._open[call]
        elif meeting.carried_out_by is None and all_there:
            meeting.carried_out_by = min(live)
            meeting.arrived[min(live)].respond(pack(True, b""))
