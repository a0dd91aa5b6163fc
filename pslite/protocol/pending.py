"""Requests that wait for their responses. Pure bookkeeping; every entry completes.

A request goes to one or more nodes and is complete when each of them - a set, not a count -
has answered, or one of them cannot any more. Answers of nodes that were not asked, and second
answers, change nothing (ps-lite compared counts for equality, so one answer too many made its
wait endless, ``src/customer.cc``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pslite.future import Future


@dataclass(slots=True)
class _OpenRequest:
    future: Future[dict[int, Any]]
    waiting: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    error: BaseException | None = None


class Pending:
    """The open requests of one customer. Futures complete with {node id: answer}."""

    def __init__(self) -> None:
        self._next_id = 1
        self._entries: dict[int, _OpenRequest] = {}

    def open(self, nodes: Iterable[int], future: Future[dict[int, Any]]) -> int:
        """Enter a request to ``nodes``; returns its id."""
        request_id = self._next_id
        self._next_id += 1
        entry = _OpenRequest(future, set(nodes))
        if entry.waiting:
            self._entries[request_id] = entry
        else:
            future.set_result({})
        return request_id

    def answer(self, request_id: int, node: int, answer: Any) -> None:
        """``node`` has answered."""
        self._settle(request_id, node, answer, None)

    def refuse(self, request_id: int, node: int, error: BaseException) -> None:
        """``node`` has answered with an error, which the future ends in."""
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

    def depart(self, node: int, error: BaseException) -> None:
        """``node`` is gone: what still waits for it ends with ``error``."""
        for request_id, entry in list(self._entries.items()):
            if node in entry.waiting:
                self.refuse(request_id, node, error)

    def cancel(self, request_id: int, error: BaseException) -> None:
        """End one request with ``error``, whatever has been answered."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            entry.future.set_error(error)

    def fail(self, error: BaseException) -> None:
        """End everything that is open with ``error``."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.future.set_error(error)

    def waiting_for(self, request_id: int) -> tuple[int, ...]:
        """The nodes that have not answered yet."""
        entry = self._entries.get(request_id)
        return tuple(sorted(entry.waiting)) if entry else ()

    def __len__(self) -> int:
        return len(self._entries)
