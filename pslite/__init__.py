"""The runtime under ``kvstore``: a scheduler, servers and workers that exchange messages.

::

    import pslite

    with pslite.start() as node:                # settings from the environment
        worker = pslite.KVWorker(node, app=0)   # on a server: pslite.KVServer(node, app=0, ...)
        worker.wait(worker.push(keys, values))

It knows nothing of stores and optimizers. Importing starts nothing. Read next: ``kv_app.py``
for what users call, ``plane/`` for how data moves, ``postoffice.py`` for the node's loop.
"""

from pslite.config import Config
from pslite.customer import Incoming, Reply
from pslite.future import Future
from pslite.ids import ALL_GROUP, SCHEDULER_GROUP, SERVER_GROUP, WORKER_GROUP, NodeInfo, Role
from pslite.kv_app import KVMeta, KVServer, KVWorker
from pslite.kv_pairs import KVPairs
from pslite.kv_sum import SumHandle
from pslite.postoffice import Postoffice
from pslite.simple_app import SimpleApp, SimpleData
from pslite.start import start
from pslite.version import __version__

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
    "Postoffice",
    "Reply",
    "Role",
    "SimpleApp",
    "SimpleData",
    "SumHandle",
    "__version__",
    "start",
]
