"""The runtime below ``kvstore``: a scheduler, servers and workers.

::

    import pslite

    with pslite.start() as node:                # settings from the environment
        worker = pslite.KVWorker(node, app=0)   # on a server: pslite.KVServer(node, app=0, ...)
        worker.wait(worker.push(keys, values))

The runtime knows nothing about stores and optimizers. Importing it is cheap and starts nothing:
each name is imported on first use. Read next: ``apps/kv_app.py`` for what users call, ``plane/``
for how data moves, ``node/postoffice.py`` for the node's loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pslite.version import __version__

if TYPE_CHECKING:
    from pslite.apps.kv_app import KVMeta, KVServer, KVWorker
    from pslite.apps.kv_pairs import KVPairs
    from pslite.apps.kv_sum import SumHandle
    from pslite.apps.observer import Observer, ask_status
    from pslite.apps.simple_app import SimpleApp, SimpleData
    from pslite.collective.communicator import Communicator
    from pslite.collective.mailbox import ReceivedArray
    from pslite.collective.server import CollectiveServer
    from pslite.config import Config
    from pslite.future import Future
    from pslite.ids import ALL_GROUP, SCHEDULER_GROUP, SERVER_GROUP, WORKER_GROUP, NodeInfo, Role
    from pslite.node.customer import Incoming, Reply
    from pslite.node.postoffice import Postoffice
    from pslite.node.start import start
    from pslite.wire.survey import Survey

_NAMES = {
    "collective.communicator": "Communicator",
    "collective.server": "CollectiveServer",
    "apps.kv_app": "KVMeta KVServer KVWorker",
    "apps.kv_pairs": "KVPairs",
    "apps.kv_sum": "SumHandle",
    "collective.mailbox": "ReceivedArray",
    "apps.observer": "Observer ask_status",
    "apps.simple_app": "SimpleApp SimpleData",
    "config": "Config",
    "future": "Future",
    "ids": "ALL_GROUP NodeInfo Role SCHEDULER_GROUP SERVER_GROUP WORKER_GROUP",
    "node.customer": "Incoming Reply",
    "node.postoffice": "Postoffice",
    "node.start": "start",
    "wire.survey": "Survey",
}
"""Module -> the public names that live in it."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "ALL_GROUP",
    "SCHEDULER_GROUP",
    "SERVER_GROUP",
    "WORKER_GROUP",
    "CollectiveServer",
    "Communicator",
    "Config",
    "Future",
    "Incoming",
    "KVMeta",
    "KVPairs",
    "KVServer",
    "KVWorker",
    "NodeInfo",
    "Observer",
    "Postoffice",
    "ReceivedArray",
    "Reply",
    "Role",
    "SimpleApp",
    "SimpleData",
    "SumHandle",
    "Survey",
    "__version__",
    "ask_status",
    "start",
]


if not TYPE_CHECKING:  # with it, a type checker would accept every name, even misspelt ones

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'pslite' has no attribute {name!r}")
        value = getattr(import_module(f"pslite.{home}"), name)
        globals()[name] = value
        return value
