"""The runtime under ``kvstore``: a scheduler, servers and workers that exchange messages.

::

    import pslite

    with pslite.start() as node:                # settings from the environment
        worker = pslite.KVWorker(node, app=0)   # on a server: pslite.KVServer(node, app=0, ...)
        worker.wait(worker.push(keys, values))

It knows nothing of stores and optimizers. Importing starts nothing and is cheap: each name is
imported when it is first used. Read next: ``kv_app.py`` for what users call, ``plane/`` for
how data moves, ``postoffice.py`` for the node's loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pslite.version import __version__

if TYPE_CHECKING:
    from pslite.config import Config
    from pslite.customer import Incoming, Reply
    from pslite.future import Future
    from pslite.ids import ALL_GROUP, SCHEDULER_GROUP, SERVER_GROUP, WORKER_GROUP, NodeInfo, Role
    from pslite.kv_app import KVMeta, KVServer, KVWorker
    from pslite.kv_pairs import KVPairs
    from pslite.kv_sum import SumHandle
    from pslite.observer import Observer, ask_status
    from pslite.postoffice import Postoffice
    from pslite.simple_app import SimpleApp, SimpleData
    from pslite.starting import start
    from pslite.survey import Survey

_HOMES = {
    "ALL_GROUP": "ids",
    "SCHEDULER_GROUP": "ids",
    "SERVER_GROUP": "ids",
    "WORKER_GROUP": "ids",
    "Config": "config",
    "Future": "future",
    "Incoming": "customer",
    "KVMeta": "kv_app",
    "KVPairs": "kv_pairs",
    "KVServer": "kv_app",
    "KVWorker": "kv_app",
    "NodeInfo": "ids",
    "Observer": "observer",
    "Postoffice": "postoffice",
    "Reply": "customer",
    "Role": "ids",
    "SimpleApp": "simple_app",
    "SimpleData": "simple_app",
    "SumHandle": "kv_sum",
    "Survey": "survey",
    "ask_status": "observer",
    "start": "starting",
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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pslite' has no attribute {name!r}")
    value = getattr(import_module(f"pslite.{home}"), name)
    globals()[name] = value
    return value
