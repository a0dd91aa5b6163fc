"""A worker's half of the data plane. Pure; runs on the node's I/O thread.

The rules stand in the package's docstring; ``server.py`` is the other half.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pslite.errors import ProtocolError, PSError, UsageError, rebuild
from pslite.ids import rank_of, role_of
from pslite.plane.interface import Buffer, Piece, Send, cut
from pslite.wire.messages import Answer, Exchange, Ints, PartsFailed, StaleEpoch

#: So often a list of parts has to be asked for before they are kept as one.
_FAMILIAR = 2
#: Lists that are not familiar yet are remembered for so many.
_MAX_LISTS = 256

_Request = tuple["Transfer", "int | None"]

Sink = Callable[[Sequence[int], Sequence[Piece], Sequence[int]], None]
"""Takes (indices into the transfer's parts, their values, their versions)."""


class _Letter(NamedTuple):
    """A message that waits to be sent."""

    transfer: Transfer
    message: Exchange
    indices: Sequence[int] | None
    """The parts that it carries; None for all."""
    frames: Sequence[Buffer] | None
    """None while they are to be made."""


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
                self._not_taken(error, indices, pieces, versions)
        self._settle(len(indices))

    def _not_taken(
        self,
        error: Exception,
        indices: Sequence[int],
        pieces: Sequence[Piece],
        versions: Sequence[int],
    ) -> None:
        """The sink has raised: find out about which part. Plain values may be copied twice."""
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
        """What an answer about these parts comes to which makes no sense.

        A ``UsageError`` of the sink stays what it is: the answer is sound, and the call is not.
        """
        if isinstance(error, UsageError):
            return error
        parts = ", ".join(str(self.parts[index]) for index in indices[:5])
        more = f" and {len(indices) - 5} more" if len(indices) > 5 else ""
        found = ProtocolError(
            f"the answer of {role_of(self.server).value} {rank_of(self.server)} about part "
            f"{parts}{more} cannot be used: {error or type(error).__name__}"
        )
        found.__cause__ = error
        return found

    def fail(self, index: int, error: BaseException) -> None:
        """One part came to nothing."""
        self._note(index, error)
        self._settle(1)

    def _note(self, index: int, error: BaseException) -> None:
        if self.failed is not None:
            self.failed[index] = error
        self._error = self._error or error

    def give_up(self, error: BaseException) -> None:
        """All parts that are not answered yet came to nothing."""
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

    @property
    def complete(self) -> bool:
        """Whether every part has been answered or given up."""
        return self._left == 0

    def _settle(self, count: int) -> None:
        self._left -= count
        if self._left == 0:
            # Whoever still holds this transfer does not hold memory.
            done, self.done = self.done, _nothing
            self.frames, self.sink, self._make = (), None, None
            done(self._error)


def _nothing(error: BaseException | None) -> None:
    """What a transfer does that is done already."""


class _Requested:
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
        self.inflight: dict[int, _Request] = {}
        #: The request whose value is awaited: a pull, or a push with pull; and its round.
        self.pulling: tuple[_Request, int] | None = None
        #: Requests that wait for their turn, oldest first.
        self.held: deque[_Request] = deque()

    def split(self) -> list[_Requested]:
        """The same state, once for each part."""
        singles = []
        for index, part in enumerate(self.parts):
            single = _Requested((part,))
            single.pushed, single.freed = self.pushed, list(self.freed)
            single.inflight = {r: (t, index) for r, (t, _) in self.inflight.items()}
            if self.pulling is not None:
                (transfer, _), round_ = self.pulling
                single.pulling = ((transfer, index), round_)
            single.held = deque((transfer, index) for transfer, _ in self.held)
            singles.append(single)
        return singles

    def requests(self) -> list[_Request]:
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
        """Whether a request may go out now, if none is held before it."""
        if self.pulling is not None:
            return False
        return not transfer.push or len(self.inflight) <= window

    def find(self, round_: int, pushed: bool) -> _Request | None:
        """The request that an answer belongs to. None: it was answered before."""
        if pushed:
            return self.inflight.get(round_)
        if self.pulling is None:
            return None
        request, round_pulled = self.pulling
        return None if request[0].push or round_pulled != round_ else request

    def answered(self, request: _Request, round_: int, pushed: bool) -> None:
        """What ``find`` gave is answered."""
        if pushed:
            del self.inflight[round_]
        if self.pulling is not None and self.pulling[0] == request:
            self.pulling = None


class WorkerPlane:
    """A worker's half of the plane. Effects are ``Send`` to servers' node ids."""

    def __init__(self, window: int) -> None:
        self._window = window
        #: Part -> its state, which may be that of several.
        self._parts: dict[int, _Requested] = {}
        #: How often a list of parts without a state of its own was asked for.
        self._lists: Counter[Ints] = Counter()
        #: Transfers that are not complete, in order of submission.
        self._active: dict[Transfer, None] = {}
        self._outbox: dict[int, list[tuple[int, int, _Letter]]] = {}
        self._sequence = 0
        self._stale: list[StaleEpoch] = []
        self._error: BaseException | None = None
        self._departed: dict[int, BaseException] = {}
        #: What was pushed and never answered. A server that was lost, or is thought to be, may
        #: still read it where it lies; so it is never used again while the node is there.
        self._unanswered: list[Sequence[Buffer]] = []
        self.epoch = 1

    @property
    def num_active(self) -> int:
        """Transfers that are not complete."""
        return len(self._active)

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
        whole = self._whole(transfer.parts)
        if whole is not None:
            self._start(whole, (transfer, None))
            return
        ready = []
        for index, part in enumerate(transfer.parts):
            state = self._single(part)
            if state.held or not state.may_send(transfer, self._window):
                state.held.append((transfer, index))
            else:
                ready.append((index, self._claim(state, (transfer, index))))
        if ready:
            self._queue_send(transfer, ready)

    def _start(self, state: _Requested, request: _Request) -> None:
        """A request for all parts of a unit."""
        transfer, _ = request
        if state.held or not state.may_send(transfer, self._window):
            state.held.append(request)
        else:
            self._queue_whole(transfer, self._claim(state, request))

    def answered(self, message: Answer, frames: Sequence[Buffer]) -> None:
        """A server has applied rounds, or sends values.

        Raises ``ProtocolError`` for an answer that makes no sense; what waits for it ends with one.
        """
        try:
            pieces = _pieces_in(message, frames)
        except ProtocolError as error:
            reason = error

            def why(transfer: Transfer, index: int) -> PSError:
                return transfer.unusable((index,), reason)

            self._come_to_nothing(message, why, is_open=False)
            raise
        if self._answered_whole(message, pieces):
            return
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
            is_plain = transfer.pull and not transfer.form
            if is_plain and piece.stop - piece.start != transfer.sizes[index]:
                size = ValueError(f"{piece.stop - piece.start} bytes for {transfer.sizes[index]}")
                transfer.fail(index, transfer.unusable((index,), size))
                continue
            indices.append(index)
            values.append(piece)
            versions.append(version)
        for transfer, (indices, values, versions) in found.items():
            if indices:
                transfer.deliver(indices, values, versions)
        self._advance(freed, found)

    def _answered_whole(self, message: Answer, pieces: Sequence[Piece]) -> bool:
        """An answer to a request for all parts of a unit; whether it was one."""
        parts, rounds = message.parts, message.rounds
        state = self._parts.get(parts[0]) if parts else None
        if state is None or state.parts != parts or rounds.count(rounds[0]) != len(rounds):
            return False
        request = state.find(rounds[0], message.pushed)
        if request is None:
            return True  # it was answered before
        transfer = request[0]
        is_plain = transfer.pull and not transfer.form
        if transfer.parts != parts or (is_plain and message.sizes != transfer.sizes):
            return False
        state.answered(request, rounds[0], message.pushed)
        transfer.deliver(range(len(parts)), pieces, message.versions)
        if transfer.complete:
            self._active.pop(transfer, None)
        self._send_held(state)
        return True

    def _send_held(self, state: _Requested) -> None:
        """Send what waited for this answer; each request that is sent may hold back the next."""
        while state.held and state.may_send(state.held[0][0], self._window):
            request = state.held.popleft()
            round_ = self._claim(state, request)
            if request[1] is None:
                self._queue_whole(request[0], round_)
            else:
                self._queue_send(request[0], [(request[1], round_)])

    def refused(self, message: PartsFailed) -> None:
        """A server could not do it."""
        error = rebuild(message.kind, message.error, role=message.role, rank=message.rank)
        is_open = message.pushed and not message.consumed
        self._come_to_nothing(message, lambda *_: error, is_open=is_open)

    def _come_to_nothing(
        self,
        message: Answer | PartsFailed,
        why: Callable[[Transfer, int], BaseException],
        *,
        is_open: bool,
    ) -> None:
        """End what waits for these parts; pushes are to be made again where rounds are open."""
        touched: set[Transfer] = set()
        freed = []
        for part, round_ in zip(message.parts, message.rounds, strict=True):
            request = self._match(part, round_, message.pushed)
            if request is None:
                continue
            if is_open:
                self._parts[part].free(round_)
            request[0].fail(request[1], why(*request))
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

    def close(self) -> None:
        """The node has ended, after ``fail``: its memory is not used again, whoever holds it."""
        self._unanswered.clear()

    def forget(self, parts: Iterable[int]) -> None:
        """These parts are gone for good; requests of them that are under way are still answered."""
        for part in parts:
            state = self._parts.get(part)
            if state is not None and state.is_idle:
                self._single(part)
                del self._parts[part]

    # -- what may be sent --------------------------------------------------------------

    def servers_with_mail(self) -> list[int]:
        """The servers for which something waits to be sent."""
        return list(self._outbox)

    def take(self, server: int) -> Send | None:
        """The next message for a server, highest priority first; its frames are made now."""
        mail = self._outbox.get(server)
        if not mail:
            return None
        transfer, message, indices, frames = heapq.heappop(mail)[2]
        if not mail:
            del self._outbox[server]
        if frames is None:
            transfer.make_frames()
            frames = _frames(transfer, indices)
        return Send(server, message, frames)

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

    def _single(self, part: int) -> _Requested:
        """The state of this part alone."""
        state = self._parts.get(part)
        if state is None:
            state = self._parts[part] = _Requested((part,))
        elif len(state.parts) > 1:
            self._parts.update((single.parts[0], single) for single in state.split())
            state = self._parts[part]
        return state

    def _whole(self, parts: Ints) -> _Requested | None:
        """The state of exactly these parts as one, if they have one or can have one now."""
        state = self._parts.get(parts[0])
        if state is not None and state.parts == parts:
            return state
        if len(parts) == 1:
            return self._single(parts[0])
        if len(self._lists) >= _MAX_LISTS:
            self._lists.clear()
        self._lists[parts] += 1
        if self._lists[parts] <= _FAMILIAR:
            return None
        whole = _joined([self._single(part) for part in parts], parts)
        if whole is not None:
            del self._lists[parts]
            self._parts.update(dict.fromkeys(parts, whole))
        return whole

    def _match(self, part: int, round_: int, pushed: bool) -> tuple[Transfer, int] | None:
        """The request that an answer belongs to; it counts as answered. None: it was before."""
        if part not in self._parts:
            return None
        state = self._single(part)
        request = state.find(round_, pushed)
        if request is None:
            return None
        state.answered(request, round_, pushed)
        return request[0], request[1] or 0

    def _find(self, part: int, round_: int, pushed: bool) -> tuple[Transfer, int] | None:
        request = self._single(part).find(round_, pushed) if part in self._parts else None
        return None if request is None else (request[0], request[1] or 0)

    def _advance(self, parts: Sequence[int], answered: Iterable[Transfer]) -> None:
        """Send what waited for these parts, and forget transfers that are complete."""
        for transfer in answered:
            if transfer.complete:
                self._active.pop(transfer, None)
        ready: dict[Transfer, list[tuple[int, int]]] = {}
        for part in parts:
            state = self._single(part)
            # One at a time: each that is sent may hold back the next.
            while state.held and state.may_send(state.held[0][0], self._window):
                request = state.held.popleft()
                round_ = self._claim(state, request)
                ready.setdefault(request[0], []).append((request[1] or 0, round_))
        for transfer, entries in ready.items():
            self._queue_send(transfer, entries)

    @staticmethod
    def _claim(state: _Requested, request: _Request) -> int:
        """Number the request and note that it is under way."""
        transfer, _ = request
        round_ = state.pushed
        if transfer.push:
            round_ = state.number()
            state.inflight[round_] = request
        if transfer.pull:
            state.pulling = (request, round_)
        return round_

    def _queue_whole(self, transfer: Transfer, round_: int) -> None:
        """Put a transfer into one message, all its parts in the same round."""
        rounds = (round_,) * len(transfer.parts)
        self._put(transfer, transfer.parts, rounds, transfer.push_sizes, None)

    def _queue_send(self, transfer: Transfer, entries: Sequence[tuple[int, int]]) -> None:
        """Put these (index, round) of a transfer into one message for its server."""
        rounds = tuple(round_ for _, round_ in entries)
        if len(entries) == len(transfer.parts):
            self._put(transfer, transfer.parts, rounds, transfer.push_sizes, None)
            return
        indices = [index for index, _ in entries]
        parts = tuple(transfer.parts[index] for index in indices)
        sizes = tuple(transfer.push_sizes[index] for index in indices)
        has_payload = transfer.push or transfer.form
        self._put(transfer, parts, rounds, sizes, indices if has_payload else None)

    def _put(
        self, transfer: Transfer, parts: Ints, rounds: Ints, sizes: Ints, indices: list[int] | None
    ) -> None:
        form = transfer.form
        message = Exchange(
            transfer.push,
            transfer.pull,
            parts,
            rounds,
            sizes if transfer.push or form else (),
            form,
        )
        self._sequence += 1
        mail = self._outbox.setdefault(transfer.server, [])
        frames = _frames(transfer, indices) if transfer.has_frames else None
        letter = _Letter(transfer, message, indices, frames)
        heapq.heappush(mail, (-transfer.priority, self._sequence, letter))

    def _drop(self, transfer: Transfer, error: BaseException) -> None:
        self._active.pop(transfer, None)
        self._unanswered.append(transfer.frames)
        for part in transfer.parts:
            state = self._parts[part]
            state.held = deque(entry for entry in state.held if entry[0] is not transfer)
            for round_ in [r for r, e in state.inflight.items() if e[0] is transfer]:
                del state.inflight[round_]
            if state.pulling is not None and state.pulling[0][0] is transfer:
                state.pulling = None
        transfer.give_up(error)


def _pieces_in(message: Answer, frames: Sequence[Buffer]) -> list[Piece]:
    """The value of each part of an answer. Raises ``ProtocolError``."""
    if not message.sizes:
        return [Piece(b"", 0, 0)] * len(message.parts)
    if len(message.sizes) != len(message.parts):
        raise ProtocolError("an answer with values needs a size for each part")
    return cut(message.sizes, frames)


def _joined(states: Sequence[_Requested], parts: Ints) -> _Requested | None:
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
    whole = _Requested(parts)
    whole.pushed = first.pushed
    whole.inflight = {round_: (transfer, None) for round_, (transfer, _) in first.inflight.items()}
    whole.held = deque((transfer, None) for transfer, _ in first.held)
    if first.pulling is not None:
        whole.pulling = ((first.pulling[0][0], None), first.pulling[1])
    return whole


def _frames(transfer: Transfer, indices: Sequence[int] | None) -> Sequence[Buffer]:
    """The frames with these parts of a push, None: with all."""
    return transfer.frames if indices is None else _views(transfer, indices)


def _views(transfer: Transfer, indices: Sequence[int]) -> list[Buffer]:
    """Frames with these parts of a push, neighbours in one."""
    pieces = cut(transfer.push_sizes, transfer.frames)
    joined: list[Piece] = []
    for index in indices:
        frame, start, stop = pieces[index]
        if joined and joined[-1].frame is frame and joined[-1].stop == start:
            joined[-1] = Piece(frame, joined[-1].start, stop)
        else:
            joined.append(Piece(frame, start, stop))
    return [memoryview(frame)[start:stop] for frame, start, stop in joined]
