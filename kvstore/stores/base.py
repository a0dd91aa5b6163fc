"""``KVStore``: the public interface of every store, and what each call promises.

Nothing here does anything but delegate. Read next: ``arguments.py`` for the checks that all stores
share, then ``stores/local/store.py``, the shortest of them; ``plugin.py`` for what stores of others
have to do.

Names and meaning are those of MXNet (``python/mxnet/kvstore/base.py`` and ``kvstore.py``);
``docs/migration.md`` says where they differ.
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
    """In how many parts its value travels and is updated; 1 for stores in one process."""
    generation: int
    """1 after the first ``init``; ``delete`` and ``init`` again count it up.

    A store remembers its last 1,000 deleted keys; after more a new key may begin above 1.
    """
    stype: str = "default"
    """``"row_sparse"`` for a key that was initialised so; MXNet's words."""


class Version(int):
    """How many pushes (in a synchronous store: rounds) a pulled value includes.

    ``parts`` has the number of each part of the key. The parts are read one by one, so with
    ``dist_async`` they can differ for a key of more than one part; the number itself is the
    least of them.
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
"""MXNet's name, for scripts that catch it: the base of all errors of this project."""


class KVStore(KVStoreBase, abc.ABC):
    """Maps keys to arrays; pushed values are summed and merged into the stored ones.

    **Keys** are ``int`` or ``str``; a store's keys are all of one kind. **Values** are arrays
    of NumPy, CuPy, PyTorch or JAX, or ``mx.nd.NDArray``; a push must have exactly the shape
    and dtype of the key. Row-sparse values (``RowSparseArray``, SciPy's sparse matrices, PyTorch's
    sparse tensors) may be the first value of a key, which is row-sparse then, and gradients of any
    key.

    Every call takes one key or a list of keys. With one key, a list of arrays means one for
    each device. With a list of keys, the values are a parallel list whose items are again an
    array or a list of arrays; the same key twice is one push of all its arrays. Lists of keys
    are the fast path: one call can move a whole model.

    ``priority`` says which of several calls in flight should be served first, the higher the
    sooner; it never changes a result.

    Errors are raised at the call, before any of it takes effect, and derive from
    ``pslite.errors.PSError``. ``with create(...) as kv:`` closes the store at the end.
    """

    _table: KeyTable
    """The keys, and below it whether ``close`` was called: for ``repr``, which takes no lock, so
    that it can be printed from anywhere, and raises no error of an earlier call."""

    _is_closed: bool

    # -- the calls of every training loop ----------------------------------------------

    @abc.abstractmethod
    def init(self, key: Keys, value: Values) -> None:
        """Create the key with this value, which is copied. Once for each key.

        One array for each key; with several workers, rank 0's counts. The keys can be pushed
        and pulled by every worker when the call returns.

        Raises ``DuplicateKeyError`` for a key that exists or stands twice in the call,
        ``KeyTypeError`` and ``ArgumentTypeError`` for keys and values of the wrong kind.
        """

    @abc.abstractmethod
    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Sum the values of each key and merge the sum into the store.

        The arrays of a list are added left to right, then those of all workers in rank order.
        Without an optimizer the sum replaces the stored value; it never accumulates. With one,
        the sum is the gradient of one update.

        The arrays stay the caller's: the store has copied what it needs when the call returns.
        Raises ``UnknownKeyError`` and ``ValueMismatchError`` (shape or dtype of the key).
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

        The value includes this worker's own pushes before the call. ``out`` has the key's
        shape and any strides, and stays the caller's. Values are cast to its dtype by NumPy's
        rule ``same_kind``: floats to floats of any size, never to integers or bool; what
        float16 cannot hold becomes infinite. Returns None, or without ``out`` a new array (a
        list of them for a list of keys); with ``with_version`` a pair of that and the
        ``Version`` (or list of them).

        When all arrays of ``out`` are ``mx.nd.NDArray``, the call returns at once and reading
        them waits. A row-sparse key fills dense arrays whole, and without ``out`` gives the rows
        it holds as a ``RowSparseArray``. A ``RowSparseArray`` in ``out`` is not filled, with a
        warning, as in MXNet; with ``ignore_sparse`` False it gets all rows that the key holds.
        Raises ``UnknownKeyError`` and ``ValueMismatchError`` (shape, or a dtype of another kind).
        """

    @abc.abstractmethod
    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update the stored values by ``optimizer`` at each push from now on.

        An equal optimizer changes nothing; one of the same class with other numbers keeps
        each key's state and update count; one of another class starts them afresh. With
        several workers, rank 0's call counts: the others may call it with an equal one.
        Raises ``ArgumentTypeError`` for anything but an ``Optimizer``.
        """

    def set_optimizer_params(self, **numbers: Number) -> None:
        """Change parameters of the current optimizer from the next push on: ``lr=0.01``.

        Each key keeps its state and update count. ``lr`` stands for ``learning_rate``. With
        several workers it is ordered as ``set_optimizer`` is: all servers use the new numbers
        for every push of rank 0 after this call, and none before.
        Raises ``OptimizerNotSet``, ``OptimizerParameterError``.
        """
        self.set_optimizer(self.current_optimizer().replace(**numbers))

    def optimizer_params(self) -> dict[str, Any]:
        """The parameters of the optimizer that the store (with servers: each of them) uses.

        Raises ``OptimizerNotSet``.
        """
        return self.current_optimizer().params()

    @abc.abstractmethod
    def current_optimizer(self) -> Optimizer:
        """The optimizer in use, read back from where it runs. Raises ``OptimizerNotSet``."""

    @abc.abstractmethod
    def set_updater(self, updater: UpdateFunction) -> None:
        """Let pushes call ``updater(key, recv, local)``, which changes ``local`` in place.

        ``recv`` is the sum, ``local`` the stored value, both NumPy (or CuPy) arrays in the
        key's shape that are valid during the call. What it raises comes out of ``push``, and
        the stored value stays as it was. For stores in one process only: servers never run
        code that a worker sends; they have ``--server-import`` (``NotSupportedError``).
        """

    # -- the same as futures -----------------------------------------------------------

    @abc.abstractmethod
    def push_async(self, key: Keys, value: Values, priority: int = 0) -> Future[None]:
        """``push``; done when the push has been applied.

        NumPy's and other libraries' arrays belong to the store until then, as it may send them
        from where they lie; an ``mx.nd.NDArray`` is the caller's at once.
        """

    @abc.abstractmethod
    def pull_async(self, key: Keys, out: Values | None = None, priority: int = 0) -> Future[Any]:
        """``pull``; the arrays of ``out`` belong to the store until the future is done.

        Without ``out`` the future's value is a new array (or a list of them).
        """

    @abc.abstractmethod
    def pushpull_async(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> Future[None]:
        """``pushpull``; the arrays of both belong to the store until the future is done."""

    @abc.abstractmethod
    def wait(self, what: Any = None, timeout: float | None = None) -> Any:
        """Wait for futures, for what is in flight for some keys, or for everything.

        ``what`` is a future or a list of them (returns their values), a key or a list of keys
        (returns None), or None for all that this store has in flight. Raises the first error, and
        ``DeadlineError`` after ``timeout`` seconds (by default PS_STALL_TIMEOUT), which names what
        is missing; what was waited for stays in flight.
        """

    # -- keys --------------------------------------------------------------------------

    @abc.abstractmethod
    def keys(self) -> list[Key]:
        """All keys, in the order of this worker's ``init``."""

    @abc.abstractmethod
    def info(self, key: Key) -> KeyInfo:
        """Shape, dtype and more of a key. Raises ``UnknownKeyError``."""

    @abc.abstractmethod
    def delete(self, key: Keys) -> None:
        """Forget keys, with their values and optimizer states; they can be initialised anew.

        With several workers, all call it; the keys are gone when it returns. What was pushed
        before is applied first. Raises ``UnknownKeyError``.
        """

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    # -- files -------------------------------------------------------------------------

    @abc.abstractmethod
    def save_checkpoint(self, directory: Path) -> None:
        """Write values, optimizer states, update counts and the optimizer into ``directory``.

        Two files of named arrays and a manifest, which is written last: a directory without
        one is not complete. They take the place of the checkpoint that was there; other files
        in the directory stay. With several workers the lowest rank writes, wherever it is
        called; the others return at once. Raises ``CheckpointError``, also while another save
        writes there, and ``ArgumentTypeError`` for what is not a path.
        """

    @abc.abstractmethod
    def load_checkpoint(self, directory: Path) -> None:
        """Load values, states, counts and the optimizer from ``save_checkpoint``'s directory.

        Keys that the store does not have are initialised. Any number of servers will do. With
        several workers, all call it, and the lowest rank reads. Raises ``CheckpointError``.
        """

    @abc.abstractmethod
    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        """Write the optimizer's states and update counts, and with ``dump_optimizer`` itself.

        A link is followed. With several workers the lowest rank writes; the others return at
        once. Raises ``OptimizerNotSet``, ``CheckpointError`` where ``fname`` cannot be written or
        is something else than a regular file, ``ArgumentTypeError`` for what is not a path.
        """

    @abc.abstractmethod
    def load_optimizer_states(self, fname: Path) -> None:
        """Load what ``save_optimizer_states`` wrote, for the keys of this store.

        The optimizer in use must be of the class that wrote them, unless the file holds the
        optimizer itself. With several workers, all call it, and the lowest rank reads.
        Raises ``CheckpointError``, ``OptimizerNotSet``.
        """

    # -- the cluster -------------------------------------------------------------------

    @abc.abstractmethod
    def barrier(self, timeout: float | None = None) -> None:
        """Return when all workers have called it; at once for stores in one process.

        After ``timeout`` seconds (by default PS_STALL_TIMEOUT) of any worker that waits, all of
        them, also those who come later, get a ``DeadlineError`` that names who had not come.
        """

    @abc.abstractmethod
    def placement(self) -> dict[int, dict[Key, int]]:
        """The bytes of each key on each server: ``{server rank: {key: bytes}}``.

        Empty for stores in one process.
        """

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters of this store, and of the servers where there are any."""

    def num_dead_node(self, node_id: int = 7, timeout: float = 60) -> int:
        """How many nodes are lost; 0 for stores in one process.

        ``node_id`` is a node, or a sum of groups: 1 scheduler, 2 servers, 4 workers. Nodes
        that have said goodbye do not count. ``timeout`` has no effect: losses are noticed
        when they happen. Source: ``MXKVStoreGetNumDeadNode`` of MXNet's C API.
        """
        return 0

    def send_command_to_servers(self, head: int, body: str = "") -> list[str]:
        """Have each server run the command ``head``; returns their answers in rank order.

        Commands are functions that the servers' own modules register
        (``kvstore.register_command``). Stores in one process have no servers: an empty list.
        Raises ``ArgumentTypeError`` unless ``head`` is an int from 0 on and ``body`` a str, and
        ``ArgumentValueError`` for half a character (a lone surrogate) in ``body``.
        """
        check_command(head, body)
        return []

    def set_barrier_before_exit(self, barrier_before_exit: bool = True) -> None:
        """Do nothing, for MXNet's sake: servers serve until every worker has left or is lost."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the store and free its memory; later calls raise ``ClosedError``. Idempotent.

        A distributed store waits until what it has pushed is applied, and raises the error of a
        push that was not, unless that was raised before; it is closed all the same.
        """

    # -- data --------------------------------------------------------------------------

    def empty(
        self, shape: int | Sequence[int], dtype: DTypeLike = np.float32
    ) -> np.ndarray[Any, Any]:
        """Make an uninitialised array in the store's fastest memory for gradients.

        A distributed store returns memory that the servers of this machine read where it lies:
        ``push_async``, ``pushpull`` and ``pushpull_async`` send such arrays without a copy, best
        when those of one model were made one after the other. They are ordinary NumPy arrays,
        C-contiguous, of ``shape`` and ``dtype``; the memory is free when nothing refers to it.
        Make them once and fill them in place. Raises ``ArgumentValueError`` for a negative size and
        ``ArgumentTypeError`` for what is not a shape, or a dtype that stores cannot hold.
        """
        sizes, kind = checked_shape(shape), checked_dtype(dtype)
        if any(size < 0 for size in sizes):
            raise ArgumentValueError(f"an array cannot have the shape {sizes}")
        return self._memory(math.prod(sizes) * kind.itemsize).view(kind).reshape(sizes)

    def _memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Flat memory for ``empty``."""
        return np.empty(nbytes, np.uint8)

    def zeros(
        self, shape: int | Sequence[int], dtype: DTypeLike = np.float32
    ) -> np.ndarray[Any, Any]:
        """``empty``, filled with zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def shard(
        self, num_samples: int, seed: int | None = None, epoch: int = 0, *, even: bool = True
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the samples that this worker visits in ``epoch``: int64 indices, shape (n,).

        All workers shuffle alike, by ``seed`` and ``epoch`` (None: not at all), and deal the
        samples out in turn. The shards cover everything. With ``even`` all are equally long,
        as synchronous training needs it: the last ones are filled up from the start of the
        order. Else they are disjoint, and differ by one sample at most.
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
        """Another name of ``num_dead_node``."""
        return self.num_dead_node(node_id, timeout)

    def _barrier(self) -> None:
        """MXNet's name of ``barrier``, which scripts use."""
        self.barrier()

    def _set_updater(self, updater: UpdateFunction) -> None:
        """MXNet's name of ``set_updater``."""
        self.set_updater(updater)

    def _send_command_to_servers(self, head: int, body: str) -> list[str]:
        """MXNet's name of ``send_command_to_servers``."""
        return self.send_command_to_servers(head, body)

    def __repr__(self) -> str:
        """``<dist_sync store: rank 0 of 2, 12 keys>``; never raises."""
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
    """Return what ``read`` gives, or a question mark when it raises: a ``repr`` that raises
    would hide the error whose text includes it."""
    try:
        return str(read())
    except Exception:
        return "?"
