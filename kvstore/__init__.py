"""A parameter server with the API of MXNet's KVStore.

::

    import kvstore as mx

    kv = mx.kvstore.create("local")         # also mx.kv.create, mx.create
    kv.init("w", w0)
    kv.push("w", [g_device0, g_device1])    # a list is one value for each device
    kv.pull("w", out=[w_device0, w_device1])

Importing this package is cheap and starts nothing. Each name, and NumPy with it, is imported on
first use. Read next: ``kvstore/stores/base.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from pslite.version import __version__

if TYPE_CHECKING:  # tells type checkers and editors about the names imported on first use
    from kvstore import errors as errors
    from kvstore import kvstore as kvstore
    from kvstore import optimizer as optimizer
    from kvstore.arrays import context as context
    from kvstore.arrays import initializer as initializer
    from kvstore.arrays.context import Context as Context
    from kvstore.arrays.context import cpu as cpu
    from kvstore.arrays.context import current_context as current_context
    from kvstore.arrays.context import gpu as gpu
    from kvstore.arrays.context import num_gpus as num_gpus
    from kvstore.frameworks import horovod as horovod
    from kvstore.frameworks import jax as jax
    from kvstore.frameworks import lightning as lightning
    from kvstore.frameworks import torch as torch
    from kvstore.kvstore import create as create
    from kvstore.launch.run import LocalCluster as LocalCluster
    from kvstore.launch.run import run as run
    from kvstore.mxnet import callback as callback
    from kvstore.mxnet import gluon as gluon
    from kvstore.mxnet import io as io
    from kvstore.mxnet import metric as metric
    from kvstore.mxnet import model as model
    from kvstore.mxnet import nd as nd
    from kvstore.mxnet import random as random
    from kvstore.mxnet.nd import ndarray as ndarray
    from kvstore.protocol.commands import register_command as register_command
    from kvstore.sparse import RowSparseArray as RowSparseArray
    from kvstore.stores.base import KVStore as KVStore
    from kvstore.stores.base import KVStoreBase as KVStoreBase
    from kvstore.stores.base import MXNetError as MXNetError
    from kvstore.stores.tables import Table as Table

    init = initializer
    kv = kvstore
    lr_scheduler = optimizer.schedule
    opt = optimizer
    rnd = random

#: Modules with a public name that is also their location.
_OWN = ("errors", "kvstore", "optimizer")

#: Other public modules: public name -> the module with the code.
_PUBLIC = {
    "base": "kvstore.stores.base",
    "callback": "kvstore.mxnet.callback",
    "context": "kvstore.arrays.context",
    "gluon": "kvstore.mxnet.gluon",
    "init": "kvstore.arrays.initializer",
    "initializer": "kvstore.arrays.initializer",
    "io": "kvstore.mxnet.io",
    "jax": "kvstore.frameworks.jax",
    "kv": "kvstore.kvstore",
    "lightning": "kvstore.frameworks.lightning",
    "lr_scheduler": "kvstore.optimizer.schedule",
    "metric": "kvstore.mxnet.metric",
    "model": "kvstore.mxnet.model",
    "nd": "kvstore.mxnet.nd",
    "ndarray": "kvstore.mxnet.nd.ndarray",
    "opt": "kvstore.optimizer",
    "random": "kvstore.mxnet.random",
    "rnd": "kvstore.mxnet.random",
    "horovod": "kvstore.frameworks.horovod",
    "torch": "kvstore.frameworks.torch",
    "training": "kvstore.mxnet.fit.network",
}

#: Public functions and classes: name -> their module.
_MEMBERS = {
    "Context": "kvstore.arrays.context",
    "KVStore": "kvstore.stores.base",
    "KVStoreBase": "kvstore.stores.base",
    "LocalCluster": "kvstore.launch.run",
    "MXNetError": "kvstore.stores.base",
    "RowSparseArray": "kvstore.sparse",
    "Table": "kvstore.stores.tables",
    "cpu": "kvstore.arrays.context",
    "create": "kvstore.kvstore",
    "current_context": "kvstore.arrays.context",
    "gpu": "kvstore.arrays.context",
    "num_gpus": "kvstore.arrays.context",
    "register_command": "kvstore.protocol.commands",
    "run": "kvstore.launch.run",
}

_NOT_IMPORTED_BY_STAR = ("base", "horovod", "jax", "lightning", "torch", "training")

__all__ = [
    "__version__",
    *_OWN,
    *(name for name in _PUBLIC if name not in _NOT_IMPORTED_BY_STAR),
    *_MEMBERS,
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts misspelt names

    def __getattr__(name):
        if name in _OWN or name in _PUBLIC:
            place = _PUBLIC.get(name, f"kvstore.{name}")
            found = globals()[name] = importlib.import_module(place)
            return found
        if name in _MEMBERS:
            found = globals()[name] = getattr(importlib.import_module(_MEMBERS[name]), name)
            return found
        from kvstore.errors.hints import missing

        raise missing("kvstore", name, __all__)


class _PublicNames:
    """Import finder for public names: ``kvstore.gluon`` and others.

    Both names give the same module object. The same is true of their submodules. It has the
    methods of ``importlib.abc.MetaPathFinder`` and ``Loader`` without importing them: those
    classes cost a process 10 ms.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        first, _, inner = rest.partition(".")
        if package != __name__ or first not in _PUBLIC:
            return None
        place = f"{_PUBLIC[first]}.{inner}" if inner else _PUBLIC[first]
        exists = importlib.util.find_spec(place) is not None
        return ModuleSpec(name, self, origin=place) if exists else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class _Absent:
    """Import finder that explains missing modules of MXNet and Horovod."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, own = name.rpartition(".")
        if package.startswith("kvstore"):
            from kvstore.errors.hints import INSTEAD, sentence

            if own in INSTEAD.get(package, ()):
                raise ModuleNotFoundError(sentence(package, own), name=name)


if str(_Absent) not in map(str, sys.meta_path):  # it is there if this module is reloaded
    sys.meta_path.insert(0, _PublicNames())
    sys.meta_path.append(_Absent)
