"""``OpenRounds``: for whom the open rounds of a server wait (I/O thread).

Where a server relays for a machine, the owner of a part only knows that the machine's sum is
missing. So a server that relays tells the owners which of its workers have not pushed yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pslite.ids import Role
from pslite.plane import Effect, Ints, OpenRound, Send
from pslite.protocol.relays import Relays
from pslite.wire.messages import RoundWaits
from pslite.wire.survey import LEAST_WAIT_S, Wait

#: The most reports of relays that are remembered.
_MOST = 65_536


class OpenRounds:
    """The workers for which rounds wait, also those behind servers that relay."""

    def __init__(self, relays: Callable[[], Relays]) -> None:
        self._relays = relays
        #: (number of a server that relays, part) -> its last report.
        self._reports: dict[tuple[int, int], RoundWaits] = {}
        #: What servers have told this worker: (time, text).
        self.told: deque[tuple[float, str]] = deque(maxlen=16)

    def learn(self, contributor: int, report: RoundWaits) -> None:
        """Note which workers a server that relays waits for."""
        if len(self._reports) >= _MOST:
            self._reports.clear()
        self._reports[contributor, report.part] = report

    def ranks(self, missing: Iterable[int], part: int, round_: int) -> Ints:
        """Return the missing workers; all of a machine if its relay has not said which."""
        found: list[int] = []
        for number in missing:
            report = self._reports.get((number, part))
            if number >= 0:
                found.append(number)
            elif report is not None and report.round == round_:
                found += report.missing
            else:
                found += self._relays().members(-1 - number)
        return tuple(sorted(found))

    def named(self, effect: Effect) -> Effect:
        """Return an effect in which a report names workers only."""
        if not isinstance(effect, Send) or not isinstance(effect.message, RoundWaits):
            return effect
        waits = effect.message
        ranks = self.ranks(waits.missing, waits.part, waits.round)
        return effect._replace(message=replace(waits, missing=ranks))

    def waits(
        self, open_: Sequence[OpenRound], now: float, name_of: Callable[[int], str]
    ) -> list[Wait]:
        """Return the long waits, one for all parts that wait for the same workers."""
        together: dict[tuple[int, Ints], list[OpenRound]] = {}
        for each in open_:
            if each.opened_at is not None and now - each.opened_at >= LEAST_WAIT_S:
                ranks = self.ranks(each.missing, each.parts[0], each.round)
                together.setdefault((each.round, ranks), []).append(each)
        waits = []
        for (round_, ranks), alike in together.items():
            more = sum(len(each.parts) for each in alike) - 1
            others = f" and {more} other part{'s' if more > 1 else ''}" if more else ""
            what = name_of(alike[0].parts[0]) + others
            names = tuple(f"{Role.WORKER.value} {rank}" for rank in ranks)
            since = min(each.opened_at for each in alike if each.opened_at is not None)
            waits.append(Wait(what, round_, names, now - since))
        return waits
