"""Optimizers: each has a registered name, typed parameters and an update formula.

``create("sgd", learning_rate=0.1)`` returns an optimizer; ``kv.set_optimizer`` gives it to a store.
Servers receive only a name and numbers (``serialize.py``), never code. ``docs/optimizers.md``
lists all optimizers with their formulas. Read next: ``base.py``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvstore.optimizer.base import Optimizer, create, register
from kvstore.optimizer.parameters import MODULES, Number
from kvstore.optimizer.schedule import Schedule
from kvstore.optimizer.serialize import from_plain, to_plain
from kvstore.optimizer.updater import Updater, get_updater

if TYPE_CHECKING:  # these are imported on first use
    from kvstore.optimizer import contrib as contrib
    from kvstore.optimizer.adam import Adam, Adamax, AdamW, Nadam
    from kvstore.optimizer.adaptive import AdaDelta, AdaGrad, RMSProp
    from kvstore.optimizer.contrib import GroupAdaGrad
    from kvstore.optimizer.ftrl import FTML, Ftrl
    from kvstore.optimizer.layerwise import LAMB, LARS, LBSGD
    from kvstore.optimizer.sgd import DCASGD, NAG, SGD, SGLD, SignSGD, Signum, Test, TorchSGD

    ccSGD = SGD  # noqa: N816

__all__ = [
    "DCASGD",
    "FTML",
    "LAMB",
    "LARS",
    "LBSGD",
    "NAG",
    "SGD",
    "SGLD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "GroupAdaGrad",
    "Nadam",
    "Number",
    "Optimizer",
    "RMSProp",
    "Schedule",
    "SignSGD",
    "Signum",
    "Test",
    "TorchSGD",
    "Updater",
    "ccSGD",
    "contrib",
    "create",
    "from_plain",
    "get_updater",
    "register",
    "to_plain",
]


_MXNET_NAMES = {"ccSGD": "SGD"}
"""MXNet's older names -> the classes."""


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # a type checker would accept every name, misspelt ones too

    def __getattr__(name):
        own = _MXNET_NAMES.get(name, name)
        if own in MODULES:
            module = importlib.import_module(f"{__name__}.{MODULES[own]}")
            found = globals()[name] = getattr(module, own)
            return found
        if name in MODULES.values():
            return importlib.import_module(f"{__name__}.{name}")
        from kvstore.errors.hints import missing

        raise missing("kvstore.optimizer", name, __all__)
