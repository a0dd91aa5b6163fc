"""The public interface of every store, and the checks of keys and values that all share.

``KVStore`` says what each call promises; ``group_values`` and ``KeyTable`` turn what callers
pass (one key or many, one array or one for each device) into pairs that are known to fit.
Pure: no I/O, no threads, and no array is read or changed. A check that raises has changed
nothing. Read next: ``local.py``, the shortest store.

The rules of keys and lists are those of MXNet (``python/mxnet/kvstore/base.py``), except that
``bool`` is no key, NumPy integers are, and shapes and dtypes are checked at the call.
"""

from __future__ import annotations

import abc
import builtins
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore.arrays import Array, adapter_for, check_dtype
from kvstore.errors import (
    ArgumentTypeError,
    DuplicateKeyError,
    KeyTypeError,
    UnknownKeyError,
    ValueMismatchError,
)
from kvstore.optimizer.base import Optimizer

Key: TypeAlias = int | str
Keys: TypeAlias = Key | Sequence[Key]
Values: TypeAlias = Array | Sequence[Array] | Sequence[Sequence[Array]]


class KVStore(abc.ABC):
    """Maps keys to arrays; pushed values are added up and merged into the stored ones.

    **Keys** are ``int`` or ``str``; a store's keys are all of one kind. **Values** are NumPy
    or CuPy arrays; a push must have exactly the shape and dtype of the key.

    Every call takes one key or a list of keys. With one key, a list of arrays means one for
    each device. With a list of keys, the values are a parallel list whose items are again an
    array or a list of arrays; the same key twice is one push of all its arrays. Lists of keys
    are the fast path: one call can move a whole model.

    ``priority`` says which of several calls under way should be served first, the higher the
    sooner; it never changes a result.

    Errors are raised at the call, before any of it takes effect, and derive from
    ``pslite.errors.PSError``. ``with create(...) as kv:`` closes the store at the end.
    """

    @property
    @abc.abstractmethod
    def type(self) -> str:
        """The name under which the store was created, lower-cased."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This worker's number, from 0 on; 0 for stores in one process."""

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """How many workers share the store; 1 for stores in one process."""

    @abc.abstractmethod
    def init(self, key: Keys, value: Values) -> None:
        """Create the key with this value, which is copied. Once for each key.

        One array for each key; with several workers, rank 0's counts. The keys can be pushed
        and pulled by every worker when the call returns.

        Raises ``DuplicateKeyError`` for a key that exists or stands twice in the call,
        ``KeyTypeError`` and ``ArgumentTypeError`` for keys and values of the wrong kind.
        """

    @abc.abstractmethod
    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Add the values of each key up and merge the sum into the store.

        The arrays of a list are added left to right, then those of all workers in rank order.
        Without an optimizer the sum replaces the stored value; it never accumulates. With one,
        the sum is the gradient of one update.

        The arrays stay the caller's: the store has copied what it needs when the call returns.
        Raises ``UnknownKeyError`` and ``ValueMismatchError`` (shape or dtype of the key).
        """

    @abc.abstractmethod
    def pull(self, key: Keys, out: Values | None = None, priority: int = 0) -> Any:
        """Copy the stored value of each key into every one of its ``out`` arrays.

        The value includes this worker's own pushes before the call. ``out`` has the key's
        shape, any dtype (values are cast) and any strides, and stays the caller's. Returns
        None, or without ``out`` a new array (a list of them for a list of keys).
        Raises ``UnknownKeyError`` and ``ValueMismatchError``.
        """

    @abc.abstractmethod
    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        """``push`` and then ``pull`` in one round; without an optimizer, an all-reduce.

        ``out`` has one array or a list for each key. Without it the result is written into
        the arrays of ``value``.
        """

    @abc.abstractmethod
    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """``init`` and then ``pull``: every worker gets rank 0's value. Once for each key."""

    @abc.abstractmethod
    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Let pushes update the stored values by ``optimizer`` from now on.

        An equal optimizer changes nothing; one of the same class with other numbers keeps
        each key's state and update count; one of another class starts them afresh.
        Raises ``ArgumentTypeError`` for anything but an ``Optimizer``.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return when all workers have called it; at once for stores in one process."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the store and free its memory; later calls raise ``ClosedError``. Idempotent."""

    def _barrier(self) -> None:
        """MXNet's name of ``barrier``, which scripts use."""
        self.barrier()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self,
        exception_type: builtins.type[BaseException] | None,
        exception: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()


