"""``Customers``: open requests between apps, their answers and routing.

An app is a number that both ends agree on. ``Customers`` lives on the I/O thread: it hands
arriving requests to the app's handler and arriving responses to the future of the request.
Handlers run on the I/O thread and must be short; ``KVServer``, for example, gives long work to the
node's pool. Requests for an app that does not exist yet wait for some time, so processes may
create their apps in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from pslite.errors import RemoteError, UsageError, rebuild, told
from pslite.future import Future
from pslite.wire.messages import Request, Response

SendTo = Callable[[int, Request | Response, Sequence[Any]], None]

#: The most requests that may wait for apps that do not exist yet.
_MAX_EARLY = 4096
_MAX_EARLY_BYTES = 256 << 20


@dataclass(slots=True, eq=False, repr=False)
class _OpenRequest:
    future: Future[dict[int, Any]]
    waiting: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    error: BaseException | None = None
    message: Request | None = None
    """The request, if it can be sent again to a server that takes the place of a lost one."""
    frames: Mapping[int, Sequence[Any]] = field(default_factory=dict)


class Pending:
    """The open requests of one customer. Futures complete with {node id: answer}."""

    def __init__(self) -> None:
        self._next_id = 1
        self._entries: dict[int, _OpenRequest] = {}

    def open(self, nodes: Iterable[int], future: Future[dict[int, Any]]) -> int:
        """Add a request to ``nodes``; return its id, a number from 1."""
        request_id = self._next_id
        self._next_id += 1
        entry = _OpenRequest(future, set(nodes))
        if entry.waiting:
            self._entries[request_id] = entry
        else:
            future.set_result({})
        return request_id

    def answer(self, request_id: int, node: int, answer: Any) -> None:
        """Note the answer of ``node``."""
        self._settle(request_id, node, answer, None)

    def refuse(self, request_id: int, node: int, error: BaseException) -> None:
        """Note an error as the answer of ``node``; the future will fail with it."""
        self._settle(request_id, node, None, error)

    def _settle(self, request_id: int, node: int, answer: Any, error: BaseException | None) -> None:
        entry = self._entries.get(request_id)
        if entry is None or node not in entry.waiting:
            return
        entry.waiting.discard(node)
        entry.answers[node] = answer
        entry.error = entry.error or error
        if not entry.waiting:
            del self._entries[request_id]
            if entry.error is not None:
                entry.future.set_error(entry.error)
            else:
                entry.future.set_result(entry.answers)

    def depart(self, node: int, error: BaseException, *, for_good: bool = True) -> None:
        """Note ``error`` as the answer of ``node``, which is gone, to all requests.

        If it is not ``for_good``, requests that can be sent again wait for the next process.
        """
        for request_id, entry in list(self._entries.items()):
            if node in entry.waiting and (for_good or entry.message is None):
                self.refuse(request_id, node, error)

    def keep(self, request_id: int, message: Request, frames: Mapping[int, Sequence[Any]]) -> None:
        """Keep a request until it is answered, to send it again."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.message, entry.frames = message, frames

    def unanswered(self, node: int) -> list[tuple[Request, Sequence[Any]]]:
        """Return the kept requests that a node has not answered."""
        return [
            (entry.message, entry.frames.get(node, ()))
            for entry in self._entries.values()
            if node in entry.waiting and entry.message is not None
        ]

    def cancel(self, request_id: int, error: BaseException) -> None:
        """Fail one request with ``error``; ignore its answers."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            entry.future.set_error(error)

    def fail(self, error: BaseException) -> None:
        """Fail all open requests with ``error``."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.future.set_error(error)

    def __len__(self) -> int:
        return len(self._entries)


class Reply(NamedTuple):
    """The answer of a node."""

    body: bytes
    frames: Sequence[Any]


