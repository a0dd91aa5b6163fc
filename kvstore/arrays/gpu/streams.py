"""Devices, streams and addresses, for ``sums.py`` and ``copies.py``.

Reaches CuPy through ``cupy.py`` only, at the first call. Any thread may call: the current device
and stream are CuPy's per-thread settings.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvstore.arrays import Array, NativeArray, adapter_for, adapter_on
from kvstore.arrays.context import Context
from kvstore.arrays.cupy import CupyAdapter, contiguous, load
from kvstore.arrays.gpu.kernels import Pointers

Rows = Sequence[Sequence[NativeArray]]
"""For each key its arrays: C-contiguous CuPy arrays of one size and dtype."""


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Inside the block this GPU is the thread's current one."""
    with load().cuda.Device(device):
        yield


def current_stream(device: int) -> Any:
    """The calling thread's current stream of this GPU."""
    return load().cuda.get_current_stream(device)


@functools.cache
def own_stream(device: int, purpose: str) -> Any:
    """The stores' own stream of this GPU for a purpose; nothing else is queued there."""
    with on_device(device):
        return load().cuda.Stream(non_blocking=True)


def wait_for(stream: Any, home: int, other: int) -> None:
    """Let ``stream``, of ``home``, wait for the current stream of another GPU."""
    _may_reach(home, other)
    with on_device(other):
        event = current_stream(other).record()
    stream.wait_event(event)


@functools.cache
def _may_reach(device: int, peer: int) -> None:
    """Let copies between two GPUs go without the host's memory in between, if they can."""
    runtime = load().cuda.runtime
    if not runtime.deviceCanAccessPeer(device, peer):
        return
    with on_device(device):
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError:  # another library has done it already
            return


def addresses_of(rows: Sequence[Sequence[NativeArray]]) -> Pointers:
    """Where each of these CuPy arrays begins; rows are of one length."""
    return np.array([[array.data.ptr for array in row] for row in rows], np.uint64)


def near(array: Array, home: Context) -> NativeArray:
    """A caller's array as a C-contiguous CuPy array: where it is, or on ``home`` from the host.

    The caller's own memory where it can be.
    """
    adapter = adapter_for(array)
    if isinstance(adapter, CupyAdapter):
        return contiguous(array)
    device = adapter.context(array)
    where = device if device.device_type == "gpu" else home
    return contiguous(adapter_on(home).to_context(array, where))
