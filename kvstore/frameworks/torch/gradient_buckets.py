"""``GradientBuckets``: sums gradients over all ranks in a few large arrays.

A bucket is sent when all its gradients are complete and all earlier buckets have been sent, so
every rank makes the same calls in the same order. After its gradients, a bucket has a number for
each of them: 1 if this rank has the gradient. The sum of these numbers shows which gradients no
rank has. Sparse gradients are sent separately, row by row. After the exchange, ``parameter.grad``
is a part of a bucket.

Which gradients are sparse is known only after the first pass. So the ranks agree on the buckets in
the first exchange, and again after parameters were added or are no longer frozen. Runs on the
threads of ``backward``; the thread that calls ``finish`` waits. Read next:
``distributed_optimizer.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.errors import ArgumentValueError
from kvstore.frameworks.torch.tensors import (
    Array,
    array_of,
    check_reducible,
    contiguous,
    sparse_sum,
)
from kvstore.stores.dist.store import DistKVStore, create_dist
from pslite import Communicator, Future
from pslite.future import gather

Compression = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]

_FROZEN, _DENSE, _SPARSE = range(3)


class DenseBucket:
    """The gradients of one dtype, one after the other in one array."""

    def __init__(self, kv: DistKVStore, places: list[int], parameters: list[torch.Tensor]) -> None:
        self.places = places
        sizes = [parameters[place].numel() for place in places]
        dtype = parameters[places[0]].dtype
        memory = kv.empty((sum(sizes) + len(places)) * dtype.itemsize, np.uint8)
        whole = torch.from_numpy(memory).view(dtype)
        *pieces, self.has = whole.split([*sizes, len(places)])
        shapes = [parameters[place].shape for place in places]
        self.views = {
            place: piece.view(shape)
            for place, piece, shape in zip(places, pieces, shapes, strict=True)
        }
        self.whole, self.values = array_of(whole), array_of(whole[: sum(sizes)])
        self._index = {place: index for index, place in enumerate(places)}
        self.missing = set(places)

    def take(self, place: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient to its place; zeros for None."""
        view = self.views[place]
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse or gradient.data_ptr() != view.data_ptr():
            own = gradient.detach()  # without the graph of create_graph
            view.copy_(own.to_dense() if own.is_sparse else own)
        self.has[self._index[place]] = gradient is not None
        self.missing.discard(place)

    def somebody_has(self, place: int) -> bool:
        """Return whether any rank had this gradient; call it after the sum."""
        return bool(self.has[self._index[place]] != 0)


class SparseGradient:
    """The gradient of an embedding with ``sparse=True``: some rows."""

    def __init__(self, place: int, parameter: torch.Tensor) -> None:
        self.places = [place]
        self.missing = {place}
        self._parameter = parameter
        self.own = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64),
            torch.zeros(0, *parameter.shape[1:], dtype=parameter.dtype),
            parameter.shape,
            check_invariants=True,
        )
        self._none = self.own

    def take(self, place: int, gradient: torch.Tensor | None) -> None:
        """Store the gradient's rows; no rows for None."""
        if gradient is None:
            self.own = self._none
        else:
            rows = gradient if gradient.is_sparse else gradient.to_sparse(sparse_dim=1)
            self.own = rows.detach().cpu().coalesce()
        self.missing.discard(place)

    def total(self, rows: Sequence[Array], values: Sequence[Array]) -> torch.Tensor | None:
        """Return the sum of all ranks' rows, or None if there are none."""
        if not any(map(len, rows)):
            return None
        return sparse_sum(rows, values, self._parameter).to(self._parameter.device)


