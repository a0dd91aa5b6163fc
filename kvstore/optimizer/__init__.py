"""Optimizers: a registered name with typed numbers, and one update formula each.

``create("sgd", learning_rate=0.1)`` makes one; ``kv.set_optimizer`` hands it to a store. What
travels to a server is only a name and numbers (``plain.py``), never code. All of them, with
their formulas: ``docs/optimizers.md``. Read next: ``base.py``.
"""

from kvstore.optimizer.adadelta import AdaDelta
from kvstore.optimizer.adagrad import AdaGrad
from kvstore.optimizer.adam import Adam, AdamW
from kvstore.optimizer.adamax import Adamax
from kvstore.optimizer.base import Optimizer, create, register
from kvstore.optimizer.fields import Number
from kvstore.optimizer.ftrl import Ftrl
from kvstore.optimizer.lamb import LAMB
from kvstore.optimizer.lars import LARS
from kvstore.optimizer.nadam import Nadam
from kvstore.optimizer.plain import from_plain, to_plain
from kvstore.optimizer.rmsprop import RMSProp
from kvstore.optimizer.schedule import Schedule
from kvstore.optimizer.sgd import NAG, SGD
from kvstore.optimizer.signum import SignSGD, Signum
from kvstore.optimizer.test import Test
from kvstore.optimizer.updater import Updater, get_updater

__all__ = [
    "LAMB",
    "LARS",
    "NAG",
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Nadam",
    "Number",
    "Optimizer",
    "RMSProp",
    "Schedule",
    "SignSGD",
    "Signum",
    "Test",
    "Updater",
    "create",
    "from_plain",
    "get_updater",
    "register",
    "to_plain",
]
