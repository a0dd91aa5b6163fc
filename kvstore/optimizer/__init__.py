"""Optimizers: a registered name with typed numbers, and one update formula each.

``create("sgd", learning_rate=0.1)`` makes one; ``kv.set_optimizer`` hands it to a store. What
travels to a server is only ``name`` and ``params()``, never code. Read next: ``base.py``.
"""

from kvstore.optimizer.adam import Adam
from kvstore.optimizer.base import Number, Optimizer, create, register
from kvstore.optimizer.sgd import SGD

__all__ = ["SGD", "Adam", "Number", "Optimizer", "create", "register"]
