"""``SimpleApp``: send a number and some bytes to nodes, and get answers.

For commands and settings, not for bulk data (``kv_app.py``). An app is a number that both
ends agree on. Handles run one at a time: on a server's pool thread, elsewhere on the I/O
thread, where they must be short and cannot wait. Semantics are those of ps-lite's
``include/ps/simple_app.h``, except that a failing handle is an error at the asker, and that
every wait may have a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

from pslite.apps.asking import Asker, check_sizes, log_failure
from pslite.errors import UsageError, check_unicode
from pslite.future import Future, completed
from pslite.node.customer import Incoming
from pslite.node.postoffice import Postoffice

T = TypeVar("T")


class SimpleData(NamedTuple):
    """A request as the handle sees it."""

    head: int
    body: bytes
    sender: int
    """Node id of the asker."""
    app: int
    customer: int
    request_id: int
    """The asker's number of the request (ps-lite's timestamp)."""

    @property
    def text(self) -> str:
        """The body as UTF-8 text."""
        return self.body.decode()


SimpleHandle: TypeAlias = Callable[[SimpleData], "bytes | str | None"]


class SimpleApp:
    """Sends requests to apps of the same number on other nodes, and answers theirs.

    Args:
        node: a running node, or one that is being prepared.
        app: the number, the same on all nodes; one app of a number per node takes requests.
        handle: answers requests with a body or None (an empty one). What it raises arrives at
            the asker as ``RemoteError`` with the traceback; errors of ``pslite.errors`` arrive
            as they are. Without a handle, every answer is empty.
        customer: tells several askers of one node apart. Requests go to customer 0, so only
            that one has a handle.
    """

    def __init__(
        self, node: Postoffice, app: int, handle: SimpleHandle | None = None, customer: int = 0
    ) -> None:
        if customer and handle is not None:
            raise UsageError(f"only customer 0 may have a handle, this is customer {customer}")
        self.node = node
        self._asker = Asker(node, app, customer)
        self._handle = handle
        #: Completes once this app takes requests; an error when its number is taken.
        self.registered: Future[None] = completed(None)
        if not customer:
            self.registered = node.add_app(self._asker.app, self._arrived)
            log_failure(node, self.registered)

    def request(self, head: int, body: str | bytes, receiver: int) -> Future[dict[int, bytes]]:
        """Ask a node, or every node of a group (this one too, if it belongs to it).

        Args:
            head: any 64-bit integer.
            body: bytes, or text that travels as UTF-8; at most about 16 MiB.
            receiver: a node id, or a group (``SERVER_GROUP``, ``ALL_GROUP``, ...).

        Returns:
            A future of {node id: body of its answer}. It ends in the first error, once all
            have answered or are lost.

        Raises:
            UsageError: there is no such node or group, or no connection to it; or the text has
                half a character (a lone surrogate).
        """
        if isinstance(body, str):
            body = check_unicode("the body", body).encode()
        nodes = self._asker.members(receiver)
        return self._asker.ask(
            head,
            bytes(body),
            dict.fromkeys(nodes, ()),
            lambda replies: {node: reply.body for node, reply in replies.items()},
        )

    def wait(self, request: Future[T], timeout_s: float | None = None) -> T:
        """Return what the request brought. Errors: as of the request, and

        Raises:
            DeadlineError: ``timeout_s`` is over; the text names who has not answered.
            UsageError: on the I/O thread, which would wait for itself.
        """
        return self._asker.wait(request, timeout_s)

    def close(self) -> None:
        """Take no more requests. Those that come wait for another app of this number."""
        if not self._asker.customer and self.registered.error() is None:
            self.node.remove_app(self._asker.app)

    def _arrived(self, incoming: Incoming) -> None:
        self.node.pool.submit(self._asker.app, lambda: self._serve(incoming))

    def _serve(self, incoming: Incoming) -> None:
        try:
            r = incoming.request
            data = SimpleData(r.head, r.body, incoming.sender, r.app, r.customer, r.request_id)
            answer = None if self._handle is None else self._handle(data)
            body = answer.encode() if isinstance(answer, str) else answer
            if not isinstance(body, bytes | bytearray | None):
                raise TypeError(
                    f"a handle must return bytes, str or None, got {type(body).__name__}"
                )
            content = bytes(body or b"")
            check_sizes(self.node, content, (), "send a shorter answer")
            incoming.respond(content)
        except BaseException as error:  # SystemExit of a handle must not end the pool's thread
            incoming.fail(error)
