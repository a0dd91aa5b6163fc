"""The state of a process from ``init`` to ``shutdown``: rank, process sets, calls.

``init`` finds the servers in one of three ways:

- **A job of ours** (``kvstore-launch``): the node of this process, which its stores share.
- **Ranks of another launcher** (torchrun, mpiexec): the ranks start servers, as for a process group
  of ``kvstore.torch``; they meet through a store of PyTorch (``torch/rendezvous.py``).
- **One process**: there are no servers (``stores/one_rank.py``).

Ranks may make calls in any order, and may join. So a server matches all calls, and large calls then
use shared memory (``any_order=True``). Any thread may call. Read next: ``calls.py``.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    MissingDependencyError,
    NotSupportedError,
)
from kvstore.frameworks.horovod.timeline import Timeline
from kvstore.launch.ranks import RankOfProcess, rank_of_process
from kvstore.stores.dist.node import Waiter, worker_node
from kvstore.stores.one_rank import OneRank
from pslite import Communicator, Config, Future, Postoffice, Role
from pslite.errors import PSError, UsageError
from pslite.ids import node_id

if TYPE_CHECKING:
    from kvstore.frameworks.torch.cluster import GroupCluster

Group = Communicator | OneRank
_NAME = "horovod"


class HorovodInternalError(PSError):
    """A call failed: the ranks' calls differ, or a rank is lost; see ``__cause__``."""


class HorovodSession:
    """The state of one process. Made by :func:`init`.

    Args:
        node: the node of this process; None if there are no servers and only one rank.
        ranks: the worker that each rank is.
        leave: makes this process leave the cluster.
    """

    def __init__(
        self,
        node: Postoffice | None = None,
        ranks: Sequence[int] = (0,),
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.node = node
        self.workers = tuple(ranks)
        self._leave = leave
        self._waiter = None if node is None else Waiter(node)
        everybody = self._group_of(range(len(self.workers)))
        self.rank, self.size = everybody.rank, everybody.size
        #: Number of a process set -> its ranks; and -> its group, if this process is a member.
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(self.size))}
        self.groups: dict[int, Group] = {0: everybody}
        self._numbers = itertools.count(1)
        self.timeline: Timeline | None = None
        machines = [self._machine_of(worker) for worker in self.workers]
        self.local_ranks = [
            rank for rank, each in enumerate(machines) if each == machines[self.rank]
        ]
        self.machines = list(dict.fromkeys(machines))
        self._machine_of_rank = machines

    def _machine_of(self, worker: int) -> str:
        known = (
            None if self.node is None else self.node.membership.node(node_id(Role.WORKER, worker))
        )
        return "" if known is None else known.machine

    def peers_across(self) -> list[int]:
        """Return the ranks with this rank's local rank, one on each machine that has it."""
        local = self.local_ranks.index(self.rank)
        found = []
        for machine in self.machines:
            there = [rank for rank, each in enumerate(self._machine_of_rank) if each == machine]
            found += there[local : local + 1]
        return found

    def is_homogeneous(self) -> bool:
        """Return whether all machines have the same number of ranks."""
        return len({self._machine_of_rank.count(machine) for machine in self.machines}) == 1

    def wait(self, future: Future[Any]) -> Any:
        """Return a future's value; log what it waits for if it takes long.

        Raises:
            HorovodInternalError: the call has failed.
        """
        try:
            return future.result(0) if self._waiter is None else self._waiter.wait(future)
        except PSError as error:
            raise HorovodInternalError(str(error)) from error

    # -- process sets --------------------------------------------------------------------

    def add_set(self, ranks: Sequence[int]) -> int:
        """Register a process set, on all ranks; return its number."""
        found = tuple(ranks)
        if not found or found[0] < 0 or found[-1] >= self.size or len(set(found)) < len(found):
            raise ArgumentValueError(
                f"a process set has different ranks from 0 to {self.size - 1}, got {list(ranks)}"
            )
        if found in self.sets.values():
            raise ArgumentValueError(
                f"there is a process set of the ranks {list(found)} already; use that one"
            )
        own = np.array(found, np.int64)
        for rank, theirs in enumerate(self.wait(self.groups[0].all_gather(own))):
            if theirs.tolist() != list(found):
                raise HorovodInternalError(
                    f"all ranks must add the same process set: rank {self.rank} adds {list(found)} "
                    f"and rank {rank} adds {theirs.tolist()}"
                )
        number = next(self._numbers)
        self.sets[number] = found
        if self.rank in found:
            self.groups[number] = self._group_of(found)
        return number

    def remove_set(self, number: int) -> bool:
        """Forget a process set; return whether there was one."""
        group = self.groups.pop(number, None)
        if group is not None:
            group.close()
        return self.sets.pop(number, None) is not None

    def _group_of(self, ranks: Sequence[int]) -> Group:
        if self.node is None:
            return OneRank()
        workers = [self.workers[rank] for rank in ranks]
        return Communicator(self.node, workers, name=_NAME, any_order=True)

    def close(self) -> None:
        """Stop making calls, and leave the cluster."""
        if self.timeline is not None:
            self.timeline.close()
        for group in self.groups.values():
            group.close()
        self._leave()


