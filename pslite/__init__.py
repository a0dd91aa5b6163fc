"""The runtime under ``kvstore``: a scheduler, servers and workers that exchange messages.

::

    import pslite

    with pslite.start() as node:                # settings from the environment
        worker = pslite.KVWorker(node, app=0)   # on a server: pslite.KVServer(node, app=0, ...)
        worker.wait(worker.push(keys, values))

It knows nothing of stores and optimizers. Importing starts nothing and is cheap: each name is
imported when it is first used. Read next: ``apps/kv_app.py`` for what users call, ``plane/`` for
how data moves, ``node/postoffice.py`` for the node's loop.
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
    from pslite.config import Config
    from pslite.future import Future
    from pslite.ids import ALL_GROUP, SCHEDULER_GROUP, SERVER_GROUP, WORKER_GROUP, NodeInfo, Role
    from pslite.node.customer import Incoming, Reply
    from pslite.node.postoffice import Postoffice
    from pslite.node.start import start
    from pslite.wire.survey import Survey

_HOMES = {
    "ALL_GROUP": "ids",
    "SCHEDULER_GROUP": "ids",
    "SERVER_GROUP": "ids",
    "WORKER_GROUP": "ids",
    "Config": "config",
    "Future": "future",
    "Incoming": "node.customer",
    "KVMeta": "apps.kv_app",
    "KVPairs": "apps.kv_pairs",
    "KVServer": "apps.kv_app",
    "KVWorker": "apps.kv_app",
    "NodeInfo": "ids",
    "Observer": "apps.observer",
    "Postoffice": "node.postoffice",
    "Reply": "node.customer",
    "Role": "ids",
    "SimpleApp": "apps.simple_app",
    "SimpleData": "apps.simple_app",
    "SumHandle": "apps.kv_sum",
    "Survey": "wire.survey",
    "ask_status": "apps.observer",
    "start": "node.start",
}
"""Public name -> the module that it lives in."""

__all__ = [
    "ALL_GROUP",
    "SCHEDULER_GROUP",
    "SERVER_GROUP",
    "WORKER_GROUP",
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


if not TYPE_CHECKING:  # a checker would take every name, misspelt ones too

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'pslite' has no attribute {name!r}")
        value = getattr(import_module(f"pslite.{home}"), name)
        globals()[name] = value
        return value
