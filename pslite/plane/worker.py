"""A worker's half of the data plane. Pure; runs on the node's I/O thread.

The rules stand in the package's docstring; ``server.py`` is the other half.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pslite.errors import ProtocolError, rebuild
from pslite.plane.interface import Buffer, Piece, Send, cut
from pslite.wire.messages import Answer, Exchange, Ints, PartsFailed, StaleEpoch

Sink = Callable[[Sequence[int], Sequence[Piece], Sequence[int]], None]
"""Takes (indices into the transfer's parts, their values, their versions)."""


class Transfer:
    """A push, a pull or both, of several parts of one server.

    ``frames`` hold the pushed parts' bytes in order, each frame whole parts. They belong to
    the plane until ``done`` is called: with None, or with the first error once every part has
    been answered or given up. ``sink`` copies values out; its pieces are valid during the call.
    """

    __slots__ = (
        "_error",
        "_left",
        "abandoned",
        "done",
        "failed",
        "frames",
        "parts",
        "priority",
        "pull",
        "push",
        "server",
        "sink",
        "sizes",
    )

    def __init__(
        self,
        server: int,
        parts: Ints,
        sizes: Ints,
        frames: Sequence[Buffer] | None,
        sink: Sink | None,
        done: Callable[[BaseException | None], None],
        priority: int = 0,
    ) -> None:
        self.server = server
        self.parts = parts
        self.sizes = sizes
        self.push = frames is not None
        self.frames: Sequence[Buffer] = frames if frames is not None else ()
        self.pull = sink is not None
        self.sink = sink
        self.done = done
        self.priority = priority
        #: Nobody wants the values any more (a time-out); they are not copied out.
        self.abandoned = False
        #: Index of a part that came to nothing -> why; None when it may be any of them.
        self.failed: dict[int, BaseException] | None = {}
        self._left = len(parts)
        self._error: BaseException | None = None

    def deliver(
        self, indices: Sequence[int], pieces: Sequence[Piece], versions: Sequence[int]
    ) -> None:
        """These parts are answered."""
        if self.sink is not None and not self.abandoned:
            try:
                self.sink(indices, pieces, versions)
            except Exception as error:
                self.failed = None
                self._error = self._error or error
        self._settle(len(indices))

    def fail(self, index: int, error: BaseException) -> None:
        """One part came to nothing."""
        if self.failed is not None:
            self.failed[index] = error
        self._error = self._error or error
        self._settle(1)

    def give_up(self, error: BaseException) -> None:
        """All parts that are not answered yet came to nothing."""
        if self._left:
            self.failed = None
            self._error = self._error or error
            self._settle(self._left)

    @property
    def complete(self) -> bool:
        """Whether every part has been answered or given up."""
        return self._left == 0

    def _settle(self, count: int) -> None:
        self._left -= count
        if self._left == 0:
            self.frames = ()
            self.done(self._error)


class _Requested:
    """A worker's view of one part."""

    __slots__ = ("freed", "held", "inflight", "pulling", "pushed")

    def __init__(self) -> None:
        #: The highest round that counts, and the lower ones that were refused: those are
        #: given to the next pushes, since a round without them would never be complete.
        self.pushed = 0
        self.freed: list[int] = []
        #: Round -> the push that is not answered yet.
        self.inflight: dict[int, tuple[Transfer, int]] = {}
        #: The request whose value is awaited: a pull, or a push with pull; and its round.
        self.pulling: tuple[Transfer, int, int] | None = None
        #: Requests that wait for their turn, oldest first.
        self.held: deque[tuple[Transfer, int]] = deque()

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
        if self.pulling is not None:
            return False
        return not transfer.push or len(self.inflight) <= window


class WorkerPlane:
    """A worker's half of the plane. Effects are ``Send`` to servers' node ids."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._parts: dict[int, _Requested] = {}
        #: Transfers that are not complete, in order of submission.
        self._active: dict[Transfer, None] = {}
        self._outbox: dict[int, list[tuple[int, int, Send]]] = {}
        self._sequence = 0
        self._stale: list[StaleEpoch] = []
        self._error: BaseException | None = None
        self._departed: dict[int, BaseException] = {}
        self.epoch = 1

    # -- events ------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        """Take a request on; ``take`` hands out what may be sent."""
        error = self._error or self._departed.get(transfer.server)
        if error is not None:
            if transfer.parts:
                transfer.give_up(error)
            else:
                transfer.done(error)
            return
        if not transfer.parts:
            transfer.done(None)
            return
        self._active[transfer] = None
        window = self._window
        ready = []
        for index, part in enumerate(transfer.parts):
            state = self._parts.get(part)
            if state is None:
                state = self._parts[part] = _Requested()
            if state.held or not state.may_send(transfer, window):
                state.held.append((transfer, index))
            else:
                ready.append((index, self._claim(state, transfer, index)))
        if ready:
            self._queue_send(transfer, ready)

    def answered(self, message: Answer, frames: Sequence[Buffer]) -> None:
        """A server has applied rounds, or sends values."""
        if message.sizes:
            pieces = cut(message.sizes, frames)
        else:
            pieces = [Piece(b"", 0, 0)] * len(message.parts)
        if len(pieces) != len(message.parts):
            raise ProtocolError("an answer with values needs a size for each part")
        found: dict[Transfer, tuple[list[int], list[Piece], list[int]]] = {}
        freed = []
        for part, round_, version, piece in zip(
            message.parts, message.rounds, message.versions, pieces, strict=True
        ):
            request = self._match(part, round_, message.pushed)
            if request is None:
                continue
            transfer, index = request
            indices, values, versions = found.setdefault(transfer, ([], [], []))
            freed.append(part)
            if transfer.pull and piece.stop - piece.start != transfer.sizes[index]:
                transfer.fail(index, ProtocolError(f"a value of part {part} has a wrong size"))
                continue
            indices.append(index)
            values.append(piece)
            versions.append(version)
        for transfer, (indices, values, versions) in found.items():
            if indices:
                transfer.deliver(indices, values, versions)
        self._advance(freed, found)

    def refused(self, message: PartsFailed) -> None:
        """A server could not do it."""
        error = rebuild(message.kind, message.error, role=message.role, rank=message.rank)
        touched: set[Transfer] = set()
        freed = []
        for part, round_ in zip(message.parts, message.rounds, strict=True):
            request = self._match(part, round_, message.pushed)
            if request is None:
                continue
            if message.pushed and not message.consumed:
                self._parts[part].free(round_)
            request[0].fail(request[1], error)
            touched.add(request[0])
            freed.append(part)
        self._advance(freed, touched)

    def stale(self, message: StaleEpoch) -> None:
        """A server is in a later epoch than a request was; send it again in that epoch."""
        if message.epoch > self.epoch:
            self._stale.append(message)
            return
        again: dict[Transfer, list[tuple[int, int]]] = {}
        for part, round_ in zip(message.parts, message.rounds, strict=True):
            request = self._find(part, round_, message.pushed)
            if request is not None:
                again.setdefault(request[0], []).append((request[1], round_))
        for transfer, entries in again.items():
            self._queue_send(transfer, entries)

    @property
    def awaited_epoch(self) -> int:
        """The latest epoch that a server has spoken of and nobody has announced; 0: none."""
        return max((message.epoch for message in self._stale), default=0)

    def begin_epoch(self, epoch: int) -> None:
        """The scheduler has announced a later epoch."""
        self.epoch = epoch
        waiting, self._stale = self._stale, []
        for message in waiting:
            self.stale(message)

    def depart(self, server: int, error: BaseException) -> None:
        """A server is gone: what waits for it, and what comes, ends with ``error``."""
        self._departed[server] = error
        self._outbox.pop(server, None)
        for transfer in [t for t in self._active if t.server == server]:
            self._drop(transfer, error)

    def fail(self, error: BaseException) -> None:
        """Nothing can be done any more: everything ends with ``error``."""
        self._error = error
        self._outbox.clear()
        for transfer in list(self._active):
            self._drop(transfer, error)

    def forget(self, parts: Iterable[int]) -> None:
        """These parts are gone for good; requests of them that are under way are still answered."""
        for part in parts:
            state = self._parts.get(part)
            if state is not None and not (state.inflight or state.held or state.pulling):
                del self._parts[part]

    # -- what may be sent --------------------------------------------------------------

    def servers_with_mail(self) -> list[int]:
        """The servers for which something waits to be sent."""
        return list(self._outbox)

    def take(self, server: int) -> Send | None:
        """The next message for a server, highest priority first."""
        mail = self._outbox.get(server)
        if not mail:
            return None
        send = heapq.heappop(mail)[2]
        if not mail:
            del self._outbox[server]
        return send

    @property
    def idle(self) -> bool:
        """Whether every request has been answered."""
        return not self._active

    @property
    def everything_sent(self) -> bool:
        """Whether no request is held back any more."""
        return not self._outbox and not any(state.held for state in self._parts.values())

    def waiting_for(self) -> list[int]:
        """The servers that still owe an answer."""
        return sorted({transfer.server for transfer in self._active})

    # -- inside ------------------------------------------------------------------------

    def _match(self, part: int, round_: int, pushed: bool) -> tuple[Transfer, int] | None:
        """The request that an answer belongs to; it counts as answered. None: it was before."""
        request = self._find(part, round_, pushed)
        if request is None:
            return None
        state = self._parts[part]
        if pushed:
            del state.inflight[round_]
        if state.pulling is not None and state.pulling[:2] == request:
            state.pulling = None
        return request

    def _find(self, part: int, round_: int, pushed: bool) -> tuple[Transfer, int] | None:
        state = self._parts.get(part)
        if state is None:
            return None
        if pushed:
            return state.inflight.get(round_)
        pulling = state.pulling
        if pulling is None or pulling[0].push or pulling[2] != round_:
            return None
        return pulling[:2]

    def _advance(self, parts: Sequence[int], answered: Iterable[Transfer]) -> None:
        """Send what waited for these parts, and forget transfers that are complete."""
        for transfer in answered:
            if transfer.complete:
                self._active.pop(transfer, None)
        ready: dict[Transfer, list[tuple[int, int]]] = {}
        for part in parts:
            state = self._parts[part]
            # One at a time: each that is sent may hold back the next.
            while state.held and state.may_send(state.held[0][0], self._window):
                transfer, index = state.held.popleft()
                round_ = self._claim(state, transfer, index)
                ready.setdefault(transfer, []).append((index, round_))
        for transfer, entries in ready.items():
            self._queue_send(transfer, entries)

    @staticmethod
    def _claim(state: _Requested, transfer: Transfer, index: int) -> int:
        """Number the request and note that it is under way."""
        round_ = state.pushed
        if transfer.push:
            round_ = state.number()
            state.inflight[round_] = (transfer, index)
        if transfer.pull:
            state.pulling = (transfer, index, round_)
        return round_

    def _queue_send(self, transfer: Transfer, entries: Sequence[tuple[int, int]]) -> None:
        """Put these (index, round) of a transfer into one message for its server."""
        indices = [index for index, _ in entries]
        rounds = tuple(round_ for _, round_ in entries)
        frames: Sequence[Buffer]
        if len(indices) == len(transfer.parts):
            parts, sizes, frames = transfer.parts, transfer.sizes, transfer.frames
        else:
            parts = tuple(transfer.parts[index] for index in indices)
            sizes = tuple(transfer.sizes[index] for index in indices)
            frames = _views(transfer, indices) if transfer.push else ()
        message = Exchange(
            transfer.push, transfer.pull, parts, rounds, sizes if transfer.push else ()
        )
        self._sequence += 1
        mail = self._outbox.setdefault(transfer.server, [])
        entry = (-transfer.priority, self._sequence, Send(transfer.server, message, frames))
        heapq.heappush(mail, entry)

    def _drop(self, transfer: Transfer, error: BaseException) -> None:
        self._active.pop(transfer, None)
        for part in transfer.parts:
            state = self._parts[part]
            state.held = deque(entry for entry in state.held if entry[0] is not transfer)
            for round_ in [r for r, e in state.inflight.items() if e[0] is transfer]:
                del state.inflight[round_]
            if state.pulling is not None and state.pulling[0] is transfer:
                state.pulling = None
        transfer.give_up(error)


def _views(transfer: Transfer, indices: Sequence[int]) -> list[Buffer]:
    """Frames with these parts of a push, neighbours in one."""
    pieces = cut(transfer.sizes, transfer.frames)
    joined: list[Piece] = []
    for index in indices:
        frame, start, stop = pieces[index]
        if joined and joined[-1].frame is frame and joined[-1].stop == start:
            joined[-1] = Piece(frame, joined[-1].start, stop)
        else:
            joined.append(Piece(frame, start, stop))
    return [memoryview(frame)[start:stop] for frame, start, stop in joined]
