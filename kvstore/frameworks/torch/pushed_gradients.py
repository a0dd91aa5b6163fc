"""``PushedGradients``: pushes gradients to the servers and pulls the new weights.

Neighbouring parameters are sent in one call, in the order in which ``backward`` reaches them. Calls
for early layers are sent first (``priority``), since the next pass needs these first. Large
parameters move to views of the servers' weights (``KVStore.view``), so that servers on the same
machine need not send them; the others get new weights in their own memory. Embeddings with sparse
gradients are row-sparse keys: their rows are pushed, and the rows that any worker has pushed are
pulled. Runs on the threads of ``backward``; ``wait`` waits. Read next: ``server_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.arrays.keys import Key
from kvstore.frameworks.torch.tensors import array_of, fill
from kvstore.sparse import RowSparseArray
from kvstore.stores.dist.store import DistKVStore
from kvstore.stores.dist.views import LEAST_MAPPED_BYTES
from pslite import Future
from pslite.future import completed


class PushedGradients:
    """The gradients and weights of one optimizer. All workers use the same keys.

    Args:
        kv: the store whose servers have the weights.
        weights: the parameters; each is a key, at the same place of ``keys``.
        sparse: the places of embeddings with sparse gradients.
        bucket_bytes: how many bytes of gradients are sent in one call.
    """

    def __init__(
        self,
        kv: DistKVStore,
        weights: Sequence[torch.Tensor],
        keys: Sequence[Key],
        sparse: Collection[int],
        bucket_bytes: int,
    ) -> None:
        self._kv = kv
        self._weights = weights
        self._keys = keys
        self._sparse = sorted(sparse)
        self._is_synchronous = "async" not in kv.type
        self._buckets = _buckets(weights, self._sparse, bucket_bytes)
        self._bucket_of = {place: bucket for bucket in self._buckets for place in bucket}
        self._arrays: dict[int, tuple[int, Any]] = {}
        """Place of a weight -> its last known address, and its array."""
        self._missing: dict[int, int] = {}
        self._pushed: set[int] = set()
        self._under_way: list[Future[Any]] = []
        self._rows: dict[int, Future[Any]] = {}
        """Place of an embedding -> the ids of the rows that each worker has pushed."""

    def start(self) -> None:
        """Create the keys with worker 0's weights, and pull these on all workers."""
        dense = [place for place in range(len(self._keys)) if place not in self._sparse]
        if dense:
            self._kv.init(self._names(dense), [self._weight(place) for place in dense])
        for place in self._sparse:
            whole = self._weight(place)
            rows = RowSparseArray(np.arange(len(whole)), whole, tuple(whole.shape))
            self._kv.init(self._keys[place], rows)
        self._pull_whole(range(len(self._keys)))
        if self._is_synchronous:
            self._move_to_views([place for place in dense if _may_move(self._weights[place])])

    def begin(self) -> None:
        """Begin a step."""
        self._missing = {bucket[0]: len(bucket) for bucket in self._buckets}
        self._pushed = set()

    def ready(self, place: int) -> None:
        """Handle a complete gradient; push a bucket's gradients when all are complete."""
        bucket = self._bucket_of.get(place)
        if bucket is None:  # an embedding, whose rows are pushed at the end
            return
        self._missing[bucket[0]] -= 1
        if self._missing[bucket[0]] == 0:
            self._push(bucket)

    def push_rest(self) -> None:
        """Push the other gradients, and zeros for those that only other workers have."""
        late = [place for place in self._bucket_of if place not in self._pushed]
        self._push([place for place in late if self._weights[place].grad is not None])
        wanted = [place for place in self._sparse if self._weights[place].grad is not None]
        if self._is_synchronous and self._kv.num_workers > 1:
            mine = np.zeros(len(self._weights), np.uint8)
            mine[[*self._pushed, *wanted]] = 1
            group = self._kv.communicator
            has = self._kv.wait(group.all_reduce(mine, "max"))
            wanted = [place for place in self._sparse if has[place]]
            for place in wanted:
                self._rows[place] = group.all_gather(_ids_of(self._weights[place].grad))
            self._push([place for place in late if has[place] and place not in self._pushed])
        else:
            for place in wanted:
                self._rows[place] = completed([_ids_of(self._weights[place].grad)])
        for place in wanted:
            self._push_rows(place)

    def wait(self) -> None:
        """Wait until the new weights are in the parameters."""
        under_way, self._under_way = self._under_way, []
        self._kv.wait(under_way)
        rows, self._rows = self._rows, {}
        if not self._is_synchronous:  # other workers change rows at any time
            self._pull_whole(self._sparse)
            return
        for place, gathered in rows.items():
            ids = np.unique(np.concatenate(self._kv.wait(gathered)))
            if len(ids):
                found = self._kv.row_sparse_pull(self._keys[place], row_ids=ids)
                _set_rows(self._weight(place), found)
                self._count_versions([place])

    # -- inside --------------------------------------------------------------------------------

    def _push(self, places: Sequence[int]) -> None:
        if not places:
            return
        gradients = [self._gradient(place) for place in places]
        outs = [self._weight(place) for place in places]
        self._count_versions(places)
        self._pushed.update(places)
        self._under_way.append(
            self._kv.pushpull_async(self._names(places), gradients, outs, -min(places))
        )

    def _push_rows(self, place: int) -> None:
        gradient = self._weights[place].grad
        if gradient is None:
            dtype = self._kv.info(self._keys[place]).dtype
            gradient = RowSparseArray.zeros(tuple(self._weights[place].shape), dtype)
        self._pushed.add(place)
        self._under_way.append(self._kv.push_async(self._keys[place], gradient, -place))

    def _pull_whole(self, places: Sequence[int]) -> None:
        if places:
            self._kv.pull(self._names(places), out=[self._weight(place) for place in places])
            self._count_versions(places)

    def _move_to_views(self, places: Sequence[int]) -> None:
        """Let parameters live on the memory in which new weights appear."""
        if places:
            shown = self._kv.view(self._names(places))  # a view that nothing refers to ends
            live = self._kv.views.live()
            del shown
            for place in places:
                memory = live.get(self._keys[place])
                if memory is not None:
                    self._weights[place].data = torch.from_numpy(memory)

    def _names(self, places: Sequence[int]) -> list[Key]:
        return [self._keys[place] for place in places]

    def _weight(self, place: int) -> Any:
        """Return a weight as an array in its own memory, cached to save time."""
        weight = self._weights[place]
        address = weight.data_ptr()
        known = self._arrays.get(place)
        if known is None or known[0] != address or known[1].shape != weight.shape:
            known = self._arrays[place] = address, _in_memory(weight)
        return known[1]

    def _gradient(self, place: int) -> Any:
        weight = self._weights[place]
        if weight.grad is None:
            return np.zeros(tuple(weight.shape), self._kv.info(self._keys[place]).dtype)
        return _in_memory(weight.grad)

    def _count_versions(self, places: Sequence[int]) -> None:
        for place in places:
            torch.autograd.graph.increment_version(self._weights[place])