@dataclass(slots=True, eq=False, repr=False)
class Incoming:
    """A received request. Call ``respond`` or ``fail`` once, from any thread."""

    sender: int
    request: Request
    #: Payload frames; the app may write a lent one that is not read-only. They may be in the
    #: asker's memory, so they are valid only until the answer, which removes them.
    frames: Sequence[Any]
    _respond: Callable[[Incoming, Response, Sequence[Any]], None]
    is_lent: bool = False
    """Whether the frames are the asker's own, in this process."""
    attempt: int = 0
    """How many processes had the sender's seat before the asker."""
    _answered: bool = False

    @property
    def head(self) -> int:
        return self.request.head

    @property
    def body(self) -> bytes:
        return self.request.body

    @property
    def nbytes(self) -> int:
        """The bytes that the request occupies while it waits."""
        return len(self.body) + sum(len(frame) for frame in self.frames)

    def respond(self, body: bytes = b"", frames: Sequence[Any] = ()) -> None:
        """Answer; ``frames`` must stay unchanged until the peer has accepted them."""
        self._finish(None, body, frames)

    def fail(self, error: BaseException) -> None:
        """Answer with an error; the asker's future fails with it."""
        self._finish(error, b"", ())

    def _finish(self, error: BaseException | None, body: bytes, frames: Sequence[Any]) -> None:
        if self._answered:
            return
        self._answered = True
        self.frames = ()
        r = self.request
        response = Response(r.app, r.customer, r.request_id, r.head, *told(error), body)
        self._respond(self, response, frames)


Handler = Callable[[Incoming], None]


class KeptState(Protocol):
    """The state of an app, which depends only on its requests and on who is gone."""

    def state(self) -> list[Any] | None:
        """Return it as plain data; None if a request waits for others."""

    def resume(self, state: Sequence[Any]) -> None:
        """Go on from what ``state`` has returned."""


def _unchanged(app: int, handler: Handler, kept: KeptState | None) -> Handler:
    return handler


