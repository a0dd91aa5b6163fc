"""One collective call in flight: its chunks, and one future for all of them.

The caller's thread sends the chunks, or the node's I/O thread does once it knows how many there
are. Answers arrive on the I/O thread. Read next: ``server.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pslite.collective.arrays import IN_PLACE_BYTES, Bytes
from pslite.collective.asker import CollectiveAsker
from pslite.collective.waits import CallWaits
from pslite.collective.wire import (
    CALL,
    GIVE_UP,
    ArrayLayout,
    CallRequest,
    pack_call,
    pack_give_up,
)
from pslite.errors import describe
from pslite.future import Future
from pslite.ids import Role, node_id
from pslite.node.customer import Reply
from pslite.node.postoffice import Postoffice
from pslite.protocol.collective import CallKey, CollectiveCall, LeadersStep

T = TypeVar("T")

_STAGED_BYTES = 1 << 16
"""Smaller pieces are sent as bytes: copying them to shared memory takes longer."""

# Guards the counts of all calls; it is held only briefly.
_lock = threading.Lock()


def as_frame(node: Postoffice, piece: Bytes, server: int, *, may_write: bool = False) -> memoryview:
    """Return a frame to send; put a large one for a server here in shared memory.

    ``may_write`` lets a server in this process write to a piece that is not read-only.
    """
    frame = piece.data if may_write else piece.data.toreadonly()
    may_map = server not in node.nearby.beside and node.nearby.may_share_with(server)
    if len(piece) < _STAGED_BYTES or not may_map or node.sharing.place_of(frame) is not None:
        return frame
    copy = node.buffer(len(piece))
    copy[:] = piece
    return copy.data


ChunkRequest = tuple[Sequence[Bytes], Callable[[Reply], None], ArrayLayout | None]
"""The pieces that this rank sends, a function for the answer, and a first chunk's layout."""


class CallUnderWay(Generic[T]):
    """A call in flight: ends with its last chunk's answer, or with the first error."""

    def __init__(
        self,
        asker: CollectiveAsker,
        waits: CallWaits | None,
        key: CallKey,
        call: CollectiveCall,
        value: T,
        ended: Callable[[], None],
        text: str | None = None,
        step: LeadersStep | None = None,
    ) -> None:
        self._asker = asker
        self._key = key
        self._call = call
        self._value = value
        self._num_chunks = 0
        self._unanswered: set[int] = set()
        self._ended = ended
        self._step = step
        self._waits, self._wait = waits, None
        text = key.text(call) if text is None else text
        self.future: Future[T] = Future(text)
        if waits is not None:
            self._wait = waits.begin(text, key, self._unanswered)
            self.future.describe = self._wait.text

    def start(self, requests: Sequence[ChunkRequest]) -> None:
        """Send these chunks: the first ones or the next ones."""
        first = self.expect(len(requests))
        for chunk, request in enumerate(requests, first):
            self.send(chunk, request)

    def expect(self, count: int) -> int:
        """Note that ``count`` more chunks will be sent; return the number of the first."""
        with _lock:
            first, self._num_chunks = self._num_chunks, self._num_chunks + count
            self._unanswered.update(range(first, self._num_chunks))
        return first

    def send(self, chunk: int, request: ChunkRequest) -> None:
        """Send one of them."""
        try:
            self._ask(chunk, *request)
        except BaseException:
            self._end()
            raise

    def fail(self, error: BaseException) -> None:
        """End the call with an error of this rank; the other ranks get it too."""
        if not self.future.done():
            self._end()
            self.future.set_error(error)
            give_up(self._asker, self._key, error)

    def _end(self) -> None:
        if self._waits is not None and self._wait is not None:
            self._waits.end(self._wait)
        self._ended()

    def _ask(
        self,
        chunk: int,
        pieces: Sequence[Bytes],
        take: Callable[[Reply], None],
        layout: ArrayLayout | None,
    ) -> None:
        server = self._asker.server_of(self._key, chunk, self._step)
        call = CallRequest(self._key, self._call, chunk, layout, self._step)
        body = pack_call(call, self._asker.node.config.num_workers)
        node = self._asker.node
        is_reduced = self._call.kind == "all_reduce"
        frames = [as_frame(node, piece, server, may_write=is_reduced) for piece in pieces]
        # The answer may lie in another rank's array, whose call is done when this one has accepted.
        may_be_lent = is_reduced and not node.nearby.may_share_with(server)

        def finish(replies: dict[int, Reply]) -> None:
            reply = replies[server]
            if not self.future.done():  # otherwise the arrays belong to the caller again
                take(reply)
            if may_be_lent and sum(map(len, reply.frames)) >= IN_PLACE_BYTES:
                node.links.tell_at_once(node.membership.uids.get(server, ""))

        asked = self._asker.ask(CALL, body, {server: frames}, finish)
        asked.on_done(lambda done: self._chunk_done(chunk, done))

    def _chunk_done(self, chunk: int, done: Future[None]) -> None:
        error = done.error()
        with _lock:
            self._unanswered.discard(chunk)
            is_last = not self._unanswered
        if self.future.done():  # it failed, and the call's name may be in use again
            return
        if error is not None:
            self.fail(error)
        elif is_last:
            self._end()
            self.future.set_result(self._value)


def give_up(asker: CollectiveAsker, key: CallKey, error: BaseException) -> None:
    """Tell the servers to give up a call that failed on one of them or on this rank."""
    node = asker.node
    if node.error is not None:
        return
    body = pack_give_up(key, *describe(error), node.config.num_workers)
    for rank in range(node.config.num_servers):
        server = int(node_id(Role.SERVER, rank))
        asker.ask(GIVE_UP, body, {server: ()}, lambda replies: None)
