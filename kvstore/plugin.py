"""What training code needs of a store, and how stores of others are found by their name.

``KVStoreBase`` is what a plug-in implements, and the base of this package's own stores as well.
Nothing here does anything but keep the list of names. Read next: ``teststore.py``, the smallest
plug-in, and ``base.py``, what the stores of this package offer.

Names and meaning are those of MXNet (``python/mxnet/kvstore/base.py``).
"""

from __future__ import annotations

import builtins
import warnings
from os import PathLike
from typing import ClassVar, TypeVar

from kvstore.errors import ArgumentTypeError
from kvstore.keys import Keys, Values
from kvstore.optimizer.base import Optimizer

Path = str | PathLike[str]

_Class = TypeVar("_Class", bound=type)


class KVStoreBase:
    """What training code needs of a store, and the base of stores that others plug in.

    ::

        @kvstore.KVStoreBase.register
        class MyStore(kvstore.KVStoreBase):
            ...

        kv = kvstore.create("mystore")      # the class name in lower case

    A plug-in for training without an optimizer on the store defines ``broadcast``,
    ``pushpull``, ``is_capable``, ``rank``, ``num_workers`` and ``type``. What it leaves out
    raises ``NotImplementedError``. Source: ``KVStoreBase`` of MXNet.
    """

    OPTIMIZER: ClassVar[str] = "optimizer"
    """The capability to run an optimizer in the store."""

    kv_registry: ClassVar[dict[str, builtins.type]] = {}
    """Registered classes by the name that ``create`` takes."""

    @staticmethod
    def register(klass: _Class) -> _Class:
        """Class decorator: let ``create`` make objects of this class by its name, lower-cased.

        Registering a name again warns and replaces. Raises ``ArgumentTypeError`` for what is
        no class.
        """
        if not isinstance(klass, builtins.type):
            raise ArgumentTypeError(f"register takes a class, got {klass!r}")
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
        """This worker's number, from 0 on; 0 for stores in one process."""
        raise NotImplementedError

    @property
    def num_workers(self) -> int:
        """How many workers share the store; 1 for stores in one process."""
        raise NotImplementedError

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """``init`` and then ``pull``: every worker gets rank 0's value. Once for each key."""
        raise NotImplementedError

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        """``push`` and then ``pull`` in one round; without an optimizer, an all-reduce.

        ``out`` has one array or a list for each key. Without it the result is written into
        the arrays of ``value``.
        """
        raise NotImplementedError

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do it; the one that is known is ``KVStoreBase.OPTIMIZER``.

        Raises ``ArgumentValueError`` for an unknown one.
        """
        raise NotImplementedError

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Let pushes update the stored values by ``optimizer`` from now on."""
        raise NotImplementedError

    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        """Write what the optimizer keeps for each key to a file."""
        raise NotImplementedError

    def load_optimizer_states(self, fname: Path) -> None:
        """Take over what ``save_optimizer_states`` wrote."""
        raise NotImplementedError