class Customers:
    """The apps of one node and their open requests."""

    def __init__(
        self,
        send: SendTo,
        on_io_thread: Callable[[Callable[[], None]], None],
        hand_over: SendTo | None = None,
    ) -> None:
        self._send = send
        self._hand_over = hand_over or send
        self._on_io_thread = on_io_thread
        self._handlers: dict[int, Handler] = {}
        self._early: list[tuple[float, Incoming]] = []
        self._early_bytes = 0
        self._error: BaseException | None = None
        self.pending = Pending()
        #: Node -> how many of its processes were replaced.
        self._replaced: Counter[int] = Counter()
        #: App -> the number of requests that it has not answered.
        self._open: Counter[int] = Counter()
        self._waiting_apps: set[int] = set()
        #: Apps of which a standby repeats the requests: the next process can be asked again.
        self.repeated_apps: set[int] = set()
        #: Nodes of which the next process repeats all requests.
        self.repeating_nodes: set[int] = set()
        #: Returns the handler to use for an app that waits for others, instead of its own.
        self.wrap: Callable[[int, Handler, KeptState | None], Handler] = _unchanged

    @property
    def is_at_work(self) -> bool:
        """Whether an app may still answer a request before another message arrives."""
        return any(count for app, count in self._open.items() if app not in self._waiting_apps)

    def add(
        self,
        app: int,
        handler: Handler,
        *,
        waits_for_others: bool = False,
        kept: KeptState | None = None,
    ) -> None:
        """Pass requests for ``app`` to ``handler``, including those that wait for it.

        With ``waits_for_others``, a request that the app does not answer at once is answered only
        after another request arrives, another answer is accepted, or a node is gone. Another
        process of the scheduler can go on from ``kept``.
        """
        if waits_for_others:
            self._waiting_apps.add(app)
            handler = self.wrap(app, handler, kept)
        if app in self._handlers:
            raise UsageError(f"this node already has an app {app}; choose another number")
        self._handlers[app] = handler
        early, self._early = self._early, []
        for arrived_at, incoming in early:
            if incoming.request.app == app:
                self._early_bytes -= incoming.nbytes
                self._handle(handler, incoming)
            else:
                self._early.append((arrived_at, incoming))

    def fail(self, error: BaseException) -> None:
        """Fail this node's open requests with ``error``, and all later requests too."""
        self._error = error
        self.pending.fail(error)

    def replaced(self, node: int) -> None:
        """Forget the requests of a process whose seat another one has taken."""
        self._replaced[node] += 1
        early, self._early = self._early, []
        for arrived_at, incoming in early:
            if incoming.sender == node:
                self._early_bytes -= incoming.nbytes
                self._close(incoming.request.app)
            else:
                self._early.append((arrived_at, incoming))

    def ask_again(self, node: int) -> None:
        """Send what a node has not answered to the process that has its seat now."""
        for message, frames in self.pending.unanswered(node):
            self._send(node, message, frames)

    def remove(self, app: int) -> None:
        """Remove an app; later requests wait for another app with this number."""
        self._handlers.pop(app, None)

    def close(self) -> None:
        """Release the apps and their memory: the node has ended."""
        self._handlers.clear()
        self._early.clear()

    def ask(
        self,
        nodes: Sequence[int],
        app: int,
        customer: int,
        head: int,
        body: bytes,
        frames: dict[int, Sequence[Any]],
        future: Future[dict[int, Reply]],
        *,
        ordered: bool = True,
    ) -> int:
        """Send a request to each of ``nodes`` with its own frames; return its id."""
        send = self._send if ordered else self._hand_over
        request_id = self.pending.open(nodes, future)
        message = Request(app, customer, request_id, head, body)
        if app in self.repeated_apps or self.repeating_nodes.issuperset(nodes):
            self.pending.keep(request_id, message, frames)
        try:
            for node in nodes:
                send(node, message, frames.get(node, ()))
        except Exception as error:
            self.pending.cancel(request_id, error)
        return request_id

    def request_arrived(
        self,
        sender: int,
        message: Request,
        frames: Sequence[Any],
        now: float,
        *,
        is_lent: bool = False,
    ) -> None:
        attempt = self._replaced[sender] if self._replaced else 0
        incoming = Incoming(sender, message, frames, self._responded, is_lent, attempt)
        self._open[message.app] += 1
        if self._error is not None:
            incoming.fail(self._error)
            return
        handler = self._handlers.get(message.app)
        if handler is not None:
            self._handle(handler, incoming)
            return
        nbytes = self._early_bytes + incoming.nbytes
        if len(self._early) < _MAX_EARLY and nbytes <= _MAX_EARLY_BYTES:
            self._early.append((now, incoming))
            self._early_bytes = nbytes
        else:
            incoming.fail(UsageError(f"this node does not have an app {message.app}"))

    def repeated(self, sender: int, message: Request) -> Incoming:
        """Return a request of a node that another process had got before."""
        attempt = self._replaced[sender] if self._replaced else 0
        self._open[message.app] += 1
        return Incoming(sender, message, (), self._responded, False, attempt)

    def response_arrived(self, sender: int, message: Response, frames: Sequence[Any]) -> None:
        if not message.kind:
            self.pending.answer(message.request_id, sender, Reply(message.body, frames))
            return
        error = rebuild(message.kind, message.error, role=message.role, rank=message.rank)
        if isinstance(error, RemoteError):
            error.where = f"node {sender}"
        self.pending.refuse(message.request_id, sender, error)

    def expire(self, before: float) -> None:
        """Refuse requests that arrived before ``before`` and still wait for an app."""
        for arrived_at, incoming in self._early:
            if arrived_at < before:
                app = incoming.request.app
                self._early_bytes -= incoming.nbytes
                incoming.fail(
                    UsageError(f"the receiver does not have an app {app}; create it there first")
                )
        self._early = [entry for entry in self._early if entry[0] >= before]

    def _close(self, app: int) -> None:
        """Count a request to an app as answered."""
        self._open[app] -= 1
        if not self._open[app]:
            # Peers may ask for any app number, so do not keep an entry for each.
            del self._open[app]

    @staticmethod
    def _handle(handler: Handler, incoming: Incoming) -> None:
        try:
            handler(incoming)
        except BaseException as error:  # SystemExit of an app must not end the I/O thread
            incoming.fail(error)

    def _responded(self, incoming: Incoming, response: Response, frames: Sequence[Any]) -> None:
        def deliver() -> None:
            self._close(response.app)
            if self._replaced and incoming.attempt != self._replaced[incoming.sender]:
                return  # another process has the asker's seat, and did not ask this
            try:
                if incoming.is_lent:
                    lent = [memoryview(frame).toreadonly() for frame in frames]
                    self._hand_over(incoming.sender, response, lent)
                else:
                    self._send(incoming.sender, response, frames)
            except Exception as error:
                kind, text, role, rank = told(error)
                refusal = replace(response, kind=kind, error=text, role=role, rank=rank, body=b"")
                self._send(incoming.sender, refusal, ())

        self._on_io_thread(deliver)
