"""What all workers of a store do together: deleting keys, loading a checkpoint.

Each rank numbers its calls of this kind. A call is carried out by the deciding rank (the
lowest that is there) once every live rank has come to it, and is over for all when that rank
has reported back. Ranks whose calls differ are told so. Pure but for answering; part of the
directory, on the scheduler's I/O thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.protocol import pack
from pslite.customer import Incoming
from pslite.errors import UsageError
from pslite.ids import rank_of


@dataclass(slots=True)
class _Meeting:
    """One call: who has come, and who is carrying it out."""

    name: str
    """What it does, in words for the error of a rank that does something else."""
    arrived: dict[int, Incoming] = field(default_factory=dict)
    carried_out_by: int | None = None


class Meetings:
    """The calls of one store that are not over yet."""

    def __init__(self) -> None:
        self._open: dict[int, _Meeting] = {}

    def arrive(self, call: int, name: str, incoming: Incoming, live: Sequence[int]) -> None:
        """A rank has come to its ``call``-th call."""
        meeting = self._open.setdefault(call, _Meeting(name))
        rank = rank_of(incoming.sender)
        meeting.arrived[rank] = incoming
        if meeting.name != name:
            del self._open[call]
            error = UsageError(
                f"worker {rank} calls {name} where worker {min(meeting.arrived)} calls "
                f"{meeting.name}; all workers have to make these calls in the same order"
            )
            for other in meeting.arrived.values():
                other.fail(error)
        else:
            self._begin(meeting, live)

    def departed(self, live: Sequence[int]) -> None:
        """A rank is gone: nobody waits for it any more, and another may have to decide."""
        for meeting in list(self._open.values()):
            if meeting.carried_out_by is not None and meeting.carried_out_by not in live:
                meeting.carried_out_by = None
            self._begin(meeting, live)

    def done(self, call: int, news: bytes, error: BaseException | None) -> None:
        """The deciding rank has carried it out, or failed."""
        meeting = self._open.pop(call, None)
        if meeting is None:
            return
        for rank, incoming in meeting.arrived.items():
            if rank == meeting.carried_out_by:
                continue
            if error is not None:
                incoming.fail(error)
            else:
                incoming.respond(pack(False, news))

    @staticmethod
    def _begin(meeting: _Meeting, live: Sequence[int]) -> None:
        """Let the deciding rank go ahead once all are there."""
        if meeting.carried_out_by is None and live and meeting.arrived.keys() >= set(live):
            meeting.carried_out_by = min(live)
            meeting.arrived[min(live)].respond(pack(True, b""))
