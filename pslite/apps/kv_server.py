"""``KVServer``: pass the requests of ``KVWorker`` to a handle.

Requests arrive on the I/O thread. Handles run on a pool thread, one request of an app at a time.
The arrays of a request are not used after its answer, because they may be in the worker's memory.
Read next: ``kv_wire.py`` for the format of requests, ``kv_sum.py`` for a handle.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pslite.apps.asking import as_int64, check_sizes, log_failure, new_array
from pslite.apps.kv_lists import ReceivedLists
from pslite.apps.kv_pairs import Empty, KVPairs, Lens, Values, as_lens, as_values, fault_in_values
from pslite.apps.kv_wire import Missing, pack_answer, pack_missing, unpack_request
from pslite.errors import ProtocolError, UsageError
from pslite.future import Future, completed
from pslite.ids import Role
from pslite.node.customer import Incoming
from pslite.node.postoffice import Postoffice


class KVMeta(NamedTuple):
    """The properties of a request, passed to the handle with the pairs."""

    cmd: int
    push: bool
    pull: bool
    sender: int
    """Node id of the worker."""
    app: int
    customer: int
    request_id: int
    """The worker's number for the request (ps-lite's timestamp)."""
    empty: Empty = np.empty
    """Like ``numpy.empty``, for the arrays of an answer: puts large ones in shared memory."""


KVHandle: TypeAlias = Callable[[KVMeta, KVPairs], "KVPairs | Future[KVPairs | None] | None"]
"""A function that takes a request and returns the values of a pull, or None.

To answer later, it returns a future of that. The arrays of the request are read-only and stay
valid as long as something refers to them. A handle that copies everything it keeps should have an
attribute ``borrows = True``. Then it gets arrays that may be in the worker's memory and are valid
only until the request is answered.
"""


class KVServer:
    """The server's side: passes requests to ``handle``, one at a time.

    If the handle raises an exception, the worker gets a ``RemoteError`` with the traceback (or the
    same error, if it is from ``pslite.errors``), and the server continues.

    Args:
        node: a node with the role of a server, running or being prepared.
        app: the number of the app; a node can have only one app with this number.
        handle: see ``KVHandle``. For a pull it must return the values of exactly the requested
            keys, in their order. Its result for a push without a pull is ignored.
        copy: False sends the returned arrays without a copy. They must then never change
            again, because they may be sent a second time. (``fresh`` answers are never copied.)

    For each worker it keeps the most recently used long lists of keys, at most 256 MiB. A list
    that several workers use is kept once.
    """

    def __init__(self, node: Postoffice, app: int, handle: KVHandle, *, copy: bool = True) -> None:
        if node.role is not Role.SERVER:
            raise UsageError(
                f"a KVServer needs the node of a server, got the node of a {node.role.value}"
            )
        self.node = node
        self.app = as_int64(app, "the app's number")
        self._handle = handle
        self._borrows = bool(getattr(handle, "borrows", False))
        self._empty: Empty = partial(new_array, node)
        self._copy = copy
        self._lists = ReceivedLists()
        """Belongs to the pool thread that serves this app."""
        #: Completes once this app accepts requests; fails if its number is in use.
        self.registered: Future[None] = node.add_app(self.app, self._arrived)
        log_failure(node, self.registered)

    def close(self) -> None:
        """Stop accepting requests; later ones wait for another app with this number."""
        if self.registered.error() is None:
            self.node.remove_app(self.app)

    def _arrived(self, incoming: Incoming) -> None:
        self.node.pool.submit(self.app, lambda: self._serve(incoming))

    def _serve(self, incoming: Incoming) -> None:
        request = incoming.request
        try:
            self._lists.forget(list(self.node.membership.gone))
            frames = incoming.frames if self._borrows else _lasting(incoming.frames)
            resolve = partial(self._lists.resolve, incoming.sender)
            asked = unpack_request(incoming.body, frames, resolve)
            if isinstance(asked, Missing):
                incoming.respond(pack_missing(asked))
                return
            meta = KVMeta(
                request.head,
                asked.push,
                asked.pull,
                incoming.sender,
                request.app,
                request.customer,
                request.request_id,
                self._empty,
            )
            found = self._handle(meta, asked.pairs)
            result = found if isinstance(found, Future) else completed(found)
            result.on_done(lambda done: self._respond(incoming, meta, asked.pairs, done))
        except BaseException as error:  # SystemExit of a handle must not end the pool's thread
            incoming.fail(error)

    def _respond(
        self, incoming: Incoming, meta: KVMeta, asked: KVPairs, done: Future[KVPairs | None]
    ) -> None:
        try:
            result = done.result(0)
            if not meta.pull:
                incoming.respond()
                return
            body, frames = pack_answer(*self._checked_answer(asked, result))
            check_sizes(self.node, body, frames, "pull fewer keys at a time")
            incoming.respond(body, frames)
        except BaseException as error:
            incoming.fail(error)

    def _checked_answer(self, asked: KVPairs, result: Any) -> tuple[Values, Lens | None]:
        """Check and return the values and lens that the handle returned.

        Raises:
            ProtocolError: they do not fit the requested keys.
        """
        whose = f"the handle of app {self.app} on server {self.node.rank} answered a pull with"
        if not isinstance(result, KVPairs):
            raise ProtocolError(f"{whose} {type(result).__name__} instead of KVPairs")
        if result.keys is not asked.keys and not np.array_equal(result.keys, asked.keys):
            raise ProtocolError(f"{whose} different keys from those requested")
        try:
            empty = self._empty if self._copy and not result.fresh else None
            values = as_values(result.values, empty)
            lens = None if result.lens is None else as_lens(result.lens, empty)
        except UsageError as error:
            raise ProtocolError(f"{whose} values of an unsupported type: {error}") from error
        fault = fault_in_values(len(asked.keys), values, lens)
        if fault is not None:
            raise ProtocolError(f"{whose} values that do not fit the keys: {fault}")
        return values, lens


def _lasting(frames: Sequence[Any]) -> list[Any]:
    """Copy the frames that are in a peer's memory, so that all frames stay valid."""
    return [
        bytes(frame)
        if isinstance(frame, memoryview) and isinstance(frame.obj, mmap.mmap)
        else frame
        for frame in frames
    ]
