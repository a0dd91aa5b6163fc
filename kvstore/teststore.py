"""``create("teststore")``: the smallest plug-in, for tests of code that takes any store.

One process, no optimizer, nothing is kept: ``broadcast`` copies and ``pushpull`` adds up. It
shows what a plug-in has to define. Source: ``TestStore`` of MXNet (python/mxnet/kvstore/base.py).
"""

from __future__ import annotations

from kvstore.arrays import adapter_for
from kvstore.errors import ArgumentValueError
from kvstore.keys import Keys, KeySpec, Values, check_outs, group_values, spec_of
from kvstore.plugin import KVStoreBase


@KVStoreBase.register
class TestStore(KVStoreBase):
    """Adds on the first value's device. A key may be broadcast any number of times."""

    __test__ = False  # not a class of tests, whatever its name looks like

    @property
    def type(self) -> str:
        return "teststore"

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 1

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        outs = group_values(key, out)
        for item, values in group_values(key, value).items():
            check_outs(item, spec_of(values[0]), outs.get(item, []))
            for array in outs.get(item, []):
                adapter_for(array).assign(values[0], array)

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        values = group_values(key, value)
        outs = values if out is None else group_values(key, out)
        for item, arrays in values.items():
            spec: KeySpec = spec_of(arrays[0])
            check_outs(item, spec, outs.get(item, []))
            adapter = adapter_for(arrays[0])
            total = adapter.sum_in_order(arrays, adapter.context(arrays[0]), spec.dtype)
            for array in outs.get(item, []):
                adapter_for(array).assign(total, array)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """False: there is no optimizer. Raises ``ArgumentValueError`` for what is unknown."""
        if capability.lower() != KVStoreBase.OPTIMIZER:
            raise ArgumentValueError(f"unknown capability: {capability!r}")
        return False
