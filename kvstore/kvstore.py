"""``create``: make a store by the name of its type.

The lower-cased name must be one of ``STORE_TYPES``, or a store's that registered itself. MXNet
only searches the name for parts of words, so a typo there gives a ``local`` store. The code of
distributed stores is imported when one is created. Importing this module has no side effects. Read
next: ``stores/base.py``.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from kvstore.errors import ArgumentTypeError, UnknownTypeError
from kvstore.errors.hints import did_you_mean
from kvstore.stores.base import KVStore, KVStoreBase
from kvstore.stores.plugin import TestStore
from pslite import Config

__all__ = ["STORE_TYPES", "KVStore", "KVStoreBase", "TestStore", "create"]

STORE_TYPES: dict[str, str] = {
    "local": "local",
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "device": "device",
    "local_allreduce_device": "device",
    "dist": "dist_sync",
    "dist_sync": "dist_sync",
    "dist_device": "dist_device_sync",
    "dist_device_sync": "dist_device_sync",
    "dist_sync_device": "dist_device_sync",
    "dist_async": "dist_async",
    "dist_async_device": "dist_device_async",
    "dist_device_async": "dist_device_async",
}
"""Accepted names -> the canonical name of the same type."""


_PLUG_INS = dict.fromkeys(("horovod", "byteps"), "kvstore.frameworks.horovod.store")
"""Names of stores that register themselves -> the module to import when one is created."""


def create(name: str = "local", **options: Any) -> KVStore:
    """Make a new store of the type ``name``; case does not matter.

    ``local``
        one process; values are added and updated in the host's memory.
    ``device``
        one process; values are added and updated on the GPU that holds the key.
    ``dist_sync``
        many workers and servers; a round is complete when every worker has pushed the key,
        and then all of them see the same result.
    ``dist_device_sync``
        the same; each worker adds its devices' values on a GPU before it sends the sum.
    ``dist_async``, ``dist_device_async``
        each push is applied at once and atomically; needs an optimizer.

    ``horovod``, ``byteps``
        values are broadcast and added over all workers, and not stored; no optimizer.

    ``teststore``, and the names of other classes that ``KVStoreBase.register`` knows
        a new object of that class, made with ``options``.

    Other names of the original are accepted too (``STORE_TYPES``). ``options`` are for the
    distributed types only, see ``kvstore/stores/dist/store.py``. The store's ``type`` is ``name``
    in lower case. Raises ``UnknownTypeError``, which lists the names.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a string, got {type(name).__name__}: {name!r}")
    given = name.lower()
    check_type(name)
    if given in _PLUG_INS:
        importlib.import_module(_PLUG_INS[given])
    plug_in = KVStoreBase.kv_registry.get(given)
    if plug_in is not None:
        # A plug-in has the methods that training code needs. Type checkers see all of KVStore.
        return cast(KVStore, plug_in(**options))
    canonical = STORE_TYPES[given]
    if canonical.startswith("dist"):
        from kvstore.stores.dist.store import create_dist

        return create_dist(canonical, given, serve=_serve, **options)
    if options:
        raise ArgumentTypeError(
            f"a {given} store does not take options, got {', '.join(sorted(options))}; leave "
            "them out"
        )
    if canonical == "device":
        from kvstore.stores.local.device import DeviceKVStore

        return DeviceKVStore(given)
    from kvstore.stores.local.store import LocalKVStore

    return LocalKVStore(given)


def _serve(config: Config) -> int:
    """Run this process's server or scheduler, and return the exit code."""
    from kvstore.server import serve

    return serve(config)


def check_type(name: str) -> None:
    """Raise ``UnknownTypeError`` unless ``create`` knows this store type."""
    known = list(dict.fromkeys([*STORE_TYPES, *_PLUG_INS, *KVStoreBase.kv_registry]))
    if name.lower() not in known:
        raise UnknownTypeError(
            f"unknown store type {name!r}; known types: {', '.join(known)}"
            f"{did_you_mean(name.lower(), known)}"
        )
