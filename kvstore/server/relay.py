"""The parts for which this server relays sums of its machine to their owners.

``pslite/protocol/relays.py`` says which servers relay. A round of a relayed part is complete when
all workers of the machine have pushed. Their sum goes to the owner of the part. Its answer, the new
value, is stored here, and the workers get it as from any server: through shared memory. If the
owner refuses a sum, or is lost, the workers get its error and the value stays as it was.

When a worker of the machine is gone, this server tells the owners up to which rounds they may
still get sums (``RELAY_ENDS``), and when all workers are gone and all sums are answered, that it is
done. Until then an owner must not end. Runs on the I/O thread, except for sums. A value is written
on the I/O thread, between the last push of the machine's workers and their answers, so nothing else
reads it then. Read next: ``dense.py``, which makes the parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from kvstore.protocol.requests import STORE_APP, StoreCall, bytes_of, pack, unpack
from kvstore.server.memory import Part, StoreState
from kvstore.server.part_table import PartTable
from kvstore.server.sparse import rows_of_cuts
from pslite import Incoming, Postoffice
from pslite.errors import ProtocolError, PSError, UsageError, rebuild, told, unexpected
from pslite.ids import Role, node_id
from pslite.plane import (
    Job,
    Outcome,
    Piece,
    RoundWaits,
    Run,
    ServerPlane,
    Transfer,
    contributor_of,
    frames_of,
    node_of,
    piece_of,
)

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
        #: The workers of this machine that are gone.
        self._gone: set[int] = set()
        #: Whether the owners know that no more sums follow.
        self._has_ended = False
        #: The ids of the servers that relay to this one and have said so.
        self._ended: set[int] = set()

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
        if self._owners.pop(part, None) is not None:
            self._node.traffic.forget([part])

    def owner_of(self, part: int) -> int | None:
        """Return the node id of the owner of a relayed part; None for another part."""
        return self._owners.get(part)

    def end(self, number: int) -> list[int]:
        """Forget a store; return its relayed parts."""
        store = self._stores.pop(number, None)
        return [part.entry.part for part in self._parts if part.store is store]

    # -- rounds ------------------------------------------------------------------------

    def run(self, run: Run) -> None:
        """Add up complete rounds and send the sums to their owners."""
        jobs = [each for job in run.jobs for each in self._present(job)]
        if jobs:
            work = partial(self._sums, jobs)
            self._node.traffic.execute(run, work, partial(self._forward, jobs))

    def _present(self, job: Job) -> list[Job]:
        """Return the job, or a job for each part that was not deleted if some were."""
        if all(number in self._owners for number in job.parts) and (
            len({self._owners[number] for number in job.parts}) == 1
        ):
            return [job]
        stops = list(itertools.accumulate(job.push_sizes))
        found = []
        for number, size, push_size, stop in zip(*job[:3], stops, strict=True):
            pieces = job.batch.payloads
            if not job.is_formed:
                pieces = tuple(piece_of(piece, stop - push_size, stop) for piece in pieces)
            single = job._replace(
                parts=(number,),
                sizes=(size,),
                push_sizes=(push_size,),
                batch=job.batch._replace(payloads=pieces),
            )
            if number in self._owners:
                found.append(single)
            else:
                self._finish(single, [UsageError("the key was deleted")])
        return found

    def _sums(self, jobs: Sequence[Job]) -> list[_Sum]:
        """Add up each job's contributions. On the pool thread of the parts' lane."""
        found: list[_Sum] = []
        for job in jobs:
            try:
                found.append(self._sum(job))
            except Exception as error:
                found.append(error)
        return found

    def _sum(self, job: Job) -> tuple[int, Piece]:
        part = self._parts.get(job.parts[0])
        if job.is_formed and part is not None:
            most_bytes = self._node.config.max_message_bytes
            return rows_of_cuts(part, job.batch.payloads, self._node.buffer, most_bytes)
        return 0, self._parts.summed(job).batch.payloads[0]

    def _forward(self, jobs: Sequence[Job], sums: Sequence[_Sum]) -> None:
        for job, found in zip(jobs, sums, strict=True):
            parts = [part for part in map(self._parts.get, job.parts) if part is not None]
            if len(parts) < len(job.parts):  # some were deleted meanwhile: add up the others again
                self.run(Run(parts[0].lane if parts else -1, [job]))
            elif isinstance(found, Exception):
                self._give_up(found)
            else:
                self._send(job, found, parts)

    def _give_up(self, error: Exception) -> None:
        """End this node: the owner would wait for the sum, or take the next one for it."""
        if self._node.error is None:
            text = f"cannot add up what the workers of this machine pushed: {error}"
            self._node.log.error(text)
            self._node.fail(PSError(text))

    def _send(self, job: Job, found: tuple[int, Piece], parts: Sequence[Part]) -> None:
        """Push a sum to its owner, and get the new value."""
        form, piece = found
        frames, priority = frames_of(piece), self._plane.priority(job.parts[0])
        to = self._owners[job.parts[0]], job.parts, tuple(part.pull_bytes for part in parts)
        transfers: list[Transfer] = []

        def write(indices: Sequence[int], pieces: Sequence[Piece], _: Sequence[int]) -> None:
            write_values([parts[index] for index in indices], pieces)

        def done(_: BaseException | None) -> None:
            if any(transfer.left for transfer in transfers):
                return
            errors = [_first_error(transfers, index) for index in range(len(parts))]
            self._finish(job, errors if any(errors) else None)

        if form:  # rows cannot be pushed and pulled in one message
            sizes = (piece.stop - piece.start,)
            transfers.append(Transfer(*to, frames, None, done, priority, form, sizes))
        transfers.append(Transfer(*to, None if form else frames, write, done, priority))
        for transfer in transfers:
            self._node.traffic.worker.submit(transfer)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        self._node.traffic.carry_out(self._plane.finished([job], [outcome]))
        self._node.traffic.forget(part for part in job.parts if part not in self._owners)

    # -- workers that are gone ---------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether nothing will be relayed any more, by this server or to it."""
        has_ended = self._has_ended or not self._members
        return has_ended and not self.awaited

    @property
    def awaited(self) -> list[int]:
        """The ids of the servers that relay to this one and may send more sums."""
        gone = self._node.membership.gone
        relays = (node_of(number) for number in self.contributors() or () if number < 0)
        return [node for node in relays if node not in self._ended and node not in gone]

    def departed(self, rank: int, error: BaseException) -> None:
        """Tell the owners what they may still expect of this machine."""
        if rank in self._members:
            self._look(rank, error)

    def _look(self, rank: int, error: BaseException) -> None:
        if self._node.error is not None or self._has_ended:
            return
        if rank not in self._gone and self._plane.is_gone(rank):  # else pushes are on the way
            self._gone.add(rank)
            self._tell(error, is_done=False)
        if self._gone.issuperset(self._members) and all(map(self._plane.is_quiet, self._owners)):
            self._has_ended = True
            self._tell(error, is_done=True)
        elif rank not in self._gone or len(self._gone) == len(self._members):
            self._node.io_queue.call_later(_LOOK_EVERY_S, partial(self._look, rank, error))

    def _tell(self, error: BaseException, *, is_done: bool) -> None:
        for rank in self._node.membership.relays.owners(self.own_rank):
            owner = node_id(Role.SERVER, rank)
            mine = (part for part, server in self._owners.items() if server == owner)
            lasts: dict[int, list[int]] = {}
            for part, last in self._plane.lasts(mine).items():
                lasts.setdefault(last, []).append(part)
            body = pack(is_done, *told(error), [[last, parts] for last, parts in lasts.items()])
            asked = self._node.request([owner], STORE_APP, StoreCall.RELAY_ENDS, body)
            asked.on_error(lambda told: self._node.log.info(1, f"RELAY_ENDS: {told.error()}"))

    def ended(self, incoming: Incoming) -> None:
        """Handle a relay's ``RELAY_ENDS``: it sends no sums after these rounds."""
        kinds = bool, str, str, str, int, list
        is_done, kind, text, role, rank, rows = unpack(incoming.body, *kinds)
        contributor = contributor_of(incoming.sender)
        if contributor not in (self.contributors() or ()):
            raise ProtocolError("only a server that relays sends RELAY_ENDS")
        lasts: dict[int, int] = {}
        for row in rows:
            if type(row) is not list or list(map(type, row)) != [int, list]:
                raise unexpected("a round and parts", row)
            lasts.update(dict.fromkeys(row[1], row[0]))
        error = rebuild(kind, text, role=role, rank=rank)
        self._node.traffic.carry_out(self._plane.end(contributor, error, lasts))
        if is_done:
            self._ended.add(incoming.sender)
        incoming.respond()

    @property
    def _members(self) -> tuple[int, ...]:
        relays = self._node.membership.relays
        return relays.members(self.own_rank) if relays else ()

    # -- who is missing ----------------------------------------------------------------

    def tick(self) -> None:
        """Tell the owners for which workers open rounds of relayed parts wait."""
        for each in self._plane.open_rounds() if self._owners else ():
            owner = self._owners.get(each.parts[0])
            if owner is not None:
                waits = RoundWaits(each.parts[0], each.round, each.missing, 0.0)
                self._node.send(owner, waits)


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


def _first_error(transfers: Sequence[Transfer], index: int) -> BaseException | None:
    errors = (transfer.error_of(index) for transfer in transfers)
    return next((error for error in errors if error is not None), None)
