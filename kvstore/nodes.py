"""The node that the stores of this process share when nobody passes one: made from DMLC_*.

One per process because there is one environment; it is made when the first distributed store
is created and closed with the last one, or when the interpreter ends.
"""

from __future__ import annotations

import atexit
import sys
import threading

from kvstore.server import serve
from pslite import Config, Postoffice, Role, start

# Guards the two names below; stores may be created and closed on any thread.
_lock = threading.Lock()
_node: Postoffice | None = None
_users = 0


def worker_node() -> Postoffice:
    """The process's worker node; ``release_node`` gives it back.

    Raises:
        SystemExit: DMLC_ROLE is server or scheduler: the process has served until the end.
        ConfigError, DeadlineError: the cluster cannot be joined; the text says why.
    """
    global _node, _users
    with _lock:
        if _node is None:
            config, unknown = Config.from_env()
            if config.role != Role.WORKER.value:
                sys.exit(serve(config))
            for sentence in unknown:
                print(f"warning: {sentence}", file=sys.stderr)
            _node = start(config)
            atexit.register(_close_at_exit)
        _users += 1
        return _node


def release_node(node: Postoffice) -> None:
    """One store less uses ``node``; the last one closes it."""
    global _node, _users
    with _lock:
        if node is not _node:
            return
        _users -= 1
        if _users > 0:
            return
        _node = None
    atexit.unregister(_close_at_exit)
    node.close()


def _close_at_exit() -> None:
    """A script that never closed its stores still says goodbye."""
    if _node is not None:
        _node.close()
