"""``Updater``: an optimizer with the state of many keys, for use outside a store.

``updater(key, grad, weight)`` changes ``weight`` in place, as MXNet's does. The result has the
same bits as in a ``local`` store with one pushed value. It computes on the host; arrays on a GPU
are copied to the host and back. It starts no threads, and only one thread at a time may call it.
Read next: ``kvstore/arrays/cpu/sums.py``, which updates in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.cpu.sums import Flat, Workspace, apply_round
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.arrays.keys import Key, width_of
from kvstore.errors import ArgumentTypeError, NotSupportedError, ValueMismatchError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.scripted import ScriptedOptimizer, ScriptedStates, check_travels
from kvstore.optimizer.serialize import from_bytes, from_plain, to_bytes, to_plain
from kvstore.optimizer.states import create_state, follow, has_master, restored, take_over

States = dict[Key, tuple[int, tuple[Flat, ...]]]
"""For each key: how many updates it had, and its arrays in the order of ``states.state_names``."""


class Updater:
    """Update many weights with one optimizer.

    Source: ``mxnet.optimizer.Updater``.

    The first update of a key creates its state; each key has its own count. You may set
    ``optimizer`` to another one at any time: one of the same class keeps states and counts, any
    other starts again, as in the stores. An optimizer that is written MXNet's way
    (``scripted.py``) cannot be replaced; it is called for each array, on the host, and may keep
    any state. float16 and bfloat16 weights have a float32 master here; where the caller has
    changed a weight since its last update, the weight replaces the master.
    """

    def __init__(self, optimizer: Optimizer | ScriptedOptimizer) -> None:
        self._scripted: ScriptedStates | None = None
        if isinstance(optimizer, ScriptedOptimizer):
            self._scripted = ScriptedStates(optimizer)
        elif not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"an Updater needs an Optimizer, got {type(optimizer).__name__}; create one with "
                "kvstore.optimizer.create('sgd', learning_rate=0.1)"
            )
        self.optimizer: Any = optimizer
        self._entries: dict[Key, tuple[Optimizer, int, tuple[Flat, ...]]] = {}
        self._workspace = Workspace()

    def __call__(
        self, key: Key | Sequence[Key], grad: Array | Sequence[Array], weight: Array | Any
    ) -> None:
        """Update ``weight`` in place from ``grad``; lists are updated in order.

        Both are arrays with the same shape and dtype, of any library and memory order, on any
        device; ``grad`` is only read. The updater keeps neither. Raises ``ArgumentTypeError`` for
        arguments that are not arrays, not floating point or (the weight) read-only, and
        ``ValueMismatchError`` for unequal shapes, dtypes or lengths of lists.
        """
        if not isinstance(key, list | tuple):
            self._update(key, grad, weight)  # type: ignore[arg-type]
            return
        if not (len(key) == len(grad) == len(weight)):
            raise ValueMismatchError(
                f"a call with {len(key)} keys needs {len(key)} gradients and weights, got "
                f"{len(grad)} and {len(weight)}"
            )
        for row in zip(key, grad, weight, strict=True):
            self._update(*row)

    def states(self) -> States:
        """Return copies of every key's count and arrays, flat, on the host.

        ``get_states`` returns them as bytes.

        Raises ``NotSupportedError`` for an optimizer that is written MXNet's way.
        """
        check_travels(self.optimizer)
        return {
            key: (count, tuple(array.copy() for array in state))
            for key, (_, count, state) in self._entries.items()
        }

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return counts and states as bytes for ``set_states``.

        With ``dump_optimizer`` they include the optimizer. MXNet has this call, but these bytes
        are not a pickle (``serialize.py``). An optimizer that is written MXNet's way is code, so
        dumping it raises ``NotSupportedError``.
        """
        if dump_optimizer:
            check_travels(self.optimizer)
        plain = to_plain(self.optimizer) if dump_optimizer else None
        if self._scripted is None:
            return to_bytes(self.states(), plain)
        own = self._scripted
        return to_bytes({key: (own.count(key), state) for key, state in own.states.items()}, plain)

    def _set_bytes(self, data: bytes) -> None:
        entries, plain = from_bytes(data)
        if self._scripted is not None:
            self._scripted.restore(entries)
            return
        if plain is not None:
            self.optimizer = from_plain(plain)
        for key, (_, arrays) in entries.items():
            if type(arrays) is not tuple or not all(type(each) is np.ndarray for each in arrays):
                raise ValueMismatchError(
                    f"the state of key {key!r} must be a tuple of arrays, got {arrays!r:.60}"
                )
        self.set_states(entries)

    def set_states(self, states: bytes | Mapping[Key, tuple[int, Sequence[Flat]]]) -> None:
        """Load states that ``states`` or ``get_states`` returned for the same class.

        If bytes include an optimizer, it is loaded too; malformed bytes raise ``CheckpointError``.
        The updater copies the arrays.

        The loaded states replace those of all keys. Masters may be missing. If a key has a count
        below 0, or not as many arrays as the optimizer keeps, it raises ``ValueMismatchError`` and
        changes no states. Lengths and dtypes are checked at the key's next update.
        """
        if isinstance(states, bytes | bytearray | memoryview):
            self._set_bytes(bytes(states))
            return
        check_travels(self.optimizer)
        names = self.optimizer.state_names()
        entries: dict[Key, tuple[Optimizer, int, tuple[Flat, ...]]] = {}
        for key, (count, arrays) in states.items():
            if len(arrays) - len(names) not in (0, 1) or count < 0:
                raise ValueMismatchError(
                    f"the state of key {key!r} has {len(arrays)} arrays and {count} updates, but "
                    f"{self.optimizer.name} keeps {len(names)} arrays ({', '.join(names)}); load "
                    "states of the same optimizer"
                )
            copies = tuple(np.array(array).reshape(-1) for array in arrays)
            entries[key] = self.optimizer, int(count), copies
        self._entries = entries

    def _update(self, key: Key, grad: Array, weight: Array) -> None:
        if "row_sparse" in (getattr(grad, "stype", ""), getattr(weight, "stype", "")):
            raise NotSupportedError(
                f"an Updater needs dense arrays, got a row-sparse array for key {key!r}; pass "
                "array.to_dense(), or update by rows in a store with kv.set_optimizer"
            )
        source, target = adapter_for(grad), adapter_for(weight)
        shape, dtype = target.shape(weight), target.dtype(weight).newbyteorder("=")
        offered = source.shape(grad), source.dtype(grad).newbyteorder("=")
        if offered != (shape, dtype):
            raise ValueMismatchError(
                f"the gradient of key {key!r} must have the shape and dtype of its weight, "
                f"{shape} and {dtype}, got {offered[0]} and {offered[1]}"
            )
        refusal = target.why_read_only(weight)
        if refusal is not None:
            raise ArgumentTypeError(f"cannot update the weight of key {key!r}: {refusal}")
        if self._scripted is None:
            self.optimizer.check_dtype(dtype)
        memory = target.memory(weight)
        flat = (
            np.array(target.to_host(weight)).reshape(-1) if memory is None else memory.view(dtype)
        )
        gradient = source.to_host(grad).reshape(-1)
        if self._scripted is not None:
            self._scripted.update(key, gradient.reshape(shape), flat.reshape(shape))
        else:
            state, count = self._taken_over(key, flat)
            chosen = self.optimizer.for_key(key, width_of(shape))
            apply_round(flat, [gradient], chosen, state, count + 1, self._workspace)
            self._entries[key] = self.optimizer, count + 1, state
        if memory is None:
            target.from_host(flat.reshape(shape), weight)
        else:
            target.written(weight)

    def _taken_over(self, key: Key, weight: Flat) -> tuple[tuple[Flat, ...], int]:
        if key not in self._entries:
            return create_state(self.optimizer, weight), 0
        previous, count, state = self._entries[key]
        dtype = accumulation_dtype(weight.dtype)
        is_fit = all(array.shape == weight.shape and array.dtype == dtype for array in state)
        num_masters = len(state) - len(previous.state_names())
        if not is_fit or num_masters > has_master(weight.dtype):
            raise ValueMismatchError(
                f"the state of key {key!r} does not fit its weight of {len(weight)} elements of "
                f"dtype {weight.dtype}; load states of the same model"
            )
        if num_masters:
            follow(weight, state[-1])
        else:
            state = restored(previous, weight, state)
        if previous is self.optimizer:
            return state, count
        return take_over(self.optimizer, previous, weight, state, count)


def get_updater(optimizer: Optimizer | ScriptedOptimizer) -> Updater:
    """Return an ``Updater`` of ``optimizer``.

    Source of the name: ``mxnet.optimizer.get_updater``.
    """
    return Updater(optimizer)