class GradientBuckets:
    """The gradients of one optimizer. All ranks create one with the same parameters.

    Args:
        kv: the store whose workers are the ranks.
        average: divide the sums by the number of ranks.
        bucket_bytes: the size of a bucket; a larger gradient gets a bucket of its own.
        compression: as for ``kv.set_gradient_compression``; gradients are then sent through the
            servers.
    """

    def __init__(
        self,
        kv: DistKVStore,
        *,
        average: bool,
        bucket_bytes: int,
        compression: Compression | None,
    ) -> None:
        self._kv = kv
        self._average = average
        self._bucket_bytes = bucket_bytes
        self._calls = Communicator(kv.node, name="torch optimizer")
        weakref.finalize(self, self._calls.close)
        self._coded: DistKVStore | None = None
        if compression is not None:
            self._coded = create_dist("dist_sync", "dist_sync", node=kv.node)
            self._coded.set_gradient_compression(_both_ways(compression))
        self._parameters: list[torch.Tensor] = []
        self._units: list[DenseBucket | SparseGradient] | None = None
        self._unit_of: dict[int, Any] = {}
        self._frozen: list[torch.Tensor] = []
        """Parameters that were frozen on all ranks when the ranks agreed on the buckets."""
        self._elsewhere: list[tuple[int, torch.Tensor]] = []
        """Places of the gradients on other devices, with their parts of the buckets."""
        self._num_sent = 0
        self._under_way: list[Future[Any]] = []

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add parameters; the ranks agree on new buckets in the next exchange."""
        for parameter in parameters:
            check_reducible(parameter)
        self._parameters += parameters
        self._units = None

    def begin(self) -> None:
        """Begin an exchange; parameters that are no longer frozen need new buckets."""
        if self._units is not None and any(each.requires_grad for each in self._frozen):
            self._units = None
        self._num_sent = 0
        self._under_way = []
        for unit in self._units or ():
            unit.missing = set(unit.places)

    def ready(self, place: int) -> None:
        """Take a complete gradient; send the complete buckets."""
        if self._units is not None:
            self._take(place)
            self._send_complete()

    def finish(self) -> None:
        """Send the remaining buckets, with zeros for missing gradients; wait for all sums.

        Raises ``NodeLostError``, ``MismatchError`` and other errors of an all-reduce.
        """
        if self._units is None:
            self._settle_buckets()
        units = self._units or []
        late = [place for unit in units for place in sorted(unit.missing, reverse=True)]
        for place in late:
            self._take(place)
        self._send_complete()
        under_way, self._under_way = self._under_way, []
        results = self._kv.wait(under_way)
        for unit, result in zip(units, results, strict=True):
            if isinstance(unit, SparseGradient):
                total = unit.total(*result)
                share = self._calls.size if self._average else 1
                self._parameters[unit.places[0]].grad = None if total is None else total / share
            elif self._coded is not None and self._average:
                unit.values /= self._calls.size
        for place in late:
            unit = self._unit_of[place]
            if isinstance(unit, DenseBucket) and not unit.somebody_has(place):
                self._parameters[place].grad = None
        for place, view in self._elsewhere:
            parameter = self._parameters[place]
            if self._unit_of[place].somebody_has(place):
                parameter.grad = view.to(parameter.device)

    # -- inside --------------------------------------------------------------------------------

    def _settle_buckets(self) -> None:
        """Agree with the other ranks on the buckets."""
        kinds = np.array([_kind(each) for each in self._parameters], np.uint8)
        kinds = self._kv.wait(self._calls.all_reduce(kinds, "max"))
        self._units = []
        open_buckets: dict[torch.dtype, tuple[int, list[int]]] = {}
        for place in reversed(range(len(kinds))):
            parameter = self._parameters[place]
            if kinds[place] == _SPARSE:
                self._units.append(SparseGradient(place, parameter))
            elif kinds[place] == _DENSE:
                filled, places = open_buckets.setdefault(parameter.dtype, (0, []))
                nbytes = parameter.numel() * parameter.dtype.itemsize
                if places and filled + nbytes > self._bucket_bytes:
                    self._units.append(DenseBucket(self._kv, places, self._parameters))
                    filled, places = 0, []
                open_buckets[parameter.dtype] = filled + nbytes, [*places, place]
        for _, places in open_buckets.values():
            self._units.append(DenseBucket(self._kv, places, self._parameters))
        self._frozen = [self._parameters[place] for place in np.flatnonzero(kinds == _FROZEN)]
        self._unit_of = {place: unit for unit in self._units for place in unit.places}
        dense = [unit for unit in self._units if isinstance(unit, DenseBucket)]
        self._elsewhere = [
            (place, view)
            for unit in dense
            for place, view in unit.views.items()
            if self._parameters[place].device.type != "cpu"
        ]
        if self._coded is not None:
            self._coded.delete(self._coded.keys())
            for number, unit in enumerate(self._units):
                if isinstance(unit, DenseBucket):
                    unit.values.fill(0)
                    self._coded.init(number, unit.values)
        self.begin()

    def _take(self, place: int) -> None:
        unit = self._unit_of[place]
        parameter = self._parameters[place]
        unit.take(place, parameter.grad)
        if isinstance(unit, DenseBucket) and parameter.device.type == "cpu":
            parameter.grad = unit.views[place]

    def _send_complete(self) -> None:
        units = self._units or []
        while self._num_sent < len(units) and not units[self._num_sent].missing:
            unit = units[self._num_sent]
            if isinstance(unit, SparseGradient):
                self._under_way.append(self._send_rows(unit))
            else:
                self._under_way.append(self._send(self._num_sent, unit))
            self._num_sent += 1

    def _send(self, number: int, bucket: DenseBucket) -> Future[Any]:
        if self._coded is None:
            op = "average" if self._average else "sum"
            return self._calls.all_reduce(bucket.whole, op, out=bucket.whole)
        has = bucket.whole[len(bucket.values) :]  # the codec must not round these
        return gather(
            [
                self._coded.pushpull_async(number, bucket.values),
                self._calls.all_reduce(has, out=has),
            ]
        )

    def _send_rows(self, unit: SparseGradient) -> Future[Any]:
        indices = self._calls.all_gather(contiguous(unit.own.indices().t()))
        return gather([indices, self._calls.all_gather(contiguous(unit.own.values()))])


def _kind(parameter: torch.Tensor) -> int:
    if parameter.grad is not None and parameter.grad.is_sparse:
        return _SPARSE
    return _DENSE if parameter.requires_grad or parameter.grad is not None else _FROZEN


def _both_ways(compression: Compression) -> Any:
    """Return the codec's rules; 'fp16' and 'bf16' also compress the sums."""
    if not isinstance(compression, str):
        return compression
    if compression not in ("fp16", "bf16"):
        raise ArgumentValueError(
            f"compression must be 'fp16', 'bf16' or what kv.set_gradient_compression takes, got "
            f"{compression!r}"
        )
    return {"type": compression, "pull": {"type": compression}}
