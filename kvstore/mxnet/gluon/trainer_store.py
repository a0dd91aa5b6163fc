"""The connection of a ``Trainer`` to its store: exchange and updates.

``open_link`` decides, from the arguments, whether there is a store and where updates happen, or
raises an error if the arguments are impossible. All calls to the store go through a ``StoreLink``.

If the store updates, each step overwrites the parameters with the store's weights, so weights that
the caller has loaded meanwhile would be lost. ``Parameter.set_data`` reports such a change itself.
To find other writes, ``HeldWeights`` compares a few elements of every array in host memory with
their values after the last update, which takes a tenth of a millisecond for a model of 300 arrays.
It misses writes to other elements, to ``mx.nd`` arrays and on a GPU. Called on the trainer's
thread. Read next: ``consistency.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.keys import Key
from kvstore.errors import ArgumentTypeError, ArgumentValueError, DuplicateKeyError, OptimizerNotSet
from kvstore.mxnet.fit.store import LARGE_ELEMENTS, check_store
from kvstore.mxnet.gluon.consistency import SET_TOO_LATE, Agreement, Plan
from kvstore.mxnet.gluon.parameter import Parameter
from kvstore.optimizer.base import Optimizer
from kvstore.stores.base import KVStore, KVStoreBase
from kvstore.stores.local.store import LocalKVStore
from pslite.errors import UsageError

if TYPE_CHECKING:
    from kvstore.stores.dist.store import DistKVStore


Params = Mapping[Key, Parameter]
Gradients = Mapping[Key, Sequence[Array]]


class StoreLink:
    """A store that either runs the optimizer (``updates``) or only adds gradients."""

    def __init__(self, store: KVStoreBase, updates: bool) -> None:
        self.store = store
        self.updates = updates
        self._agreement: Agreement | None = None
        self._optimizer: Optimizer | None = None
        self._weights: HeldWeights | None = None
        self._set_while_frozen: set[Key] = set()
        self._pending: dict[str, Any] = {}
        """Numbers of the optimizer that the store does not have yet."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the store applies each push separately."""
        return _is_asynchronous(self.store)

    @property
    def needs_all_keys(self) -> bool:
        """Whether workers wait for each other, so that all must push the same parameters."""
        return self.store.num_workers > 1 and not self.is_asynchronous

    @property
    def num_summed(self) -> int:
        """The number of workers whose gradients an update adds."""
        return 1 if self.is_asynchronous else self.store.num_workers

    def start(self, params: Params, optimizer: Optimizer, averages: bool) -> None:
        """Give the store its optimizer, and set all parameters to rank 0's values.

        ``averages``: gradients are means; this must be the same on all workers.
        """
        store = self.store
        if isinstance(store, KVStore) and self.needs_all_keys:
            agreement = Agreement(cast("DistKVStore", store))
            agreement.start(params, optimizer, self.updates, averages)
            self._agreement = agreement
        if self.updates:
            store.set_optimizer(optimizer)
            self._optimizer = optimizer
        else:
            self._check_only_adds()
        values = [parameter.list_data()[0] for parameter in params.values()]
        outs = [parameter.list_data() for parameter in params.values()]
        try:
            if isinstance(store, KVStore):
                store.broadcast(list(params), values, out=outs)
            else:  # a plug-in need not know lists of keys
                for index, key in enumerate(params):
                    store.broadcast(key, values[index], out=outs[index], priority=-index)
        except DuplicateKeyError as error:
            raise UsageError(
                "the store already has keys with the names of the parameters, perhaps from "
                "another Trainer; create one store for each Trainer"
            ) from error
        if self.updates:
            self._weights = HeldWeights(params)
            self._weights.note()

    def _check_only_adds(self) -> None:
        if isinstance(self.store, KVStore):
            try:
                found = self.store.current_optimizer()
            except OptimizerNotSet:
                return
            raise UsageError(
                "update_on_kvstore=False needs a store without an optimizer, and this one has "
                f"{found.name}; create a new store"
            )

    # -- numbers of the optimizer ------------------------------------------------------

    def change(self, **numbers: Any) -> None:
        """Use these numbers in the store's optimizer from the next step on."""
        if self.updates:
            self._pending.update(numbers)

    def flush(self) -> None:
        """Send changed numbers to the store; only worker 0 does if workers must agree.

        Every round needs worker 0's push, which worker 0 sends after this call. So all rounds
        use the new numbers, and the other workers need not wait for this call.
        """
        numbers, self._pending = self._pending, {}
        if not numbers or self._optimizer is None:
            return
        self._optimizer = self._optimizer.replace(**numbers)
        if self._agreement is not None and self.store.rank != 0:
            return
        if isinstance(self.store, KVStore):
            self.store.set_optimizer_params(**numbers)
        else:
            self.store.set_optimizer(self._optimizer)

    # -- a step ------------------------------------------------------------------------

    def exchange(self, gradients: Gradients, params: Params, plan: Plan) -> None:
        """Push gradients, and pull new weights or, without ``updates``, their sums.

        The weights are written into the parameters, the sums into the gradients.
        """
        keys, pushed = list(gradients), list(gradients.values())
        outs = [params[key].list_data() for key in keys] if self.updates else pushed
        changed = self._set_meanwhile(gradients)
        # Before any gradient is sent, in case the plans differ.
        self.meet(plan._replace(num_changed=len(changed)))
        if changed:
            raise UsageError(
                f"the weights of {', '.join(map(repr, changed[:5]))} were changed after the last "
                f"step; {SET_TOO_LATE}"
            )
        self.flush()
        try:
            if not isinstance(self.store, KVStore):
                for index, key in enumerate(keys):
                    self.store.pushpull(key, pushed[index], out=outs[index], priority=-index)
            elif keys:
                self.store.pushpull(keys, pushed, out=outs)
        finally:
            self._note_weights()

    def _note_weights(self) -> None:
        if self._weights is not None:
            self._weights.note()

    def _set_meanwhile(self, gradients: Gradients) -> list[Key]:
        """Return the weights changed since the last step that the store cannot take over.

        A store in one process uses the changed weights and keeps its optimizer states. The store
        does not write values of frozen parameters until they are trained again.
        """
        if self._weights is None:
            return []
        changed = self._weights.changed()
        if isinstance(self.store, LocalKVStore):
            self.store._overwrite({key: self._weights.value(key) for key in changed})
            return []
        self._set_while_frozen.update(key for key in changed if key not in gradients)
        return [key for key in gradients if key in changed or key in self._set_while_frozen]

    def meet(self, plan: Plan) -> None:
        """Raise if workers that wait for each other have different plans."""
        if self._agreement is not None:
            self._agreement.meet(plan)

    def pull(self, keys: Sequence[Key], params: Params) -> None:
        """Pull the current weights of some parameters that were not pushed."""
        if keys and isinstance(self.store, KVStore):
            self.store.pull(list(keys), out=[params[key].list_data() for key in keys])
            self._note_weights()

    # -- files -------------------------------------------------------------------------

    def load_states(self, fname: Any, optimizer: Optimizer) -> Optimizer:
        """Make the store load its states; return the optimizer that it then uses."""
        self._pending = {}
        self.store.load_optimizer_states(fname)
        if not isinstance(self.store, KVStore):
            return optimizer
        self._optimizer = self.store.current_optimizer()
        return self._optimizer

    def resume(self, params: Params) -> Optimizer | None:
        """Pull all weights of a store that was loaded; return the optimizer that it uses."""
        if not self.updates or not isinstance(self.store, KVStore):
            return None
        self._pending = {}
        self._optimizer = self.store.current_optimizer()
        self.pull(list(params), params)
        return self._optimizer

    def from_first(self, number: float) -> float:
        """Return worker 0's number, or this worker's own in an asynchronous store."""
        return number if self._agreement is None else self._agreement.from_first(number)


