"""An optimizer with the state of many keys, for updates outside of a store.

``updater(key, grad, weight)`` changes ``weight`` in place, as MXNet's does, with the bits that
the ``local`` store gives for one pushed value. Works on the host; arrays of other libraries
are brought there and back. No threads of its own: one thread at a time. Read next:
``kvstore/aggregate.py``, which does the work in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.aggregate import Flat, Workspace, apply_round
from kvstore.arrays import Array, adapter_for
from kvstore.dtypes import accumulation_dtype
from kvstore.errors import ArgumentTypeError, ValueMismatchError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.fields import Key
from kvstore.optimizer.states import create_state, follow, has_master, restored, take_over

States = dict[Key, tuple[int, tuple[Flat, ...]]]
"""For each key the number of its updates, and its arrays in the order of ``states.state_names``."""


class Updater:
    """Updates the weights of many keys by one optimizer. Source: ``mxnet.optimizer.Updater``.

    A key's state is made at its first update; keys have counts of their own. ``optimizer`` may
    be set to another at any time: of the same class keeps state and counts, any other begins
    anew, as in the stores. float16 and bfloat16 weights have a float32 master here; where the
    caller has changed a weight since its last update, the weight counts and not the master.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"an Updater takes an Optimizer, got {type(optimizer).__name__}; make one with "
                "kvstore.optimizer.create('sgd', learning_rate=0.1)"
            )
        self.optimizer = optimizer
        self._entries: dict[Key, tuple[Optimizer, int, tuple[Flat, ...]]] = {}
        self._workspace = Workspace()

    def __call__(
        self, key: Key | Sequence[Key], grad: Array | Sequence[Array], weight: Array | Any
    ) -> None:
        """Update ``weight`` in place from ``grad``; lists of all three are updated in order.

        Both are arrays of one shape and dtype, in any library and memory order, on any device;
        ``grad`` is only read. Both are the caller's and are not kept. Raises
        ``ArgumentTypeError`` for what is no array, not floating point or read-only, and
        ``ValueMismatchError`` for unequal shapes, dtypes or lengths of lists.
        """
        if not isinstance(key, list | tuple):
            self._update(key, grad, weight)  # type: ignore[arg-type]
            return
        if not (len(key) == len(grad) == len(weight)):
            raise ValueMismatchError(
                f"{len(key)} keys come with {len(grad)} gradients and {len(weight)} weights"
            )
        for row in zip(key, grad, weight, strict=True):
            self._update(*row)

    def states(self) -> States:
        """Copies of every key's count and arrays, flat, on the host."""
        return {
            key: (count, tuple(array.copy() for array in state))
            for key, (_, count, state) in self._entries.items()
        }

    def set_states(self, states: Mapping[Key, tuple[int, Sequence[Flat]]]) -> None:
        """Go on from what ``states`` gave, of an optimizer of the same kind; keeps copies.

        Replaces all keys. Masters may be missing. Raises ``ValueMismatchError`` where a key has
        another number of arrays than the optimizer keeps, or a count below 0; then nothing has
        changed. Lengths and dtypes are checked at the key's next update.
        """
        names = self.optimizer.state_names()
        entries: dict[Key, tuple[Optimizer, int, tuple[Flat, ...]]] = {}
        for key, (count, arrays) in states.items():
            if len(arrays) - len(names) not in (0, 1) or count < 0:
                raise ValueMismatchError(
                    f"key {key!r} has {len(arrays)} arrays and {count} updates; "
                    f"{self.optimizer.name} keeps {len(names)} ({', '.join(names)})"
                )
            copies = tuple(np.array(array).reshape(-1) for array in arrays)
            entries[key] = self.optimizer, int(count), copies
        self._entries = entries

    def _update(self, key: Key, grad: Array, weight: Array) -> None:
        source, target = adapter_for(grad), adapter_for(weight)
        shape, dtype = target.shape(weight), target.dtype(weight).newbyteorder("=")
        offered = source.shape(grad), source.dtype(grad).newbyteorder("=")
        if offered != (shape, dtype):
            raise ValueMismatchError(
                f"the gradient of key {key!r} has shape {offered[0]} and dtype {offered[1]}, "
                f"its weight {shape} and {dtype}"
            )
        refusal = target.why_read_only(weight)
        if refusal is not None:
            raise ArgumentTypeError(f"the weight of key {key!r} cannot be updated: {refusal}")
        self.optimizer.check_dtype(dtype)
        memory = target.memory(weight)
        flat = (
            np.array(target.to_host(weight)).reshape(-1) if memory is None else memory.view(dtype)
        )
        state, count = self._taken_over(key, flat)
        chosen = self.optimizer.for_key(key)
        gradient = source.to_host(grad).reshape(-1)
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
                f"the state of key {key!r} does not fit a weight of {len(weight)} elements and "
                f"dtype {weight.dtype}"
            )
        if num_masters:
            follow(weight, state[-1])
        else:
            state = restored(previous, weight, state)
        if previous is self.optimizer:
            return state, count
        return take_over(self.optimizer, previous, weight, state, count)


def get_updater(optimizer: Optimizer) -> Updater:
    """An ``Updater`` of ``optimizer``. Source of the name: ``mxnet.optimizer.get_updater``."""
    return Updater(optimizer)
