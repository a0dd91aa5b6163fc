"""``KVWorker`` and ``KVServer``: push and pull values under 64-bit keys.

::

    worker = KVWorker(node, app=0)                                   # on a worker
    worker.wait(worker.push([3, 7], np.array([0.5, 1.5], np.float32)))
    values = worker.wait(worker.pull([3, 7]))

    KVServer(node, app=0, handle=SumHandle())                        # on every server

Each server owns a range of the keys; a call is cut into one request per server. What a push
means is the handle's business. Every request arrives once and is answered once (the channel
below sees to it). Callers may be on any thread; callbacks run on the I/O thread, handles on a
pool thread of the server, one request of an app at a time. Nouns and arguments are those of
ps-lite's ``include/ps/kv_app.h``. Read next: ``kv_pairs.py`` for the rules of keys and
values, ``kv_sum.py`` for a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from pslite.asking import Asker, as_int64, check_sizes, log_failure
from pslite.customer import Incoming, Reply
from pslite.errors import ProtocolError, UsageError
from pslite.future import Future
from pslite.ids import Role, node_id
from pslite.kv_pairs import (
    KVPairs,
    Lens,
    Slicer,
    Values,
    as_keys,
    as_lens,
    as_values,
    assemble,
    check_lens_result,
    check_result,
    checked_slices,
    cut_pairs,
    fault_in,
    fault_in_values,
    server_ranges,
    slice_by_range,
)
from pslite.kv_wire import (
    pack_answer,
    pack_request,
    request_frames,
    unpack_answer,
    unpack_request,
)
from pslite.postoffice import Postoffice

T = TypeVar("T")


class KVMeta(NamedTuple):
    """What the handle learns of a request besides the pairs."""

    cmd: int
    push: bool
    pull: bool
    sender: int
    """Node id of the worker."""
    app: int
    customer: int
    request_id: int
    """The worker's number of the request (ps-lite's timestamp)."""


KVHandle: TypeAlias = Callable[[KVMeta, KVPairs], "KVPairs | Future[KVPairs | None] | None"]
"""Takes a request and returns the values of a pull, or None; or a future of it, to answer later.

