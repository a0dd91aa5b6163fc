"""The errors of the stores; ``except PSError`` catches these and the runtime's.

::

    PSError                          (pslite.errors)
    ├── JobFailed                    a job of run or LocalCluster did not start, or ended too early
    │   └── WorkerFailed             one of its workers died, or raised what cannot be raised here
    └── UsageError                   (pslite.errors) you misused it; nothing took effect
        ├── UnknownTypeError         create() was given a name that is not a store type
        ├── KeyTypeError             a key is neither int nor str, or the two are mixed
        ├── UnknownKeyError          the key was never initialized
        ├── DuplicateKeyError        the key is initialized already (or twice in one call)
        ├── ArgumentTypeError        an argument or a value has the wrong type
        ├── ArgumentValueError       an argument has a value that the call cannot take
        ├── ValueMismatchError       shape or dtype does not fit the key; the text holds both
        ├── OptimizerNotSet          the call needs an optimizer and there is none
        ├── OptimizerMismatch        two workers asked for different optimizers
        ├── UnknownOptimizerError    no optimizer is registered under this name
        ├── OptimizerParameterError  a parameter of an optimizer is unknown or of the wrong type
        ├── CheckpointError          a saved file is missing, damaged or cannot be written
        ├── NotSupportedError        this store, or this version, cannot do it
        └── MissingDependencyError   an optional package is needed; the text says what to install

Errors of peers and networks are in ``pslite.errors``. Many of these errors also derive from the
built-in error that a Python programmer would expect (``TypeError``, ``LookupError``, ...).
"""

from __future__ import annotations

from pslite.errors import PSError, UsageError


class JobFailed(PSError):
    """A job of ``kvstore.run`` did not start, or ended before all workers returned.

    ``role`` and ``rank`` name the process that failed first; ``""`` and -1 if there is none.
    """

    def __init__(self, message: str, *, role: str = "", rank: int = -1) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank


class WorkerFailed(JobFailed):
    """A worker of ``kvstore.run`` died, or its result was not transferred.

    If a worker raised an error, the caller raises it again. Its ``__cause__`` is then a
    ``WorkerFailed`` whose text is the worker's traceback.
    """


class UnknownTypeError(UsageError, ValueError):
    """``create`` was given an unknown store type; the message lists the types."""


class KeyTypeError(UsageError, TypeError):
    """A key is neither ``int`` nor ``str``, or a store would have keys of both types."""


class UnknownKeyError(UsageError, LookupError):
    """The key was never initialized in this store."""


class DuplicateKeyError(UsageError):
    """The key is already initialized, or appears twice in one call of ``init``."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has the wrong type, such as a list in place of an array."""


class ArgumentValueError(UsageError, ValueError):
    """An argument has an invalid value; the message lists the valid ones."""


class ValueMismatchError(UsageError, ValueError):
    """The shape, dtype or number of the values does not match the keys."""


class OptimizerNotSet(UsageError):
    """The call needs an optimizer, but the store does not have one."""


class OptimizerMismatch(UsageError):
    """Two workers of one store set different optimizers."""


class UnknownOptimizerError(UsageError, ValueError):
    """No optimizer is registered under this name; the message lists the known ones."""


class OptimizerParameterError(UsageError, ValueError):
    """A parameter of an optimizer is unknown, or its value is invalid."""


class CheckpointError(UsageError):
    """A file of arrays or states cannot be read or written; the message says why."""


class NotSupportedError(UsageError, NotImplementedError):
    """The store or this version lacks the call; the message names an alternative."""


class MissingDependencyError(UsageError, ImportError):
    """An optional package is missing; the message has the command that installs it."""
