"""The node of this process, made from its environment (DMLC_*), which all its stores share.

One per process because there is one environment. It joins the cluster when the first
distributed store is created and says goodbye when the interpreter ends, so that a notebook can
close its stores and create others.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading

from kvstore.server import serve
from pslite import Config, Postoffice, Role, start

# Guards the name below; stores may be created on any thread.
_lock = threading.Lock()
_node: Postoffice | None = None
_pid = 0


def worker_node() -> Postoffice:
    """The process's worker node.

    Raises:
        SystemExit: DMLC_ROLE is server or scheduler: the process has served until the end.
        ConfigError, DeadlineError: the cluster cannot be joined; the text says why.
    """
    global _node, _pid
    with _lock:
        if _node is None or _pid != os.getpid():  # a forked child needs a node of its own
            config, unknown = Config.from_env()
            for sentence in unknown:
                print(f"warning: {sentence}", file=sys.stderr)
            if config.role != Role.WORKER.value:
                sys.exit(serve(config))
            _node, _pid = start(config), os.getpid()
            atexit.register(_leave, _node)
        return _node


def _leave(node: Postoffice) -> None:
    """At the end of the interpreter: a goodbye, unless an exception has ended the script.

    Without one the others see a lost worker, which ends the job, instead of a worker that has
    got all it wanted. The interpreter leaves an uncaught exception in ``sys.last_value``; in
    an interactive session that says nothing about its end.
    """
    is_interactive = hasattr(sys, "ps1")
    failed = getattr(sys, "last_value", None) is not None and not is_interactive
    node.close(goodbye=not failed)
