"""Keep a store's values on the GPUs of one process: ``create("device")``.

A ``local`` store whose keys move, at their first push with GPU arrays, to the one of those
GPUs that holds the fewest bytes of this store; from then on the key's value, optimizer state,
sums and updates stay there. With arrays on the host only, it works as a ``local`` store with the
same bits. The key's GPU adds the values that the others send to it; no collective library is used.
The caller's thread queues the work on GPUs, and the work is done when the call returns.

The keys of a call on the same GPU are added, updated and copied together, in one launch for some
dozens of keys; keys that cannot be fused are updated one by one by the formulas of ``optimizer/``.
Read next: ``arrays/gpu/sums.py`` for the device work.

The tests of the GPU code in ``tests/gpu`` need a real GPU; ``docs/gpu.md`` says what ran on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays import Array, NativeArray, adapter_for, adapter_on
from kvstore.arrays.context import Context
from kvstore.arrays.cupy import CupyAdapter, near
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.arrays.gpu.copies import copy_all
from kvstore.arrays.gpu.kernels import Kernel, KernelParameters, kernel_of
from kvstore.arrays.gpu.sums import update
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.sgd import SGD
from kvstore.optimizer.states import create_state, has_master
from kvstore.stores.local.memory import StoredKey
from kvstore.stores.local.store import LocalKVStore
from kvstore.stores.local.values import LocalValues


class KernelCall(NamedTuple):
    """Keys of a call that one kernel updates with the same parameters."""

    kernel: Kernel
    numbers: KernelParameters
    indices: list[int]
    """Positions of the keys in the call."""


def kernel_for(dtype: np.dtype[Any], num_copies: int, optimizer: Optimizer | None) -> Kernel | None:
    """Return the kernel that adds and updates keys of ``dtype``, or None.

    Kernels exist for sums of floats and integers, and for plain SGD on floats (for float16, on the
    master weights), of up to ``MOST_COPIES`` values. There are no kernels for bool, complex and
    bfloat16, nor for other optimizers, such as a subclass of SGD.
    """
    if optimizer is None:
        formula = "sum"
    elif type(optimizer) is SGD and dtype.kind == "f":
        formula = "momentum" if optimizer.momentum != 0.0 else "sgd"
    else:
        return None
    return kernel_of(dtype, num_copies, formula)


def numbers_of(optimizer: Optimizer | None, count: int) -> KernelParameters:
    """Return the kernel's parameters for a sum, or for the SGD update of this count."""
    if not isinstance(optimizer, SGD):
        return KernelParameters()
    limit = optimizer.clip_gradient
    return KernelParameters(
        rescale=optimizer.rescale_grad,
        limit=np.inf if limit is None or limit <= 0 else limit,
        decay=optimizer.wd,
        rate=optimizer.rate(count),
        momentum=optimizer.momentum,
    )


def jobs_of(
    entries: Sequence[StoredKey], num_copies: Sequence[int], optimizer: Optimizer | None
) -> tuple[list[KernelCall], list[int]]:
    """Return the kernel calls of an update, and the positions of unsuitable keys.

    All keys are on the same GPU; ``num_copies`` has the number of arrays to add for each. Keys
    whose optimizers or counts differ (multipliers, a schedule, a key that was created later) are in
    different jobs.
    """
    found: dict[tuple[object, ...], KernelCall] = {}
    others: list[int] = []
    for index, (entry, copies) in enumerate(zip(entries, num_copies, strict=True)):
        variant = None if optimizer is None else optimizer.for_key(entry.key, entry.spec.width)
        group = (entry.spec.dtype, copies, id(variant), entry.count)
        job = found.get(group)
        if job is None:
            kernel = kernel_for(entry.spec.dtype, copies, variant)
            if kernel is None:
                others.append(index)
                continue
            job = found[group] = KernelCall(kernel, numbers_of(variant, entry.count + 1), [])
        if all(array.dtype == job.kernel.working for array in entry.state or ()):
            job.indices.append(index)
        else:
            others.append(index)
    return [job for job in found.values() if job.indices], others


