"""Rings: shared memory through which processes of one machine exchange values.

Each process of a group has one ring: memory that the others map for reading (``segment.py``). It
has some slots for values, used in turn, and counters that only increase. A process writes only its
own slots and counters and reads those of all, so no lock is needed. *Chunk* number c is in slot c
modulo ``SLOTS``. The counters say how many chunks are ``STAGED`` (the slot has the values),
``REDUCED`` (it has the results) and ``DONE`` (the owner has read all it needs from the others'
slots). So a slot is free again when all processes are ``DONE`` with its last chunk.

A process writes the values before the counter that announces them, and reads the counter first.
x86-64 processors keep this order for all processes. On others ``is_ordered`` is False, and rings
are not used. A process that has waited for some microseconds sleeps at its bell, a pipe that the
others write to. Read next: ``collective/shared_memory_driver.py``.
"""

from __future__ import annotations

import os
import platform
import select
import stat
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pslite.memory.segment import HEADER_BYTES, PAGE_BYTES, Ticket, map_segment, shared_segment

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SLOTS = 4
"""One slot to fill, one to add up, one to read, and one for processes that are ahead."""
_DESCRIPTION_BYTES = 16 * PAGE_BYTES
MAX_DESCRIPTION = _DESCRIPTION_BYTES - 4
"""The most bytes that a chunk's description may have."""

STAGED, REDUCED, DONE, _ASLEEP, _GIVEN_UP, ARRIVED = range(6)
_WORDS_A_LINE = 8
_COUNTERS_BYTES = PAGE_BYTES


def is_ordered() -> bool:
    """Return whether other processes see this process's writes in program order."""
    return platform.machine() in ("x86_64", "AMD64")


class RingTicket(NamedTuple):
    """The data that a peer needs to map a ring and to ring its owner's bell."""

    pid: int
    memory: Ticket
    slot_bytes: int
    bell: int
    """The file descriptor of the pipe's write end."""
    bell_inode: int


class _Slots:
    """The memory of one ring, this process's own or a peer's, as arrays."""

    def __init__(self, memory: Any, slot_bytes: int) -> None:
        self.counters = memoryview(memory)[HEADER_BYTES:][:_COUNTERS_BYTES].cast("q")
        whole = np.frombuffer(memory, np.uint8)[HEADER_BYTES + _COUNTERS_BYTES :]
        self.descriptions = []
        self.staged: list[Bytes] = []
        self.results: list[Bytes] = []
        at = 0
        for _ in range(SLOTS):
            self.descriptions.append(whole[at : at + _DESCRIPTION_BYTES].data)
            at += _DESCRIPTION_BYTES
            self.staged.append(whole[at : at + slot_bytes])
            at += slot_bytes
            self.results.append(whole[at : at + slot_bytes])
            at += slot_bytes


