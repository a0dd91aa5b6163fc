"""``Sharing``: the shared memory between a node and its peers. On the I/O thread.

A node offers each segment of its heap to the peers on the same machine (``SegmentOffer``). A peer
that could map it answers with ``SegmentTaken``. From then on, frames in the segment are sent to
that peer as descriptors. Before the answer, and to other peers, they are sent as bytes; a value
waits up to ``PATIENCE_S`` for the answer. A peer keeps a segment mapped until the owner is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from pslite.errors import ProtocolError
from pslite.memory.heap import Heap
from pslite.memory.segment import Bytes, Ticket, map_copy_on_write, map_segment
from pslite.wire.base import Ints
from pslite.wire.messages import SegmentOffer, SegmentTaken

MIN_SHARED_BYTES = 1024
"""Smaller frames are sent as bytes, because copying them is faster."""
MAX_SEGMENTS = 4096
"""The most segments of one peer to map."""
PATIENCE_S = 0.5
"""How long values wait for a peer's answer to an offer, which usually takes a millisecond."""
_FIELDS = 4

Frames = Sequence[Any]


class _Window(NamedTuple):
    """A segment of a peer, mapped read-only."""

    memory: memoryview
    address: int
    pid: int
    ticket: Ticket


class Sharing:
    """The descriptors of one node: its own, and those of its peers."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        #: Peer -> the numbers of this node's segments that it has mapped.
        self._taken: dict[str, set[int]] = {}
        #: Peer -> the number of its segment -> the memory.
        self._windows: dict[str, dict[int, _Window]] = {}
        self._offered: dict[str, int] = {}
        #: Peer -> segment of this node without an answer -> when to stop waiting for the answer.
        self._awaited: dict[str, dict[int, float]] = {}
        #: Peers that could not map a segment, or refused to.
        self._refused: set[str] = set()
        #: Payload bytes sent or received as descriptors, including repeated messages.
        self.shared_bytes = 0

    # -- agreeing ----------------------------------------------------------------------

    def offers(self, peer: str, now: float) -> Iterator[SegmentOffer]:
        """Return offers of new segments for ``peer``, which is on the same machine."""
        for number, segment in self._heap.segments():
            if number > self._offered.get(peer, 0) and segment.ticket is not None:
                self._offered[peer] = number
                self._awaited.setdefault(peer, {})[number] = now + PATIENCE_S
                yield SegmentOffer(number, *segment.ticket)

    def awaits(self, peer: str, now: float) -> bool:
        """Return whether ``peer`` will probably answer an offer soon."""
        awaited = self._awaited.get(peer)
        return awaited is not None and max(awaited.values()) > now

    def map(self, peer: str, pid: int, offer: SegmentOffer) -> SegmentTaken:
        """Map a segment that ``peer`` offers; return the answer to the offer."""
        windows = self._windows.setdefault(peer, {})
        if len(windows) >= MAX_SEGMENTS:
            return SegmentTaken(offer.segment, False, f"{MAX_SEGMENTS} segments are mapped already")
        try:
            ticket = Ticket(offer.fd, offer.nbytes, offer.nonce)
            memory = map_segment(pid, ticket)
            address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
            windows[offer.segment] = _Window(memory, address, pid, ticket)
        except (OSError, ValueError) as error:
            return SegmentTaken(offer.segment, False, f"{type(error).__name__}: {error}")
        return SegmentTaken(offer.segment, True, "")

    def taken(self, peer: str, answer: SegmentTaken) -> None:
        """Note whether ``peer`` can read a segment of this node."""
        awaited = self._awaited.get(peer, {})
        awaited.pop(answer.segment, None)
        if not awaited:
            self._awaited.pop(peer, None)
        if answer.taken:
            self._taken.setdefault(peer, set()).add(answer.segment)
        else:
            self._refused.add(peer)

    def reaches(self, peer: str) -> bool:
        """Return whether ``peer`` has mapped memory of this node. From any thread."""
        return peer in self._taken

    def may_reach(self, peer: str) -> bool:
        """Return whether a peer here has mapped this node's memory, or still may."""
        return peer in self._taken or (peer not in self._refused and self._heap.is_shared)

    def forget(self, peer: str) -> None:
        """Forget a peer that is gone; its memory stays mapped while it is referred to."""
        self._taken.pop(peer, None)
        windows = self._windows.pop(peer, None)
        if windows:  # the last one to unmap a gigabyte waits 0.7 s until the kernel has freed it
            with contextlib.suppress(RuntimeError):  # no thread can be started: this one waits
                Thread(target=windows.clear, name="unmap", daemon=True).start()
        self._offered.pop(peer, None)
        self._awaited.pop(peer, None)
        self._refused.discard(peer)

    def close(self) -> None:
        """Forget all peers: the node has ended."""
        for peer in {*self._taken, *self._windows}:
            self.forget(peer)
        self._heap.close()

    # -- frames ------------------------------------------------------------------------

    def describe(self, peer: str, frames: Frames) -> tuple[Frames, Ints]:
        """Return the frames to send as bytes, and descriptors of the other frames.

        A descriptor is four numbers: index of the frame in the message, segment, offset, bytes.
        """
        taken = self._taken.get(peer)
        if taken is None:
            return frames, ()
        rest: list[Any] = []
        shared: list[int] = []
        for index, frame in enumerate(frames):
            place = self.place_of(frame)
            if place is None or place[0] not in taken:
                rest.append(frame)
            else:
                shared += (index, *place, frame.nbytes)
                self.shared_bytes += frame.nbytes
        return rest, tuple(shared)

    def place_of(self, frame: Any) -> tuple[int, int] | None:
        """Find (segment, offset) of a frame that peers can map. From any thread."""
        if type(frame) is not memoryview or frame.nbytes < MIN_SHARED_BYTES:
            return None
        if not frame.c_contiguous:
            return None  # the van rejects it with an error
        address = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
        return self._heap.find(address, frame.nbytes)

    def copy_on_write(self, peer: str, address: int, nbytes: int) -> Bytes | None:
        """Map memory of ``peer`` once more; see ``segment.py``.

        ``address`` is in memory that ``resolve`` returned. Returns None if the address is not in
        memory of the peer. From any thread.
        """
        for window in list(self._windows.get(peer, {}).values()):
            start = address - window.address
            if start >= 0 and start + nbytes <= len(window.memory):
                try:
                    return map_copy_on_write(window.pid, window.ticket, start, nbytes)
                except (OSError, ValueError):
                    return None  # the peer has just ended
        return None

    def resolve(self, peer: str, shared: Ints, frames: Frames) -> Frames:
        """Return all frames of a message in order, with descriptors replaced by memory.

        Raises:
            ProtocolError: the descriptors do not fit the frames or the mapped memory.
        """
        windows = self._windows.get(peer, {})
        if len(shared) % _FIELDS:
            raise ProtocolError(
                f"expected {_FIELDS} numbers for each descriptor, got {len(shared)} numbers in "
                "total"
            )
        resolved = list(frames)
        last = -1
        for at in range(0, len(shared), _FIELDS):
            index, segment, offset, nbytes = shared[at : at + _FIELDS]
            window = windows.get(segment)
            if window is None or offset < 0 or nbytes < 0 or offset + nbytes > len(window.memory):
                raise ProtocolError(
                    f"segment {segment} is not mapped here at {offset} for {nbytes} bytes"
                )
            if not last < index <= len(resolved):
                raise ProtocolError(
                    f"descriptor of frame {index} is out of order after frame {last}"
                )
            resolved.insert(index, window.memory[offset : offset + nbytes])
            last = index
        self.shared_bytes += sum(shared[3::_FIELDS])
        return resolved