The arrays of the request are read-only and live as long as they are referred to.
"""

Callback: TypeAlias = Callable[[Future[T]], None]


class KVWorker:
    """A worker's side.

    Keys are sorted, strictly increasing and unique: a 1-D ``uint64`` array or what converts to
    one. Values are NumPy arrays on the CPU, bool to complex, 1-D with the same number of
    elements for every key, 2-D with one row a key, or 1-D with ``lens`` (int32 or int64, one
    length a key). All calls return at once with a future, take ``cmd`` (any number, for the
    handle), ``callback`` (called once with the finished future, also after an error) and
    ``priority`` (the highest goes first of what the I/O thread has not taken up yet).

    Args:
        node: a node with the role of a worker.
        app: the number of the ``KVServer`` on the servers.
        customer: tells several workers' sides of one node apart; the handle sees it.
    """

    def __init__(self, node: Postoffice, app: int, customer: int = 0) -> None:
        if node.role is not Role.WORKER:
            raise UsageError(f"a KVWorker needs a worker's node, this is a {node.role.value}'s")
        self.node = node
        self._asker = Asker(node, app, customer)
        self._slicer: Slicer = slice_by_range

    def set_slicer(self, slicer: Slicer) -> None:
        """Share the keys otherwise than by ranges; all workers must do it alike.

        ``slicer(keys, ranges)`` gets the keys of a call and the servers' ranges and returns one
        slice per server, in the order of ranks. Each key must be in exactly one of them.
        """
        self._slicer = slicer

    def push(
        self,
        keys: ArrayLike,
        values: ArrayLike,
        lens: ArrayLike | None = None,
        cmd: int = 0,
        callback: Callback[None] | None = None,
        priority: int = 0,
        *,
        copy: bool = True,
    ) -> Future[None]:
        """Send values to the servers; done when their handles have returned.

        Args:
            copy: False sends without a copy: keys, values and lens then belong to the worker
                until the future is done. (Arrays that are not C-contiguous are copied.)

        Raises:
            UsageError: the arguments break a rule above; nothing was sent.
        """
        pairs = _checked_pairs(keys, values, lens, copy)
        return self._exchange(pairs, cmd, True, False, lambda answers: None, callback, priority)

    def pull(
        self,
        keys: ArrayLike,
        values: Values | None = None,
        lens: Lens | None = None,
        cmd: int = 0,
        callback: Callback[Values] | None = None,
        priority: int = 0,
        *,
        copy: bool = True,
    ) -> Future[Values]:
        """Fetch values from the servers.

        Args:
            values: where to write them: C-contiguous, of the servers' dtype and exact size. None
                makes a new array: 2-D if all servers answer in rows, else 1-D (of float32 and
                empty if there are no keys).
            lens: where to write each key's length: int32 or int64 of shape (number of keys,).
            copy: False leaves ``keys`` to the worker until the future is done.

        Returns:
            A future of ``values``, or of the new array. ``values`` and ``lens`` belong to the
            worker until it is done; after an error, ``lens`` and ``values`` are unchanged.

        Raises:
            UsageError: the arguments break a rule; nothing was sent.
        """
        checked = _checked_keys(keys, copy)
        pairs = KVPairs(checked, np.empty(0, np.float32))
        finish = _finish_pull(len(checked), values, lens)
        return self._exchange(pairs, cmd, False, True, finish, callback, priority)

    def pushpull(
        self,
        keys: ArrayLike,
        values: ArrayLike,
        lens: ArrayLike | None = None,
        out: Values | None = None,
        out_lens: Lens | None = None,
        cmd: int = 0,
        callback: Callback[Values] | None = None,
        priority: int = 0,
        *,
        copy: bool = True,
    ) -> Future[Values]:
        """Push and pull the same keys in one request; the handle sees both at once.

        ``values``, ``lens`` and ``copy`` are those of ``push``; ``out`` and ``out_lens`` are
        what ``values`` and ``lens`` are to ``pull``. ``out`` may be ``values``.
        """
        pairs = _checked_pairs(keys, values, lens, copy)
        finish = _finish_pull(len(pairs.keys), out, out_lens)
        return self._exchange(pairs, cmd, True, True, finish, callback, priority)

    def wait(self, future: Future[T], timeout_s: float | None = None) -> T:
        """What the call brought.

        Raises:
            DeadlineError: ``timeout_s`` is over; names the servers that have not answered. The
                request goes on, so its buffers stay in use.
            RemoteError: a server's handle raised; the text has the traceback.
            ProtocolError: a server answered what does not fit the request.
            NodeLostError: a server is lost or gone.
            UsageError: in a callback, which must not wait.
        """
        return self._asker.wait(future, timeout_s)

    def _exchange(
        self,
        pairs: KVPairs,
        cmd: int,
        push: bool,
        pull: bool,
        finish: Callable[[Sequence[KVPairs]], T],
        callback: Callback[T] | None,
        priority: int,
    ) -> Future[T]:
        """Cut a call into requests, one per server that owns some of its keys."""
        ranges = server_ranges(self.node.config.num_servers)
        slices = checked_slices(self._slicer(pairs.keys, ranges), len(pairs.keys), len(ranges))
        shares = {
            int(node_id(Role.SERVER, rank)): share
            for rank, share in enumerate(cut_pairs(pairs, slices))
            if len(share.keys)
        }
        body = pack_request(push, pull, pairs.values if push else None, pairs.lens)
        frames = {node: request_frames(share, push) for node, share in shares.items()}

        def answered(replies: dict[int, Reply]) -> T:
            return finish(self._answers(shares, replies) if pull else ())

        future = self._asker.ask(cmd, body, frames, answered, priority=priority)
        if callback is not None:
            self._asker.call_back(future, callback)
        return future

    def _answers(
        self, shares: Mapping[int, KVPairs], replies: Mapping[int, Reply]
    ) -> list[KVPairs]:
        """What the servers answered to a pull, in the order of the keys."""
        answers = []
        for node, share in shares.items():
            try:
                reply = replies[node]
                answers.append(unpack_answer(reply.body, reply.frames, share.keys))
            except ProtocolError as error:
                raise ProtocolError(f"{self.node.title(node)} answered badly: {error}") from error
        return sorted(answers, key=lambda answer: int(answer.keys[0]))


class KVServer:
    """A server's side: hands requests to ``handle``, one at a time, and sends what it returns.

    What the handle raises arrives at the worker as ``RemoteError`` with the traceback (errors
    of ``pslite.errors`` arrive as they are), and the server goes on.

    Args:
        node: a node with the role of a server, running or being prepared.
        app: the number of the app; one app of a number per node takes requests.
        handle: see ``KVHandle``. To a pull it must return the values of exactly the keys that
            were asked, in their order; what it returns to a pure push is not looked at.
        copy: False sends the returned arrays without a copy. They must then never change
            again, since they may be sent a second time.
    """

    def __init__(self, node: Postoffice, app: int, handle: KVHandle, *, copy: bool = True) -> None:
        if node.role is not Role.SERVER:
            raise UsageError(f"a KVServer needs a server's node, this is a {node.role.value}'s")
        self.node = node
        self.app = as_int64(app, "the app's number")
        self._handle = handle
        self._copy = copy
        #: Completes once this app takes requests; an error when its number is taken.
        self.registered: Future[None] = node.add_app(self.app, self._arrived)
        log_failure(node, self.registered)

    def close(self) -> None:
        """Take no more requests. Those that come wait for another app of this number."""
        if self.registered.error() is None:
            self.node.remove_app(self.app)

    def _arrived(self, incoming: Incoming) -> None:
        self.node.pool.submit(self.app, lambda: self._serve(incoming))

    def _serve(self, incoming: Incoming) -> None:
        request = incoming.request
        try:
            asked = unpack_request(incoming.body, incoming.frames)
            meta = KVMeta(
                request.head,
                asked.push,
                asked.pull,
                incoming.sender,
                request.app,
                request.customer,
                request.request_id,
            )
            result = self._handle(meta, asked.pairs)
            if isinstance(result, Future):
                result.on_done(lambda done: self._respond_later(incoming, meta, asked.pairs, done))
            else:
                self._respond(incoming, meta, asked.pairs, result)
        except BaseException as error:  # SystemExit of a handle must not end the pool's thread
            incoming.fail(error)

    def _respond_later(
        self, incoming: Incoming, meta: KVMeta, asked: KVPairs, done: Future[KVPairs | None]
    ) -> None:
        try:
            self._respond(incoming, meta, asked, done.result(0))
        except BaseException as error:
            incoming.fail(error)

    def _respond(
        self, incoming: Incoming, meta: KVMeta, asked: KVPairs, result: KVPairs | None
    ) -> None:
        if not meta.pull:
            incoming.respond()
            return
        body, frames = pack_answer(*self._checked_answer(asked, result))
        check_sizes(self.node, body, frames, "pull fewer keys at a time")
        incoming.respond(body, frames)

    def _checked_answer(self, asked: KVPairs, result: Any) -> tuple[Values, Lens | None]:
        """The values and lens that the handle returned.

        Raises:
            ProtocolError: they are not those of the keys that were asked.
        """
        whose = f"the handle of app {self.app} on server {self.node.rank} answered a pull with"
        if not isinstance(result, KVPairs):
            raise ProtocolError(f"{whose} {type(result).__name__} instead of KVPairs")
        if result.keys is not asked.keys and not np.array_equal(result.keys, asked.keys):
            raise ProtocolError(f"{whose} other keys than those that were asked")
        try:
            values = as_values(result.values, copy=self._copy)
            lens = None if result.lens is None else as_lens(result.lens, copy=self._copy)
        except UsageError as error:
            raise ProtocolError(f"{whose} what cannot be sent: {error}") from error
        fault = fault_in_values(len(asked.keys), values, lens)
        if fault is not None:
            raise ProtocolError(f"{whose} values that fit no pull: {fault}")
        return values, lens


def _checked_keys(keys: ArrayLike, copy: bool) -> Any:
    checked = as_keys(keys, copy=copy)
    fault = fault_in(checked)
    if fault is not None:
        raise UsageError(fault)
    return checked


def _checked_pairs(
    keys: ArrayLike, values: ArrayLike, lens: ArrayLike | None, copy: bool
) -> KVPairs:
    pairs = KVPairs(
        _checked_keys(keys, copy),
        as_values(values, copy=copy),
        None if lens is None else as_lens(lens, copy=copy),
    )
    fault = fault_in_values(len(pairs.keys), pairs.values, pairs.lens)
    if fault is not None:
        raise UsageError(fault)
    return pairs


def _finish_pull(
    num_keys: int, out: Values | None, lens: Lens | None
) -> Callable[[Sequence[KVPairs]], Values]:
    if out is not None:
        check_result(out, num_keys)
    if lens is not None:
        check_lens_result(lens, num_keys)
    return lambda answers: assemble(answers, out, lens)
