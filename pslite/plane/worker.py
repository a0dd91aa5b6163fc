"""``WorkerPlane``: the worker's half of the data plane. Pure.

The docstring of the package has the rules; ``server.py`` is the other half. Read next:
``transfer.py``.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pslite.errors import ProtocolError, PSError, UsageError, rebuild
from pslite.plane.interface import Buffer, Piece, Send, cut
from pslite.plane.transfer import Requested, Transfer, joined, telling
from pslite.wire.base import Ints
from pslite.wire.messages import Answer, Exchange, PartsFailed, StaleEpoch

#: A list of parts is kept as one state after it was requested more often than this.
_FAMILIAR = 2
#: The most lists whose requests are counted.
_MAX_LISTS = 256
_NO_VALUE = Piece(b"", 0, 0)

_EARLY_PUSH = (
    "this process takes the place of a lost worker and has not come to its step yet, so it must "
    "not push; let the script push only in the loop of kv.steps"
)


class _QueuedMessage(NamedTuple):
    """A message that waits to be sent."""

    transfer: Transfer
    message: Exchange
    indices: Sequence[int] | None
    """Indices of the parts in the message; None for all."""
    frames: Sequence[Buffer] | None
    """None until they are made."""


@dataclass(slots=True, eq=False, repr=False)
class _Gate:
    """Whether requests may begin."""

    held_back: list[Transfer] | None = None
    """Requests that wait for ``release``; None if they need not wait."""
    refuses_pushes: bool = False


class WorkerPlane:
    """A worker's half of the plane. Effects are ``Send`` to servers' node ids."""

    def __init__(self, window: int) -> None:
        self._window = window
        #: Part -> its state; several parts may share one.
        self._parts: dict[int, Requested] = {}
        #: How often each list of parts without a joint state was requested.
        self._lists: Counter[Ints] = Counter()
        #: Transfers that are not complete, in order of submission.
        self._active: dict[Transfer, None] = {}
        #: Server -> a heap of the messages that wait to be sent there.
        self.outbox: dict[int, list[tuple[int, int, _QueuedMessage]]] = {}
        self._sequence = 0
        self._stale: list[StaleEpoch] = []
        self._error: BaseException | None = None
        self._tell: Callable[[BaseException], None] | None = None
        self._departed: dict[int, BaseException] = {}
        #: The frames of pushes that were never answered. A server that was declared lost may still
        #: read them in shared memory, so they are kept until the node ends.
        self._unanswered: list[Sequence[Buffer]] = []
        #: Part -> the pushes of an earlier process of this worker, until its state is made.
        self._resumed: dict[int, int] = {}
        self._gate = _Gate()
        self.epoch = 1

    @property
    def num_active(self) -> int:
        """The number of transfers that are not complete."""
        return len(self._active)

    # -- events ------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        """Accept a request; ``take`` returns its messages when they may be sent."""
        if self._tell is not None and transfer.push:
            transfer.done = telling(transfer.done, self._tell)
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
        if self._gate.refuses_pushes and transfer.push:
            transfer.give_up(UsageError(_EARLY_PUSH))
            return
        self._active[transfer] = None
        if self._gate.held_back is None:
            self._begin(transfer)
        else:
            self._gate.held_back.append(transfer)

    def _begin(self, transfer: Transfer) -> None:
        parts, ready = transfer.parts, []
        whole = self._parts.get(parts[0])
        if whole is None or whole.parts != parts:
            whole = self._make_whole(parts)
        requests: Iterable[tuple[int | None, Requested]] = ((None, whole),) if whole else ()
        for index, state in requests or enumerate(map(self._single, parts)):
            request = (transfer, index)
            round_ = None if state.held else state.claim(request, self._window)
            if round_ is None:
                state.held.append(request)
            else:
                ready.append((index, round_))
        if ready:
            self._queue_send(transfer, ready)

    def answered(self, message: Answer, frames: Sequence[Buffer]) -> None:
        """Handle an answer: a server has applied rounds, or sends values.

        Raises ``ProtocolError`` for a malformed answer; its requests end with such an error too.
        """
        parts, rounds = message.parts, message.rounds
        try:
            if message.sizes and len(message.sizes) != len(parts):
                raise ProtocolError(
                    f"an answer needs a size for each of its {len(parts)} parts, got "
                    f"{len(message.sizes)}"
                )
            pieces = cut(message.sizes, frames) if message.sizes else [_NO_VALUE] * len(parts)
        except ProtocolError as error:
            reason = error

            def why(transfer: Transfer, index: int) -> PSError:
                return transfer.unusable((index,), reason)

            self._come_to_nothing(message, why, is_open=False)
            raise
        state = self._parts.get(parts[0]) if parts else None
        if state is None or state.parts != parts or rounds.count(rounds[0]) != len(rounds):
            self._answered_singly(message, pieces)
            return
        request = state.find(rounds[0], message.pushed)
        if request is None:
            return  # it was answered before
        transfer = request[0]
        is_plain = transfer.pull and not transfer.form
        if transfer.parts != parts or (is_plain and message.sizes != transfer.sizes):
            self._answered_singly(message, pieces)
            return
        state.answered(request, rounds[0], message.pushed)
        transfer.deliver(range(len(parts)), pieces, message.versions)
        self._advance((state,), (transfer,))

    def _answered_singly(self, message: Answer, pieces: Sequence[Piece]) -> None:
        """Handle an answer whose parts do not have one state together."""
        found: dict[Transfer, tuple[list[int], list[Piece], list[int]]] = {}
        freed: list[Requested] = []
        for part, round_, version, piece in zip(
            message.parts, message.rounds, message.versions, pieces, strict=True
        ):
            request = self._match(part, round_, message.pushed)
            if request is None:
                continue
            transfer, index = request
            indices, values, versions = found.setdefault(transfer, ([], [], []))
            freed.append(self._parts[part])
            is_plain = transfer.pull and not transfer.form
            if is_plain and piece.stop - piece.start != transfer.sizes[index]:
                size = ValueError(
                    f"expected {transfer.sizes[index]} bytes, got {piece.stop - piece.start}"
                )
                transfer.fail(index, transfer.unusable((index,), size))
                continue
            indices.append(index)
            values.append(piece)
            versions.append(version)
        for transfer, (indices, values, versions) in found.items():
            if indices:
                transfer.deliver(indices, values, versions)
        self._advance(freed, found)

    def refused(self, message: PartsFailed) -> None:
        """Fail the requests that a server refused."""
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
        """Fail the requests of a message; with ``is_open``, free their round numbers."""
        touched: set[Transfer] = set()
        freed: list[Requested] = []
        for part, round_ in zip(message.parts, message.rounds, strict=True):
            request = self._match(part, round_, message.pushed)
            if request is None:
                continue
            if is_open:
                self._parts[part].free(round_)
            request[0].fail(request[1], why(*request))
            touched.add(request[0])
            freed.append(self._parts[part])
        self._advance(freed, touched)

    def stale(self, message: StaleEpoch) -> None:
        """Resend a request in the server's epoch, once the scheduler has announced it."""
        if message.epoch > self.epoch:
            self._stale.append(message)
            return
        again: dict[Transfer, list[tuple[int | None, int]]] = {}
        for part, round_ in zip(message.parts, message.rounds, strict=True):
            request = self._match(part, round_, message.pushed, is_answered=False)
            if request is not None:
                again.setdefault(request[0], []).append((request[1], round_))
        for transfer, entries in again.items():
            self._queue_send(transfer, entries)

    @property
    def awaited_epoch(self) -> int:
        """The latest epoch that a server named and that is not announced yet; 0: none."""
        return max((message.epoch for message in self._stale), default=0)

    def begin_epoch(self, epoch: int) -> None:
        """Begin a later epoch, which the scheduler has announced."""
        self.epoch = epoch
        waiting, self._stale = self._stale, []
        for message in waiting:
            self.stale(message)

    # -- steps, and another process in the place of this one ---------------------------

    def hold_back(self) -> None:
        """Let later requests wait for ``release``."""
        if self._gate.held_back is not None:
            raise UsageError("a step begins already; wait for that first")
        self._gate.held_back = []

    def release(self) -> None:
        """Send the requests that have waited since ``hold_back``."""
        held, self._gate.held_back = self._gate.held_back or [], None
        for transfer in held:
            if transfer.left:
                self._begin(transfer)

    def counts(self) -> dict[int, int] | None:
        """Return how many pushes each part has had; parts without pushes are left out.

        Returns None if a refused push has freed its round, so that numbers do not tell it.
        """
        if any(state.freed for state in self._parts.values()):
            return None
        counts = {**self._resumed}
        counts.update((part, state.pushed) for part, state in self._parts.items())
        return {part: pushed for part, pushed in counts.items() if pushed}

    def resume(self, counts: Mapping[int, int]) -> None:
        """Go on in the place of a lost process.

        ``counts`` are its pushes of each part. Pushes are refused until ``repeat``. Call this
        before any request.
        """
        self._resumed, self._gate.refuses_pushes = dict(counts), True

    def repeat(self) -> None:
        """Allow pushes: this process has come to the step that it repeats."""
        self._gate.refuses_pushes = False

    @property
    def catches_up(self) -> bool:
        """Whether this process has not come to the step that it repeats."""
        return self._gate.refuses_pushes

    def reroute(self, server: int) -> None:
        """Send what a server has not answered again: another process has its seat."""
        self.outbox.pop(server, None)
        for transfer in [t for t in self._active if t.server == server]:
            entries: list[tuple[int | None, int]] = []
            for state in dict.fromkeys(map(self._parts.get, transfer.parts)):
                if state is not None:
                    entries += state.unanswered(transfer)
            if entries:
                self._queue_send(transfer, entries)

    def depart(self, server: int, error: BaseException) -> None:
        """Fail all requests to a gone server, and later ones, with ``error``."""
        self._departed[server] = error
        self.outbox.pop(server, None)
        for transfer in [t for t in self._active if t.server == server]:
            self._drop(transfer, error)

    def fail(self, error: BaseException) -> None:
        """Fail all requests, and later ones, with ``error``."""
        self._error = error
        self.outbox.clear()
        for transfer in list(self._active):
            self._drop(transfer, error)

    def close(self) -> None:
        """Release memory: the node has ended, and ``fail`` was called."""
        self._unanswered.clear()

    def tell_failures(self, tell: Callable[[BaseException], None]) -> None:
        """Call ``tell`` with the error of each push that fails from now on."""
        if self._tell is None:
            self._tell = tell
            for transfer in self._active:
                if transfer.push:
                    transfer.done = telling(transfer.done, tell)

    def forget(self, parts: Iterable[int]) -> None:
        """Forget deleted parts, except parts with requests in flight."""
        for part in parts:
            state = self._parts.get(part)
            self._resumed.pop(part, None)
            if state is not None and state.is_idle:
                self._single(part)
                del self._parts[part]

    # -- what may be sent --------------------------------------------------------------

    def take(self, server: int) -> Send:
        """Take the next message from ``outbox``, highest priority first; make its frames."""
        queue = self.outbox[server]
        transfer, message, indices, frames = heapq.heappop(queue)[2]
        if not queue:
            del self.outbox[server]
        if frames is None:
            transfer.make_frames()
            frames = transfer.frames if indices is None else transfer.frames_of(indices)
        return Send(server, message, frames)

    @property
    def idle(self) -> bool:
        """Whether every request has been answered or has failed."""
        return not self._active

    @property
    def everything_sent(self) -> bool:
        """Whether no request waits to be sent."""
        return not self._gate.held_back and self.everything_sent_before

    @property
    def everything_sent_before(self) -> bool:
        """Whether no request from before ``hold_back`` waits to be sent."""
        if self.outbox or self._stale:
            return False
        return not any(state.held for state in self._parts.values())

    @property
    def everything_answered_before(self) -> bool:
        """Whether every request from before ``hold_back`` is complete."""
        return len(self._active) <= len(self._gate.held_back or ())

    @property
    def num_unsent(self) -> int:
        """The number of messages that wait for credits."""
        return sum(map(len, self.outbox.values()))

    def waiting_for(self) -> list[int]:
        """Return the servers that have not answered all requests."""
        return sorted({transfer.server for transfer in self._active})

    # -- inside ------------------------------------------------------------------------

    def _single(self, part: int) -> Requested:
        """Return the state of this part alone, split off or made if needed."""
        state = self._parts.get(part)
        if state is None:
            state = self._parts[part] = Requested((part,), self._resumed.pop(part, 0))
        elif len(state.parts) > 1:
            self._parts.update((single.parts[0], single) for single in state.split())
            state = self._parts[part]
        return state

    def _make_whole(self, parts: Ints) -> Requested | None:
        """Make a joint state of exactly these parts, if they can have one now."""
        if len(parts) == 1:
            return self._single(parts[0])
        if len(self._lists) >= _MAX_LISTS:
            self._lists.clear()
        self._lists[parts] += 1
        if self._lists[parts] <= _FAMILIAR:
            return None
        whole = joined([self._single(part) for part in parts], parts)
        if whole is not None:
            del self._lists[parts]
            self._parts.update(dict.fromkeys(parts, whole))
        return whole

    def _match(
        self, part: int, round_: int, pushed: bool, *, is_answered: bool = True
    ) -> tuple[Transfer, int] | None:
        """Find the request for one part of a message; mark it as answered."""
        if part not in self._parts:
            return None
        state = self._single(part)
        request = state.find(round_, pushed)
        if request is None:
            return None
        if is_answered:
            state.answered(request, round_, pushed)
        return request[0], request[1] or 0

    def _advance(self, states: Iterable[Requested], answered: Iterable[Transfer]) -> None:
        """Send requests that waited for these answers; forget complete transfers."""
        for transfer in answered:
            if not transfer.left:
                self._active.pop(transfer, None)
        ready: dict[Transfer, list[tuple[int | None, int]]] = {}
        for state in states:
            # One at a time: each request that is sent may hold back the next.
            while state.held and (round_ := state.claim(state.held[0], self._window)) is not None:
                transfer, index = state.held.popleft()
                ready.setdefault(transfer, []).append((index, round_))
        for transfer, entries in ready.items():
            self._queue_send(transfer, entries)

    def _queue_send(self, transfer: Transfer, entries: Sequence[tuple[int | None, int]]) -> None:
        """Queue one message with these entries (index, round) of a transfer.

        The index None stands for all parts, in the same round.
        """
        parts, sizes = transfer.parts, transfer.push_sizes
        if len(entries) > 1:
            entries = sorted(entries, key=lambda entry: entry[0] or 0)
        rounds = tuple(round_ for _, round_ in entries)
        indices = [index for index, _ in entries if index is not None]
        if not indices:
            rounds *= len(parts)
        elif len(indices) < len(parts):
            parts = tuple(parts[index] for index in indices)
            sizes = tuple(sizes[index] for index in indices)
        has_payload = bool(transfer.push or transfer.form)
        message = Exchange(
            transfer.push,
            transfer.pull,
            parts,
            rounds,
            sizes if has_payload else (),
            transfer.form,
            transfer.priority,
        )
        self._sequence += 1
        chosen = indices if has_payload and len(parts) < len(transfer.parts) else None
        frames = None
        if transfer.make is None:
            frames = transfer.frames if chosen is None else transfer.frames_of(chosen)
        queued = _QueuedMessage(transfer, message, chosen, frames)
        queue = self.outbox.setdefault(transfer.server, [])
        heapq.heappush(queue, (-transfer.priority, self._sequence, queued))

    def _drop(self, transfer: Transfer, error: BaseException) -> None:
        self._active.pop(transfer, None)
        self._unanswered.append(transfer.frames)
        for state in map(self._parts.get, transfer.parts):
            if state is None:  # it was held back
                continue
            state.held = deque(entry for entry in state.held if entry[0] is not transfer)
            for round_ in [r for r, e in state.inflight.items() if e[0] is transfer]:
                del state.inflight[round_]
            if state.pulling is not None and state.pulling[0][0] is transfer:
                state.pulling = None
        transfer.give_up(error)
