"""``PartCopies``: how the parts of a server and of its standby stay alike. Pure.

``node/standby.py`` uses it on the I/O thread: on a server to find what a standby needs besides the
complete rounds, on a standby to apply what its server has applied. Read next:
``protocol/replication.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from pslite.errors import ProtocolError
from pslite.plane.interface import Job, Piece, ServerApp, piece_of
from pslite.plane.unit import Parts, copied
from pslite.protocol.rounds import AsyncRounds, Batch, Verdict
from pslite.wire.messages import Ints


class PartCopies:
    """The parts of one plane, as its server and a standby see them."""

    def __init__(self, app: ServerApp, parts: Parts) -> None:
        self._app = app
        self._parts = parts

    def job_of(
        self,
        parts: Ints,
        sizes: Ints,
        pairs: Sequence[tuple[int, int]],
        payloads: Sequence[tuple[int, Piece]],
    ) -> tuple[int, Job]:
        """Return a round that a standby is to apply, and its lane.

        ``payloads`` are (form, bytes). Raises ``ProtocolError`` if a part is not open.
        """
        units = [self._parts.single(part) for part in parts]
        if not units or None in units:
            raise ProtocolError(f"this standby does not have part {parts[0] if parts else None}")
        is_formed = any(form for form, _ in payloads)
        made = [
            self._app.take(parts[0], form, piece, is_push=True) if form else piece
            for form, piece in payloads
        ]
        batch = Batch(tuple(pairs), tuple(made))
        lane = units[0].lane if units[0] is not None else 0
        return lane, Job(parts, sizes, sizes, batch, is_formed=is_formed)

    def repeated(self, job: Job) -> None:
        """Note that a standby has applied a round."""
        for part in job.parts:
            unit = self._parts.single(part)
            if unit is not None:
                unit.rounds.repeated(job.batch.rounds)
                unit.orphans.difference_update(job.batch.rounds)

    def open_of_lost(self, *ranks: int) -> list[Job]:
        """Return what lost processes of workers (none: of all) have pushed to open rounds.

        There is a job for each contribution. No process will send them again.
        """
        jobs = []
        for unit in self._parts.distinct():
            for rank, round_ in sorted(unit.orphans):
                is_running = unit.rounds.running and round_ == unit.rounds.version + 1
                if (
                    is_running
                    or isinstance(unit.rounds, AsyncRounds)
                    or rank not in (ranks or (rank,))
                ):
                    continue
                payload = unit.rounds.payload(rank, round_)
                is_formed = type(payload) is not Piece
                sizes = (payload.nbytes,) if is_formed else unit.push_sizes
                batch = Batch(((rank, round_),), (payload,))
                jobs.append(Job(unit.parts, sizes, sizes, batch, is_formed=is_formed))
        return jobs

    def keep_open(self, job: Job) -> None:
        """Keep, on a standby, what a lost process has pushed to an open round."""
        ((rank, round_),) = job.batch.rounds
        (payload,) = job.batch.payloads
        start = 0
        for part, size in zip(job.parts, job.push_sizes, strict=True):
            unit = self._parts.single(part)
            mine = payload if job.is_formed else piece_of(payload, start, start + size)
            start += size
            if unit is None:
                continue
            verdict = unit.rounds.contribute(rank, round_, copied(mine))
            if verdict is Verdict.TAKEN:
                unit.orphans.add((rank, round_))
            elif verdict is Verdict.TOO_FAR:
                raise ProtocolError(f"round {round_} of part {part} is too far ahead to keep it")

    def counts(self, part: int) -> list[tuple[int, int]]:
        """Return (rank, rounds that are applied) of a part, for a new standby."""
        return self._parts.units[part].rounds.counts()

    def resume(self, part: int, counts: Sequence[tuple[int, int]]) -> None:
        """Let a part of a new standby go on after these rounds."""
        unit = self._parts.single(part)
        if unit is None:
            raise ProtocolError(f"this standby does not have part {part}")
        unit.rounds.resume(counts)