def _buckets(
    weights: Sequence[torch.Tensor], sparse: Collection[int], most_bytes: int
) -> list[list[int]]:
    """Return the places of parameters that are sent together, from last to first."""
    found: list[list[int]] = []
    filled = most_bytes
    for place in reversed(range(len(weights))):
        nbytes = weights[place].numel() * weights[place].element_size()
        if place in sparse:
            continue
        if filled + nbytes > most_bytes:
            found.append([])
            filled = 0
        found[-1].append(place)
        filled += nbytes
    return found


def _in_memory(tensor: torch.Tensor) -> Any:
    """Return a dense CPU tensor as an array in its own memory, others detached."""
    if tensor.device.type == "cpu" and tensor.layout == torch.strided:
        return array_of(tensor)
    return tensor.detach()


def _may_move(weight: torch.Tensor) -> bool:
    """Return whether a weight is large, on the CPU, and alone in its memory."""
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.is_shared():
        return False
    nbytes = weight.numel() * weight.element_size()
    is_alone = weight.is_contiguous() and weight.untyped_storage().nbytes() == nbytes
    return bool(is_alone) and nbytes >= LEAST_MAPPED_BYTES and weight.dtype != torch.bfloat16


def _ids_of(gradient: torch.Tensor | None) -> np.ndarray[Any, Any]:
    if gradient is None:
        return np.zeros(0, np.int64)
    if not gradient.is_sparse:
        return np.arange(len(gradient))
    found: np.ndarray[Any, Any] = gradient._indices()[0].unique().cpu().numpy()
    return found


def _set_rows(weight: Any, rows: RowSparseArray) -> None:
    """Set rows of a weight, which is what ``_in_memory`` returned."""
    if not isinstance(weight, torch.Tensor):
        weight[rows.ids] = rows.values
        return
    values = torch.empty(rows.values.shape, dtype=weight.dtype)
    fill(values, rows.values)
    ids = torch.from_numpy(np.asarray(rows.ids))
    weight.index_copy_(0, ids.to(weight.device), values.to(weight.device))
