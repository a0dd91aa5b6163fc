"""``KVStoreBase``: the interface of stores and plug-ins, with a registry.

Plug-ins implement ``KVStoreBase``, and this package's own stores derive from it. The smallest
plug-in is ``create("teststore")``, for testing code that takes any store. It runs in one process,
has no optimizer and stores no values: ``broadcast`` copies and ``pushpull`` adds. The methods have
the names and meaning of MXNet's (python/mxnet/kvstore/base.py). Read next: ``base.py``, the
interface of this package's stores.
"""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from kvstore.arrays import adapter_for
from kvstore.arrays.keys import Keys, KeySpec, Values
from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError
from kvstore.optimizer.base import Optimizer
from kvstore.stores.arguments import ROWS_REFUSED, check_outs, group_values, spec_of

if TYPE_CHECKING:
    from kvstore.stores.tables import Table


Path = str | PathLike[str]

CompressionParams = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""The argument of ``set_gradient_compression``."""

_Class = TypeVar("_Class", bound=type)


class KVStoreBase:
    """The interface of stores for training code, and the base of plug-ins.

    ::

        @kvstore.KVStoreBase.register
        class MyStore(kvstore.KVStoreBase):
            ...

        kv = kvstore.create("mystore")      # the class name in lower case

    A plug-in for training without an optimizer on the store defines ``broadcast``,
    ``pushpull``, ``is_capable``, ``rank``, ``num_workers`` and ``type``. The methods that it does
    not define raise ``NotImplementedError``. Source: ``KVStoreBase`` of MXNet.
    """

    OPTIMIZER: ClassVar[str] = "optimizer"
    """The capability to run an optimizer in the store."""

    kv_registry: ClassVar[dict[str, builtins.type]] = {}
    """The name that ``create`` takes -> the registered class."""

    @staticmethod
    def register(klass: _Class) -> _Class:
        """Decorate a class so that ``create`` knows it by its lower-case name.

        A class with the name of an earlier one replaces it, with a warning. Raises
        ``ArgumentTypeError`` if the argument is not a class.
        """
        if not isinstance(klass, builtins.type):
            raise ArgumentTypeError(f"register needs a class, got {klass!r}")
        name = klass.__name__.lower()
        known = KVStoreBase.kv_registry.get(name)
        if known is not None and known is not klass:
            warnings.warn(
                f"the new store {klass.__module__}.{klass.__qualname__} replaces "
                f"{known.__module__}.{known.__qualname__}",
                stacklevel=2,
            )
        KVStoreBase.kv_registry[name] = klass
        return klass

    @property
    def type(self) -> str:
        """The name under which the store was created, lower-cased."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This worker's rank, counted from 0; 0 for stores in one process."""
        raise NotImplementedError

    @property
    def num_workers(self) -> int:
        """How many workers share the store; 1 for stores in one process."""
        raise NotImplementedError

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Create new keys and pull them: every worker gets rank 0's values."""
        raise NotImplementedError

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        """Push and pull in one round; without an optimizer this is an all-reduce.

        ``out`` has one array or a list for each key. Without it the result is written into
        the arrays of ``value``.
        """
        raise NotImplementedError

    def is_capable(self, capability: str) -> bool:
        """Return whether the store has a capability.

        The only known capability is ``KVStoreBase.OPTIMIZER``; others raise ``ArgumentValueError``.
        """
        raise NotImplementedError

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update the stored values with ``optimizer`` at each push from now on."""
        raise NotImplementedError

    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        """Write the optimizer states of all keys to a file."""
        raise NotImplementedError

    def load_optimizer_states(self, fname: Path) -> None:
        """Load the file of ``save_optimizer_states``."""
        raise NotImplementedError

    # -- calls that only some stores have ----------------------------------------------

    def row_sparse_pull(
        self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> Any:
        """Copy rows ``row_ids`` of each key into ``out``.

        ``row_ids`` is an array of ids or a list of ints. It may have any integer dtype, shape and
        order, may repeat ids and may be empty. For a single key, ``out`` may be a list of arrays;
        then ``row_ids`` is one array for all of them, or a list with one for each. For a list of
        keys, ``out`` and ``row_ids`` are lists with an item for each key.

        After the call, a ``RowSparseArray`` in ``out`` holds exactly the requested rows, each once,
        sorted by id and cast to its dtype; rows that the store does not have are zero. Any other
        array must have the shape of the ids followed by the shape of a row, and gets the rows in
        the order of the ids. Without ``out``, returns a new ``RowSparseArray`` (or a list, if
        ``row_ids`` is a list of arrays). The key may also be dense.

        Raises ``ArgumentTypeError`` for ids that are not integers, ``ArgumentValueError`` for ids
        out of range or if ``row_ids`` is None, ``ValueMismatchError`` for lists and arrays that do
        not fit, and ``NotSupportedError`` if a plug-in store lacks the call.
        """
        raise NotSupportedError(ROWS_REFUSED)

    def create_table(
        self,
        name: str,
        dim: int,
        init: Any = "uniform",
        optimizer: Optimizer | str | None = None,
        capacity: int | None = None,
        ttl: int | None = None,
        admit_after: int = 1,
        *,
        dtype: Any = np.float32,
        seed: int = 0,
    ) -> Table:
        """Create a growing table, which maps 64-bit ids to rows of ``dim`` numbers.

        An id gets its row when it is first requested. The first values of a row depend only on
        ``seed``, ``name`` and its id. ``init`` draws them: ``kvstore.init.Uniform`` (from -0.07
        to 0.07 by default), ``Normal`` or ``Constant``, the name of one, or a number for all
        values. ``optimizer`` (an ``Optimizer`` or the name of one) updates only the pushed rows;
        without it a push replaces them. The table does not use the store's optimizer.

        ``capacity`` is the largest number of rows: in a full table, a new row replaces the row
        that was touched longest ago. A row is also removed when more than ``ttl`` pushes to the
        table have passed since it was last touched. An id gets its row at the ``admit_after``-th
        pull of that id; by default at its first pull or push.

        With several workers, all of them call it with the same arguments, and the rows are spread
        over all servers. Raises ``UsageError`` if the workers' arguments differ,
        ``DuplicateKeyError`` for a name that is taken, ``ArgumentTypeError``,
        ``ArgumentValueError``, and ``NotSupportedError`` for an optimizer that would also change
        other rows (one that needs whole keys, such as LAMB, or has ``lazy_update=False``) and for
        plug-in stores that lack the call.
        """
        options = {"init": init, "capacity": capacity, "ttl": ttl, "admit_after": admit_after}
        return self._create_table(name, dim, optimizer, dtype=dtype, seed=seed, **options)

    def _create_table(self, name: object, dim: object, optimizer: object, **options: Any) -> Table:
        """Create a table; stores with tables override this."""
        raise NotSupportedError(
            f"a {self.type} store does not support growing tables; create a store of type local, "
            "device or dist_sync"
        )

    def set_gradient_compression(self, compression_params: CompressionParams) -> None:
        """Compress pushed values, for example with ``{"type": "2bit", "threshold": 0.5}``.

        ``compression_params`` is a dictionary, or a list of dictionaries: each key uses the first
        one that matches it. None turns compression off. ``docs/compression.md`` lists the codecs
        and their parameters. Codecs with error feedback add the lost part of a gradient (the
        residual) to the next push of the key; this call drops all residuals. With several workers,
        all must call it with the same parameters; no thread may push or pull meanwhile
        (``UsageError``). Raises ``ArgumentTypeError`` and ``ArgumentValueError``, which list the
        valid parameters.
        """
        raise NotSupportedError(
            f"a {self.type} store cannot compress gradients; do not call "
            "set_gradient_compression, or push float16 values"
        )


@KVStoreBase.register
class TestStore(KVStoreBase):
    """A store for tests: it adds on the first value's device and stores nothing.

    A key may be broadcast any number of times.
    """

    __test__ = False  # pytest must not collect it because of its name

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
        """Return False for OPTIMIZER. Raises ``ArgumentValueError`` for other names."""
        if capability.lower() != KVStoreBase.OPTIMIZER:
            raise ArgumentValueError(
                f"unknown capability: {capability!r}; known: {KVStoreBase.OPTIMIZER!r}"
            )
        return False