def open_link(
    kvstore: KVStoreBase | str | None,
    params: Params,
    update_on_kvstore: bool | None,
    compression_params: Mapping[str, Any] | None,
) -> StoreLink | None:
    """Return a link to the store, created if given by name; None if not needed.

    As in MXNet, parameters on one device do not need a store of a type for one process. Unlike in
    MXNet, a store is created if it must update or compress, or if the device is a GPU.
    """
    is_asked_for = update_on_kvstore or compression_params is not None
    if kvstore is None or (
        isinstance(kvstore, str) and not is_asked_for and _is_needless(kvstore, params)
    ):
        return None
    from kvstore.kvstore import create

    store: KVStoreBase = create(kvstore) if isinstance(kvstore, str) else kvstore
    updates = _resolve(store, update_on_kvstore)
    if update_on_kvstore is None and kvstore == "local":
        updates &= all(each.spec.num_elements <= LARGE_ELEMENTS for each in params.values())
    if compression_params is not None:
        if not isinstance(store, KVStore):
            raise ArgumentValueError(
                f"a {store.type} store cannot compress gradients; remove compression_params"
            )
        store.set_gradient_compression(compression_params)
    return StoreLink(store, updates)


def check_arguments(
    kvstore: object, params: Params, update_on_kvstore: object, compression_params: object
) -> None:
    """Check for arguments that are invalid with every store."""
    check_store(kvstore)
    if isinstance(kvstore, str):
        from kvstore.kvstore import check_type

        check_type(kvstore)
    if update_on_kvstore is not None and not isinstance(update_on_kvstore, bool):
        raise ArgumentTypeError(
            f"update_on_kvstore must be True, False or None, got {update_on_kvstore!r}"
        )
    if compression_params is not None and not isinstance(compression_params, Mapping):
        raise ArgumentTypeError(
            f"compression_params must be a mapping, got {type(compression_params).__name__}"
        )
    if kvstore is not None:
        return
    if update_on_kvstore or compression_params is not None:
        wanted = "update_on_kvstore=True" if update_on_kvstore else "compression_params"
        raise ArgumentValueError(
            f"{wanted} needs a store, but kvstore is None; pass a store or its type"
        )
    num_devices = max(len(parameter.list_data()) for parameter in params.values())
    if num_devices > 1:
        raise ArgumentValueError(
            f"parameters on {num_devices} devices need a store that adds their gradients, but "
            "kvstore is None; pass kvstore='device'"
        )


