"""``mx.gluon``: the part of MXNet's Gluon that trains over a KVStore, for any network.

::

    trainer = mx.gluon.Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.1}, "dist_sync")
    ...
    trainer.step(batch_size)

Only names; no threads. Read next: ``trainer.py``; for users, ``docs/trainer.md``.
"""

from __future__ import annotations

from typing import Any

from kvstore import gluon_utils as utils
from kvstore.absent import missing
from kvstore.parameter import Parameter
from kvstore.trainer import Trainer

__all__ = ["Parameter", "Trainer", "utils"]


def __getattr__(name: str) -> Any:
    raise missing("kvstore.gluon", name, __all__)