# -- the session of this process ----------------------------------------------------------------

_lock = threading.Lock()  # guards the names below
_session: HorovodSession | None = None
_num_sessions = 0


def current() -> HorovodSession:
    """Return the session of this process. Raises ``UsageError`` before ``init``."""
    if _session is None:
        raise UsageError("kvstore.horovod was not initialized; call hvd.init() first")
    return _session


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; a second call does nothing.

    Args:
        comm: only for compatibility; the job always has all ranks.
        process_sets: a list of ``ProcessSet``, the same on all ranks, or "dynamic".

    Raises:
        ConfigError: the ranks cannot find each other; the text says what to set.
    """
    global _session, _num_sessions
    if comm is not None and not (isinstance(comm, list | tuple) and not comm):
        raise NotSupportedError(
            f"hvd.init takes no communicator, got {comm!r:.60}; call hvd.init() and use "
            "hvd.ProcessSet for a part of the ranks"
        )
    with _lock:
        if _session is not None:
            return
        _num_sessions += 1
        session = _session = _begin()
    global_process_set.ranks = list(session.sets[0])
    for process_set in [] if process_sets in (None, "dynamic") else process_sets:
        add_process_set(process_set)


def shutdown() -> None:
    """Leave the job. ``init`` may be called again."""
    global _session
    with _lock:
        session, _session = _session, None
    if session is not None:
        session.close()


def is_initialized() -> bool:
    """Return whether ``init`` was called without a later ``shutdown``."""
    return _session is not None


def _begin() -> HorovodSession:
    config, _ = Config.from_env()
    if config.root_uri:
        node = worker_node()
        return HorovodSession(node, range(node.config.num_workers))
    place = rank_of_process()
    if place.size == 1:
        return HorovodSession()
    cluster = _cluster_of(place)
    return HorovodSession(cluster.node, cluster.ranks, cluster.leave)


def _cluster_of(place: RankOfProcess) -> GroupCluster:
    try:
        from kvstore.frameworks.torch.cluster import join
        from kvstore.frameworks.torch.rendezvous import meeting_store
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError(
            "ranks that kvstore-launch has not started meet in a store of PyTorch, and PyTorch is "
            "not installed: start them by kvstore-launch, or pip install torch"
        ) from None
    store = meeting_store(place, f"kvstore.horovod/{_num_sessions}")
    return join(store, place.rank, place.size)


# -- process sets ---------------------------------------------------------------------------------


class ProcessSet:
    """Some of the ranks, for calls among them (``process_set=``).

    Args:
        ranks: global ranks, in any order.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        try:
            self.ranks: list[int] | None = sorted(map(operator.index, ranks))
        except TypeError:
            raise ArgumentTypeError(
                f"a ProcessSet takes a list of ranks, got {ranks!r:.60}"
            ) from None
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """Return the number of its ranks; None before it is added."""
        return None if self.process_set_id is None else len(current().sets[self.process_set_id])

    def rank(self) -> int | None:
        """Return this process's rank within it; None before it is added."""
        if self.process_set_id is None:
            return None
        return group_of(self).rank

    def included(self) -> bool | None:
        """Return whether this process belongs to it; None before the ranks are known."""
        if self.process_set_id is not None:
            return current().rank in current().sets[self.process_set_id]
        return None if self.ranks is None else current().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(ranks={self.ranks}, process_set_id={self.process_set_id})"


global_process_set = ProcessSet([])
global_process_set.ranks = None
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; all ranks add the same sets in the same order.

    Raises:
        ArgumentValueError: a rank does not exist, or these ranks have a process set already.
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    found.process_set_id = current().add_set(found.ranks or [])
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set, on all ranks; return whether that was possible."""
    number, is_own = process_set.process_set_id, process_set is not global_process_set
    if number is None or not is_own:
        return False
    process_set.process_set_id = None
    return current().remove_set(number)


def group_of(process_set: ProcessSet) -> Group:
    """Return the group that makes a set's calls.

    Raises:
        ArgumentValueError: the set was not added, or this process is not in it.
    """
    session, number = current(), process_set.process_set_id
    if number is None or number not in session.sets:
        raise ArgumentValueError(f"{process_set} is not known here; call hvd.add_process_set first")
    if number not in session.groups:
        raise ArgumentValueError(
            f"rank {session.rank} does not belong to {process_set}; only its members make calls"
        )
    return session.groups[number]


# -- who this is -----------------------------------------------------------------------------------


def rank() -> int:
    """Return this process's rank."""
    return current().rank


def size() -> int:
    """Return the number of ranks."""
    return current().size


def local_rank() -> int:
    """Return this process's rank among those of its machine."""
    return current().local_ranks.index(current().rank)


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return len(current().local_ranks)


def cross_rank() -> int:
    """Return this machine's number among those that have this local rank."""
    return current().peers_across().index(current().rank)


def cross_size() -> int:
    """Return the number of machines that have this local rank."""
    return len(current().peers_across())


def is_homogeneous() -> bool:
    """Return whether all machines have the same number of ranks."""
    return current().is_homogeneous()