class Ring:
    """This process's ring in a group, and the rings of the others.

    Args:
        slot_bytes: the most bytes of values in a chunk; a multiple of 64.

    Raises:
        OSError: there is not enough memory, or this system cannot share it.
    """

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        nbytes = SLOTS * (_DESCRIPTION_BYTES + 2 * slot_bytes) + _COUNTERS_BYTES + HEADER_BYTES
        self._segment = shared_segment(nbytes)
        self._own = _Slots(self._segment.memory, slot_bytes)
        self._bell, self._bell_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._arriving = threading.Lock()  # guards ARRIVED, which any thread may increase
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._members: list[_Slots] = [self._own]
        self._bells: list[int | None] = [None]
        self.rank = 0

    @property
    def ticket(self) -> RingTicket:
        """The ticket that the others need."""
        assert self._segment.ticket is not None
        inode = os.fstat(self._bell_in).st_ino
        return RingTicket(os.getpid(), self._segment.ticket, self.slot_bytes, self._bell_in, inode)

    def connect(self, rank: int, tickets: Sequence[RingTicket]) -> None:
        """Map the rings of all ranks, in order; ``rank`` is this process's rank.

        Raises:
            OSError: a ring cannot be mapped, or does not match its ticket.
        """
        members: list[_Slots] = []
        bells: list[int | None] = []
        try:
            for number, ticket in enumerate(tickets):
                if number == rank:
                    members.append(self._own)
                    bells.append(None)
                    continue
                members.append(_Slots(map_segment(ticket.pid, ticket.memory), self.slot_bytes))
                bells.append(_open_bell(ticket))
        except BaseException:
            _close_all(bells)
            raise
        self.rank, self._members, self._bells = rank, members, bells

    def close(self) -> None:
        """Release all rings; memory with remaining references stays mapped."""
        if not self._members:
            return
        with self._arriving:
            _close_all(self._bells)
            self._bells, self._members = [], []
            del self._own, self._segment
        os.close(self._bell)
        os.close(self._bell_in)

    # -- chunks ------------------------------------------------------------------------

    def describe(self, chunk: int, description: bytes) -> None:
        """Write the description of the chunk that this process will stage next."""
        place = self._own.descriptions[chunk % SLOTS]
        place[: 4 + len(description)] = len(description).to_bytes(4, "little") + description

    def description(self, chunk: int, rank: int) -> bytes:
        """Return the description of a chunk that ``rank`` has staged."""
        place = self._members[rank].descriptions[chunk % SLOTS]
        nbytes = min(int.from_bytes(place[:4], "little"), MAX_DESCRIPTION)
        return bytes(place[4 : 4 + nbytes])

    def staged(self, chunk: int, rank: int) -> Bytes:
        """Return the bytes in which ``rank`` stages data; other ranks' are read-only."""
        return self._members[rank].staged[chunk % SLOTS]

    def result(self, chunk: int, rank: int) -> Bytes:
        """Return the bytes in the slot for the results of ``rank``."""
        return self._members[rank].results[chunk % SLOTS]

    def announce(self, kind: int, count: int) -> None:
        """Set a counter of this process and wake the peers that sleep."""
        self._own.counters[kind * _WORDS_A_LINE] = count
        for member, bell in zip(self._members, self._bells, strict=True):
            if bell is not None and member.counters[_ASLEEP * _WORDS_A_LINE]:
                _ring(bell)

    def arrived(self) -> int:
        """Return the count of arrivals that ``note_arrival`` has noted."""
        return int(self._own.counters[ARRIVED * _WORDS_A_LINE])

    def note_arrival(self, count: int = 1) -> None:
        """Count an arrival and wake this process and its peers. From any thread."""
        with self._arriving:
            if self._members:
                self.announce(ARRIVED, self.arrived() + count)
                if self._own.counters[_ASLEEP * _WORDS_A_LINE]:
                    _ring(self._bell_in)

    def has_reached(self, kind: int, count: int) -> bool:
        """Return whether a counter of every member is at least ``count``."""
        at = kind * _WORDS_A_LINE
        return all(member.counters[at] >= count for member in self._members)

    def lacking(self, kind: int, count: int) -> list[int]:
        """Return the ranks whose counter is less than ``count``."""
        at = kind * _WORDS_A_LINE
        return [rank for rank, each in enumerate(self._members) if each.counters[at] < count]

    def give_up(self, *, has_failed: bool = False) -> None:
        """Tell the others that this process has stopped, and whether by an error."""
        self.announce(_GIVEN_UP, 2 if has_failed else 1)

    def given_up(self) -> dict[int, bool]:
        """Return the ranks that have stopped, and whether each has failed."""
        at = _GIVEN_UP * _WORDS_A_LINE
        said = ((rank, each.counters[at]) for rank, each in enumerate(self._members))
        return {rank: value > 1 for rank, value in said if value}

    def sleep(self, kind: int, count: int, timeout_s: float) -> None:
        """Wait until a peer rings the bell, unless all have reached ``count``.

        If a peer checked just before this process fell asleep, it does not ring. So sleeps should
        be short.
        """
        asleep = _ASLEEP * _WORDS_A_LINE
        self._own.counters[asleep] = 1
        try:
            if not self.has_reached(kind, count) and self._poll.poll(1000 * timeout_s):
                self._silence()
        finally:
            self._own.counters[asleep] = 0

    def _silence(self) -> None:
        try:
            os.read(self._bell, 4096)
        except BlockingIOError:  # the pipe is empty
            pass


def _open_bell(ticket: RingTicket) -> int:
    path = f"/proc/{ticket.pid}/fd/{ticket.bell}"
    if not _is_bell(os.stat(path), ticket):  # check first: opening another file may have effects
        raise OSError(f"{path} is not the pipe that was offered")
    bell = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not _is_bell(os.fstat(bell), ticket):
        os.close(bell)
        raise OSError(f"{path} is not the pipe that was offered")
    return bell


def _is_bell(found: os.stat_result, ticket: RingTicket) -> bool:
    return stat.S_ISFIFO(found.st_mode) and found.st_ino == ticket.bell_inode


def _ring(bell: int) -> None:
    try:
        os.write(bell, b"!")
    except (BlockingIOError, BrokenPipeError):  # it rings already, or its owner is gone
        pass


def _close_all(bells: Sequence[int | None]) -> None:
    for bell in bells:
        if bell is not None:
            os.close(bell)
