"""Check the keys and values of calls, and pair them.

``group_values`` and ``KeyTable`` take one key or many, one array or one for each device.
Pure: no I/O, no threads, and no array is read or changed. A check that raises has changed nothing.
The rules of keys and lists are those of MXNet (``python/mxnet/kvstore/base.py``), except that
``bool`` is not a key, NumPy integers are, and shapes and dtypes are checked at the call. Read next:
``base.py``.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for, are_native
from kvstore.arrays.dtypes import check_dtype, keeps_kind
from kvstore.arrays.keys import Key, KeySpec
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DuplicateKeyError,
    KeyTypeError,
    NotSupportedError,
    UnknownKeyError,
    ValueMismatchError,
)
from kvstore.errors.hints import nearest
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.convert import is_row_sparse, row_sparse
from pslite import Future
from pslite.errors import check_unicode

_INTEGERS = (int, np.integer)
_LISTS = (list, tuple)

_look = attrgetter("shape", "dtype")

ROWS_REFUSED = (
    "this store does not support row-sparse values; pass dense arrays, such as "
    "value.to_dense(), and pull whole keys"
)


def spec_of(array: Array) -> KeySpec:
    """Return the shape and dtype of an array of any supported library.

    Raises ``ArgumentTypeError`` for a dtype that cannot be stored.
    """
    if isinstance(array, RowSparseArray):
        return KeySpec(array.shape, array.dtype)
    adapter = adapter_for(array)
    dtype = adapter.dtype(array)
    check_dtype(dtype)
    return KeySpec(adapter.shape(array), dtype.newbyteorder("="))


def normalise_keys(key: object) -> tuple[list[Key], bool]:
    """Return the keys of a call in order, and whether it was a single key, not a list.

    NumPy integers become ``int``. Raises ``KeyTypeError``.
    """
    single = not isinstance(key, _LISTS)
    keys = [_checked_key(item) for item in ([key] if single else key)]  # type: ignore[attr-defined]
    if len({isinstance(item, str) for item in keys}) > 1:
        raise KeyTypeError(
            f"the keys of one call must be all int or all str, got {keys}; call once for each type"
        )
    return keys, single


def single_key(key: object) -> Key:
    """Check the key of a call that takes exactly one, and return it.

    Raises ``KeyTypeError``.
    """
    return _checked_key(key)


def checked_timeout(timeout: object) -> float | None:
    """Check a time limit: seconds, or None for the default (PS_STALL_TIMEOUT).

    Raises ``ArgumentTypeError`` and ``ArgumentValueError``.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise ArgumentTypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if not float(timeout) > 0:
        raise ArgumentValueError(f"timeout must be greater than 0 seconds, got {timeout!r}")
    return float(timeout)


def futures_in(what: Any) -> list[Future[Any]] | None:
    """Return the futures in an argument of ``wait`` as a list; None for keys or None."""
    if isinstance(what, Future):
        return [what]
    if isinstance(what, list | tuple) and what and all(isinstance(f, Future) for f in what):
        return list(what)
    return None


def check_priority(priority: object) -> None:
    """Raise ``ArgumentTypeError`` unless this is an integer of at most 64 bits."""
    if not isinstance(priority, _INTEGERS) or not -(2**63) <= priority < 2**63:
        raise ArgumentTypeError(
            "priority must be an int of at most 64 bits (higher values are sent first), got "
            f"{priority!r:.60}"
        )


def group_values(key: object, value: object, *, takes_rows: bool = False) -> dict[Key, list[Array]]:
    """Return each key's arrays: keys by first appearance, arrays in order.

    With ``takes_rows``, row-sparse values of any library are accepted and not converted; otherwise
    they raise ``NotSupportedError``. Raises ``KeyTypeError``, ``ArgumentTypeError`` (not an array,
    or a dtype that cannot be stored) and ``ValueMismatchError`` (more or fewer values than keys).
    """
    groups = _by_key(key, value)
    _check_arrays(groups, takes_rows=takes_rows)
    return groups


