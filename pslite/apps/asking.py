"""``Asker``: requests from an app to the apps of other nodes.

An ``Asker`` sends one request to each of some nodes and completes one future when all have
answered. It checks each request in the calling thread, so that nothing fails later on the I/O
thread. It does not resend messages or drop duplicates; the channel does that. ``ask`` and
``wait`` may be called from any thread; ``finish`` and callbacks run on the I/O thread.

Received frames may be in the memory of the node that sent them (``memory/``). The frames of a
request are valid until it is answered, and the frames of an answer until ``finish`` has returned.
The asker keeps the frames of a request unchanged until then, and the receiver copies what it needs
for longer. Read next: ``simple_app.py``, then ``kv_app.py``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pslite.errors import ClosedError, UsageError
from pslite.future import Future, gather
from pslite.ids import ALL_GROUP, Role, group_members, node_id
from pslite.node.customer import Reply
from pslite.node.postoffice import Postoffice
from pslite.wire.codec import MAX_HEADER_BYTES

T = TypeVar("T")

#: The body is sent in the header frame; the rest is for the other fields of the message.
MAX_BODY_BYTES = MAX_HEADER_BYTES - (64 << 10)

#: Smaller arrays are not shared: the socket copies them faster.
_SMALL_BYTES = 1 << 16

Ask = Callable[[int], "Future[dict[int, Reply]]"]
"""A function that asks one node. It runs on the I/O thread."""

_INT64 = range(-(1 << 63), 1 << 63)


class Asker:
    """The sender of an app's requests on one node.

    ``ordered`` says whether a request must arrive after earlier messages of other apps.
    """

    def __init__(
        self, node: Postoffice, app: int, customer: int = 0, *, ordered: bool = True
    ) -> None:
        self.node = node
        self.app = as_int64(app, "the app's number")
        self.customer = as_int64(customer, "the customer's number")
        self._ordered = ordered
        self._lock = threading.Lock()
        """Guards the heap, which callers fill and the I/O thread empties."""
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def ask(
        self,
        head: int,
        body: bytes,
        frames: Mapping[int, Sequence[Any]],
        finish: Callable[[dict[int, Reply]], T],
        *,
        priority: int = 0,
        ask_one: Ask | None = None,
        is_push: bool = False,
    ) -> Future[T]:
        """Ask each node in ``frames``; the future completes with ``finish(replies)``.

        Args:
            frames: node id -> payload, unchanged until the future is done.
            finish: runs on the I/O thread. If it raises an exception, the future fails with it.
                The frames of the replies are valid until it returns.
            priority: the I/O thread sends the waiting request with the highest priority first, and
                requests of equal priority in the order of their calls.
            ask_one: a function that asks one node; by default one ``request``.
            is_push: a closing node waits for this request, and raises its error if no caller
                has received it.

        Raises:
            UsageError: the cluster is not complete yet, or the request is too large.
        """
        if self.node.info is None and self.node.error is None:
            raise UsageError("requests need a complete cluster; wait for node.ready first")
        head = as_int64(head, "a request's head (cmd)")
        priority = operator.index(priority)
        for payload in frames.values():
            check_sizes(self.node, body, payload, "request fewer keys at once")
        send = ask_one or (lambda node: self.request(node, head, body, frames[node]))
        open_: dict[int, Future[dict[int, Reply]]] = {}
        # The future keeps the frames alive until it is done, and the open requests keep the future.
        make = self.node.unheard.push if is_push else Future
        future: Future[T] = make(lambda: self._unanswered(frames, open_))

        def start() -> None:
            for node in frames:
                open_[node] = send(node)
            _join(list(open_.values()), finish).on_done(lambda done: _settle(future, done))

        with self._lock:
            heapq.heappush(self._heap, (-priority, next(self._sequence), start))
        self.node.io_queue.call(self._start_first)
        # If the node has ended, it may never run a command that arrives after its last step.
        if self.node.error is not None:
            future.set_error(self.node.error)
        return future

    def request(
        self, node: int, head: int, body: bytes, frames: Sequence[Any]
    ) -> Future[dict[int, Reply]]:
        """Ask one node, now."""
        payload = {node: frames}
        return self.node.request(
            [node], self.app, head, body, payload, self.customer, ordered=self._ordered
        )

    def wait(self, future: Future[T], timeout_s: float | None = None) -> T:
        """Wait for the future's value and return it.

        Raises:
            DeadlineError: ``timeout_s`` has passed; the text names the nodes that have not
                answered. The request continues, and its buffers stay in use.
            UsageError: the caller is on the I/O thread (in a callback) and would wait for itself.
            Exception: the error of the request.
        """
        if self.node.io_queue.is_io_thread and not future.done():
            raise UsageError(
                "a callback must not wait: it runs on the I/O thread, which receives the "
                "answers; continue in the callback of the request that you wait for"
            )
        return future.result(timeout_s)

    def call_back(self, future: Future[T], callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(future)`` when it is done; only log exceptions of the callback."""

        def guarded(done: Future[T]) -> None:
            try:
                callback(done)
            except Exception:
                self.node.log.error(
                    f"a callback of app {self.app} raised: {traceback.format_exc()}"
                )

        future.on_done(guarded)

    def members(self, receiver: int) -> list[int]:
        """Return the node ids of a node or group: servers, workers, the scheduler.

        Raises:
            UsageError: there is no such node, or no connection to it.
        """
        config, role = self.node.config, self.node.membership.role
        receiver = as_int64(receiver, "a receiver")
        everybody = group_members(ALL_GROUP, config.num_workers, config.num_servers)
        members = group_members(receiver, config.num_workers, config.num_servers) & everybody
        if not members:
            raise UsageError(
                f"the receiver must be a node or a group of this cluster, got {receiver}"
            )
        own = None if self.node.info is None else self.node.info.node_id
        count = config.num_workers if role is Role.WORKER else config.num_servers
        peers = {node_id(role, rank) for rank in range(count)} - {own}
        if role is not Role.SCHEDULER and peers & members:
            raise UsageError(
                f"a {role.value} cannot send to other {role.value}s; send to the other roles"
            )
        return sorted(members, key=lambda node: (node == 1, node % 2, node))

    def _start_first(self) -> None:
        with self._lock:
            _, _, start = heapq.heappop(self._heap)
        start()

    def _unanswered(
        self, nodes: Mapping[int, Any], asked: Mapping[int, Future[dict[int, Reply]]]
    ) -> str:
        missing = [node for node in nodes if node not in asked or not asked[node].done()]
        titles = ", ".join(self.node.membership.title(node) for node in missing)
        return f"app {self.app} waits for {titles}"


