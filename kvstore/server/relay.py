"""The parts for which this server relays sums of its machine to their owners.

``pslite/protocol/relays.py`` says which servers relay. A round of a relayed part is complete when
all workers of the machine have pushed. Their sum goes to the owner of the part. Its answer, the new
value, is stored here, and the workers get it as from any server: through shared memory. If the
owner refuses a sum, or is lost, the workers get its error and the value stays as it was. A worker
that has left blocks the machine's next rounds, which the owner learns from this server, since only
this one knows which rounds are still on their way. Runs on the I/O thread, except for sums. Read
next: ``dense.py``, which makes the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from kvstore.arrays.cpu.sums import Workspace
from kvstore.protocol.requests import STORE_APP, StoreCall, bytes_of, pack, unpack
from kvstore.server.memory import Part, StoreState
from kvstore.server.part_table import PartTable
from kvstore.server.sparse import rows_of_cuts
from pslite import Incoming, Postoffice
from pslite.errors import UsageError, rebuild, told
from pslite.ids import Role, node_id, rank_of
from pslite.plane import Job, Outcome, Piece, Run, ServerPlane, Transfer, frames_of

_LOOK_EVERY_S = 0.05

_Sum = tuple[int, Piece] | Exception
"""The form and the bytes of a sum; or why there is none."""


class Relay:
    """The relayed parts of one server. Implements ``pslite.node.office.Relaying``."""

    def __init__(self, node: Postoffice, plane: ServerPlane, parts: PartTable) -> None:
        self._node = node
        self._plane = plane
        self._parts = parts
        #: The number of a store -> the state of its relayed parts.
        self._stores: dict[int, StoreState] = {}
        #: Part -> the node id of its owner.
        self._owners: dict[int, int] = {}
        #: Whether a worker of this machine is gone.
        self._is_blocked = False
        self._workspace = Workspace()

    # -- parts -------------------------------------------------------------------------

    @property
    def own_rank(self) -> int:
        """The rank of this server."""
        assert self._node.info is not None
        return self._node.info.rank

    def contributors(self) -> tuple[int, ...] | None:
        """Return who contributes to this server's own parts; None: all workers."""
        relays = self._node.membership.relays
        return relays.contributors(self.own_rank) if relays else None

    def store(self, number: int) -> StoreState:
        """Return the state of a store's relayed parts."""
        found = self._stores.get(number)
        if found is None:
            members = self._node.membership.relays.members(self.own_rank)
            found = self._stores[number] = StoreState(members)
        return found

    def add(self, part: int, owner: int) -> None:
        """Note the owner (a node id) of a new part."""
        self._owners[part] = owner

    def forget(self, part: int) -> None:
        """Forget a part, if it is relayed."""
        self._owners.pop(part, None)

    def end(self, number: int) -> list[int]:
        """Forget a store; return its relayed parts."""
        store = self._stores.pop(number, None)
        return [part.entry.part for part in self._parts if part.store is store]

    # -- rounds ------------------------------------------------------------------------

    def takes(self, run: Run) -> bool:
        """Return whether the parts are relayed: then their lane is below 0."""
        return run.lane < 0

    def run(self, run: Run) -> None:
        """Add up complete rounds and send the sums to their owners."""
        work, jobs = partial(self._sums, run.jobs), run.jobs
        self._node.traffic.execute(run, work, partial(self._forward, jobs))

    def _sums(self, jobs: Sequence[Job]) -> list[_Sum]:
        """Add up each job's contributions. On the pool thread of the parts' lane."""
        found: list[_Sum] = []
        for job in jobs:
            try:
                found.append(self._sum(job))
            except Exception as error:  # a key that was deleted, or no memory
                found.append(error)
        return found

    def _sum(self, job: Job) -> tuple[int, Piece]:
        part = self._parts.get(job.parts[0])
        if job.is_formed and part is not None:
            memory = self._node.buffer
            return rows_of_cuts(part, job.batch.payloads, memory, self._workspace)
        summed = self._parts.summed(job)
        if len(summed.batch.payloads) > 1:
            raise UsageError("the key was deleted")
        return 0, summed.batch.payloads[0]

    def _forward(self, jobs: Sequence[Job], sums: Sequence[_Sum]) -> None:
        for job, found in zip(jobs, sums, strict=True):
            parts = [self._parts.get(number) for number in job.parts]
            owners = {self._owners.get(number) for number in job.parts}
            if isinstance(found, Exception):
                self._finish(job, [found] * len(parts))
            elif None in parts or len(owners) > 1:
                text = f"parts {job.parts[:5]} were deleted, or have different owners"
                self._finish(job, [UsageError(text)] * len(parts))
            else:
                self._send(job, found, [part for part in parts if part is not None])

    def _send(self, job: Job, found: tuple[int, Piece], parts: Sequence[Part]) -> None:
        """Push a sum to its owner, and get the new value."""
        form, piece = found
        owner, frames = self._owners[job.parts[0]], frames_of(piece)
        priority = self._plane.priority(job.parts[0])

        def write(indices: Sequence[int], pieces: Sequence[Piece], _: Sequence[int]) -> None:
            write_values([parts[index] for index in indices], pieces)

        def done(error: BaseException | None) -> None:
            errors = [transfer.error_of(index) for index in range(len(parts))]
            self._finish(job, errors if error is not None else None)

        worker = self._node.traffic.worker
        to = owner, job.parts, tuple(part.pull_bytes for part in parts)
        if form:  # rows cannot be pushed and pulled in one message
            sizes = (piece.stop - piece.start,)
            worker.submit(Transfer(*to, frames, None, _nothing, priority, form, sizes))
        transfer = Transfer(*to, None if form else frames, write, done, priority)
        worker.submit(transfer)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        self._node.traffic.carry_out(self._plane.finished([job], [outcome]))

    # -- workers that are gone ---------------------------------------------------------

    def departed(self, rank: int, error: BaseException) -> None:
        """Tell the owners, once it is sure that this machine's rounds cannot go on."""
        members = self._node.membership.relays.members(self.own_rank)
        if rank in members and not self._is_blocked:
            self._is_blocked = True
            self._look(rank, error)

    def _look(self, rank: int, error: BaseException) -> None:
        if self._node.error is not None:
            return
        if self._plane.is_gone(rank) and all(map(self._plane.is_quiet, self._owners)):
            owners = self._node.membership.relays.owners(self.own_rank)
            to = [node_id(Role.SERVER, owner) for owner in owners]
            self._node.request(to, STORE_APP, StoreCall.RELAY_ENDS, pack(*told(error)))
        else:
            self._node.io_queue.call_later(_LOOK_EVERY_S, partial(self._look, rank, error))

    def ended(self, incoming: Incoming) -> None:
        """Handle a relay's ``RELAY_ENDS``: there will be no more sums of its machine."""
        kind, text, role, rank = unpack(incoming.body, str, str, str, int)
        if incoming.sender not in self._node.membership.fellows:
            raise UsageError("only a server that relays sends RELAY_ENDS")
        error = rebuild(kind, text, role=role, rank=rank)
        contributor = -1 - rank_of(incoming.sender)
        self._node.traffic.carry_out(self._plane.depart(contributor, error))
        incoming.respond()


def write_values(parts: Sequence[Part], pieces: Iterable[Piece]) -> None:
    """Set the values of parts; those of neighbours with one copy."""
    runs: list[tuple[Part, int, Piece]] = []
    for part, piece in zip(parts, pieces, strict=True):
        if runs:
            first, stop, before = runs[-1]
            if (part.arena, part.start, piece.frame, piece.start) == (
                first.arena,
                stop,
                before.frame,
                before.stop,
            ):
                runs[-1] = first, part.stop, Piece(before.frame, before.start, piece.stop)
                continue
        runs.append((part, part.stop, piece))
    for first, stop, piece in runs:
        first.arena.changes += 1
        first.arena.weight[first.start : stop].view(np.uint8)[:] = bytes_of(piece)


def _nothing(error: BaseException | None) -> None:
    """Do nothing: the pull that follows gets the push's error, too."""
