"""Copy many keys from one GPU to arrays on any GPUs, for pulls.

This module uses CuPy only through ``cupy.py``, and loads it at the first call. Several threads may
call at once; order and waits are as in ``sums.py``. Read next: ``kernels.py``.

**NCCL** forwards values from GPU to GPU, so sending to seven receivers takes the sender no longer
than sending to one. It is used only for copies: its sums do not add from left to right, so their
bits differ. If a GPU is waiting in a call of another communicator at the same time, such as another
library's, it can wait forever (NCCL User Guide, "Using multiple NCCL communicators
concurrently").
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.arrays import NativeArray
from kvstore.arrays.cupy import (
    Rows,
    addresses_of,
    current_stream,
    load,
    on_device,
    own_stream,
    wait_for,
)
from kvstore.arrays.gpu.kernels import Kernel, KernelParameters
from kvstore.arrays.gpu.sums import launch

_broadcasting = threading.Lock()
"""Guards NCCL's communicators: only one thread at a time may use them, and all GPUs must see their
calls in the same order."""


def copy_all(home: int, sources: Sequence[NativeArray], targets: Rows) -> None:
    """Copy each source, on GPU ``home``, to its targets, on any GPUs.

    All are C-contiguous; targets have their source's dtype and do not overlap. Targets on ``home``
    share launches. If every key goes to the same three or more GPUs and NCCL is installed, NCCL
    forwards the values from one GPU to the next; otherwise each GPU gets its own copy.
    """
    pairs = [
        (source, target) for source, row in zip(sources, targets, strict=True) for target in row
    ]
    with on_device(home):
        stream = current_stream(home)
        try:
            _copy_here([pair for pair in pairs if pair[1].data.device_id == home])
            rows = [[out for out in row if out.data.device_id != home] for row in targets]
            ring = _ring(home, rows)
            if ring is not None:
                _broadcast(ring, home, sources, rows)
            else:
                _copy_away(home, [pair for pair in pairs if pair[1].data.device_id != home])
        finally:
            stream.synchronize()


def _copy_here(pairs: Sequence[tuple[NativeArray, NativeArray]]) -> None:
    """Copy on the current GPU. Bits are copied as integers of an element's size."""
    by_size: dict[int, list[tuple[NativeArray, NativeArray]]] = {}
    for pair in pairs:
        by_size.setdefault(min(pair[0].itemsize, 8), []).append(pair)
    for size, same in by_size.items():
        kernel = Kernel(f"uint{8 * size}", 1, "sum")
        lengths = np.array([source.nbytes // size for source, _ in same], np.int64)
        launch(kernel, addresses_of(same), lengths, KernelParameters())


def _copy_away(home: int, pairs: Sequence[tuple[NativeArray, NativeArray]]) -> None:
    """Copy to other GPUs, and wait."""
    stream = own_stream(home, "out")
    stream.wait_event(current_stream(home).record())
    for device in {target.data.device_id for _, target in pairs}:
        wait_for(stream, home, device)
    copy = load().cuda.runtime.memcpyPeerAsync
    try:
        for source, target in pairs:
            device = target.data.device_id
            copy(target.data.ptr, device, source.data.ptr, home, source.nbytes, stream.ptr)
    finally:
        stream.synchronize()


def _ring(home: int, rows: Rows) -> dict[int, Any] | None:
    """Return NCCL's communicators if all keys are sent once to the same GPUs."""
    if not rows:
        return None
    wanted = sorted(target.data.device_id for target in rows[0])
    if len(wanted) < 2 or len(set(wanted)) < len(wanted):
        return None
    if any(sorted(target.data.device_id for target in row) != wanted for row in rows):
        return None
    return _communicators(tuple(sorted([home, *wanted])))


@functools.cache
def _communicators(devices: tuple[int, ...]) -> dict[int, Any] | None:
    nccl = load().cuda.nccl
    if not nccl.available:
        return None
    return dict(zip(devices, nccl.NcclCommunicator.initAll(list(devices)), strict=True))


def _broadcast(ring: dict[int, Any], home: int, sources: Sequence[NativeArray], rows: Rows) -> None:
    """Send each source to all GPUs of the ring by NCCL, as bytes, and wait."""
    nccl = load().cuda.nccl
    root = list(ring).index(home)
    streams = {device: current_stream(device) for device in ring}
    with _broadcasting:
        nccl.groupStart()
        try:
            for source, row in zip(sources, rows, strict=True):
                # The root sends the value from its own memory, where it stays.
                targets = {home: source, **{target.data.device_id: target for target in row}}
                for device, communicator in ring.items():
                    communicator.broadcast(
                        source.data.ptr,
                        targets[device].data.ptr,
                        source.nbytes,
                        nccl.NCCL_UINT8,
                        root,
                        streams[device].ptr,
                    )
        finally:
            nccl.groupEnd()
            for device, stream in streams.items():
                with on_device(device):
                    stream.synchronize()
