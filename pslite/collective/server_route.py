"""Collective calls through the servers: chunks of arrays, and their answers.

A call is one request to a server for each chunk, and the servers' answers. ``Communicator`` uses
this route if a group has no rings, and for calls that need no order. Any thread may call; answers
are copied into arrays on the node's I/O thread. Read next: ``pending_call.py``, then ``server.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pslite.collective.arrays import (
    Array,
    Bytes,
    chunks,
    filling,
    flat,
    is_same,
    layout_of,
    piece_for,
    receivers,
    spans,
)
from pslite.collective.asker import CollectiveAsker
from pslite.collective.pending_call import CallUnderWay, ChunkRequest, give_up
from pslite.collective.sums import DTYPES
from pslite.collective.waits import CallWaits
from pslite.collective.wire import (
    JOIN,
    pack_join,
    unpack_layouts,
    unpack_number,
)
from pslite.future import Future
from pslite.ids import Role, node_id
from pslite.node.customer import Reply
from pslite.node.postoffice import Postoffice
from pslite.protocol.collective import (
    ANY,
    READY,
    Absence,
    CallKey,
    CollectiveCall,
    GroupKey,
    LeadersStep,
)

T = TypeVar("T")
Progress = Callable[[int], None]
"""A function that is told how many bytes, from the beginning, are ready."""
COLLECTIVE_CHUNKS = 4
"""A message has at most this many times PS_CHUNK_BYTES of an array."""
_LEAST_SHARED = 1 << 18
"""Smaller arrays go to one server: a second message takes longer than half of the bytes."""
_LEAST_STEP = 1024
"""If the sizes of arrays may differ, a message has at least this many bytes of them."""


class ServerRoute:
    """Makes the calls of one rank through the servers; calls ``ended`` after each.

    With ``meets``, all calls of the group begin at one server, and ``ready`` may be used.
    """

    def __init__(
        self,
        node: Postoffice,
        rank: int,
        size: int,
        ended: Callable[[CallKey], None],
        *,
        meets: bool = False,
    ) -> None:
        self._asker = CollectiveAsker(node, meets=meets)
        self.waits = CallWaits(self._asker)
        self._rank = rank
        self._size = size
        self._ended = ended

    def make(
        self,
        key: CallKey,
        call: CollectiveCall,
        outgoing: Sequence[Array],
        into: Sequence[Array],
        value: T,
    ) -> Future[T]:
        """Cut the arrays in the same way on all ranks, and send the chunks."""
        under_way = self._under_way(key, call, value)
        sent, filled = list(map(flat, outgoing)), list(map(flat, into))
        under_way.start([request for _, request in self._cut(call, self._rank, sent, filled)])
        return under_way.future

    def step(
        self,
        key: CallKey,
        call: CollectiveCall,
        step: LeadersStep,
        sent: Sequence[Bytes],
        filled: Sequence[Bytes],
        answered: Progress,
    ) -> tuple[CallUnderWay[None], Progress]:
        """Make the leaders' step of a call whose values become ready bit by bit.

        Returns the step, and a function to call with the number of bytes that are ready.
        ``answered`` is called with the number of bytes, from the beginning, that are answered.
        """
        place = step.leaders.index(self._asker.node.rank)
        requests = self._cut(step.call, place, sent, filled)
        under_way: CallUnderWay[None] = self._under_way(key, call, None, step=step)
        under_way.expect(len(requests))
        stops = [stop for stop, _ in requests]
        open_ = set(range(len(requests)))
        next_ = 0

        def noting(chunk: int, take: Callable[[Reply], None]) -> Callable[[Reply], None]:
            def note(reply: Reply) -> None:
                take(reply)
                open_.discard(chunk)
                first = min(open_, default=len(stops))
                answered(stops[first - 1] if first else 0)

            return note

        def progress(nbytes: int) -> None:
            nonlocal next_
            while next_ < len(requests) and stops[next_] <= nbytes:
                pieces, take, layout = requests[next_][1]
                under_way.send(next_, (pieces, noting(next_, take), layout))
                next_ += 1

        return under_way, progress

    def _cut(
        self, call: CollectiveCall, rank: int, sent: Sequence[Bytes], filled: Sequence[Bytes]
    ) -> list[tuple[int, ChunkRequest]]:
        """Return the chunks of a call whose sizes all ranks know, and where each ends."""
        lengths = [math.prod(shape) * DTYPES[call.dtype].itemsize for shape in call.shapes]
        index = rank if len(lengths) > 1 else 0
        requests: list[tuple[int, ChunkRequest]] = []
        for chunk in chunks(sum(lengths), self._equal_chunk(call.dtype, sum(lengths))):
            parts = spans(lengths, chunk)
            pieces = [array[part] for array, part in zip(sent, parts, strict=False)]
            places = [array[parts[index]] for array in filled]
            # A server in this process may write an all_reduce's result over these values.
            may_write = call.kind == "all_reduce" and is_same(pieces[0], places[0])
            for piece in pieces if not may_write else ():
                piece.flags.writeable = False
            request: ChunkRequest = (pieces, filling(places), None)
            requests.append((min(chunk.stop, sum(lengths)), request))
        return requests

    def exchange(
        self,
        key: CallKey,
        call: CollectiveCall,
        outgoing: Sequence[Array],
        sources: Sequence[int],
        outs: Sequence[Array] | None,
        text: str | None = None,
        leaders: LeadersStep | None = None,
    ) -> Future[list[Array]]:
        """Send the first chunk; its answer says what the others send. Then send the rest."""
        size = self._size if leaders is None else len(leaders.leaders)
        step = max(self.chunk_bytes("") // size, _LEAST_STEP)
        sent = list(map(flat, outgoing))
        index = piece_for(call, self._rank)
        found: list[Array] = []
        under_way = self._under_way(key, call, found, text, leaders)

        def pieces(chunk: slice) -> list[Bytes]:
            parts = spans([len(array) for array in sent], chunk)
            return [array[part] for array, part in zip(sent, parts, strict=True)]

        def begin(reply: Reply) -> None:
            layouts = unpack_layouts(reply.body, size)
            found.extend(receivers(layouts, sources, index, outgoing, outs))
            lengths = [layouts[source].lengths for source in sources]

            def fill(chunk: slice) -> Callable[[Reply], None]:
                parts = [spans(each, chunk)[index] for each in lengths]
                return filling(
                    [flat(array)[part] for array, part in zip(found, parts, strict=True)]
                )

            first, *others = chunks(max(sum(each.lengths) for each in layouts), step)
            under_way.start([(pieces(chunk), fill(chunk), None) for chunk in others])
            fill(first)(reply)

        under_way.start([(pieces(slice(0, step)), begin, layout_of(outgoing))])
        return under_way.future

    def ready(self, key: CallKey, call: CollectiveCall) -> Future[int]:
        """Ask for the number of a call among those that all ranks make.

        Completes once all ranks have asked, with 0 if a rank has joined and does not make it.
        """
        found: list[int] = []
        step = LeadersStep(key.group.ranks, READY)
        under_way = CallUnderWay(self._asker, self.waits, key, call, found, lambda: None, step=step)
        note: Callable[[Reply], None] = lambda reply: found.append(unpack_number(reply.body))  # noqa: E731
        under_way.start([((), note, None)])
        return under_way.future.map(lambda numbers: numbers[0])

    def stop_meeting(self) -> None:
        """Spread calls over all servers; all ranks must begin this at the same call."""
        self._asker.meets = False

    def give_up(self, key: CallKey, error: BaseException | None) -> None:
        """End a call on all ranks with an error of this rank."""
        if error is not None:
            give_up(self._asker, key, error)

    def gather_bytes(self, key: CallKey, data: bytes) -> Future[list[bytes]]:
        """Give every rank's bytes to all; the future's text names the awaited ranks."""
        array = np.frombuffer(data, np.uint8)
        call = CollectiveCall("all_gather", dtype="uint8", shapes=((ANY,),))
        found = self.exchange(key, call, [array], range(self._size), None, text="")
        return found.map(lambda arrays: [each.tobytes() for each in arrays])

    def join(self, group: GroupKey, absence: Absence) -> Future[int]:
        """Count this rank as zeros on the servers; the future gets the last rank to join."""
        config = self._asker.node.config
        nodes = [int(node_id(Role.SERVER, rank)) for rank in range(config.num_servers)]
        first = self._asker.server_of(CallKey(group, "", 0), 0)
        body = pack_join(group, absence, config.num_workers)
        frames: dict[int, Sequence[Bytes]] = dict.fromkeys(nodes, ())
        return self._asker.ask(JOIN, body, frames, lambda found: unpack_number(found[first].body))

    def chunk_bytes(self, dtype: str) -> int:
        """Return how many bytes of arrays a message has: whole elements of ``dtype``."""
        config, itemsize = self._asker.node.config, DTYPES[dtype].itemsize if dtype else 1
        most = min(COLLECTIVE_CHUNKS * config.chunk_bytes, config.max_message_bytes // 2)
        return max(most // itemsize, 1) * itemsize

    def _equal_chunk(self, dtype: str, nbytes: int) -> int:
        """Return the bytes of a chunk; all servers get equal parts of a large array."""
        most, servers = self.chunk_bytes(dtype), self._asker.node.config.num_servers
        if nbytes < _LEAST_SHARED:
            return most
        itemsize = DTYPES[dtype].itemsize
        count = servers * -(-nbytes // (servers * most))
        return -(-nbytes // (count * itemsize)) * itemsize

    def _under_way(
        self,
        key: CallKey,
        call: CollectiveCall,
        value: T,
        text: str | None = None,
        step: LeadersStep | None = None,
    ) -> CallUnderWay[T]:
        ended = lambda: self._ended(key)  # noqa: E731
        waits = self.waits if step is None else None
        return CallUnderWay(self._asker, waits, key, call, value, ended, text, step)
