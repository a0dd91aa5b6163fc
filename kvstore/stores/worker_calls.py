"""Calls by which the workers of a store exchange data without keys.

All workers must make the same calls in the same order, except ``send`` and ``recv``. ``pslite``'s
Communicator does the work (``OneRank`` in a store of one process). This module converts arrays of
any library to NumPy, and waits for the result. It runs on the caller's thread.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.dtypes import bfloat16, check_dtype
from kvstore.errors import ArgumentValueError, ValueMismatchError
from kvstore.protocol.objects import pack_object, unpack_object
from kvstore.stores.one_rank import OneRank
from kvstore.stores.plugin import KVStoreBase
from pslite.errors import PSError, UsageError
from pslite.future import Future

if TYPE_CHECKING:
    from kvstore.stores.steps import StepKeeper
    from pslite import Communicator, ReceivedArray

Host = np.ndarray[Any, Any]


class WorkerCalls(KVStoreBase, abc.ABC):
    """Collective calls of all workers of a store, and messages between two of them."""

    _group: Communicator | OneRank
    """All workers of the store."""
    _refuses_steps = ""
    """Why ``steps`` cannot save this store's progress; empty if it can."""
    _keeper: StepKeeper | None = None
    """Where ``steps`` keeps what another process needs in place of this one; None: nowhere."""

    @abc.abstractmethod
    def _check_may_wait(self) -> None:
        """Raise ``ClosedError`` if closed, or an error if this thread may not wait."""

    @abc.abstractmethod
    def _wait(self, future: Future[Any]) -> Any:
        """Return a future's value."""

    def _agree(self, name: str, prepare: Callable[[], Any], act: Callable[[], str]) -> Any:
        """Let every worker ``prepare``, then the lowest rank ``act``.

        Returns what this worker has prepared, and the text of ``act``. All workers must call it
        with the same name. All get the error of one.
        """
        return prepare(), act()

    def _learn_keys(self) -> None:
        """Learn the keys that the other workers have, in place of a lost worker."""

    def _log_progress(self, text: str) -> None:
        """Write a line to the log."""
        logging.getLogger("kvstore").info(text)

    def all_reduce(
        self,
        value: Array,
        op: str = "sum",
        *,
        factor: float | None = None,
        out: Array | None = None,
    ) -> Array:
        """Combine one value of each worker, in rank order; all workers get the result.

        ``op`` is sum, average, product, min, max, band, bor, bxor, or premul_sum, which multiplies
        each value by ``factor`` first. Returns a new NumPy array, or ``out``, which gets the result
        and may be ``value``. Raises ``MismatchError`` on all workers if their calls differ.
        """
        self._check_may_wait()
        host = _host(value)
        if out is None:
            return self._wait(self._group.all_reduce(host, op, factor=factor))
        return self._into(out, host, self._group.all_reduce, host, op, factor=factor)

    def reduce_scatter(
        self,
        values: Sequence[Array],
        op: str = "sum",
        *,
        factor: float | None = None,
        out: Array | None = None,
    ) -> Array:
        """Combine the workers' lists of values item by item; rank i gets the i-th result.

        Each list has an item for each rank, all of one dtype; the shapes of items may differ.
        ``op``, ``factor`` and ``out`` are those of ``all_reduce``.
        """
        self._check_may_wait()
        hosts = [_host(value) for value in values]
        if out is None:
            return self._wait(self._group.reduce_scatter(hosts, op, factor=factor))
        own = hosts[self.rank] if len(hosts) == self.num_workers else np.empty(0)
        return self._into(out, own, self._group.reduce_scatter, hosts, op, factor=factor)

    def all_gather(self, value: Array) -> list[Host]:
        """Return the values of all workers; their first dimensions may differ."""
        self._check_may_wait()
        found: list[Host] = self._wait(self._group.all_gather(_host(value)))
        return found

    allreduce, allgather = all_reduce, all_gather

    def broadcast_object(self, value: object = None, root: int = 0) -> Any:
        """Return the object of worker ``root`` on all workers.

        The objects of other workers are ignored. The object may contain None, bools, numbers,
        texts, bytes, arrays, and lists, tuples, sets and dicts of them; arrays of all libraries
        arrive as NumPy arrays. It is not pickled.
        """
        self._check_may_wait()
        if self._group.rank != root:
            return self._object_of(root)
        try:
            tree, arrays = pack_object(value)
        except PSError as error:  # the others must not wait for ever
            text = np.frombuffer(str(error).encode(), np.uint8)
            self._wait(self._group.broadcast(np.array([-1, len(text)]), root))
            self._wait(self._group.broadcast(text, root))
            raise
        memory = np.concatenate([np.frombuffer(tree, np.uint8), *arrays])
        self._wait(self._group.broadcast(np.array([len(tree), len(memory)]), root))
        self._wait(self._group.broadcast(memory, root))
        return value

    def send(self, value: Array, to: int, tag: int = 0) -> None:
        """Send a value to worker ``to``; return when its mailbox on a server has it.

        Messages of one sender, receiver and tag arrive in order. Stores of one process raise
        ``NotSupportedError``.
        """
        self._check_may_wait()
        self._wait(self._group.send(_host(value), to, tag))

    def recv(self, source: int | None = None, tag: int = 0) -> ReceivedArray:
        """Return the oldest message with this tag from ``source``, or from any worker."""
        self._check_may_wait()
        found: ReceivedArray = self._wait(self._group.recv(source, tag))
        if found.dtype == "bfloat16":
            return found._replace(array=found.array.view(bfloat16()))
        return found

    def _object_of(self, root: int) -> Any:
        sizes = np.empty(2, np.int64)
        self._wait(self._group.broadcast(sizes, root))
        tree_bytes, nbytes = map(int, sizes)
        memory = self._wait(self._group.broadcast(np.empty(nbytes, np.uint8), root))
        if tree_bytes < 0:
            raise UsageError(f"worker {root} could not send its object: {bytes(memory).decode()}")
        return unpack_object(bytes(memory[:tree_bytes]), memory[tree_bytes:])

    def _into(self, out: Array, like: Host, call: Any, *arguments: Any, **options: Any) -> Array:
        """Make a call and put its result, of ``like``'s shape and dtype, in ``out``."""
        adapter = adapter_for(out)
        reason = adapter.why_read_only(out)
        if reason is not None:
            raise ArgumentValueError(reason)
        if adapter.shape(out) != like.shape:
            raise ValueMismatchError(
                f"out must have the shape {like.shape} of the result, got {adapter.shape(out)}"
            )
        memory = adapter.memory(out) if adapter.dtype(out) == like.dtype else None
        if memory is not None:
            options["out"] = memory.view(like.dtype).reshape(like.shape)
        future: Future[Host] = call(*arguments, **options)
        result = self._wait(future)
        if memory is None:
            adapter.from_host(result, out)
        else:
            adapter.written(out)
        return out


def _host(value: Array) -> Host:
    """Return a value as a contiguous NumPy array, which may share its memory."""
    adapter = adapter_for(value)
    check_dtype(adapter.dtype(value))
    return adapter.to_host(value)