def _is_needless(name: str, params: Params) -> bool:
    from kvstore.kvstore import STORE_TYPES

    if STORE_TYPES.get(name.lower()) not in ("local", "device"):
        return False
    return all(
        len(each.list_data()) == 1
        and adapter_for(each.first).context(each.first).device_type == "cpu"
        for each in params.values()
    )


def _resolve(store: KVStoreBase, update_on_kvstore: bool | None) -> bool:
    """Return whether the store updates the weights.

    Raises ``ArgumentValueError`` if the store cannot do what ``update_on_kvstore`` asks for.
    """
    is_capable = store.is_capable(KVStoreBase.OPTIMIZER)
    if update_on_kvstore and not is_capable:
        raise ArgumentValueError(
            f"update_on_kvstore=True: a {store.type} store cannot run an optimizer; remove the "
            "argument"
        )
    if update_on_kvstore is False and _is_asynchronous(store):
        raise ArgumentValueError(
            f"update_on_kvstore=False: a {store.type} store applies each push at once and does "
            "not return sums; remove the argument"
        )
    return is_capable if update_on_kvstore is None else update_on_kvstore


def _is_asynchronous(store: KVStoreBase) -> bool:
    return isinstance(store, KVStore) and "async" in store.type


ELEMENTS = 16
"""At least this many evenly spaced elements of an array are compared (or all, if it has fewer)."""

Elements = np.ndarray[Any, np.dtype[Any]]


class HeldWeights:
    """The weights of some parameters after the store's last update.

    Only the first copy of each parameter is watched.
    """

    def __init__(self, params: Mapping[Key, Parameter]) -> None:
        self._params = dict(params)
        self._tensors = [each.first for each in params.values() if hasattr(each.first, "data_ptr")]
        self._places: list[int] = []
        self._views: list[Elements] = []
        """Some elements of each weight, as views of the arrays."""
        self._left: Elements = np.zeros(0, np.uint8)
        """The bits of these elements after the store's last update, one after the other."""
        self._num_sets: list[int] = []

    def note(self) -> None:
        """Record the current values as those of the store."""
        if not self._num_sets:
            self._look()
        self._left = np.concatenate(self._views)
        self._num_sets = self._sets()

    def changed(self) -> list[Key]:
        """Return the keys whose values have changed since the last ``note``."""
        if not self._num_sets:
            return []
        if self._places != self._present_places():
            self._look()  # tensor.data = x
        now, sets = np.concatenate(self._views), self._sets()
        if sets == self._num_sets and np.array_equal(now, self._left):
            return []
        ends = np.cumsum([len(view) for view in self._views])[:-1]
        each = zip(np.split(now, ends), np.split(self._left, ends), strict=True)
        return [
            key
            for key, (mine, its), count, before in zip(
                self._params, each, sets, self._num_sets, strict=True
            )
            if count != before or not np.array_equal(mine, its)
        ]

    def value(self, key: Key) -> Array:
        """Return the first copy of a weight."""
        return self._params[key].first

    def _sets(self) -> list[int]:
        return [parameter.num_sets for parameter in self._params.values()]

    def _present_places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def _look(self) -> None:
        """Choose the elements to compare, as views of the current arrays."""
        self._places = self._present_places()
        self._views = [_elements(parameter.first) for parameter in self._params.values()]


def _elements(array: Array) -> Elements:
    """Return the bits of some elements as unsigned integers, in place if possible."""
    nothing: Elements = np.zeros(0, np.uint8)
    if not (type(array) is np.ndarray or hasattr(array, "data_ptr")):
        return nothing  # reading an mx.nd array would wait for its values
    adapter = adapter_for(array)
    memory = adapter.memory(array)
    if memory is None:
        return nothing
    bits = memory.view(f"u{min(adapter.dtype(array).itemsize, 8)}")
    return bits[:: max(1, len(bits) // ELEMENTS)]
