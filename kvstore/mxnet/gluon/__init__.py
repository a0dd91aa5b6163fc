"""``mx.gluon``: the part of MXNet's Gluon that trains any network over a KVStore.

::

    trainer = mx.gluon.Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.1}, "dist_sync")
    ...
    trainer.step(batch_size)

This module only exports names. Read next: ``trainer.py``; for users, ``docs/trainer.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors.hints import missing
from kvstore.mxnet import metric
from kvstore.mxnet.gluon import utils
from kvstore.mxnet.gluon.parameter import Parameter
from kvstore.mxnet.gluon.trainer import Trainer

__all__ = ["Parameter", "Trainer", "metric", "utils"]


if not TYPE_CHECKING:  # with this, a type checker would accept misspelt names

    def __getattr__(name):
        raise missing("kvstore.gluon", name, __all__)
