"""``KVStore``: the public interface of every store.

The methods have the names and meaning of MXNet's (``python/mxnet/kvstore/base.py`` and
``kvstore.py``); ``docs/migration.md`` lists the differences. Read next: ``arguments.py`` for the
checks that all stores share, then ``stores/local/store.py``, the shortest store; ``plugin.py`` for
the interface of plug-in stores.
"""

from __future__ import annotations

import abc
import builtins
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from kvstore.arrays.dtypes import checked_dtype, checked_shape
from kvstore.arrays.keys import Key, Keys, KeySpec, UpdateFunction, Values
from kvstore.errors import ArgumentValueError
from kvstore.optimizer.base import Number, Optimizer
from kvstore.protocol.commands import check_command
from kvstore.stores.arguments import KeyTable
from kvstore.stores.plugin import CompressionParams, KVStoreBase, Path
from kvstore.stores.steps import Steps
from kvstore.stores.worker_calls import WorkerCalls
from pslite.errors import PSError
from pslite.future import Future

__all__ = [
    "CompressionParams",
    "KVStore",
    "KVStoreBase",
    "Key",
    "KeyInfo",
    "KeySpec",
    "Keys",
    "MXNetError",
    "Path",
    "Values",
    "Version",
]


class KeyInfo(NamedTuple):
    """The properties of a key."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    num_parts: int
    """The number of parts in which the value is sent and updated; 1 for stores in one process."""
    generation: int
    """1 after the first ``init``; each later ``init`` after ``delete`` adds 1.

    A store remembers its last 1,000 deleted keys; after more deletions a new key may begin above
    1.
    """
    stype: str = "default"
    """``"row_sparse"`` if ``init`` was given a row-sparse value, otherwise ``"default"``."""


class Version(int):
    """The number of pushes (synchronous: rounds) that a pulled value includes.

    ``parts`` are the versions of the key's parts, which can differ with ``dist_async``; the key's
    version is the smallest.
    """

    parts: tuple[int, ...]

    def __new__(cls, parts: Iterable[int]) -> Version:
        parts = tuple(parts)
        version = super().__new__(cls, min(parts, default=0))
        version.parts = parts
        return version

    def __repr__(self) -> str:
        return f"Version({list(self.parts)})"


MXNetError = PSError
"""MXNet's name for the base class of all errors of this project."""


