"""Gradient compression in one process: pass values through a key's codecs.

The store adds the values that a server would have received, so a script behaves as it will with
servers. As in MXNet's ``device`` store, every device's values are encoded, even if there is only
one device; each device has its own residual for each key. The caller holds the store's lock. Read
next: ``compression/config.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.cpu.sums import Flat
from kvstore.arrays.keys import Key, KeySpec
from kvstore.checkpoint.residuals import StoreCompression
from kvstore.compression import Chain, Compression, Draw
from kvstore.compression.config import rows_refused, value_refused
from kvstore.errors import ArgumentValueError, NotSupportedError
from kvstore.sparse.array import RowSparseArray
from kvstore.stores.arguments import KeyTable


class LocalCompression(StoreCompression):
    """The encoding of one store in one process."""

    def __init__(self, compression: Compression, table: KeyTable) -> None:
        super().__init__(compression)
        self._table = table
        #: How many times each key was pushed.
        self._rounds: Counter[Key] = Counter()

    def passed(self, groups: Mapping[Key, Sequence[Array]]) -> list[list[Array]]:
        """Return each key's arrays; those of compressed keys are encoded and decoded.

        The arrays in ``groups`` fit their keys and are only read. Raises ``NotSupportedError`` for
        row-sparse values of a compressed key and ``ArgumentValueError`` for numbers that a codec
        cannot encode, before anything has changed.
        """
        chains = {key: self._chain(key) for key in groups}
        hosts: dict[Key, list[np.ndarray[Any, Any]]] = {}
        for key, arrays in groups.items():
            chain = chains[key]
            if chain is not None:
                hosts[key] = [self._on_host(key, array) for array in arrays]
                for host in hosts[key]:
                    chain.check(host)
        return [
            list(arrays) if (chain := chains[key]) is None else self._pass(key, chain, hosts[key])
            for key, arrays in groups.items()
        ]

    def _on_host(self, key: Key, array: Array) -> np.ndarray[Any, Any]:
        if isinstance(array, RowSparseArray) or self._table.is_row_sparse(key):
            raise NotSupportedError(rows_refused(key))
        return adapter_for(array).to_host(array)

    def _chain(self, key: Key) -> Chain | None:
        return self.compression.rule_for(key, self._table.spec(key)).chain

    def _pass(self, key: Key, chain: Chain, hosts: Sequence[np.ndarray[Any, Any]]) -> list[Array]:
        self._rounds[key] += 1
        draw = Draw(round=self._rounds[key])
        passed: list[Array] = []
        for device, host in enumerate(hosts):
            residual = None
            if chain.has_feedback:
                residual = self.residuals.of(key, host.size, host.dtype, device)
            passed.append(_through(chain, host, residual, draw))
        return passed

    @property
    def encodes_pulls(self) -> bool:
        """Whether a codec encodes the pulled values of any key."""
        return any(rule.pull is not None for rule in self.compression.rules)

    def pulled(self, key: Key, weight: Array) -> np.ndarray[Any, Any] | None:
        """Return a dense key's value after encoding and decoding; None without a codec.

        Raises ``ArgumentValueError`` for numbers that the codec cannot encode.
        """
        chain = self.compression.rule_for(key, self._table.spec(key)).pull
        if chain is None:
            return None
        host = adapter_for(weight).to_host(weight)
        try:
            chain.check(host)
        except ArgumentValueError:
            raise ArgumentValueError(value_refused(key, chain)) from None
        return _through(chain, host, None, Draw())

    def specs(self) -> dict[Key, KeySpec]:
        keys = self._table.keys()
        return dict(zip(keys, map(self._table.spec, keys), strict=True))

    def forget(self, keys: Sequence[Key]) -> None:
        """Drop the residuals of deleted keys."""
        self.residuals.forget(keys)
        for key in keys:
            self._rounds.pop(key, None)


def _through(
    chain: Chain, host: np.ndarray[Any, Any], residual: Flat | None, draw: Draw
) -> np.ndarray[Any, Any]:
    """Return a new array with the values of ``host`` after encoding and decoding."""
    out = np.empty(host.shape, host.dtype)
    chain.decode(chain.encode(host, residual=residual, draw=draw), out)
    return out
