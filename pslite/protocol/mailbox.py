"""Mailboxes: messages between workers, as their server keeps them. Pure.

Each worker has a box on one server. A letter stays there until its receiver requests it; if a
request already waits, it gets the letter at once. Letters of one sender and tag stay in order. A
box keeps a limited number of bytes. A letter over the limit waits, and so does its sender, until
there is room or the letter is requested. A message is one letter, or a first letter and further
ones that are requested by number. Messages may overtake each other in the network. So the first
letters of one sender, receiver and tag are numbered from 1 and handled in that order, and so are
a receiver's requests for a tag. Events go in, effects come out. Read next:
``collective/mailbox.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from pslite.protocol.collective import GroupKey

L = TypeVar("L")
"""The type that represents a letter's contents and its sender."""
R = TypeVar("R")
"""The type that represents a request to receive."""
T = TypeVar("T")

BOX_BYTES = 64 << 20
"""The most bytes that one worker's box keeps; it also keeps a single larger letter."""
ANYBODY = -1
"""A request for a letter of any sender."""


class Address(NamedTuple):
    """A filter of letters: from one sender or ``ANYBODY``, to one worker."""

    group: GroupKey
    source: int
    to: int
    tag: int
    message: int
    """The number of the message of ``source``, ``to`` and ``tag``, or of the request of ``to``."""
    chunk: int = 0
    """The number of the letter in its message; 0 for the first."""


@dataclass(slots=True)
class Keep(Generic[L]):
    """Keep the letter, and tell its sender so."""

    letter: L


@dataclass(slots=True)
class Deliver(Generic[L, R]):
    """Answer ``request`` with the letter of ``source``."""

    letter: L
    request: R
    source: int
    is_kept: bool
    """Whether the letter was kept; otherwise its sender waits for an answer too."""


class Return(NamedTuple):
    """Answer a sender or a request with ``error``."""

    what: object
    error: BaseException


MailEffect = Keep[L] | Deliver[L, R] | Return


@dataclass(slots=True, eq=False, repr=False)
class _Letter(Generic[L]):
    source: int
    nbytes: int
    content: L
    is_kept: bool = False


@dataclass(slots=True, eq=False, repr=False)
class _Slot(Generic[L, R]):
    """Waiting letters, or waiting requests, of one tag or of one numbered letter."""

    letters: list[_Letter[L]] = field(default_factory=list)
    requests: list[tuple[int, R]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class _Box(Generic[L, R]):
    """One worker's letters, of all its groups."""

    slots: dict[Address, _Slot[L, R]] = field(default_factory=dict)
    kept_bytes: int = 0
    waiting: deque[_Letter[L]] = field(default_factory=deque)


@dataclass(slots=True, eq=False, repr=False)
class _Stream(Generic[T]):
    """Letters or requests that are handled in the order of their numbers."""

    next_number: int = 1
    early: dict[int, T] = field(default_factory=dict)

    def in_turn(self, number: int, item: T) -> Iterator[T]:
        """Add an item; yield the items that are next in order."""
        self.early[number] = item
        while self.next_number in self.early:
            self.next_number += 1
            yield self.early.pop(self.next_number - 1)


class Mailboxes(Generic[L, R]):
    """The boxes of some workers. Ranks are those in the job."""

    def __init__(self) -> None:
        self._boxes: dict[int, _Box[L, R]] = {}
        self._gone: dict[int, BaseException] = {}
        self._sent: dict[Address, _Stream[tuple[Address, int, L]]] = {}
        self._asked: dict[Address, _Stream[tuple[Address, R]]] = {}

    def send(self, address: Address, nbytes: int, content: L) -> Iterator[MailEffect[L, R]]:
        """Handle a letter of ``address.source``, and later ones that waited for it."""
        if address.chunk:
            yield from self._take(address, nbytes, content)
            return
        stream = self._sent.setdefault(address._replace(message=0), _Stream())
        for letter in stream.in_turn(address.message, (address, nbytes, content)):
            yield from self._take(*letter)

    def receive(self, address: Address, request: R) -> Iterator[MailEffect[L, R]]:
        """Handle a request of ``address.to``, and later ones that waited for it."""
        if address.chunk:
            yield from self._ask(address, request)
            return
        stream = self._asked.setdefault(_slot_of(address), _Stream())
        for asked in stream.in_turn(address.message, (address, request)):
            yield from self._ask(*asked)

    def _take(self, address: Address, nbytes: int, content: L) -> Iterator[MailEffect[L, R]]:
        if address.to in self._gone:
            yield Return(content, self._gone[address.to])
            return
        box = self._boxes.setdefault(address.to, _Box())
        slot = box.slots.setdefault(_slot_of(address), _Slot())
        for index, (wanted, request) in enumerate(slot.requests):
            if wanted in (ANYBODY, address.source):
                del slot.requests[index]
                _tidy(box, address, slot)
                yield Deliver(content, request, address.source, False)
                return
        letter = _Letter(address.source, nbytes, content)
        slot.letters.append(letter)
        box.waiting.append(letter)
        yield from _keep_more(box)

    def _ask(self, address: Address, request: R) -> Iterator[MailEffect[L, R]]:
        """Answer a request with the oldest matching letter, or let it wait for one."""
        box = self._boxes.setdefault(address.to, _Box())
        slot = box.slots.setdefault(_slot_of(address), _Slot())
        for index, letter in enumerate(slot.letters):
            if address.source in (ANYBODY, letter.source):
                del slot.letters[index]
                _tidy(box, address, slot)
                yield Deliver(letter.content, request, letter.source, letter.is_kept)
                if letter.is_kept:
                    box.kept_bytes -= letter.nbytes
                else:
                    box.waiting.remove(letter)
                yield from _keep_more(box)
                return
        error = self._why_none(address.group, address.source, address.to)
        if error is not None:
            yield Return(request, error)
            return
        slot.requests.append((address.source, request))

    def depart(self, rank: int, error: BaseException) -> Iterator[MailEffect[L, R]]:
        """Return letters to the departed ``rank``, and requests only it could answer."""
        self._gone[rank] = error
        box = self._boxes.pop(rank, _Box())
        for letter in box.waiting:
            yield Return(letter.content, error)
        for to, other in self._boxes.items():
            for address, slot in other.slots.items():
                left = []
                for source, request in slot.requests:
                    reason = self._why_none(address.group, source, to)
                    if reason is None:
                        left.append((source, request))
                    else:
                        yield Return(request, reason)
                slot.requests = left

    def _why_none(self, group: GroupKey, source: int, to: int) -> BaseException | None:
        """Return the error if all possible senders are gone; else None."""
        senders = [rank for rank in group.ranks if rank != to] if source == ANYBODY else [source]
        if senders and all(rank in self._gone for rank in senders):
            return self._gone[senders[0]]
        return None


def _slot_of(address: Address) -> Address:
    """Return the address of the slot for a letter and for the requests that match it."""
    return address if address.chunk else address._replace(source=ANYBODY, message=0)


def _tidy(box: _Box[L, R], address: Address, slot: _Slot[L, R]) -> None:
    if not slot.letters and not slot.requests:
        del box.slots[_slot_of(address)]


def _keep_more(box: _Box[L, R]) -> Iterator[MailEffect[L, R]]:
    """Keep waiting letters, in order of arrival, while there is room."""
    while box.waiting:
        letter = box.waiting[0]
        if box.kept_bytes and box.kept_bytes + letter.nbytes > BOX_BYTES:
            return
        box.waiting.popleft()
        box.kept_bytes += letter.nbytes
        letter.is_kept = True
        yield Keep(letter.content)
