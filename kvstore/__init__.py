"""A parameter server with the API of MXNet's KVStore.

::

    import kvstore as mx

    kv = mx.kvstore.create("local")         # also mx.kv.create, mx.create
    kv.init("w", w0)
    kv.push("w", [g_device0, g_device1])    # a list is one value for each device
    kv.pull("w", out=[w_device0, w_device1])

Importing starts nothing and is cheap: distributed stores, ``kvstore.model`` and CuPy are
imported when they are first used. Read next: ``kvstore/base.py``.
"""

from __future__ import annotations

from typing import Any

from kvstore import errors, kvstore, optimizer
from kvstore.base import KVStore
from kvstore.context import Context, cpu, gpu
from kvstore.kvstore import create
from pslite.version import __version__

kv = kvstore

__all__ = [
    "Context",
    "KVStore",
    "__version__",
    "cpu",
    "create",
    "errors",
    "gpu",
    "kv",
    "kvstore",
    "model",
    "optimizer",
]


def __getattr__(name: str) -> Any:
    if name == "model":
        import importlib

        return importlib.import_module("kvstore.model")
    raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
