"""What one call of a distributed store is made of: when it is done, and where values arrive.

A call becomes several transfers (``plan.py``); ``Operation`` is done when all of them are, and
``Landing`` takes their values. Pure but for the arrays that it fills. Used by ``dist.py``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.keys import Key, KeySpec
from kvstore.plan import Bytes, StagingPool, flat_bytes
from pslite.future import Future
from pslite.plane import Transfer


class UnderWay:
    """Calls of a store that are not over, by key: its pushes, or its pulls."""

    def __init__(self) -> None:
        # Guards the table: calls come from any thread.
        self._lock = threading.Lock()
        self._by_key: dict[Key, deque[Future[None]]] = {}

    def add(self, keys: Iterable[Key], future: Future[None]) -> None:
        """A call for these keys has begun."""
        with self._lock:
            for key in keys:
                self._unfinished(key).append(future)

    def beyond(self, keys: Iterable[Key], window: int) -> list[Future[None]]:
        """What to wait for until each of these keys has at most ``window`` unfinished calls."""
        with self._lock:
            waiting = {}
            for key in keys:
                unfinished = self._unfinished(key)
                for position in range(len(unfinished) - window):
                    waiting[id(unfinished[position])] = unfinished[position]
            return list(waiting.values())

    def of(self, keys: Iterable[Key] | None = None) -> list[Future[None]]:
        """Every unfinished call for these keys (None: for any)."""
        with self._lock:
            chosen = list(self._by_key) if keys is None else keys
            futures = {id(f): f for key in chosen for f in self._unfinished(key)}
            return list(futures.values())

    def forget(self, keys: Iterable[Key]) -> None:
        """These keys are gone."""
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)

    def _unfinished(self, key: Key) -> deque[Future[None]]:
        futures = self._by_key.setdefault(key, deque())
        while futures and futures[0].done():
            futures.popleft()
        return futures


class Operation:
    """Completes a future when all transfers of a call are done."""

    def __init__(self, count: int, describe: Callable[[], str], staging: StagingPool) -> None:
        self.future: Future[None] = Future(describe)
        #: Set by the caller, for ``let_go``.
        self.transfers: list[Transfer] = []
        self._left = count
        self._error: BaseException | None = None
        self._staging = staging
        if count == 0:
            self.future.set_result(None)

    def let_go(self) -> None:
        """The caller takes its arrays back before the end (it was interrupted).

        On the I/O thread. Values are not copied out any more, and what was not sent yet is
        sent from copies. What the transport has is the caller's only once it is accepted.
        """
        for transfer in self.transfers:
            transfer.abandoned = True
            if isinstance(transfer.frames, list):
                transfer.frames[:] = [memoryview(bytes(frame)) for frame in transfer.frames]

    def part_done(self, staging: Bytes | None) -> Callable[[BaseException | None], None]:
        """What to call when one transfer is done; ``staging`` is its buffer, if it has one.

        Runs on the I/O thread only, so it needs no lock.
        """

        def done(error: BaseException | None) -> None:
            if staging is not None and error is None:
                self._staging.give_back(staging)
            self._error = self._error or error
            self._left -= 1
            if self._left == 0:
                if self._error is not None:
                    self.future.set_error(self._error)
                else:
                    self.future.set_result(None)

        return done


class Landing:
    """Where the values of a call arrive: in the first array of a key when it is fit for it.

    An array is fit when its memory is the host's and contiguous, and its dtype the key's (an
    array of NumPy, a tensor of PyTorch). Else the values land in memory of our own, and
    ``finish`` brings them to all the others, cast and strided.
    """

    def __init__(self, outs: Sequence[Sequence[Array]], specs: Sequence[KeySpec]) -> None:
        self.arrays: list[Bytes] = []
        self._landed: list[Array] = []
        self._rest: list[tuple[np.ndarray[Any, Any], Sequence[Array]]] = []
        for arrays, spec in zip(outs, specs, strict=True):
            first = arrays[0]
            adapter = adapter_for(first)
            memory = adapter.memory(first) if adapter.dtype(first) == spec.dtype else None
            if memory is None:
                host, rest = np.empty(spec.shape, spec.dtype), arrays
                memory = flat_bytes(host)
            else:
                host, rest = memory.view(spec.dtype).reshape(spec.shape), arrays[1:]
                self._landed.append(first)
            self.arrays.append(memory)
            if rest:
                self._rest.append((host, rest))

    def finish(self) -> None:
        """The values are there: bring them to the arrays that they did not land in."""
        for array in self._landed:
            adapter_for(array).written(array)
        for host, outs in self._rest:
            for out in outs:
                adapter_for(out).from_host(host, out)


def futures_in(what: Any) -> list[Future[Any]] | None:
    """The futures that a call of ``wait`` names; None when it names keys, or nothing."""
    if isinstance(what, Future):
        return [what]
    if isinstance(what, list | tuple) and what and all(isinstance(f, Future) for f in what):
        return list(what)
    return None


def overlaps(sources: Sequence[Bytes], targets: Sequence[Bytes], indices: Iterable[int]) -> bool:
    """Whether a value may land in memory that another of these sources is still sent from.

    A source and its own target may be the very same memory: a part's value comes only after
    that part has been applied.
    """
    starts = np.array([_address(target) for target in targets])
    stops = starts + np.array([len(target) for target in targets])
    for index in indices:
        start = _address(sources[index])
        hit = (starts < start + len(sources[index])) & (stops > start)
        hit[index] &= starts[index] != start
        if hit.any():
            return True
    return False


def _address(memory: Bytes) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