class KVStore(WorkerCalls):
    """Maps keys to arrays; pushed values are summed and merged into the stored ones.

    **Keys** are ``int`` or ``str``; all keys of a store have the same type. **Values** are arrays
    of NumPy, CuPy, PyTorch or JAX, or ``mx.nd.NDArray``; a push must have exactly the shape and
    dtype of the key. Row-sparse values (``RowSparseArray``, SciPy's sparse matrices, PyTorch's
    sparse tensors) may be the first value of a key, which makes the key row-sparse, and gradients
    of any key.

    Every call takes one key or a list of keys. With one key, a list of arrays means one for
    each device. With a list of keys, the values are a parallel list whose items are again an
    array or a list of arrays; the same key twice is one push of all its arrays. Lists of keys
    are the fast path: one call can move a whole model.

    ``priority`` orders calls that are in flight at the same time: higher values are sent first. It
    never changes a result.

    Errors are raised at the call, before any of it takes effect, and derive from
    ``pslite.errors.PSError``. ``with create(...) as kv:`` closes the store at the end.
    """

    _table: KeyTable
    """The keys; the next attribute says whether ``close`` was called. ``repr`` reads both without a
    lock, so that it works anywhere and never raises an error of an earlier call."""

    _is_closed: bool

    # -- the calls of every training loop ----------------------------------------------

    @abc.abstractmethod
    def init(self, key: Keys, value: Values) -> None:
        """Create the key with a copy of this value. Call it once for each key.

        Give one array for each key; with several workers, the store keeps rank 0's value. When the
        call returns, every worker can push and pull the keys.

        Raises ``DuplicateKeyError`` for a key that exists or appears twice in the call,
        ``KeyTypeError`` and ``ArgumentTypeError`` for keys and values of the wrong type.
        """

    @abc.abstractmethod
    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Sum the values of each key and merge the sum into the store.

        The arrays of a list are added left to right, then those of all workers in rank order (on
        several machines, see ``KVSTORE_HIERARCHICAL``). Without an optimizer the sum replaces the
        stored value; it never accumulates. With one, the sum is the gradient of one update.

        The caller may change the arrays when the call returns: the store has copied them. Raises
        ``UnknownKeyError`` and ``ValueMismatchError`` (shape or dtype of the key).
        """

    @abc.abstractmethod
    def pull(
        self,
        key: Keys,
        out: Values | None = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        *,
        with_version: bool = False,
    ) -> Any:
        """Copy the stored value of each key into every one of its ``out`` arrays.

        The value includes this worker's own pushes before the call. ``out`` has the key's shape
        and any strides. Values are cast to its dtype by NumPy's rule ``same_kind``: floats to
        floats of any size, never to integers or bool; values too large for float16 become
        infinite. Returns None, or without ``out`` a new array (a list of them for a list of keys);
        with ``with_version`` a pair of that and the ``Version`` (or list of them).

        If all arrays of ``out`` are ``mx.nd.NDArray``, the call returns at once, and reading them
        waits. A row-sparse key fills whole dense arrays; without ``out`` its stored rows are
        returned as a ``RowSparseArray``. As in MXNet, a ``RowSparseArray`` in ``out`` is left
        unchanged with a warning; with ``ignore_sparse=False`` it gets all stored rows of the key.
        Raises ``UnknownKeyError`` and ``ValueMismatchError`` (shape, or a dtype of another kind).
        """

    @abc.abstractmethod
    def view(self, key: Keys) -> Any:
        """Return a read-only array that shows each key's value where the store keeps it.

        The value includes this worker's own pushes before the call. The array is valid until this
        worker's next push of the key. ``pushpull`` and ``pushpull_async`` renew it if it is their
        ``out``: then the new value is there when the call is done, and meanwhile it must not be
        read. Any other push, ``delete``, ``load_checkpoint``, ``set_gradient_compression`` and
        ``close`` end it: an array that is still in use keeps the old value, for which it is copied,
        and is an ordinary read-only array from then on. Two calls without a push between them
        return the same memory.

        Nothing is copied in stores of one process for keys of more than 65,536 elements, and in
        synchronous ones for keys of at least 64 KiB on one server of this machine; in other cases
        the array has memory of its own, which ``view`` and ``pushpull`` fill. If a call that has a
        view as ``out`` fails, the content of the view is undefined. Do not make a view of a key
        while another thread pushes it. Returns an array of NumPy, or a list of them for a list of
        keys. Raises ``UnknownKeyError``, and ``NotSupportedError`` for stores of type
        ``dist_async``, whose values change at any time, for row-sparse keys and for keys on a GPU.
        """

    @abc.abstractmethod
    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update the stored values with ``optimizer`` at each push from now on.

        An equal optimizer changes nothing; one of the same class with other parameters keeps each
        key's state and update count; one of another class resets them. With several workers, rank
        0's call takes effect; the others may call it with an equal optimizer. Raises
        ``ArgumentTypeError`` unless it is an ``Optimizer``.
        """

    def set_optimizer_params(self, **numbers: Number) -> None:
        """Change parameters of the current optimizer from the next push on: ``lr=0.01``.

        Each key keeps its state and update count. ``lr`` stands for ``learning_rate``. With
        several workers, rank 0's call takes effect: all servers use the new parameters for the
        pushes of rank 0 after this call, and for no push before it. Raises ``OptimizerNotSet``,
        ``OptimizerParameterError``.
        """
        self.set_optimizer(self.current_optimizer().replace(**numbers))

    def optimizer_params(self) -> dict[str, Any]:
        """Return the parameters of the optimizer that the store or servers use.

        Raises ``OptimizerNotSet``.
        """
        return self.current_optimizer().params()

    @abc.abstractmethod
    def current_optimizer(self) -> Optimizer:
        """Return the optimizer in use, read back from where it runs.

        Raises ``OptimizerNotSet``.
        """

    @abc.abstractmethod
    def set_updater(self, updater: UpdateFunction) -> None:
        """Let pushes call ``updater(key, recv, local)``, which changes ``local`` in place.

        ``recv`` is the sum, ``local`` the stored value, both NumPy (or CuPy) arrays in the key's
        shape that are valid during the call. ``push`` raises the errors of ``updater``, and the
        stored value stays unchanged. Only stores in one process support it; others raise
        ``NotSupportedError``, since servers never run code that a worker sends (use
        ``--server-import``).
        """

    # -- the same calls, returning futures ---------------------------------------------

    @abc.abstractmethod
    def push_async(self, key: Keys, value: Values, priority: int = 0) -> Future[None]:
        """Start a ``push``; the future is done when the push has been applied.

        Do not change arrays of NumPy and other libraries before that, since the store may send
        them without a copy; an ``mx.nd.NDArray`` may be changed at once.
        """

    @abc.abstractmethod
    def pull_async(self, key: Keys, out: Values | None = None, priority: int = 0) -> Future[Any]:
        """Start a ``pull``; do not use the arrays of ``out`` until the future is done.

        Without ``out`` the future's value is a new array (or a list of them).
        """

    @abc.abstractmethod
    def pushpull_async(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> Future[None]:
        """Start a ``pushpull``; do not use its arrays until the future is done."""

    @abc.abstractmethod
    def wait(self, what: Any = None, timeout: float | None = None) -> Any:
        """Wait for futures, for calls of some keys, or for all calls in flight.

        ``what`` is a future or a list of futures (the call returns their values), a key or a list
        of keys (it returns None), or None for all calls that this store has in flight. Raises the
        first error. After ``timeout`` seconds (by default PS_STALL_TIMEOUT) it raises
        ``DeadlineError``, which names the missing answers; the calls stay in flight.
        """

    # -- keys --------------------------------------------------------------------------

    @abc.abstractmethod
    def keys(self) -> list[Key]:
        """Return all keys, in the order of this worker's ``init``."""

    @abc.abstractmethod
    def info(self, key: Key) -> KeyInfo:
        """Return shape, dtype and more of a key. Raises ``UnknownKeyError``."""

    @abc.abstractmethod
    def delete(self, key: Keys) -> None:
        """Delete keys with their values and states; ``init`` may create them again.

        With several workers, all must call it; the keys are deleted when it returns. Earlier
        pushes are applied first. Raises ``UnknownKeyError``.
        """

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    # -- files -------------------------------------------------------------------------

    @abc.abstractmethod
    def save_checkpoint(self, directory: Path) -> None:
        """Write values, optimizer states, counts and the optimizer to a directory.

        It writes two files of named arrays and, last, a manifest: a checkpoint without a manifest
        is incomplete. It replaces an earlier checkpoint in the directory; other files stay. With
        several workers the lowest rank writes, and the others return at once. Raises
        ``CheckpointError``, also while another save writes there, and ``ArgumentTypeError`` if
        ``directory`` is not a path.
        """

    @abc.abstractmethod
    def load_checkpoint(self, directory: Path) -> None:
        """Load values, states, counts and the optimizer of ``save_checkpoint``.

        Missing keys are initialized. The number of servers may differ from that of the save. With
        several workers, all must call it, and the lowest rank reads. Raises ``CheckpointError``.
        """

    @abc.abstractmethod
    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        """Write optimizer states and counts; with ``dump_optimizer`` also the optimizer.

        A symbolic link is followed. With several workers the lowest rank writes; the others return
        at once. Raises ``OptimizerNotSet``, ``CheckpointError`` if ``fname`` cannot be written or
        is not a regular file, ``ArgumentTypeError`` if it is not a path.
        """

    @abc.abstractmethod
    def load_optimizer_states(self, fname: Path) -> None:
        """Load the file of ``save_optimizer_states`` for the keys of this store.

        The optimizer in use must have the class of the saved one, unless the file includes the
        optimizer. With several workers, all must call it, and the lowest rank reads. Raises
        ``CheckpointError``, ``OptimizerNotSet``.
        """

    # -- training ----------------------------------------------------------------------

    def steps(
        self, stop: int, state: Any = None, checkpoint: Path | None = None, every: int = 0
    ) -> Steps:
        """Return an iterator over the steps of a training, 0 to ``stop - 1``.

        With ``checkpoint``, a directory that all workers share, it saves after every ``every``
        steps and after the last: the store, but no growing tables, as ``save_checkpoint`` does, the
        number of steps, and each worker's ``state``. All workers call it after ``init`` and
        ``set_optimizer``. If the directory has the progress of an earlier run, the call loads it;
        pull the weights then, and the iterator goes on with the next step. With ``--restarts``, a
        process in place of a lost worker repeats its step (``docs/recovery.md``).
        ``state`` is an object with ``state_dict`` and ``load_state_dict``, or a dict of such
        objects, of random generators, and of what ``broadcast_object`` takes; arrays in it are
        filled in place. Raises an error on all workers if one of them cannot begin.
        """
        return Steps(self, stop, state, checkpoint, every)

    # -- the cluster -------------------------------------------------------------------

    @abc.abstractmethod
    def barrier(self, timeout: float | None = None) -> None:
        """Wait until all workers have called it; stores in one process return at once.

        When a worker has waited for ``timeout`` seconds (by default PS_STALL_TIMEOUT), all
        workers, including later ones, get a ``DeadlineError`` that names the missing workers.
        """

    @abc.abstractmethod
    def placement(self) -> dict[int, dict[Key, int]]:
        """Return the bytes of each key on each server: ``{server rank: {key: bytes}}``.

        Empty for stores in one process.
        """

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return the counters of this store and of its servers."""

    def num_dead_node(self, node_id: int = 7, timeout: float = 60) -> int:
        """Return the number of lost nodes; 0 for stores in one process.

        ``node_id`` is a node id, or a sum of groups: 1 for the scheduler, 2 for servers, 4 for
        workers. Nodes that ended properly are not lost. ``timeout`` has no effect: losses are
        detected when they happen. Source: ``MXKVStoreGetNumDeadNode`` of MXNet's C API.
        """
        return 0

    def send_command_to_servers(self, head: int, body: str = "") -> list[str]:
        """Have each server run the command ``head``; return their answers in rank order.

        Commands are functions that the servers' own modules register
        (``kvstore.register_command``). Stores in one process have no servers: an empty list.
        Raises ``ArgumentTypeError`` unless ``head`` is an int of at least 0 and ``body`` a str, and
        ``ArgumentValueError`` for half a character (a lone surrogate) in ``body``.
        """
        check_command(head, body)
        return []

    def set_barrier_before_exit(self, barrier_before_exit: bool = True) -> None:
        """Do nothing: servers always run until all workers have left.

        The method exists because MXNet has it.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the store and free its memory; later calls raise ``ClosedError``.

        Calling it again does nothing.

        A distributed store first waits until its pushes are applied, and raises the error of a
        failed push unless an earlier call raised it; the store is closed in any case.
        """

    # -- data --------------------------------------------------------------------------

    def empty(
        self, shape: int | Sequence[int], dtype: DTypeLike = np.float32
    ) -> np.ndarray[Any, Any]:
        """Make an uninitialized array in the store's fastest memory for gradients.

        A distributed store returns memory that servers on this machine can read directly:
        ``push_async``, ``pushpull`` and ``pushpull_async`` send such arrays without a copy. Make
        the arrays of one model in a row for the best speed. They are ordinary NumPy arrays,
        C-contiguous, of ``shape`` and ``dtype``; the memory is freed when no reference is left.
        Make them once and fill them in place. Raises ``ArgumentValueError`` for a negative size
        and ``ArgumentTypeError`` for an invalid shape or a dtype that stores do not support.
        """
        sizes, kind = checked_shape(shape), checked_dtype(dtype)
        if any(size < 0 for size in sizes):
            raise ArgumentValueError(f"a shape must not have negative sizes, got {sizes}")
        return self._memory(math.prod(sizes) * kind.itemsize).view(kind).reshape(sizes)

    def _memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return flat memory for ``empty``."""
        return np.empty(nbytes, np.uint8)

    def zeros(
        self, shape: int | Sequence[int], dtype: DTypeLike = np.float32
    ) -> np.ndarray[Any, Any]:
        """Make an array like ``empty``, filled with zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def shard(
        self, num_samples: int, seed: int | None = None, epoch: int = 0, *, even: bool = True
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the samples of this worker in ``epoch``: int64 indices, shape (n,).

        All workers compute the same order from ``seed`` and ``epoch`` (``seed`` None: no shuffle)
        and take samples from it in turn. Together the shards have all samples. With ``even`` all
        shards have the same length, as synchronous training needs: the last shards repeat samples
        from the start of the order. Otherwise the shards are disjoint, and their lengths differ by
        at most one.
        """
        from kvstore.stores.samples import deal_out

        return deal_out(num_samples, self.rank, self.num_workers, seed, epoch, even=even)

    # -- other names -------------------------------------------------------------------

    def is_capable(self, capability: str) -> bool:
        if not isinstance(capability, str) or capability.lower() != self.OPTIMIZER:
            raise ArgumentValueError(
                f"unknown capability: {capability!r}; known: {self.OPTIMIZER!r}"
            )
        return True

    def get_num_dead_node(self, node_id: int = 7, timeout: float = 60) -> int:
        """Return ``num_dead_node``; this is MXNet's name for it."""
        return self.num_dead_node(node_id, timeout)

    def _barrier(self) -> None:
        """Call ``barrier``; this is MXNet's name, which scripts use."""
        self.barrier()

    def _set_updater(self, updater: UpdateFunction) -> None:
        """Call ``set_updater``; this is MXNet's name."""
        self.set_updater(updater)

    def _send_command_to_servers(self, head: int, body: str) -> list[str]:
        """Call ``send_command_to_servers``; this is MXNet's name."""
        return self.send_command_to_servers(head, body)

    def __repr__(self) -> str:
        """Return ``<dist_sync store: rank 0 of 2, 12 keys>``; never raise."""
        name = _shown(lambda: self.type)
        place = f"rank {_shown(lambda: self.rank)} of {_shown(lambda: self.num_workers)}"
        keys = _shown(lambda: len(self._table))
        closed = ", closed" if getattr(self, "_is_closed", False) else ""
        return f"<{name} store: {place}, {keys} key{'' if keys == '1' else 's'}{closed}>"

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self,
        exception_type: builtins.type[BaseException] | None,
        exception: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()


def _shown(read: Callable[[], object]) -> str:
    """Return the result of ``read`` as text, or a question mark if it raises.

    A ``repr`` that raises would hide the error whose text includes it.
    """
    try:
        return str(read())
    except Exception:
        return "?"
