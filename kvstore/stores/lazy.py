"""Support ``mx.nd.NDArray`` in stores, without importing it before it is used.

``arrays/pending.py`` and ``mxnet/nd/ndarray.py`` say how such arrays wait for values that come
later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from kvstore.arrays import Array
from kvstore.arrays.pending import begin
from pslite import Future

_wrapped = attrgetter("_array")
_uses = attrgetter("_uses")


def _module() -> Any:
    """Return the module of ``NDArray`` if it was imported, or None."""
    return sys.modules.get("kvstore.mxnet.nd.ndarray")


def lazy_arrays(groups: Mapping[Any, Sequence[Array]]) -> list[Array] | None:
    """Return all arrays to fill if each is an NDArray; otherwise, or if empty, None."""
    module = _module()
    if module is None:
        return None
    arrays = [array for group in groups.values() for array in group]
    if not arrays or not all(isinstance(array, module.NDArray) for array in arrays):
        return None
    return arrays


def wrapped(values: Sequence[object]) -> list[Array] | None:
    """Return the arrays inside these NDArrays; None if any value is something else.

    Their values may still be pending.
    """
    module = sys.modules.get("kvstore.mxnet.nd.ndarray")
    if module is None or not values or type(values[0]) is not module.NDArray:
        return None
    if len(values) > 1 and set(map(type, values)) != {module.NDArray}:
        return None
    return list(map(_wrapped, values))


def wait_to_read(arrays: Iterable[Array]) -> None:
    """Wait until no call writes to these lazy arrays any more."""
    for array in arrays:
        array._memory()


def wait_to_write(arrays: Iterable[Array]) -> None:
    """Wait until no call reads or writes these lazy arrays any more."""
    for array in arrays:
        array._memory_to_write()


def unwrapped(arrays: Iterable[Array]) -> list[Array]:
    """Return the arrays inside lazy ones, once they can be written; others unchanged.

    Work that continues after a call has returned must use these: the I/O thread delivers the
    values that a lazy array waits for, so it must never wait for one.
    """
    module = _module()
    if module is None:
        return list(arrays)
    return [
        array._memory_to_write() if isinstance(array, module.NDArray) else array for array in arrays
    ]


def begin_writing(
    future: Future[Any], arrays: Sequence[Array], wait: Callable[[Future[Any]], Any]
) -> None:
    """Make every access to these lazy arrays wait for ``future``."""
    begin(future, map(_uses, arrays), (), wait)
