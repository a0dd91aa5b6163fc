"""``Transfer``: a worker's push or pull to one server. Pure.

It is used on the I/O thread once it is submitted.

Used by ``worker.py``, which decides when it goes out and what an answer belongs to.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pslite.errors import ProtocolError, PSError, UsageError
from pslite.ids import rank_of, role_of
from pslite.plane.interface import Buffer, Piece, cut
from pslite.wire.messages import Ints

Sink = Callable[[Sequence[int], Sequence[Piece], Sequence[int]], None]
"""Takes (indices into the transfer's parts, their values, their versions)."""


class Transfer:
    """A push, a pull or both, of several parts of one server.

    ``frames`` hold the pushed parts' bytes in order, each frame whole parts; a function is
    called when they are to be sent, on the I/O thread. They belong to
    the plane until ``done`` is called: with None, or with the first error once every part has
    been answered or given up. ``sink`` copies values out; its pieces are valid during the call.
    ``sizes`` are the bytes of each part's value; ``push_sizes`` those of what is pushed, where
    they differ.

    With a ``form`` of the app's own, what has a ``sink`` is a pull, its frames say what is wanted
    of each part, and ``sink`` has to look at the sizes of its pieces.
    """

    __slots__ = (
        "_error",
        "_left",
        "_make",
        "abandoned",
        "done",
        "failed",
        "form",
        "frames",
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
        self._make = frames if callable(frames) else None
        self.frames: Sequence[Buffer] = () if frames is None or callable(frames) else frames
        self.pull = sink is not None
        self.sink = sink
        self.done = done
        self.priority = priority
        #: The caller wants the values no more (a time-out); they are not copied out.
        self.abandoned = False
        #: Index of a part that failed -> why; None when it may be any of them.
        self.failed: dict[int, BaseException] | None = {}
        self._left = len(parts)
        self._error: BaseException | None = None

    def deliver(
        self, indices: Sequence[int], pieces: Sequence[Piece], versions: Sequence[int]
    ) -> None:
        """Hand on the answer about these parts."""
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
        """Find out about which part the sink has raised. May copy plain values twice."""
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
        """Return the error for an unusable answer about these parts.

        A ``UsageError`` of the sink stays what it is: the answer is sound, and the call is not.
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
        """Fail one part."""
        self._note(index, error)
        self._settle(1)

    def _note(self, index: int, error: BaseException) -> None:
        if self.failed is not None:
            self.failed[index] = error
        self._error = self._error or error

    def give_up(self, error: BaseException) -> None:
        """Fail all parts that are not answered yet."""
        if self._left:
            self.failed = None
            self._error = self._error or error
            self._settle(self._left)

    @property
    def has_frames(self) -> bool:
        """Whether there is nothing to do for ``make_frames``."""
        return self._make is None

    def make_frames(self) -> None:
        """Copy what is to be sent, unless that was done before."""
        if self._make is not None:
            make, self._make = self._make, None
            self.frames = make()

    def frames_of(self, indices: Sequence[int] | None) -> Sequence[Buffer]:
        """Return the frames with these parts of a push, neighbours in one; None: all."""
        if indices is None:
            return self.frames
        pieces = cut(self.push_sizes, self.frames)
        joined: list[Piece] = []
        for index in indices:
            frame, start, stop = pieces[index]
            if joined and joined[-1].frame is frame and joined[-1].stop == start:
                joined[-1] = Piece(frame, joined[-1].start, stop)
            else:
                joined.append(Piece(frame, start, stop))
        return [memoryview(frame)[start:stop] for frame, start, stop in joined]

    @property
    def complete(self) -> bool:
        """Whether every part has been answered or given up."""
        return self._left == 0

    def _settle(self, count: int) -> None:
        self._left -= count
        if self._left == 0:
            # An object that still holds this transfer does not hold memory.
            done, self.done = self.done, _nothing
            self.frames, self.sink, self._make = (), None, None
            done(self._error)


def _nothing(error: BaseException | None) -> None:
    """Do nothing: the transfer is done already."""


Request = tuple[Transfer, "int | None"]
"""A transfer and the index of one of its parts; None stands for all of them."""


@dataclass(slots=True, eq=False)
class Requested:
    """A worker's view of a part, or of several parts in the same state.

    A request is a transfer and the index of its part; None stands for all of its parts, which
    are then exactly these, in this order.
    """

    parts: Ints
    #: The highest round that counts, and the lower ones that were refused: those are
    #: given to the next pushes, since a round without them would never be complete.
    pushed: int = 0
    freed: list[int] = field(default_factory=list)
    #: Round -> the push that is not answered yet.
    inflight: dict[int, Request] = field(default_factory=dict)
    #: The request whose value is awaited: a pull, or a push with pull; and its round.
    pulling: tuple[Request, int] | None = None
    #: Requests that wait for their turn, oldest first.
    held: deque[Request] = field(default_factory=deque)

    def split(self) -> list[Requested]:
        """Return the same state, once for each part."""
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
        """Return everything that is under way or held, in an order of its own."""
        found = [self.inflight[round_] for round_ in sorted(self.inflight)]
        found += self.held
        return found if self.pulling is None else [*found, self.pulling[0]]

    def rounds(self) -> tuple[object, ...]:
        """Return the rounds of ``requests``."""
        pulling = None if self.pulling is None else self.pulling[1]
        return (*sorted(self.inflight), len(self.held), pulling)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self.inflight or self.held or self.pulling)

    def number(self) -> int:
        """Return the round of the next push, and count it."""
        if self.freed:
            return heapq.heappop(self.freed)
        self.pushed += 1
        return self.pushed

    def free(self, round_: int) -> None:
        """Free the round of a push that was not taken."""
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
        """Find the request that an answer belongs to. None: it was answered before."""
        if pushed:
            return self.inflight.get(round_)
        if self.pulling is None:
            return None
        request, round_pulled = self.pulling
        return None if request[0].push or round_pulled != round_ else request

    def answered(self, request: Request, round_: int, pushed: bool) -> None:
        """Note that a request, which ``find`` gave, is answered."""
        if pushed:
            del self.inflight[round_]
        if self.pulling is not None and self.pulling[0] == request:
            self.pulling = None


def joined(states: Sequence[Requested], parts: Ints) -> Requested | None:
    """Join the states of parts that are in the same one; None where they are not.

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
