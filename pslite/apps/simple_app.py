"""``SimpleApp``: send a number and some bytes to nodes, and get answers.

Use it for commands and settings, not for bulk data (``kv_app.py``). An app is a number that both
ends agree on. Handles run one at a time: on a pool thread of a server, or on the I/O thread of
other nodes, where they must be short and cannot wait. It behaves like ps-lite's
``include/ps/simple_app.h``, with two differences: if a handle fails, the asker gets an error, and
every wait can have a time limit.
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
    """A request, as it is passed to the handle."""

    head: int
    body: bytes
    sender: int
    """Node id of the asker."""
    app: int
    customer: int
    request_id: int
    """The asker's number for the request (ps-lite's timestamp)."""

    @property
    def text(self) -> str:
        """The body as UTF-8 text."""
        return self.body.decode()


SimpleHandle: TypeAlias = Callable[[SimpleData], "bytes | str | None"]


class SimpleApp:
    """Sends requests to apps with the same number on other nodes, and answers theirs.

    Args:
        node: a running node, or one that is being prepared.
        app: the number, the same on all nodes; only one app of a node can accept its requests.
        handle: returns the body of the answer, or None for an empty body. If it raises an
            exception, the asker gets a ``RemoteError`` with the traceback, or the same error if it
            is from ``pslite.errors``. Without a handle, every answer is empty.
        customer: a number that tells the askers of one node apart. Requests go to customer 0, so
            only customer 0 has a handle.
    """

    def __init__(
        self, node: Postoffice, app: int, handle: SimpleHandle | None = None, customer: int = 0
    ) -> None:
        if customer and handle is not None:
            raise UsageError(f"only customer 0 may have a handle, this is customer {customer}")
        self.node = node
        self._asker = Asker(node, app, customer)
        self._handle = handle
        #: Completes once this app accepts requests; fails if its number is in use.
        self.registered: Future[None] = completed(None)
        if not customer:
            self.registered = node.add_app(self._asker.app, self._arrived)
            log_failure(node, self.registered)

    def request(self, head: int, body: str | bytes, receiver: int) -> Future[dict[int, bytes]]:
        """Ask a node, or every node of a group (including this one if it belongs to it).

        Args:
            head: any 64-bit integer.
            body: bytes, or text, which is sent as UTF-8; at most about 16 MiB.
            receiver: a node id, or a group (``SERVER_GROUP``, ``ALL_GROUP``, ...).

        Returns:
            A future of {node id: body of its answer}. After an error, it fails with the first
            one, once all nodes have answered or are lost.

        Raises:
            UsageError: the node or group does not exist or has no connection to this node, or the
                text has a lone surrogate.
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
        """Wait for the result of a request and return it.

        Raises:
            DeadlineError: ``timeout_s`` has passed; the text names the nodes that have not
                answered.
            UsageError: the caller is on the I/O thread and would wait for itself.
            Exception: the error of the request.
        """
        return self._asker.wait(request, timeout_s)

    def close(self) -> None:
        """Stop accepting requests; later ones wait for another app with this number."""
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
