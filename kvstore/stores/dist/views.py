"""``DistViews``: views of values in the memory of servers on this machine.

A server of a synchronous store keeps a part's value at one address until the key is deleted, and
workers of its machine can map that memory. The value changes there only in a round, which needs
this worker's push. So a large key that lies in one piece is mapped once more, copy-on-write: its
view shows each new value without a copy, and when it ends it keeps its value
(``pslite/memory/segment.py``). Other keys (small ones, those on several servers or on other
machines, encoded ones) get memory of their own, which pulls fill. Runs on the caller's thread; the
I/O thread notes addresses. Read next: ``transfer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvstore.arrays.keys import Key
from kvstore.errors import NotSupportedError
from kvstore.protocol.requests import KeyEntry
from kvstore.stores.arguments import KeyTable
from kvstore.stores.dist.in_flight import Operation
from kvstore.stores.dist.plan import Bytes, Group, flat_bytes
from kvstore.stores.dist.transfer import DenseExchange
from kvstore.stores.views import HostArray, Views, address_of, check_viewable
from pslite import Postoffice
from pslite.ids import Role, node_id
from pslite.plane import Piece, Sink

LEAST_MAPPED_BYTES = 65_536
"""Smaller values are copied: a mapping takes whole pages, and the system limits their number."""


class DistViews:
    """The views of one store on one worker; ``wait`` waits for a pull."""

    def __init__(
        self,
        node: Postoffice,
        exchange: DenseExchange,
        table: KeyTable,
        wait: Callable[[Operation], None],
    ) -> None:
        self._node = node
        self._exchange = exchange
        self._keys = table
        self._wait = wait
        self.table = Views(lambda _, memory: node.nearby.keep_values(flat_bytes(memory)))

    def show(self, keys: Sequence[Key]) -> list[HostArray]:
        """Return a view of each of these known keys, with the present value."""
        check_viewable(keys, self._keys.is_row_sparse)
        shown = self._show(tuple(dict.fromkeys(keys)))
        return [shown[key] for key in keys]

    def _show(self, keys: tuple[Key, ...]) -> dict[Key, HostArray]:
        views = self.table
        # Kept until the end, since nothing else refers to the arrays.
        shown = {key: found for key in keys if (found := views.array(key)) is not None}
        old = list(shown)
        large = tuple(key for key in keys if key not in shown and self._may_map(key))
        for key, memory in self._mapped(large).items():
            shown[key] = views.add(key, memory, is_live=True)
        rest = tuple(key for key in keys if key in old or key not in shown)
        for key in rest:
            if key not in shown:
                spec = self._keys.spec(key)
                shown[key] = views.add(key, np.empty(spec.shape, spec.dtype), is_live=False)
        if rest:
            memories, _ = views.opened(rest, [shown[key] for key in rest])
            targets = [flat_bytes(memory) for memory in memories]
            views.watch(rest, targets)
            self._wait(self._exchange.begin(self._exchange.buckets.of(rest), None, targets, 0))
        return shown

    def live(self) -> dict[Key, HostArray]:
        """Return the views in use over servers' memory, as writable arrays.

        For libraries that do not know read-only arrays. What is written there is not stored and
        damages nothing, but new values no longer appear in its pages (``written``).
        """
        return self.table.live()

    def written(self) -> list[Key]:
        """Return the keys to whose live views this process has written."""
        live = self.live()
        keys, memories = list(live), list(map(flat_bytes, live.values()))
        return [keys[index] for index in self._node.nearby.written(memories)]

    def _may_map(self, key: Key) -> bool:
        entry = self._exchange.entries[key]
        servers = set(self._servers_of(entry))
        return (
            not self._node.config.standbys  # whose memory is elsewhere
            and entry.spec.nbytes >= LEAST_MAPPED_BYTES
            and len(servers) == 1
            and self._node.nearby.may_share_with(servers.pop())
        )

    def _servers_of(self, entry: KeyEntry) -> list[int]:
        """Return the ids of the servers from which this worker gets the parts of a key."""
        owners = [node_id(Role.SERVER, rank) for rank in entry.servers]
        return [self._exchange.route(entry, owner) for owner in owners]

    def _mapped(self, keys: tuple[Key, ...]) -> dict[Key, HostArray]:
        """Map the values that lie in one piece in a server's memory."""
        if not keys:
            return {}
        places: list[dict[int, int]] = [{} for _ in keys]

        def noting(group: Group, sink: Sink) -> Sink:
            return _noting_places(group, places)

        targets: list[Bytes] = [np.empty(0, np.uint8)] * len(keys)  # the sink needs none
        bucket = self._exchange.buckets.of(keys)
        self._wait(self._exchange.begin(bucket, None, targets, 0, wrap=noting))
        found = {}
        for key, place in zip(keys, places, strict=True):
            entry = self._exchange.entries[key]
            begins = {address - start for start, address in place.items()}
            if len(place) == len(entry.servers) and len(begins) == 1:
                server = self._servers_of(entry)[0]
                nearby, address = self._node.nearby, begins.pop()
                memory = nearby.copy_on_write(server, address, entry.spec.nbytes)
                if memory is not None:
                    found[key] = memory.view(entry.spec.dtype).reshape(entry.spec.shape)
        return found


def _noting_places(group: Group, places: list[dict[int, int]]) -> Sink:
    """Return a sink that notes where values are: first byte of a part -> address.

    Encoded values are left out.
    """

    def sink(indices: Sequence[int], pieces: Sequence[Piece], versions: Sequence[int]) -> None:
        for index, piece in zip(indices, pieces, strict=True):
            if group.decoders is None or group.decoders[index] is None:
                memory = np.frombuffer(piece.frame, np.uint8)
                position, start, _ = group.slices[index]
                places[position][start] = address_of(memory) + piece.start

    return sink


def no_views(store: str) -> NotSupportedError:
    """Return the error for views of an asynchronous store."""
    return NotSupportedError(
        f"{store} cannot show values in place, since other workers change them at any time; call "
        "pull"
    )
