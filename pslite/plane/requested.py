"""``Requested``: what a worker has asked for of a part. Pure; used by ``worker.py``.

It says which round a push gets, which requests wait for an answer, and which for their turn.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from pslite.plane.transfer import Transfer
from pslite.wire.messages import Ints

Request = tuple[Transfer, "int | None"]
"""A transfer and the index of one of its parts; None stands for all of them."""


class Requested:
    """A worker's view of a part, or of parts that are in the same state (as ``unit.py`` has it).

    A request is a transfer and the index of its part; None stands for all of its parts, which
    are then exactly these, in this order.
    """

    __slots__ = ("freed", "held", "inflight", "parts", "pulling", "pushed")

    def __init__(self, parts: Ints) -> None:
        self.parts = parts
        #: The highest round that counts, and the lower ones that were refused: those are
        #: given to the next pushes, since a round without them would never be complete.
        self.pushed = 0
        self.freed: list[int] = []
        #: Round -> the push that is not answered yet.
        self.inflight: dict[int, Request] = {}
        #: The request whose value is awaited: a pull, or a push with pull; and its round.
        self.pulling: tuple[Request, int] | None = None
        #: Requests that wait for their turn, oldest first.
        self.held: deque[Request] = deque()

    def split(self) -> list[Requested]:
        """The same state, once for each part."""
        singles = []
        for index, part in enumerate(self.parts):
            single = Requested((part,))
            single.pushed, single.freed = self.pushed, list(self.freed)
            single.inflight = {r: (t, index) for r, (t, _) in self.inflight.items()}
            if self.pulling is not None:
                (transfer, _), round_ = self.pulling
                single.pulling = ((transfer, index), round_)
            single.held = deque((transfer, index) for transfer, _ in self.held)
            singles.append(single)
        return singles

    def requests(self) -> list[Request]:
        """Everything that is under way or held, in an order of its own."""
        found = [self.inflight[round_] for round_ in sorted(self.inflight)]
        found += self.held
        return found if self.pulling is None else [*found, self.pulling[0]]

    def rounds(self) -> tuple[object, ...]:
        """The rounds of ``requests``."""
        pulling = None if self.pulling is None else self.pulling[1]
        return (*sorted(self.inflight), len(self.held), pulling)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self.inflight or self.held or self.pulling)

    def number(self) -> int:
        """The round of the next push."""
        if self.freed:
            return heapq.heappop(self.freed)
        self.pushed += 1
        return self.pushed

    def free(self, round_: int) -> None:
        """A push was not taken; its round is open again."""
        heapq.heappush(self.freed, round_)
        while self.pushed in self.freed:
            self.freed.remove(self.pushed)
            heapq.heapify(self.freed)
            self.pushed -= 1

    def may_send(self, transfer: Transfer, window: int) -> bool:
        """Return whether a request may go out now, if none is held before it."""
        if self.pulling is not None:
            return False
        return not transfer.push or len(self.inflight) <= window

    def find(self, round_: int, pushed: bool) -> Request | None:
        """The request that an answer belongs to. None: it was answered before."""
        if pushed:
            return self.inflight.get(round_)
        if self.pulling is None:
            return None
        request, round_pulled = self.pulling
        return None if request[0].push or round_pulled != round_ else request

    def answered(self, request: Request, round_: int, pushed: bool) -> None:
        """What ``find`` gave is answered."""
        if pushed:
            del self.inflight[round_]
        if self.pulling is not None and self.pulling[0] == request:
            self.pulling = None


def joined(states: Sequence[Requested], parts: Ints) -> Requested | None:
    """One state of parts that are in the same one; None where they are not.

    What is under way must have been asked for as exactly these parts.
    """
    first = states[0]
    if len(set(parts)) != len(parts):
        return None
    requests = [transfer for transfer, _ in first.requests()]
    rounds = first.rounds()
    for index, state in enumerate(states):
        mine = state.requests()
        if state.pushed != first.pushed or state.freed or state.rounds() != rounds:
            return None
        if [transfer for transfer, _ in mine] != requests:
            return None
        if any(transfer.parts != parts or at != index for transfer, at in mine):
            return None
    whole = Requested(parts)
    whole.pushed = first.pushed
    whole.inflight = {round_: (transfer, None) for round_, (transfer, _) in first.inflight.items()}
    whole.held = deque((transfer, None) for transfer, _ in first.held)
    if first.pulling is not None:
        whole.pulling = ((first.pulling[0][0], None), first.pulling[1])
    return whole