def are_apart(addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether these memory ranges are disjoint; empty ranges overlap nothing."""
    used = sorted((start, size) for start, size in zip(addresses, sizes, strict=True) if size)
    return all(start + size <= following for (start, size), (following, _) in pairwise(used))


Work = Sequence[tuple[StoredKey, Sequence[Array]]]
"""Some keys, each with its arrays of a call."""


class DeviceKVStore(LocalKVStore):
    """A store of one process that updates each key on the key's device.

    See ``KVStore``. ``pull`` without ``out`` returns an array on that device.
    """

    def __init__(self, name: str = "device") -> None:
        super().__init__(name, DeviceValues())


class DeviceValues(LocalValues):
    """The values of one store, each on the host or on a GPU."""

    # -- where keys live ---------------------------------------------------------------

    def _settle(self, entries: Sequence[StoredKey], rows: Sequence[Sequence[Array]]) -> None:
        held: dict[Context, int] | None = None
        for entry, row in zip(entries, rows, strict=True):
            if entry.home.device_type == "gpu":
                continue
            devices = [adapter_for(array).context(array) for array in row]
            gpus = [device for device in devices if device.device_type == "gpu"]
            if gpus:
                held = self._bytes_held() if held is None else held
                self._move(entry, min(gpus, key=lambda gpu: held.get(gpu, 0)))
                held[entry.home] = held.get(entry.home, 0) + entry.spec.nbytes

    def _bytes_held(self) -> dict[Context, int]:
        held: dict[Context, int] = {}
        for entry in self.entries.values():
            held[entry.home] = held.get(entry.home, 0) + entry.spec.nbytes
        return held

    def _move(self, entry: StoredKey, home: Context) -> None:
        adapter = adapter_on(home)
        weight = adapter.to_context(entry.weight, home)
        state = entry.state
        if state is not None:
            state = tuple(adapter.to_context(array, home) for array in state)
        entry.move(home, weight, state)
        self._rows.forget()

    # -- updates -----------------------------------------------------------------------

    def _apply_elsewhere(self, work: Work) -> None:
        for home, group in _by_home(work):
            singly = list(range(len(group)))
            if isinstance(adapter_on(home), CupyAdapter):
                sizes = [len(row) for _, row in group]
                jobs, singly = jobs_of([entry for entry, _ in group], sizes, self.optimizer)
                for job in jobs:
                    self._apply_job(home, job, [group[index] for index in job.indices])
            for index in singly:
                self._apply_singly(*group[index])

    def _apply_job(self, home: Context, job: KernelCall, work: Work) -> None:
        """Add and update the keys of a job together."""
        copies = near([row for _, row in work], home)
        own = []
        for entry, _ in work:
            if entry.state is None and self.optimizer is not None:
                with adapter_on(home).on(home):
                    entry.keep_state(create_state(self.optimizer, entry.flat), entry.count)
            own.append([entry.weight, *(entry.state or ())])
        update(home.device_id, job.kernel, job.numbers, copies, own)
        for entry, _ in work:
            entry.count += self.optimizer is not None
            entry.version += 1

    def _apply_singly(self, entry: StoredKey, arrays: Sequence[Array]) -> None:
        adapter = adapter_on(entry.home)
        working = accumulation_dtype(entry.spec.dtype)
        total = adapter.sum_in_order(arrays, entry.home, working)
        with adapter.on(entry.home):
            weight = entry.flat
            gradient = total.reshape(-1)
            if self.optimizer is None:
                weight[...] = gradient
            else:
                if entry.state is None:
                    entry.keep_state(create_state(self.optimizer, weight), entry.count)
                entry.count += 1
                scratch = np.empty_like(gradient)
                optimizer = self.optimizer.for_key(entry.key, entry.spec.width)
                own, wide = entry.state or (), weight
                if has_master(weight.dtype):
                    own, wide = own[:-1], own[-1]
                optimizer.update(wide, gradient, own, entry.count, scratch)
                if wide is not weight:
                    weight[...] = wide
        entry.version += 1

    # -- copies out --------------------------------------------------------------------

    def _fill_elsewhere(self, work: Work) -> None:
        for home, group in _by_home(work):
            if isinstance(adapter_on(home), CupyAdapter):
                group = _fill_together(home, group)
            super()._fill_elsewhere(group)


def _by_home(work: Work) -> Iterable[tuple[Context, Work]]:
    found: dict[Context, list[tuple[StoredKey, Sequence[Array]]]] = {}
    for entry, row in work:
        found.setdefault(entry.home, []).append((entry, row))
    return found.items()


def _fill_together(home: Context, work: Work) -> list[tuple[StoredKey, Sequence[Array]]]:
    """Copy values to all suitable arrays at once; return the other arrays with keys.

    Suitable arrays are contiguous, on a GPU, and have the key's dtype. If arrays overlap or may
    overlap, nothing is copied and all are returned: an array that is passed for two keys must get
    the later one.
    """
    written: list[Array] = []
    targets: list[list[NativeArray]] = []
    rest: list[tuple[StoredKey, Sequence[Array]]] = []
    for entry, row in work:
        targets.append([])
        for out in row:
            adapter = adapter_for(out)
            target = adapter.device_memory(out)
            if target is None and adapter.context(out).device_type == "cpu":
                rest.append((entry, [out]))
            elif target is None or target.dtype != entry.spec.dtype:
                return list(work)
            else:
                targets[-1].append(target)
                if target is not out:
                    written.append(out)
    flat = list(chain.from_iterable(targets))
    if not are_apart([array.data.ptr for array in flat], [array.nbytes for array in flat]):
        return list(work)
    copy_all(home.device_id, [entry.weight for entry, _ in work], targets)
    for out in written:
        adapter_for(out).written(out)
    return rest
