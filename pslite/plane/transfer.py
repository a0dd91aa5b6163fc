"""``Transfer``: a worker's push or pull to one server. Pure.

After it is submitted, only the I/O thread uses it. ``worker.py`` decides when it is sent and which
answers belong to it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pslite.errors import ProtocolError, PSError, UsageError
from pslite.ids import rank_of, role_of
from pslite.plane.interface import Buffer, Piece, cut
from pslite.wire.base import Ints

Sink = Callable[[Sequence[int], Sequence[Piece], Sequence[int]], None]
"""A function of (indices into the transfer's parts, their values, their versions)."""


class Transfer:
    """A push, a pull or both of some parts of one server.

    ``frames`` hold the bytes of the pushed parts in order, each frame whole parts. If ``frames``
    is a function, the I/O thread calls it before it sends them. Once every part has been answered
    or given up, the plane calls ``done`` with None or with the first error; until then the frames
    belong to the plane. ``sink`` copies values out; its pieces are valid during the call. ``sizes``
    are the bytes of each part's value, and ``push_sizes`` those of each pushed part, if different.

    With a ``form`` of the app's own, a transfer with a ``sink`` is a pull. Its frames describe the
    request for each part, and ``sink`` must check the sizes of its pieces.
    """

    __slots__ = (
        "_error",
        "abandoned",
        "done",
        "failed",
        "form",
        "frames",
        "left",
        "make",
        "parts",
        "priority",
        "pull",
        "push",
        "push_sizes",
        "server",
        "sink",
        "sizes",
    )

    def __init__(
        self,
        server: int,
        parts: Ints,
        sizes: Ints,
        frames: Sequence[Buffer] | Callable[[], Sequence[Buffer]] | None,
        sink: Sink | None,
        done: Callable[[BaseException | None], None],
        priority: int = 0,
        form: int = 0,
        push_sizes: Ints | None = None,
    ) -> None:
        self.server = server
        self.parts = parts
        self.sizes = sizes
        self.push_sizes = sizes if push_sizes is None else push_sizes
        self.form = form
        self.push = frames is not None and not (form and sink is not None)
        #: Makes the frames; None if they exist.
        self.make = frames if callable(frames) else None
        self.frames: Sequence[Buffer] = () if frames is None or callable(frames) else frames
        self.pull = sink is not None
        self.sink = sink
        self.done = done
        self.priority = int(priority)  # also an integer of NumPy
        #: The caller no longer wants the values (a time-out), so they are not copied out.
        self.abandoned = False
        #: Index of a failed part -> its error; None if any part may have failed.
        self.failed: dict[int, BaseException] | None = {}
        #: The number of parts that are neither answered nor given up.
        self.left = len(parts)
        self._error: BaseException | None = None

    def deliver(
        self, indices: Sequence[int], pieces: Sequence[Piece], versions: Sequence[int]
    ) -> None:
        """Pass the answer for these parts to the sink."""
        if self.sink is not None and not self.abandoned:
            try:
                self.sink(indices, pieces, versions)
            except Exception as error:
                self._not_taken(error, indices, pieces, versions)
        self._settle(len(indices))

    def _not_taken(
        self,
        error: Exception,
        indices: Sequence[int],
        pieces: Sequence[Piece],
        versions: Sequence[int],
    ) -> None:
        """Find the part for which the sink raised an error. May copy plain values twice."""
        if self.form or self.sink is None:
            self.failed = None
            self._error = self._error or self.unusable(indices, error)
            return
        for index, piece, version in zip(indices, pieces, versions, strict=True):
            try:
                self.sink((index,), (piece,), (version,))
            except Exception as again:
                self._note(index, self.unusable((index,), again))

    def unusable(self, indices: Sequence[int], error: Exception) -> PSError:
        """Return the error for an unusable answer for these parts.

        A ``UsageError`` of the sink is returned unchanged: then the call is wrong, not the answer.
        """
        if isinstance(error, UsageError):
            return error
        parts = ", ".join(str(self.parts[index]) for index in indices[:5])
        more = f" and {len(indices) - 5} more" if len(indices) > 5 else ""
        found = ProtocolError(
            f"{role_of(self.server).value} {rank_of(self.server)} sent an invalid answer for "
            f"part {parts}{more}: {error or type(error).__name__}"
        )
        found.__cause__ = error
        return found

    def fail(self, index: int, error: BaseException) -> None:
        """Note that one part has failed, and count it as answered."""
        self._note(index, error)
        self._settle(1)

    def error_of(self, index: int) -> BaseException | None:
        """Return the error of one part, once ``done`` was called."""
        return self._error if self.failed is None else self.failed.get(index)

    def _note(self, index: int, error: BaseException) -> None:
        if self.failed is not None:
            self.failed[index] = error
        self._error = self._error or error

    def give_up(self, error: BaseException) -> None:
        """Fail all parts that are not answered yet."""
        if self.left:
            self.failed = None
            self._error = self._error or error
            self._settle(self.left)

    @property
    def has_frames(self) -> bool:
        """Whether the frames exist, so that ``make_frames`` does nothing."""
        return self.make is None

    def make_frames(self) -> None:
        """Make the frames to send, unless they exist."""
        if self.make is not None:
            make, self.make = self.make, None
            self.frames = make()

    def frames_of(self, indices: Sequence[int]) -> Sequence[Buffer]:
        """Return frames with these parts of a push; join neighbours."""
        pieces = cut(self.push_sizes, self.frames)
        joined: list[Piece] = []
        for index in indices:
            frame, start, stop = pieces[index]
            if joined and joined[-1].frame is frame and joined[-1].stop == start:
                joined[-1] = Piece(frame, joined[-1].start, stop)
            else:
                joined.append(Piece(frame, start, stop))
        return [memoryview(frame)[start:stop] for frame, start, stop in joined]

    def _settle(self, count: int) -> None:
        self.left -= count
        if self.left == 0:
            # Free the memory: other objects may still refer to this transfer.
            done, self.done = self.done, _nothing
            self.frames, self.sink, self.make = (), None, None
            done(self._error)


def _nothing(error: BaseException | None) -> None:
    """Do nothing: replaces ``done`` after it has been called."""


Request = tuple[Transfer, "int | None"]
"""A transfer and the index of one of its parts; None stands for all of them."""


@dataclass(slots=True, eq=False)
class Requested:
    """A worker's view of a part, or of several parts in the same state.

    A request is a transfer and the index of its part; None stands for all of its parts, which
    are then exactly these, in this order.
    """

    parts: Ints
    #: The highest round in use, and the lower rounds whose pushes were refused. The next pushes
    #: get these, because otherwise those rounds would never be complete.
    pushed: int = 0
    freed: list[int] = field(default_factory=list)
    #: Round -> its push that is not answered yet.
    inflight: dict[int, Request] = field(default_factory=dict)
    #: The request whose value is awaited (a pull, or a push with pull), and its round.
    pulling: tuple[Request, int] | None = None
    #: Requests that wait for their turn, oldest first.
    held: deque[Request] = field(default_factory=deque)

    def split(self) -> list[Requested]:
        """Return a copy of the state for each part alone."""
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
        """Return all requests that are in flight or held, in a fixed order."""
        found = [self.inflight[round_] for round_ in sorted(self.inflight)]
        found += self.held
        return found if self.pulling is None else [*found, self.pulling[0]]

    def rounds(self) -> tuple[object, ...]:
        """Return the rounds of ``requests``, to compare two states."""
        pulling = None if self.pulling is None else self.pulling[1]
        return (*sorted(self.inflight), len(self.held), pulling)

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight or held."""
        return not (self.inflight or self.held or self.pulling)

    def free(self, round_: int) -> None:
        """Free the round number of a push that the server refused."""
        heapq.heappush(self.freed, round_)
        while self.pushed in self.freed:
            self.freed.remove(self.pushed)
            heapq.heapify(self.freed)
            self.pushed -= 1

    def claim(self, request: Request, window: int) -> int | None:
        """Give a request its round and note that it is in flight; None if it has to wait.

        No earlier request may be held. At most 1 + ``window`` pushes are in flight.
        """
        transfer = request[0]
        if self.pulling is not None or (transfer.push and len(self.inflight) > window):
            return None
        round_ = self.pushed
        if transfer.push:
            if self.freed:
                round_ = heapq.heappop(self.freed)
            else:
                round_ = self.pushed = self.pushed + 1
            self.inflight[round_] = request
        if transfer.pull:
            self.pulling = (request, round_)
        return round_

    def find(self, round_: int, pushed: bool) -> Request | None:
        """Find the request that an answer is for; None if it was answered before."""
        if pushed:
            return self.inflight.get(round_)
        if self.pulling is None:
            return None
        request, round_pulled = self.pulling
        return None if request[0].push or round_pulled != round_ else request

    def unanswered(self, transfer: Transfer) -> list[tuple[int | None, int]]:
        """Return (index, round) of a transfer's requests that were sent and not answered."""
        found = [(r, request) for r, request in self.inflight.items()]
        if self.pulling is not None and not self.pulling[0][0].push:
            found.append((self.pulling[1], self.pulling[0]))
        return [(index, round_) for round_, (sent, index) in found if sent is transfer]

    def answered(self, request: Request, round_: int, pushed: bool) -> None:
        """Note that a request from ``find`` is answered."""
        if pushed:
            del self.inflight[round_]
        if self.pulling is not None and self.pulling[0] == request:
            self.pulling = None


def joined(states: Sequence[Requested], parts: Ints) -> Requested | None:
    """Join the states of ``parts`` if all are equal; else return None.

    Requests in flight must have been for exactly these parts.
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


def telling(
    done: Callable[[BaseException | None], None], tell: Callable[[BaseException], None]
) -> Callable[[BaseException | None], None]:
    """Return a function that calls ``tell`` with an error, if any, and then ``done``."""

    def tell_and_end(error: BaseException | None) -> None:
        if error is not None:
            tell(error)
        done(error)

    return tell_and_end
