"""Parts that have seen the same so far, kept as one: why a model costs little more than a tensor.

A model's small tensors travel in one message round after round, and are in the same state all
the time. A server then keeps that state once, in one ``Unit``, instead of once for each part.
What the rules say of parts stays true: a request for only some of a unit's parts makes the
server split it, and units whose parts are in the same state again may be joined. Pure; used by
``server.py`` on the I/O thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from pslite.plane.interface import Formed, Piece, piece_of
from pslite.protocol.rounds import Rounds
from pslite.wire.messages import Ints

NO_SIZE = -1
"""The size of a part that has no plain value: its contributions have forms of the app's own."""


class Unit:
    """A server's view of parts that are in the same state. The payloads are ``Piece`` values."""

    __slots__ = (
        "is_checked",
        "lane",
        "nbytes",
        "opened_at",
        "parts",
        "pulls",
        "push_sizes",
        "refused",
        "reported_at",
        "rounds",
        "sizes",
        "stops",
        "wanted",
    )

    def __init__(
        self,
        parts: Ints,
        sizes: Ints,
        rounds: Rounds,
        lane: int,
        push_sizes: Ints | None = None,
        *,
        is_checked: bool = False,
    ) -> None:
        self.parts = parts
        self.is_checked = is_checked
        """Whether the app looks at what is pushed to some of them (``ServerApp.check``)."""
        self.sizes = sizes
        """Of the parts' values."""
        self.push_sizes = sizes if push_sizes is None else push_sizes
        """Of what is pushed."""
        self.stops = frozenset(accumulate(self.push_sizes))
        """Where each part's bytes end in a push of the unit."""
        self.nbytes = sum(self.push_sizes)
        """``NO_SIZE`` of a part without a plain value, which is always alone."""
        self.rounds = rounds
        self.lane = lane
        #: (rank, round) of the pushes whose sender wants the value.
        self.wanted: set[tuple[int, int]] = set()
        #: Pulls that wait to be readable.
        self.pulls: list[WaitingPull] = []
        #: Rank -> its rounds that were refused, and why: pulls that count on one end likewise.
        self.refused: dict[int, dict[int, BaseException]] = {}
        #: When the open round was first seen open by ``tick``, and last reported.
        self.opened_at: tuple[int, float] | None = None
        self.reported_at = 0.0

    def split(self) -> list[Unit]:
        """The same state, once for each part."""
        stops = list(accumulate(self.push_sizes))
        units = []
        for part, size, push_size, stop in zip(
            self.parts, self.sizes, self.push_sizes, stops, strict=True
        ):
            start = stop - push_size

            def share(_: int, __: int, piece: Piece, start: int = start, stop: int = stop) -> Piece:
                return piece_of(piece, start, stop)

            rounds = self.rounds.copy(share)
            unit = Unit(
                (part,), (size,), rounds, self.lane, (push_size,), is_checked=self.is_checked
            )
            unit.wanted = set(self.wanted)
            unit.refused = {rank: dict(rounds) for rank, rounds in self.refused.items()}
            unit.pulls = [
                WaitingPull(pull.rank, pull.after_round, pull.pushed, (part,), (size,))
                for pull in self.pulls
                if part in pull.parts
            ]
            unit.opened_at, unit.reported_at = self.opened_at, self.reported_at
            units.append(unit)
        return units


class WaitingPull:
    """A pull of some parts of a unit that cannot be answered yet."""

    __slots__ = ("after_round", "parts", "pushed", "rank", "sizes", "wanted")

    def __init__(
        self,
        rank: int,
        after_round: int,
        pushed: bool,
        parts: Ints,
        sizes: Ints,
        wanted: Formed | None = None,
    ) -> None:
        self.rank = rank
        self.after_round = after_round
        self.pushed = pushed
        self.parts = parts
        self.sizes = sizes
        self.wanted = wanted
        """What the app made of the request, which is for a single part; None for plain values."""


def joined(units: Sequence[Unit]) -> Unit | None:
    """One unit of these, in their order; None where their states differ, or are in motion."""
    first = units[0]
    signature = first.rounds.signature()
    for unit in units:
        if unit.rounds.running or unit.pulls or unit.refused or NO_SIZE in unit.sizes:
            return None
        if unit.lane != first.lane or type(unit.rounds) is not type(first.rounds):
            return None
        if unit.wanted != first.wanted or unit.rounds.signature() != signature:
            return None
    pieces: dict[tuple[int, int], Piece] = {}
    for rank, round_ in first.rounds.waiting():
        whole = _neighbours([unit.rounds.payload(rank, round_) for unit in units])
        if whole is None:
            return None
        pieces[rank, round_] = whole
    parts = tuple(part for unit in units for part in unit.parts)
    sizes = tuple(size for unit in units for size in unit.sizes)
    push_sizes = tuple(size for unit in units for size in unit.push_sizes)
    rounds = first.rounds.copy(lambda rank, round_, _: pieces[rank, round_])
    is_checked = any(unit.is_checked for unit in units)
    unit = Unit(parts, sizes, rounds, first.lane, push_sizes, is_checked=is_checked)
    unit.wanted = set(first.wanted)
    return unit


def _neighbours(pieces: Sequence[Any]) -> Piece | None:
    """The piece that these make up, if each begins where the one before ends."""
    first = last = pieces[0]
    if any(type(piece) is not Piece for piece in pieces):
        return None
    for piece in pieces[1:]:
        if piece.frame is not last.frame or piece.start != last.stop:
            return None
        last = piece
    return Piece(first.frame, first.start, last.stop)
