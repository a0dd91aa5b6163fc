"""The steps of a worker that another process can repeat, if this one is lost.

At the start of each step of ``kv.steps``, one server keeps what the worker would lose with its
process: its own state, and the numbers by which servers and scheduler know its pushes and calls.
If the worker is lost in the step, a new process takes its place (``pslite/node/seating.py``). The
new process runs the script from the top. Until it comes to that step, it only reads: its ``init``,
barriers and joint calls have long been made, so they end at once. Then it is given its state and
repeats the step. Pushes that had arrived are not applied again, and pulls get the same values.

All of it is off unless PS_REJOIN_TIMEOUT is set. One object serves all stores of a node. Callers'
threads use it; answers arrive on the node's I/O thread. Read next: ``stores/steps.py``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvstore.protocol.requests import STORE_APP, StoreCall, pack, unpack
from kvstore.stores.dist.joint_calls import DistOptimizer, JointCalls
from pslite import Communicator, Future, Postoffice, Role
from pslite.errors import UsageError, unexpected
from pslite.future import completed
from pslite.ids import node_id

_HEADER_BYTES = 1 << 16
_MOST_PARTS = 1 << 24
"""More parts are not plausible."""


class KeptStep(NamedTuple):
    """What a server keeps for a worker."""

    loop: int
    """The number of the loop, from 1; a script may call ``kv.steps`` several times."""
    step: int
    counts: dict[int, int]
    """Part -> how many pushes it had before the step."""
    barriers: dict[int, int]
    """Group -> how many barriers the worker had reached."""
    calls: dict[int, tuple[int, int]]
    """Store -> the numbers of its joint calls and of its optimizer's calls."""
    state: bytes
    """The worker's own state; empty if it has none."""


class Returning:
    """The steps of one worker."""

    def __init__(self, node: Postoffice) -> None:
        self._node_ref = weakref.ref(node)
        self._server = node_id(Role.SERVER, node.rank % max(node.config.num_servers, 1))
        self.is_on = node.config.rejoin_timeout_s > 0
        if node.config.standbys:  # which repeat what stores ask of servers
            node.customers.repeated_apps.add(STORE_APP)
        #: The calls with numbers of each store.
        self._joint_calls: weakref.WeakValueDictionary[int, JointCalls] = (
            weakref.WeakValueDictionary()
        )
        self._optimizers: weakref.WeakValueDictionary[int, DistOptimizer] = (
            weakref.WeakValueDictionary()
        )
        self._num_loops = 0
        self._is_in_step = False
        #: Completes when the step that was begun last is kept.
        self.keeping: Future[None] = completed(None)
        self._why_not = ""
        #: The counts that were kept last.
        self._last: dict[int, int] = {}
        self._has_said: bool | None = None
        self.is_repeating = self.catches_up = node.attempt > 0
        #: Completes with the step that this process has to repeat; None if it is the first one.
        self.found: Future[KeptStep | None] = completed(None)
        if self.is_repeating:
            self.found = self._resume()

    @property
    def _node(self) -> Postoffice:
        node = self._node_ref()
        assert node is not None  # the store that calls this has it
        return node

    def add(self, number: int, joint: JointCalls, optimizer: DistOptimizer) -> None:
        """Add a store of this node."""
        self._joint_calls[number], self._optimizers[number] = joint, optimizer

    def begin_loop(self) -> int:
        """Return the number of a loop that begins."""
        if self._is_in_step:
            self.rules_out("a loop over kv.steps began in a step of another one, or after a break")
        self._num_loops += 1
        return self._num_loops

    # -- the first process -------------------------------------------------------------

    def rules_out(self, why: str, *, is_told: bool = True) -> None:
        """Note that no other process could repeat the steps of this one.

        ``is_told`` says whether to write it to the log.
        """
        self._why_not = self._why_not or why
        if self.is_on:
            self._say(False, why if is_told else "")

    def end_step(self) -> None:
        """Note that a step is over, or that this process has left its loop at the end."""
        self._is_in_step = False

    def keep(self, loop: int, step: int, state: bytes) -> Future[None]:
        """Keep what the next step begins with. The result is done when that is kept.

        Pushes and pulls wait for it. Wait for it before the next call.
        """
        node = self._node
        self._is_in_step = True
        if Communicator.is_used_on(node):
            self.rules_out("it makes collective calls, whose other members cannot repeat them")
        most = node.config.max_message_bytes - _HEADER_BYTES
        if len(state) > most:
            self.rules_out(f"its state has {len(state)} bytes, over the limit of {most}")
        if self._why_not:
            return completed(None)
        calls = {
            number: (joint.count, self._optimizers[number].num_calls)
            for number, joint in list(self._joint_calls.items())
        }
        barriers: dict[int, int] = {}
        # Now, as the script may enter the next one before its pushes have arrived.
        node.io_queue.call(lambda: barriers.update(node.control.barriers()))

        def note(counts: dict[int, int] | None) -> Future[Any]:
            if counts is None:
                self.rules_out("a push was refused")
                return completed(None)
            last, self._last = self._last, counts
            if self._has_said and any(n > last.get(part, 0) + 1 for part, n in counts.items()):
                self.rules_out("a step has pushed a key more than once")
                return completed(None)
            kept = KeptStep(loop, step, counts, barriers, calls, b"")
            asked = node.request(
                [self._server],
                STORE_APP,
                StoreCall.KEEP_STEP,
                packed(kept),
                {self._server: [state] if state else []},
            )
            return asked.map(lambda _: self._say(True, ""))

        self.keeping = node.traffic.begin_step(note)
        return self.keeping

    def _say(self, yes: bool, why_not: str) -> None:
        """Tell the scheduler whether another process could go on, if that is news."""
        node = self._node_ref()
        if yes != self._has_said and node is not None:
            self._has_said = yes
            node.control.say_whether_to_return(yes)
            if why_not:
                node.log.info(
                    0, f"if this worker is lost, the whole job must start again: {why_not}"
                )

    # -- a process that takes its place ------------------------------------------------

    def _resume(self) -> Future[KeptStep | None]:
        """Ask for the kept step; until it is here, pushes and pulls wait."""
        node = self._node
        node.io_queue.call(node.traffic.worker.hold_back)
        asked = node.request([self._server], STORE_APP, StoreCall.KEPT_STEP)
        found: Future[KeptStep | None] = Future("the step that a server has kept")

        def arrived(replies: Mapping[int, Any]) -> None:
            reply = replies[self._server]
            kept = unpacked(reply.body, reply.frames)
            self._last = kept.counts
            self._node.traffic.worker.resume(kept.counts)
            self._node.traffic.worker.release()
            found.set_result(kept)

        def failed(done: Future[None]) -> None:
            error = done.error() or UsageError("no step is kept")
            found.set_error(error)
            self._node.fail(error)

        asked.map(arrived).on_error(failed)
        return found

    def repeat(self, kept: KeptStep) -> None:
        """Go on in place of the lost process: the script has come to its step."""
        for number, (joint_count, optimizer_count) in kept.calls.items():
            joint, optimizer = self._joint_calls.get(number), self._optimizers.get(number)
            if joint is not None and optimizer is not None:
                joint.count, optimizer.num_calls = joint_count, optimizer_count
        self.catches_up = False
        self._is_in_step = True
        node = self._node

        def go_on() -> None:
            node.control.set_barriers(kept.barriers)
            node.control.repeats(kept.step, kept.loop)
            node.traffic.worker.repeat()

        node.io_queue.call(go_on)

    def has_repeated(self) -> None:
        """Note that the step is repeated: from now on this process is like any other."""
        self.is_repeating = False

    def losses(self) -> dict[str, Any]:
        """Return what this worker knows of lost processes, for ``kv.stats()``."""
        node = self._node
        membership, now = node.membership, node.clock()
        return {
            "job_restarts": node.config.job_restarts,
            **{f"replaced_{role.value}s": membership.num_replaced(role) for role in Role},
            "waited_for_lost_s": membership.lost_time.seconds(now),
            "without_scheduler_s": membership.no_scheduler_time.seconds(now),
            "repeated_steps": int(node.attempt > 0 and not self.catches_up),
        }


