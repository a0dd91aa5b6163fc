"""A parameter server with the API of MXNet's KVStore.

::

    import kvstore as mx

    kv = mx.kvstore.create("local")         # also mx.kv.create, mx.create
    kv.init("w", w0)
    kv.push("w", [g_device0, g_device1])    # a list is one value for each device
    kv.pull("w", out=[w_device0, w_device1])

Importing starts nothing and is cheap: distributed stores, training tools and array libraries
are imported when they are first used. Read next: ``kvstore/base.py``.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvstore import context, errors, kvstore, optimizer
from kvstore.base import KVStore, KVStoreBase
from kvstore.commands import register_command
from kvstore.context import Context, cpu, gpu, num_gpus
from kvstore.kvstore import create
from pslite.version import __version__

kv = kvstore

#: Modules that are imported when they are first used, by the name that scripts use.
_LAZY = {
    "callback": "kvstore.callback",
    "gluon": "kvstore.gluon",
    "init": "kvstore.initializer",
    "initializer": "kvstore.initializer",
    "io": "kvstore.io",
    "lr_scheduler": "kvstore.lr_scheduler",
    "metric": "kvstore.metric",
    "model": "kvstore.model",
    "nd": "kvstore.nd",
    "random": "kvstore.random",
}

#: The same for single functions and classes, by their module.
_LAZY_MEMBERS = {
    "LocalCluster": "kvstore.running_cluster",
    "RowSparseArray": "kvstore.sparse",
    "Table": "kvstore.tables",
    "run": "kvstore.running",
}

__all__ = [
    "Context",
    "KVStore",
    "KVStoreBase",
    "__version__",
    "context",
    "cpu",
    "create",
    "errors",
    "gpu",
    "kv",
    "kvstore",
    "num_gpus",
    "optimizer",
    "register_command",
    *_LAZY,
    *_LAZY_MEMBERS,
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(_LAZY[name])
    if name in _LAZY_MEMBERS:
        return getattr(importlib.import_module(_LAZY_MEMBERS[name]), name)
    from kvstore.absent import missing

    raise missing("kvstore", name, __all__)
