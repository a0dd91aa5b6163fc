"""The stores ``horovod`` and ``byteps``: sums over all workers, without stored values.

::

    kv = mx.kv.create("horovod")
    trainer = mx.gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1}, kvstore=kv)

As in MXNet, they broadcast the first values and add gradients; the optimizer runs in each worker.
Both types are the same here: they make the calls of ``kvstore.horovod``, named by the keys. Source:
python/mxnet/kvstore/horovod.py and byteps.py of MXNet. Runs on the caller's thread, and waits.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from kvstore.arrays import adapter_for
from kvstore.arrays.keys import Keys, Values
from kvstore.errors import ArgumentValueError, NotSupportedError
from kvstore.frameworks.horovod import calls, session
from kvstore.frameworks.horovod.calls import Array, ReduceOperation
from kvstore.frameworks.horovod.session import global_process_set
from kvstore.stores.arguments import check_outs, group_values, spec_of
from kvstore.stores.plugin import KVStoreBase


@KVStoreBase.register
class Horovod(KVStoreBase):
    """Adds values over all workers; joins the job as ``hvd.init`` does."""

    def __init__(self) -> None:
        session.init()

    @property
    def type(self) -> str:
        return type(self).__name__.lower()

    @property
    def rank(self) -> int:
        return session.rank()

    @property
    def local_rank(self) -> int:
        """This worker's rank among those of its machine."""
        return session.local_rank()

    @property
    def num_workers(self) -> int:
        return session.size()

    @property
    def size(self) -> int:
        """The number of workers; ``num_workers`` is the same."""
        return session.size()

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        outs = group_values(key, out)
        handles = []
        for item, values in group_values(key, value).items():
            check_outs(item, spec_of(values[0]), outs.get(item, []))
            array = np.array(adapter_for(values[0]).to_host(values[0]), order="C")
            handles.append((item, calls.broadcast(array, 0, str(item), global_process_set)))
        for item, handle in handles:
            _assign(handle.result(), outs.get(item, []))

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        values = group_values(key, value)
        outs = values if out is None else group_values(key, out)
        handles = []
        for item, arrays in values.items():
            spec = spec_of(arrays[0])
            check_outs(item, spec, outs.get(item, []))
            adapter = adapter_for(arrays[0])
            total = adapter.sum_in_order(arrays, adapter.context(arrays[0]), spec.dtype)
            host = np.asarray(adapter_for(total).to_host(total), order="C")
            handle = calls.all_reduce(
                host, ReduceOperation.SUM, str(item), (1.0, 1.0), global_process_set
            )
            handles.append((item, handle))
        for item, handle in handles:
            _assign(handle.result(), outs.get(item, []))

    def push(self, key: Keys, value: Values, priority: int = 0) -> NoReturn:
        """Raise ``NotSupportedError``: the store keeps no values."""
        self._refuse("push")

    def pull(self, key: Keys, out: Any = None, priority: int = 0, **options: Any) -> NoReturn:
        """Raise ``NotSupportedError``: the store keeps no values."""
        self._refuse("pull")

    def set_optimizer(self, optimizer: Any) -> NoReturn:
        """Raise ``NotSupportedError``: the store keeps no values."""
        self._refuse("set_optimizer")

    def _refuse(self, name: str) -> NoReturn:
        raise NotSupportedError(
            f"a {self.type} store does not have {name}, since it keeps no values: call broadcast "
            "and pushpull, or create a store of type dist_sync"
        )

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return False for ``optimizer``; raise ``ArgumentValueError`` for other names."""
        if capability.lower() != KVStoreBase.OPTIMIZER:
            raise ArgumentValueError(
                f"unknown capability: {capability!r}; known: {KVStoreBase.OPTIMIZER!r}"
            )
        return False


@KVStoreBase.register
class BytePS(Horovod):
    """The same store under the name that scripts for BytePS use."""


def _assign(found: Array, targets: list[Any]) -> None:
    for target in targets:
        adapter_for(target).assign(found, target)