class KeySpec(NamedTuple):
    """What never changes about a key."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """In native byte order."""

    @property
    def num_elements(self) -> int:
        """1 for a scalar, 0 for an empty array."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """The size of the values."""
        return self.num_elements * self.dtype.itemsize


def spec_of(array: Array) -> KeySpec:
    """Shape and dtype of an array that ``adapter_for`` accepts.

    Raises ``ArgumentTypeError`` for a dtype that cannot be stored.
    """
    check_dtype(array.dtype)
    return KeySpec(tuple(array.shape), array.dtype.newbyteorder("="))


def normalise_keys(key: object) -> tuple[list[Key], bool]:
    """The keys of a call in its order, and whether it named a single one.

    NumPy integers become ``int``. Raises ``KeyTypeError``.
    """
    single = not isinstance(key, list | tuple)
    keys = [_checked_key(item) for item in ([key] if single else key)]  # type: ignore[attr-defined]
    if len({isinstance(item, str) for item in keys}) > 1:
        raise KeyTypeError(f"the keys of a call must be all int or all str, got {keys}")
    return keys, single


def group_values(key: object, value: object) -> dict[Key, list[Array]]:
    """The arrays of each key, keys in order of first appearance, arrays in the caller's order.

    Raises ``KeyTypeError``, ``ArgumentTypeError`` (no array, or a dtype that cannot be stored)
    and ``ValueMismatchError`` (as many keys as values are needed).
    """
    keys, single = normalise_keys(key)
    values = [value] if single else value
    if not isinstance(values, list | tuple):
        raise ValueMismatchError(
            f"a list of {len(keys)} keys needs a list of as many values, got {type(value).__name__}"
        )
    if len(keys) != len(values):
        raise ValueMismatchError(f"{len(keys)} keys need as many values, got {len(values)}")
    groups: dict[Key, list[Array]] = {}
    for item, arrays in zip(keys, values, strict=True):
        several = arrays if isinstance(arrays, list | tuple) else [arrays]
        if not several:
            raise ValueMismatchError(f"key {item!r} needs at least one array, got an empty list")
        for array in several:
            adapter_for(array)
            check_dtype(array.dtype)
        groups.setdefault(item, []).extend(several)
    return groups


class KeyTable:
    """What a store knows of its keys; the checks of a call against it.

    The ``check_`` methods change nothing; ``add`` does and expects what ``check_init``
    returned. Not safe to share between threads.
    """

    def __init__(self) -> None:
        self._specs: dict[Key, KeySpec] = {}

    def keys(self) -> list[Key]:
        """All keys in order of ``init``."""
        return list(self._specs)

    def spec(self, key: Key) -> KeySpec:
        """Raises ``UnknownKeyError``, or ``KeyTypeError`` for a key of the other kind."""
        found = self._specs.get(key)
        if found is None:
            self._check_kind(key)
            raise UnknownKeyError(
                f"key {key!r} is not in the store; call init({key!r}, value) first"
            )
        return found

    def check_init(self, key: object, value: object) -> dict[Key, Array]:
        """The one array of each new key."""
        keys, _ = normalise_keys(key)
        groups = group_values(key, value)
        for item, arrays in groups.items():
            self._check_kind(item)
            if item in self._specs:
                raise DuplicateKeyError(
                    f"key {item!r} is initialised already; init and broadcast take a key once"
                )
            if len(arrays) > 1:
                twice = "stands twice in the call" if keys.count(item) > 1 else "has several values"
                raise DuplicateKeyError(f"key {item!r} {twice}; init takes one array for each key")
        return {item: arrays[0] for item, arrays in groups.items()}

    def check_push(self, key: object, value: object) -> dict[Key, list[Array]]:
        """The arrays of each key; all have exactly its shape and dtype."""
        groups = group_values(key, value)
        for item, arrays in groups.items():
            spec = self.spec(item)
            for array in arrays:
                if spec_of(array) != spec:
                    raise ValueMismatchError(
                        f"key {item!r} holds {_described(spec)}, "
                        f"the pushed array is {_described(spec_of(array))}"
                    )
        return groups

    def check_out(self, key: object, out: object) -> dict[Key, list[Array]]:
        """The arrays to fill for each key; all have its shape and can be written."""
        groups = group_values(key, out)
        for item, arrays in groups.items():
            check_outs(item, self.spec(item), arrays)
        return groups

    def check_pushpull(
        self, key: object, value: object, out: object
    ) -> tuple[dict[Key, list[Array]], dict[Key, list[Array]]]:
        """What to push, and what to fill: the pushed arrays themselves when ``out`` is None."""
        pushed = self.check_push(key, value)
        return pushed, self.check_out(key, value if out is None else out)

    def check_broadcast(
        self, key: object, value: object, out: object
    ) -> tuple[dict[Key, Array], dict[Key, list[Array]]]:
        """The one array of each new key, and the arrays to fill."""
        values = self.check_init(key, value)
        filled = group_values(key, out)
        for item, arrays in filled.items():
            check_outs(item, spec_of(values[item]), arrays)
        return values, filled

    def add(self, specs: Mapping[Key, KeySpec]) -> None:
        """Record new keys."""
        self._specs.update(specs)

    def _check_kind(self, key: Key) -> None:
        first = next(iter(self._specs), key)
        if isinstance(first, str) != isinstance(key, str):
            raise KeyTypeError(
                f"a store's keys are all int or all str: it has {first!r}, the call names {key!r}"
            )


def check_outs(key: Key, spec: KeySpec, outs: Sequence[Array]) -> None:
    """Raise ``ValueMismatchError`` unless values of ``spec`` can be copied into all ``outs``."""
    for out in outs:
        if tuple(out.shape) != spec.shape:
            raise ValueMismatchError(
                f"key {key!r} has shape {spec.shape}, the array to fill has {tuple(out.shape)}"
            )
        if spec.dtype.kind == "c" and out.dtype.kind != "c":
            raise ValueMismatchError(
                f"key {key!r} is {spec.dtype}; an array of {out.dtype} would lose "
                "the imaginary parts"
            )
        if not adapter_for(out).is_writeable(out):
            raise ValueMismatchError(f"the array to fill for key {key!r} is read-only")


def check_optimizer(optimizer: object) -> Optimizer:
    """``optimizer`` itself. Raises ``ArgumentTypeError`` unless it is an ``Optimizer``."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"set_optimizer takes an Optimizer, got {type(optimizer).__name__}; make one with "
            "kvstore.optimizer.create('sgd', learning_rate=0.1)"
        )
    return optimizer


def _checked_key(key: object) -> Key:
    if isinstance(key, str):
        return key
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        number = int(key)
        if -(2**63) <= number < 2**63:
            return number
        raise KeyTypeError(f"an int key must fit 64 bits, got {number}")
    raise KeyTypeError(f"a key must be an int or a str, got {type(key).__name__}: {key!r}")


def _described(spec: KeySpec) -> str:
    return f"shape {spec.shape} of {spec.dtype}"
