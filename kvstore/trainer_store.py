"""The store of a ``Trainer``: which one it is, what is possible with it, and the exchange.

``open_link`` settles, from the arguments, whether there is a store and where updates happen;
what cannot be had is an error and never something else instead. A ``Link`` is then the one way
to that store. Called from the trainer's thread. Read next: ``agreement.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvstore.agreement import Agreement, Plan
from kvstore.arrays import Array, adapter_for
from kvstore.base import KVStore, KVStoreBase
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DuplicateKeyError,
    OptimizerNotSet,
)
from kvstore.fit_store import LARGE_ELEMENTS
from kvstore.keys import Key
from kvstore.optimizer.base import Optimizer
from kvstore.parameter import Parameter
from pslite.errors import UsageError

if TYPE_CHECKING:
    from kvstore.dist import DistKVStore

Params = Mapping[Key, Parameter]
Gradients = Mapping[Key, Sequence[Array]]


class Link:
    """A store, and whether it updates by the optimizer (``updates``) or only adds."""

    def __init__(self, store: KVStoreBase, updates: bool) -> None:
        self.store = store
        self.updates = updates
        self._agreement: Agreement | None = None
        self._optimizer: Optimizer | None = None
        self._pending: dict[str, float] = {}
        """Numbers of the optimizer that the store does not have yet."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the store applies each push by itself."""
        return _is_asynchronous(self.store)

    @property
    def needs_all_keys(self) -> bool:
        """Whether workers wait for each other, so that all must push the same parameters."""
        return self.store.num_workers > 1 and not self.is_asynchronous

    def start(self, params: Params, optimizer: Optimizer) -> None:
        """Give the store the optimizer, and every worker's parameters rank 0's values."""
        store = self.store
        if isinstance(store, KVStore) and self.needs_all_keys:
            agreement = Agreement(cast("DistKVStore", store))
            agreement.start(params, optimizer, self.updates)
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
                "the store serves another Trainer already, or holds keys of the same names; give "
                "each Trainer a store of its own"
            ) from error

    def _check_only_adds(self) -> None:
        if isinstance(self.store, KVStore):
            try:
                found = self.store.current_optimizer()
            except OptimizerNotSet:
                return
            raise UsageError(
                f"the store updates by an optimizer ({found.name}), so it cannot add gradients up "
                "for update_on_kvstore=False; create a new one"
            )

    # -- numbers of the optimizer ------------------------------------------------------

    def change(self, **numbers: float) -> None:
        """Let the optimizer of the store have these numbers from the next step on."""
        if self.updates:
            self._pending.update(numbers)

    def flush(self) -> None:
        """Hand the store what has changed. Where workers agree, worker 0 alone does it.

        No round is complete without worker 0's push, which comes after this call of its own,
        so all of them see the new numbers; the others, which may be some calls behind or
        ahead, need not meet it in the store.
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
        """Hand gradients over; new weights or, without ``updates``, their sums come back.

        The weights are written into the parameters, the sums into the gradients.
        """
        keys, pushed = list(gradients), list(gradients.values())
        outs = [params[key].list_data() for key in keys] if self.updates else pushed
        self.meet(plan)  # before a gradient is sent that others would not wait for
        self.flush()
        if not isinstance(self.store, KVStore):
            for index, key in enumerate(keys):
                self.store.pushpull(key, pushed[index], out=outs[index], priority=-index)
        elif keys:
            self.store.pushpull(keys, pushed, out=outs)

    def meet(self, plan: Plan) -> None:
        """Raise unless all workers that wait for each other have the same plan."""
        if self._agreement is not None:
            self._agreement.meet(plan)

    def pull(self, keys: Sequence[Key], params: Params) -> None:
        """Bring the present weights of some parameters, which were not pushed."""
        if keys and isinstance(self.store, KVStore):
            self.store.pull(list(keys), out=[params[key].list_data() for key in keys])

    # -- files -------------------------------------------------------------------------

    def load_states(self, fname: Any, optimizer: Optimizer) -> Optimizer:
        """Have the store load its states; the optimizer that it uses from then on."""
        self._pending = {}
        self.store.load_optimizer_states(fname)
        if not isinstance(self.store, KVStore):
            return optimizer
        self._optimizer = self.store.current_optimizer()
        return self._optimizer

    def from_first(self, number: float) -> float:
        """Worker 0's number; this worker's own where workers do not wait for each other."""
        return number if self._agreement is None else self._agreement.from_first(number)


def open_link(
    kvstore: KVStoreBase | str | None,
    params: Params,
    update_on_kvstore: bool | None,
    compression_params: Mapping[str, Any] | None,
) -> Link | None:
    """The store to train with, new if it was named; None where none is needed.

    As in MXNet, parameters on one device need no store of a type for one process; unlike
    there, one is made when it is asked to update or to compress, or when the device is a GPU.
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
            raise ArgumentValueError(f"a {store.type} store cannot compress gradients")
        store.set_gradient_compression(compression_params)
    return Link(store, updates)


def check_arguments(
    kvstore: object, params: Params, update_on_kvstore: object, compression_params: object
) -> None:
    """Raise for what no store could make possible."""
    if kvstore is not None and not isinstance(kvstore, str | KVStoreBase):
        raise ArgumentTypeError(
            f"kvstore must be a KVStore, the name of a type or None, got {type(kvstore).__name__}"
        )
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
        raise ArgumentValueError(f"{wanted} needs a store, and kvstore is None: name one")
    num_devices = max(len(parameter.list_data()) for parameter in params.values())
    if num_devices > 1:
        raise ArgumentValueError(
            f"the parameters are on {num_devices} devices, whose gradients a store has to add "
            "up, and kvstore is None: use 'device'"
        )


def _is_needless(name: str, params: Params) -> bool:
    from kvstore.kvstore import STORE_TYPES

    if STORE_TYPES.get(name.lower()) not in ("local", "device"):
        return False
    copies = [parameter.list_data() for parameter in params.values()]
    return all(len(each) == 1 and _is_on_host(each[0]) for each in copies)


def _is_on_host(array: Array) -> bool:
    return adapter_for(array).context(array).device_type == "cpu"


def _resolve(store: KVStoreBase, update_on_kvstore: bool | None) -> bool:
    """Whether the store updates. Raises ``ArgumentValueError`` for what it cannot do."""
    is_capable = store.is_capable(KVStoreBase.OPTIMIZER)
    if update_on_kvstore and not is_capable:
        raise ArgumentValueError(
            f"update_on_kvstore=True: a {store.type} store cannot run an optimizer; leave it out"
        )
    if update_on_kvstore is False and _is_asynchronous(store):
        raise ArgumentValueError(
            f"update_on_kvstore=False: a {store.type} store applies each push by itself, so "
            "there are no sums to update with; leave it out"
        )
    return is_capable if update_on_kvstore is None else update_on_kvstore


def _is_asynchronous(store: KVStoreBase) -> bool:
    return isinstance(store, KVStore) and "async" in store.type
