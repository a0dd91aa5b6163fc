"""Requests to an app without a network: who asked, and what was answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pslite.errors import PSError, rebuild
from pslite.ids import Role, node_id
from pslite.node.customer import Incoming
from pslite.wire.messages import Request, Response


class Asked:
    """One request of a worker, and its answer once there is one."""

    def __init__(
        self, rank: int = 0, head: int = 0, body: bytes = b"", frames: Sequence[Any] = ()
    ) -> None:
        self.answer: Response | None = None
        self.frames: Sequence[Any] = ()
        request = Request(0, 0, 1, head, body)
        self.incoming = Incoming(node_id(Role.WORKER, rank), request, frames, self._respond)

    def _respond(self, _: Incoming, response: Response, frames: Sequence[Any]) -> None:
        assert self.answer is None, "answered twice"
        self.answer, self.frames = response, frames

    @property
    def body(self) -> bytes:
        """What came back; an error is raised."""
        assert self.answer is not None, "not answered"
        error = self.error
        if error is not None:
            raise error
        return self.answer.body

    @property
    def error(self) -> PSError | None:
        """The error that came back, as the worker sees it."""
        if self.answer is None or not self.answer.kind:
            return None
        return rebuild(self.answer.kind, self.answer.error)