def as_int64(number: int, what: str) -> int:
    """Return ``number`` as an ``int`` of at most 64 bits; else raise ``UsageError``."""
    try:
        plain = operator.index(number)
    except TypeError:
        plain = None
    if plain is None or plain not in _INT64:
        raise UsageError(f"{what} must be a 64-bit integer, got {number!r}")
    return int(plain)


def check_sizes(node: Postoffice, body: bytes, frames: Sequence[Any], advice: str) -> None:
    """Check that a message is not larger than receivers accept.

    Raises:
        UsageError: the message is too large; the text names the limit and what to do.
    """
    if len(body) > MAX_BODY_BYTES:
        raise UsageError(
            f"the body must have at most {MAX_BODY_BYTES} bytes, got {len(body)}; {advice}"
        )
    limit = node.config.max_message_bytes
    size = sum(len(frame) for frame in frames) + len(body)
    if size > limit:
        raise UsageError(
            f"the message must have at most {limit} bytes (PS_MAX_MESSAGE_BYTES), got {size}; "
            f"{advice}, or raise the limit on all nodes"
        )


def log_failure(node: Postoffice, registered: Future[None]) -> None:
    """Log why an app could not be registered, unless the node was just closed."""

    def say(done: Future[None]) -> None:
        error = done.error()
        if error is not None and not isinstance(error, ClosedError):
            node.log.error(str(error))

    registered.on_done(say)


def new_array(node: Postoffice, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Make an uninitialized array to send; peers can read a large one directly."""
    dtype = np.dtype(dtype)
    size = shape if isinstance(shape, int) else math.prod(shape)
    if size * dtype.itemsize < _SMALL_BYTES:
        return np.empty(shape, dtype)
    return node.buffer(size * dtype.itemsize).view(dtype).reshape(shape)


def _join(
    asked: Sequence[Future[dict[int, Reply]]], finish: Callable[[dict[int, Reply]], T]
) -> Future[T]:
    """Return a future of ``finish(replies)``, complete once all nodes have answered."""
    if len(asked) == 1:
        return asked[0].map(finish)
    left = len(asked)

    def keep(replies: dict[int, Reply]) -> dict[int, Reply]:
        # Copy the frames, because they may be invalid when the last reply arrives. That one is
        # used at once and needs no copy.
        nonlocal left
        left -= 1
        return replies if left == 0 else {node: _copied(one) for node, one in replies.items()}

    return gather([one.map(keep) for one in asked]).map(lambda found: finish(_merged(found)))


def _copied(reply: Reply) -> Reply:
    return Reply(reply.body, [bytes(frame) for frame in reply.frames])


def _settle(future: Future[T], done: Future[T]) -> None:
    error = done.error()
    if error is not None:
        future.set_error(error)
    else:
        future.set_result(done.result(0))
    future.describe = "a request"  # the old description keeps the frames alive


def _merged(answers: Sequence[dict[int, Reply]]) -> dict[int, Reply]:
    return {node: reply for answer in answers for node, reply in answer.items()}
