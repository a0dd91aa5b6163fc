"""Learning-rate schedules under MXNet's name: ``mx.lr_scheduler.FactorScheduler(step=100)``.

The schedules themselves are in ``kvstore/optimizer/schedule.py``; this module only names them.
"""

from kvstore.optimizer.schedule import (
    CosineScheduler,
    FactorScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    Schedule,
    create,
    register,
)

LRScheduler = Schedule
"""MXNet's name of the base class."""

__all__ = [
    "CosineScheduler",
    "FactorScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "PolyScheduler",
    "Schedule",
    "create",
    "register",
]
