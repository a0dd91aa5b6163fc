"""``KVWorker`` (and ``KVServer``): push and pull values under 64-bit keys.

::

    worker = KVWorker(node, app=0)                                   # on a worker
    worker.wait(worker.push([3, 7], np.array([0.5, 1.5], np.float32)))
    values = worker.wait(worker.pull([3, 7]))

    KVServer(node, app=0, handle=SumHandle())                        # on every server

Each server owns a range of the keys, and a call is cut into one request per server. The server's
handle decides what a push does. Every request arrives once and is answered once (the channel
ensures this). Any thread may make calls. Callbacks run on the I/O thread, and handles on a
pool thread of the server, one request of an app at a time. Names and arguments are the same as in
ps-lite's ``include/ps/kv_app.h``. Read next: ``kv_pairs.py`` for the rules of keys and values,
``kv_lists.py`` for why long lists of keys are sent once, ``kv_server.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from pslite.apps.asking import Ask, Asker, new_array
from pslite.apps.kv_lists import MAX_BYTES, MIN_KEYS, NO_LIST, ListedKeys, SentLists
from pslite.apps.kv_pairs import (
    Empty,
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
    owned,
    server_ranges,
    slice_by_range,
)
from pslite.apps.kv_server import KVHandle, KVMeta, KVServer
from pslite.apps.kv_wire import pack_request, request_frames, says_missing, unpack_answer
from pslite.errors import ProtocolError, UsageError
from pslite.future import Future, completed
from pslite.ids import Role, node_id
from pslite.node.customer import Reply
from pslite.node.postoffice import Postoffice

__all__ = ["Callback", "KVHandle", "KVMeta", "KVServer", "KVWorker"]

T = TypeVar("T")

#: The values in the request of a pull.
_NO_VALUES: Values = np.empty(0, np.float32)


Callback: TypeAlias = Callable[[Future[T]], None]


class KVWorker:
    """The worker's side: pushes and pulls values. Any thread may call it.

    Keys are sorted and unique: a 1-D ``uint64`` array, or data that converts to one. Values are
    NumPy arrays on the CPU, bool to complex: 1-D with the same number of elements for every key,
    2-D with one row per key, or 1-D with ``lens`` (int32 or int64, one length per key). All calls
    return a future at once. They take ``cmd`` (any number, for the handle), ``callback`` (called
    once with the finished future, even after an error) and ``priority`` (the I/O thread sends
    waiting requests with the highest priority first). Calls in flight at the same time may
    overtake each other: to pull the result of a push, wait for the push first.

    Args:
        node: a node with the role of a worker.
        app: the number of the ``KVServer`` on the servers.
        customer: a number that tells apart the ``KVWorker`` objects of a node; the handle gets it.
        cache_keys: remember the last long lists of keys (``kv_lists.py``: up to 16, 256 MiB
            together), here and on the servers. A call with the same keys then sends a number
            instead. The keys are compared each time, so you may change your array.
    """

    def __init__(
        self, node: Postoffice, app: int, customer: int = 0, *, cache_keys: bool = True
    ) -> None:
        if node.role is not Role.WORKER:
            raise UsageError(
                f"a KVWorker needs the node of a worker, got the node of a {node.role.value}"
            )
        self.node = node
        self._asker = Asker(node, app, customer)
        self._slicer: Slicer = slice_by_range
        self._ranges = server_ranges(node.config.num_servers)
        self._servers = [int(node_id(Role.SERVER, rank)) for rank in range(len(self._ranges))]
        self._lists = SentLists() if cache_keys else None
        self._empty: Empty = partial(new_array, node)

    def set_slicer(self, slicer: Slicer) -> None:
        """Set how the keys are divided among the servers, identically on all workers.

        ``slicer(keys, ranges)`` gets the keys of a call and the servers' ranges and returns one
        slice per server, in the order of ranks. Each key must be in exactly one slice. The same
        keys must always give the same slices, because the result may be remembered.
        """
        self._slicer = slicer
        if self._lists is not None:
            self._lists.forget()

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
        """Send values to the servers; the future is done when their handles have returned.

        The node, or the script, does not end before the push is done. If the push fails and neither
        the future nor ``callback`` has reported it, ``node.close()`` raises the error. If the
        script ends without closing the node, it prints the error on one line and exits with code
        120.

        Args:
            copy: False sends without a copy: keys, values and lens then belong to the worker
                until the future is done. (Arrays that are not C-contiguous and keys that are
                remembered are still copied.)

        Raises:
            UsageError: the arguments break a rule of this class; nothing was sent.
        """
        listed = self._list_of(keys, copy)
        pairs = self._checked_pairs(listed, values, lens, copy)
        return self._exchange(listed, pairs, cmd, True, False, _nothing, callback, priority)

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
            values: the array to fill: C-contiguous, with the servers' dtype and the exact size.
                None makes a new array: 2-D if all servers answer in rows, else 1-D (float32 and
                empty if there are no keys).
            lens: the array for each key's length: int32 or int64, shape (number of keys,).
            copy: False sends ``keys`` without a copy; they belong to the worker until the future
                is done.

        Returns:
            A future of ``values``, or of the new array. ``values`` and ``lens`` belong to the
            worker until the future is done. After an error, both are unchanged.

        Raises:
            UsageError: the arguments break a rule; nothing was sent.
        """
        listed = self._list_of(keys, copy)
        pairs = KVPairs(listed.keys, _NO_VALUES)
        finish = _finish_pull(len(listed.keys), values, lens)
        return self._exchange(listed, pairs, cmd, False, True, finish, callback, priority)

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
        """Push and pull the same keys in one request; the handle gets both at once.

        ``values``, ``lens`` and ``copy`` are as in ``push``. ``out`` and ``out_lens`` are what
        ``values`` and ``lens`` are in ``pull``. ``out`` may be ``values``.
        """
        listed = self._list_of(keys, copy)
        pairs = self._checked_pairs(listed, values, lens, copy)
        finish = _finish_pull(len(listed.keys), out, out_lens)
        return self._exchange(listed, pairs, cmd, True, True, finish, callback, priority)

    def wait(self, future: Future[T], timeout_s: float | None = None) -> T:
        """Wait for the result of a call and return it.

        Raises:
            DeadlineError: ``timeout_s`` has passed; the text names the servers that have not
                answered. The request continues, so its buffers stay in use.
            RemoteError: a server's handle raised; the text has the traceback.
            ProtocolError: the answer of a server does not fit the request.
            NodeLostError: a server is lost or has left.
            UsageError: the caller is in a callback, which must not wait.
        """
        return self._asker.wait(future, timeout_s)

    def _list_of(self, keys: ArrayLike, copy: bool) -> ListedKeys:
        """Check the keys of a call; return them with each server's slice (cached)."""
        array = as_keys(keys)
        lists = self._lists if array.nbytes <= MAX_BYTES and len(array) >= MIN_KEYS else None
        known = None if lists is None else lists.find(array)
        if known is not None:
            return known
        own = owned(array, np.uint64, self._empty if copy or lists is not None else None)
        fault = fault_in(own)
        if fault is not None:
            raise UsageError(fault)
        if lists is not None:
            own.flags.writeable = False  # because the user's slicer gets this array
        parts = self._slicer(own, self._ranges)
        if self._slicer is not slice_by_range:
            parts = checked_slices(parts, len(own), len(self._ranges))
        return ListedKeys(own, parts) if lists is None else lists.add(own, parts)

    def _checked_pairs(
        self, listed: ListedKeys, values: ArrayLike, lens: ArrayLike | None, copy: bool
    ) -> KVPairs:
        empty = self._empty if copy else None
        pairs = KVPairs(
            listed.keys,
            as_values(values, empty),
            None if lens is None else as_lens(lens, empty),
        )
        fault = fault_in_values(len(pairs.keys), pairs.values, pairs.lens)
        if fault is not None:
            raise UsageError(fault)
        return pairs

    def _exchange(
        self,
        listed: ListedKeys,
        pairs: KVPairs,
        cmd: int,
        push: bool,
        pull: bool,
        finish: Callable[[Sequence[KVPairs]], T],
        callback: Callback[T] | None,
        priority: int,
    ) -> Future[T]:
        """Cut a call into requests, one per server that owns some of its keys."""
        cut = zip(self._servers, cut_pairs(pairs, listed.parts), strict=True)
        shares = {node: share for node, share in cut if len(share.keys)}
        body = pack_request(push, pull, pairs.values if push else None, pairs.lens, listed.name)
        frames = {node: request_frames(share, push) for node, share in shares.items()}

        def answered(replies: dict[int, Reply]) -> T:
            return finish(self._answers(shares, replies) if pull else ())

        ask_one = None if listed.name == NO_LIST else self._by_list(listed, cmd, body, frames)
        future = self._asker.ask(
            cmd, body, frames, answered, priority=priority, ask_one=ask_one, is_push=push
        )
        if callback is not None:
            self._asker.call_back(future, callback)
        return future

    def _by_list(
        self,
        listed: ListedKeys,
        cmd: int,
        body: bytes,
        frames: Mapping[int, Sequence[memoryview]],
    ) -> Ask:
        """Return a function that sends the keys only to servers that lack the list."""

        def ask(node: int) -> Future[dict[int, Reply]]:
            is_told = node in listed.told
            listed.told.add(node)
            whole = partial(self._asker.request, node, cmd, body, frames[node])
            asked = self._asker.request(node, cmd, body, frames[node][1:]) if is_told else whole()
            again = whole if is_told else None
            return asked.then(partial(self._unless_missing, node, listed, again))

        return ask

    def _unless_missing(
        self,
        node: int,
        listed: ListedKeys,
        again: Callable[[], Future[dict[int, Reply]]] | None,
        replies: dict[int, Reply],
    ) -> Future[dict[int, Reply]]:
        """Return the replies; if the server lacks the list, call ``again`` for them."""
        try:
            missing = says_missing(replies[node].body, listed.name.number)
        except ProtocolError as error:
            raise self._bad_answer(node, error) from error
        if not missing:
            return completed(replies)
        if again is None:
            raise ProtocolError(
                f"{self.node.membership.title(node)} still asks for a key list that was already "
                "sent"
            )
        return again().then(partial(self._unless_missing, node, listed, None))

    def _answers(
        self, shares: Mapping[int, KVPairs], replies: Mapping[int, Reply]
    ) -> list[KVPairs]:
        """Decode the servers' answers to a pull; return them in the order of the keys."""
        answers = []
        for node, share in shares.items():
            try:
                reply = replies[node]
                answers.append(unpack_answer(reply.body, reply.frames, share.keys))
            except ProtocolError as error:
                raise self._bad_answer(node, error) from error
        return sorted(answers, key=lambda answer: int(answer.keys[0]))

    def _bad_answer(self, node: int, error: ProtocolError) -> ProtocolError:
        return ProtocolError(f"{self.node.membership.title(node)} sent an invalid answer: {error}")


def _nothing(_: Sequence[KVPairs]) -> None:
    """Discard the answers: a push has no result."""


def _finish_pull(
    num_keys: int, out: Values | None, lens: Lens | None
) -> Callable[[Sequence[KVPairs]], Values]:
    if out is not None:
        check_result(out, num_keys)
    if lens is not None:
        check_lens_result(lens, num_keys)
    return lambda answers: assemble(answers, out, lens)
