"""The backend ``kvstore`` of ``torch.distributed``, and optimizers over servers.

::

    import torch.distributed as dist

    dist.init_process_group("kvstore")        # a script needs nothing more: see below
    model = torch.nn.parallel.DistributedDataParallel(model)

Its public name is ``kvstore.torch``. ``import torch`` registers the backend automatically
(``kvstore_torch_autoload.py``), unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is set. Importing this
module registers it too. Read next: ``process_group.py``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvstore.frameworks import PYTORCH

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(f"kvstore.torch needs {PYTORCH}", name="torch") from None

import torch.distributed

from kvstore.errors.hints import missing
from kvstore_torch_autoload import register

if TYPE_CHECKING:
    from kvstore.frameworks.torch.cluster import GroupCluster, join
    from kvstore.frameworks.torch.distributed_optimizer import DistributedOptimizer
    from kvstore.frameworks.torch.parameters import (
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from kvstore.frameworks.torch.process_group import ProcessGroupKVStore, create
    from kvstore.frameworks.torch.server_optimizer import ServerOptimizer
    from kvstore.frameworks.torch.store import init
    from kvstore.frameworks.torch.work import KVStoreWork

#: Public functions and classes: name -> module. The module is imported when the name is first used,
#: because a script with DistributedDataParallel needs no store.
_MEMBERS = {
    "DistributedOptimizer": "distributed_optimizer",
    "GroupCluster": "cluster",
    "KVStoreWork": "work",
    "ProcessGroupKVStore": "process_group",
    "ServerOptimizer": "server_optimizer",
    "broadcast_object": "parameters",
    "broadcast_optimizer_state": "parameters",
    "broadcast_parameters": "parameters",
    "create": "process_group",
    "init": "store",
    "join": "cluster",
}

__all__ = [
    "DistributedOptimizer",
    "GroupCluster",
    "KVStoreWork",
    "ProcessGroupKVStore",
    "ServerOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "create",
    "init",
    "join",
    "register",
]


if not TYPE_CHECKING:  # with this, a type checker would accept misspelt names

    def __getattr__(name):
        if name not in _MEMBERS:
            raise missing("kvstore.torch", name, __all__)
        module = importlib.import_module(f"{__name__}.{_MEMBERS[name]}")
        found = globals()[name] = getattr(module, name)
        return found


if not torch.distributed.is_available():
    raise ImportError(
        f"kvstore.torch needs torch.distributed, which PyTorch {torch.__version__} was built "
        "without: install another build of PyTorch"
    )
register()
