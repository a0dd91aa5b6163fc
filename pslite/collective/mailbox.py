"""``send`` and ``recv`` of a ``Communicator``: messages through a server.

A message is cut into letters. The receiver's box is on one server. At most ``WINDOW_BYTES`` of
letters to it are in flight and not yet kept there; the others wait here. Any thread may call;
letters are copied into arrays on the node's I/O thread. Read next: ``protocol/mailbox.py``.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from pslite.apps.asking import Asker
from pslite.collective.arrays import Array, Bytes, chunks, dtype_name, filling, flat
from pslite.collective.pending_call import as_frame
from pslite.collective.wire import (
    MAILBOX_APP,
    RECEIVE,
    SEND,
    ArrayLayout,
    LetterHead,
    pack_letter,
    unpack_letter,
)
from pslite.errors import ProtocolError
from pslite.future import Future
from pslite.ids import Role, node_id
from pslite.node.customer import Reply
from pslite.node.postoffice import Postoffice
from pslite.protocol.collective import GroupKey
from pslite.protocol.mailbox import ANYBODY, Address

WINDOW_BYTES = 16 << 20
_NO_ARRAY = ArrayLayout("", ())


class ReceivedArray(NamedTuple):
    """A message that was received."""

    source: int
    """The sender's rank in the group."""
    tag: int
    array: Array
    dtype: str
    """The name of its dtype; for ``bfloat16`` the array is uint16, unless ``out`` was given."""


class _Outgoing(NamedTuple):
    """A letter that waits to be sent."""

    body: bytes
    piece: Bytes
    done: Callable[[Future[None]], None]


class Mail:
    """The messages of one group on one worker. Ranks are those of the job."""

    def __init__(self, node: Postoffice, group: GroupKey, letter_bytes: int) -> None:
        self._node = node
        self._group = group
        self._step = letter_bytes
        self._asker = Asker(node, MAILBOX_APP, ordered=False)
        # Guards the rest; reentrant, because an answer may arrive while a letter is handed over.
        self._lock = threading.RLock()
        #: (Receiver, tag) -> the number of messages sent; tag -> the number requested.
        self._sent: Counter[tuple[int, int]] = Counter()
        self._asked: Counter[int] = Counter()
        self._queues: dict[int, deque[_Outgoing]] = {}
        self._unkept_bytes: dict[int, int] = {}

    def send(self, array: Array, to: int, tag: int) -> Future[None]:
        """Send an array; the future is done when all of it is kept or delivered."""
        future: Future[None] = self._node.unheard.push(lambda: f"room for a message to worker {to}")
        cuts = chunks(array.nbytes, self._step)
        left = len(cuts)

        def kept(done: Future[None]) -> None:
            nonlocal left
            left -= 1
            error = done.error()
            if error is not None:
                future.set_error(error)
            elif left == 0:
                future.set_result(None)

        layout = ArrayLayout(dtype_name(array), (array.shape,))
        with self._lock:
            self._sent[to, tag] += 1
            number = self._sent[to, tag]
            for chunk, cut in enumerate(cuts):
                address = Address(self._group, self._node.rank, to, tag, number, chunk)
                head = LetterHead(address, _NO_ARRAY if chunk else layout, self._step)
                body = pack_letter(head, self._node.config.num_workers)
                letter = _Outgoing(body, flat(array)[cut], kept)
                self._queues.setdefault(to, deque()).append(letter)
            self._send_more(to)
        return future

    def receive(self, source: int | None, tag: int, out: Array | None) -> Future[ReceivedArray]:
        """Receive the oldest message of a tag; ``source`` None: from any sender."""
        whom = "any worker" if source is None else f"worker {source}"
        future: Future[ReceivedArray] = Future(f"a message of {whom} with tag {tag}")

        def failed(done: Future[None]) -> None:
            error = done.error()
            if error is not None:
                future.set_error(error)

        def begin(reply: Reply) -> None:
            head = unpack_letter(reply.body, self._node.config.num_workers)
            if len(head.layout.shapes) != 1:
                raise ProtocolError(f"expected a message of one array, got {head.layout}")
            array = head.layout.empty(0, None) if out is None else out
            head.layout.check(0, array)
            rank = self._group.ranks.index(head.address.source)
            received = ReceivedArray(rank, tag, array, head.layout.dtype)
            cuts = chunks(array.nbytes, head.step)
            left = len(cuts)

            def fill(cut: slice) -> Callable[[Reply], None]:
                def take(reply: Reply) -> None:
                    nonlocal left
                    filling([flat(array)[cut]])(reply)
                    left -= 1
                    if left == 0:
                        future.set_result(received)

                return take

            for chunk, cut in enumerate(cuts[1:], 1):
                self._ask(head.address._replace(chunk=chunk), fill(cut), failed)
            fill(cuts[0])(reply)

        asked = ANYBODY if source is None else source
        with self._lock:
            self._asked[tag] += 1
            number = self._asked[tag]
        self._ask(Address(self._group, asked, self._node.rank, tag, number), begin, failed)
        return future

    def _ask(
        self,
        address: Address,
        take: Callable[[Reply], None],
        done: Callable[[Future[None]], None],
    ) -> None:
        """Ask for a letter."""
        head = LetterHead(address, _NO_ARRAY, self._step)
        body = pack_letter(head, self._node.config.num_workers)
        server = self._box_of(address.to)
        asked = self._asker.ask(RECEIVE, body, {server: ()}, lambda found: take(found[server]))
        asked.on_done(done)

    def _send_more(self, to: int) -> None:
        """Send waiting letters, as far as allowed. The caller holds the lock."""
        queue, server = self._queues.get(to), self._box_of(to)
        while queue:
            nbytes = len(queue[0].piece)
            unkept = self._unkept_bytes.get(to, 0)
            if unkept and unkept + nbytes > WINDOW_BYTES:
                return
            letter = queue.popleft()
            self._unkept_bytes[to] = unkept + nbytes
            frames = {server: [as_frame(self._node, letter.piece, server)]}
            sent = self._asker.ask(SEND, letter.body, frames, lambda _: None)
            sent.on_done(self._kept(to, letter))

    def _kept(self, to: int, letter: _Outgoing) -> Callable[[Future[None]], None]:
        def note(done: Future[None]) -> None:
            ended = [letter]
            with self._lock:
                self._unkept_bytes[to] -= len(letter.piece)
                if done.error() is None:
                    self._send_more(to)
                else:  # the letters after it would fail too
                    ended += self._queues.pop(to, ())
            for each in ended:
                each.done(done)

        return note

    def _box_of(self, rank: int) -> int:
        return int(node_id(Role.SERVER, rank % self._node.config.num_servers))