# Stores may be created on any thread.
_lock = threading.Lock()


def returning_of(node: Postoffice) -> Returning:
    """Return the object that all stores of a node share; the node keeps it."""
    with _lock:
        if node.traffic.shared is None:
            node.traffic.shared = Returning(node)
        found: Returning = node.traffic.shared
    return found


def packed(kept: KeptStep) -> bytes:
    """Return all but the state as the body of a request."""
    runs = [list(run) for run in _runs(sorted(kept.counts.items()))]
    barriers = [list(pair) for pair in sorted(kept.barriers.items())]
    calls = [[number, *counts] for number, counts in sorted(kept.calls.items())]
    return pack(kept.loop, kept.step, runs, barriers, calls)


def unpacked(body: bytes, frames: Any) -> KeptStep:
    """Parse and check what a server has kept.

    Raises ``ProtocolError``, or ``UsageError`` if it has nothing.
    """
    if not body:
        raise UsageError(
            "nothing is kept for this worker; start the whole job again, from its last checkpoint"
        )
    loop, step, runs, barriers, calls = unpack(body, int, int, list, list, list)
    if loop < 0 or step < 0:
        raise unexpected("numbers of a loop and a step from 0", [loop, step])
    for rows, length in ((runs, 3), (barriers, 2), (calls, 3)):
        for row in rows:
            if type(row) is not list or len(row) != length or not all(map(_is_natural, row)):
                raise unexpected(f"rows of {length} numbers from 0", row)
    if sum(length for _, length, _ in runs) > _MOST_PARTS:
        raise unexpected(f"counts of at most {_MOST_PARTS} parts", len(runs))
    counts = {
        part: pushed for first, length, pushed in runs for part in range(first, first + length)
    }
    of_stores = {number: (joint, optimizer) for number, joint, optimizer in calls}
    state = b"".join(map(bytes, frames))
    return KeptStep(loop, step, counts, dict(barriers), of_stores, state)


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _runs(pairs: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int, int]]:
    """Join neighbouring parts with the same count: (first part, how many, pushes)."""
    first = length = pushed = 0
    for part, count in pairs:
        if length and part == first + length and count == pushed:
            length += 1
            continue
        if length:
            yield first, length, pushed
        first, length, pushed = part, 1, count
    if length:
        yield first, length, pushed