def _by_key(key: object, value: object) -> dict[Key, list[Array]]:
    """Return each key's values, whatever they are."""
    keys, single = normalise_keys(key)
    values = [value] if single else value
    if not isinstance(values, _LISTS):
        raise ValueMismatchError(
            f"a call with a list of {len(keys)} keys needs a list of {len(keys)} values, got "
            f"{type(value).__name__}"
        )
    if len(keys) != len(values):
        raise ValueMismatchError(
            f"expected one value for each key, got {len(keys)} keys and {len(values)} values"
        )
    groups: dict[Key, list[Array]] = {}
    for item, arrays in zip(keys, values, strict=True):
        several = arrays if isinstance(arrays, _LISTS) else [arrays]
        if not several:
            raise ValueMismatchError(
                f"the value of key {item!r} is an empty list; give at least one array"
            )
        groups.setdefault(item, []).extend(several)
    return groups


def _check_arrays(groups: Mapping[Key, Sequence[Array]], *, takes_rows: bool) -> None:
    for arrays in groups.values():
        for array in arrays:
            if not is_row_sparse(array):
                check_dtype(adapter_for(array).dtype(array))
            elif not takes_rows:
                raise NotSupportedError(ROWS_REFUSED)


def _are_of(spec: KeySpec | None, arrays: Sequence[Array]) -> bool:
    """Return whether these are native arrays with exactly this shape and dtype."""
    return are_native(arrays) and list(map(_look, arrays)) == [spec] * len(arrays)


class KeyTable:
    """The keys of a store with shapes and dtypes, and the checks of calls.

    The ``check_`` methods change nothing; ``add`` records the keys that ``check_init`` returned.
    Calls that change nothing may come from any thread.
    """

    def __init__(self) -> None:
        self._specs: dict[Key, KeySpec] = {}
        self._row_sparse: set[Key] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._specs

    def __len__(self) -> int:
        return len(self._specs)

    def keys(self) -> list[Key]:
        """Return all keys, in the order of their ``init``."""
        return list(self._specs)

    def spec(self, key: Key) -> KeySpec:
        """Return a key's spec. Raises ``UnknownKeyError``, ``KeyTypeError``."""
        found = self._specs.get(key)
        if found is None:
            self._check_kind(key)
            raise UnknownKeyError(self._unknown(key))
        return found

    def is_row_sparse(self, key: Key) -> bool:
        """Return whether a key is row-sparse."""
        return key in self._row_sparse

    def check_init(self, key: object, value: object) -> dict[Key, Array]:
        """Check the arguments of ``init``; return the array of each new key."""
        keys, _ = normalise_keys(key)
        groups = _converted(group_values(key, value, takes_rows=True))
        for item, arrays in groups.items():
            self._check_kind(item)
            if item in self._specs:
                raise DuplicateKeyError(
                    f"key {item!r} is already initialized; use push to change its value, or "
                    "delete it first"
                )
            if len(arrays) > 1:
                twice = (
                    "appears twice in the call" if keys.count(item) > 1 else "has several values"
                )
                raise DuplicateKeyError(f"key {item!r} {twice}; give init one array for each key")
        return {item: arrays[0] for item, arrays in groups.items()}

    def check_push(self, key: object, value: object) -> dict[Key, list[Array]]:
        """Check the arguments of ``push``; return the arrays of each key.

        Each array must have exactly the key's shape and dtype.
        """
        groups = _by_key(key, value)
        specs = self._specs
        rest = {key: row for key, row in groups.items() if not _are_of(specs.get(key), row)}
        if not rest:
            return groups
        _check_arrays(rest, takes_rows=True)
        rest = _converted(rest)
        for item, arrays in rest.items():
            spec = self.spec(item)
            for array in arrays:
                if spec_of(array) != spec:
                    raise ValueMismatchError(
                        f"key {item!r} has {_described(spec)}, the pushed array has "
                        f"{_described(spec_of(array))}; push an array of the key's shape and "
                        "dtype"
                    )
        groups.update(rest)
        return groups

    def check_out(self, key: object, out: object) -> dict[Key, list[Array]]:
        """Check the arrays that a call fills; return those of each key.

        Each array must have the key's shape, be writable, and take its dtype (``check_cast``).
        """
        groups = _by_key(key, out)
        rest = {key: outs for key, outs in groups.items() if not self._can_fill(key, outs)}
        _check_arrays(rest, takes_rows=True)
        for item, arrays in rest.items():
            check_outs(item, self.spec(item), arrays)
        return groups

    def _can_fill(self, key: Key, outs: Sequence[Array]) -> bool:
        """Return whether these are writable native arrays of the key's shape and dtype."""
        return _are_of(self._specs.get(key), outs) and not any(
            adapter_for(out).why_read_only(out) for out in outs
        )

    def check_broadcast(
        self, key: object, value: object, out: object
    ) -> tuple[dict[Key, Array], dict[Key, list[Array]]]:
        """Check the arguments of ``broadcast``; return each new key's array and its outs."""
        values = self.check_init(key, value)
        filled = group_values(key, out, takes_rows=True)
        for item, arrays in filled.items():
            check_outs(item, spec_of(values[item]), arrays)
        return values, filled

    def add(self, specs: Mapping[Key, KeySpec], row_sparse: Iterable[Key] = ()) -> None:
        """Add new keys; ``row_sparse`` lists the row-sparse ones."""
        self._row_sparse.update(row_sparse)
        self._specs.update(specs)

    def remove(self, keys: Iterable[Key]) -> None:
        """Forget keys; unknown keys are ignored."""
        for key in keys:
            self._specs.pop(key, None)
            self._row_sparse.discard(key)

    def _unknown(self, key: Key) -> str:
        # A copy, since another thread may add keys meanwhile.
        near = nearest(key, list(self._specs))
        if near is None:
            return f"key {key!r} is not in the store; call init({key!r}, value) first"
        return (
            f"key {key!r} is not in the store; did you mean {near!r}? If not, call "
            f"init({key!r}, value) first"
        )

    def _check_kind(self, key: Key) -> None:
        first = next(iter(self._specs), key)
        if isinstance(first, str) != isinstance(key, str):
            raise KeyTypeError(
                f"the keys of a store must be all int or all str: the store has {first!r}, the "
                f"call names {key!r}"
            )


