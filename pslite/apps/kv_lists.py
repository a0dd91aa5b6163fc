"""Key lists that both ends remember, so that each list is sent once. Pure.

Training often requests the same keys again, or pulls the keys that it has just pushed. Then most
of the sent bytes would be keys. So a worker numbers each long list of keys. Its first request to a
server has the list and the number, later ones only the number. (This is the key caching of Li et
al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 4.2, which
sends a hash.) Both ends forget the least recently used list first. A server that lacks a list says
so and gets the keys again. So forgetting costs time but never changes a result: a number always
means the same list. Any thread may use ``SentLists``; ``ReceivedLists`` belongs to the thread that
serves its app. Read next: ``kv_wire.py``.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pslite.apps.kv_pairs import Keys, fault_in, same_keys
from pslite.errors import ProtocolError

#: Shorter lists are sent with every request: looking them up costs more than sending them.
MIN_KEYS = 8192
#: How many lists are remembered for each app and worker, and their bytes in total.
MAX_LISTS = 16
MAX_BYTES = 256 << 20


class ListName(NamedTuple):
    """The name of a key list between a worker and a server."""

    series: int
    """A random number per ``KVWorker``, so that names do not repeat after a restart."""
    number: int
    """1, 2, 3, ...; 0 means no list."""


NO_LIST = ListName(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class ListedKeys:
    """The keys of a call, with each server's share; on a server, the keys alone."""

    keys: Keys
    """Checked keys; if the list has a name, a copy that never changes."""
    parts: Sequence[slice] = ()
    """The slice of the keys for each server, in the order of ranks."""
    name: ListName = NO_LIST
    told: set[int] = field(default_factory=set)
    """The servers (node ids) that got the keys. Only the I/O thread uses it."""


class RecentLists:
    """The most recently used lists, within a limit of lists and bytes."""

    def __init__(self, max_lists: int = MAX_LISTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_lists = max_lists
        self._max_bytes = max_bytes
        self._lists: OrderedDict[Hashable, ListedKeys] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._lists)

    def all(self) -> Sequence[ListedKeys]:
        """Return all lists, the least recently used first."""
        return list(self._lists.values())

    def use(self, name: Hashable) -> ListedKeys | None:
        """Return the list of this name, if known, and mark it as used now."""
        found = self._lists.get(name)
        if found is not None:
            self._lists.move_to_end(name)
        return found

    def add(self, name: Hashable, new: ListedKeys) -> None:
        """Remember a list under a new name; drop the oldest lists over the limits."""
        self._lists[name] = new
        self.nbytes += new.keys.nbytes
        while len(self._lists) > self._max_lists or self.nbytes > self._max_bytes:
            _, oldest = self._lists.popitem(last=False)
            self.nbytes -= oldest.keys.nbytes


# -- on a worker ------------------------------------------------------------------------


class SentLists:
    """The numbered key lists of one ``KVWorker``."""

    def __init__(self) -> None:
        self._series = secrets.randbelow((1 << 62) - 1) + 1
        self._count = 0
        self._lock = threading.Lock()
        """Guards the count and the lists; it is held only for short operations."""
        self._recent: RecentLists = RecentLists()

    def find(self, keys: Keys) -> ListedKeys | None:
        """Return the known list with the same keys; None if there is none."""
        with self._lock:
            candidates = self._recent.all()
        for known in reversed(candidates):
            if same_keys(known.keys, keys):
                with self._lock:
                    self._recent.use(known.name)
                return known
        return None

    def add(self, keys: Keys, parts: Sequence[slice]) -> ListedKeys:
        """Number a list and remember it; ``keys`` belong to this object from now on."""
        with self._lock:
            self._count += 1
            new = ListedKeys(keys, parts, ListName(self._series, self._count))
            self._recent.add(new.name, new)
            return new

    def forget(self) -> None:
        """Forget all lists; later lists get new numbers."""
        with self._lock:
            self._recent = RecentLists()


# -- on a server ------------------------------------------------------------------------


class ReceivedLists:
    """The key lists that one app received, kept separately for each worker."""

    def __init__(self, new: Callable[[], RecentLists] = RecentLists) -> None:
        self._new = new
        self._of_sender: dict[int, RecentLists] = {}

    def resolve(self, sender: int, name: ListName, keys: Keys | None) -> Keys | None:
        """Return the checked keys of a request; None if their list is not known here.

        Args:
            keys: the keys in the request; None if it has only the name of the list.

        Raises:
            ProtocolError: the keys are not sorted and unique, or the name means other keys.
        """
        if name == NO_LIST:
            return None if keys is None else _checked(keys)
        lists = self._of_sender.setdefault(sender, self._new())
        known = lists.use(name)
        if keys is None:
            return None if known is None else known.keys
        if known is None:
            known = self._twin(keys)
            if known is None:
                copy = _checked(keys).copy()
                copy.flags.writeable = False
                known = ListedKeys(copy)
            lists.add(name, known)
        elif not same_keys(known.keys, keys):
            raise ProtocolError(f"key list {name.number} already exists with other keys")
        return known.keys

    def forget(self, senders: Iterable[int]) -> None:
        """Drop the lists of workers that are gone."""
        for sender in senders:
            self._of_sender.pop(sender, None)

    @property
    def nbytes(self) -> int:
        """The bytes of all lists; a list that workers share counts once."""
        arrays = {id(known.keys): known.keys.nbytes for known in self._all()}
        return sum(arrays.values())

    def _twin(self, keys: Keys) -> ListedKeys | None:
        """Find a known list with the same keys, so that workers share its memory."""
        return next((known for known in self._all() if same_keys(known.keys, keys)), None)

    def _all(self) -> Iterator[ListedKeys]:
        for lists in self._of_sender.values():
            yield from lists.all()


def _checked(keys: Keys) -> Keys:
    fault = fault_in(keys)
    if fault is not None:
        raise ProtocolError(fault)
    return keys
