"""``PartCopies``: how the parts of a server and of its standby stay alike. Pure.

``node/standby.py`` uses it on the standby's I/O thread to apply what its server has applied. Read
next: ``protocol/replication.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from pslite.errors import ProtocolError
from pslite.plane.interface import Job, Piece, ServerApp
from pslite.plane.unit import Parts
from pslite.protocol.rounds import Batch
from pslite.wire.base import Ints


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

    def counts(self, part: int) -> list[tuple[int, int]]:
        """Return (rank, rounds that are applied) of a part, for a new standby."""
        return self._parts.units[part].rounds.counts()

    def resume(self, part: int, counts: Sequence[tuple[int, int]]) -> None:
        """Let a part of a new standby go on after these rounds."""
        unit = self._parts.single(part)
        if unit is None:
            raise ProtocolError(f"this standby does not have part {part}")
        unit.rounds.resume(counts)