def _converted(groups: Mapping[Key, Sequence[Array]]) -> dict[Key, list[Array]]:
    """Return each key's arrays, with row-sparse ones as ``RowSparseArray``."""
    return {
        item: [row_sparse(array) if is_row_sparse(array) else array for array in arrays]
        for item, arrays in groups.items()
    }


def check_outs(key: Key, spec: KeySpec, outs: Sequence[Array]) -> None:
    """Check that a value of ``spec`` can be copied into each array of ``outs``.

    Raises ``ArgumentTypeError`` and ``ValueMismatchError``.
    """
    for out in outs:
        if is_row_sparse(out) and not isinstance(out, RowSparseArray):
            raise ArgumentTypeError(
                f"a store cannot write into a {type(out).__name__}; pull into a "
                "kvstore.RowSparseArray and make the other array from its indices and values"
            )
        adapter = None if isinstance(out, RowSparseArray) else adapter_for(out)
        shape, dtype = spec_of(out) if adapter is None else (adapter.shape(out), adapter.dtype(out))
        if shape != spec.shape:
            raise ValueMismatchError(
                f"key {key!r} has shape {spec.shape}, the array to fill has {shape}; pass an "
                f"array of shape {spec.shape}"
            )
        check_cast(f"key {key!r}", spec.dtype, dtype)
        reason = None if adapter is None else adapter.why_read_only(out)
        if reason is not None:
            raise ValueMismatchError(f"the array to fill for key {key!r} is read-only: {reason}")


def check_cast(what: str, stored: np.dtype[Any], wanted: np.dtype[Any]) -> None:
    """Raise ``ValueMismatchError`` for casts that change the kind of values."""
    if not keeps_kind(stored, wanted):
        raise ValueMismatchError(
            f"{what} has dtype {stored}, and the array to fill has {wanted}, which cannot hold "
            f"such values; pull into an array of {stored}, then convert it with "
            f"array.astype({str(wanted)!r})"
        )


def _checked_key(key: object) -> Key:
    if isinstance(key, str):
        return key if key.isascii() else check_unicode("a str key", key, KeyTypeError)
    if isinstance(key, _INTEGERS) and not isinstance(key, bool):
        number = int(key)
        if -(2**63) <= number < 2**63:
            return number
        raise KeyTypeError(
            f"an int key must fit in 64 bits (signed), got {number}; use a smaller number or a str"
        )
    raise KeyTypeError(f"a key must be an int or a str, got {type(key).__name__}: {key!r}")


def _described(spec: KeySpec) -> str:
    return f"shape {spec.shape} of {spec.dtype}"
