"""When the scheduler writes to its journal, and how it goes on from it.

``protocol/charter.py`` says what is written. On the I/O thread. Read next: ``scheduler_journal.py``
for the file.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pslite.errors import ConfigError
from pslite.ids import Role
from pslite.node.control import ControlOffice
from pslite.node.recorded_requests import RecordedRequests, request_of
from pslite.node.scheduler_journal import (
    APPS,
    CHARTER,
    DEADLOCK,
    EVENT,
    REQUEST,
    TERM,
    SchedulerJournal,
)
from pslite.protocol.barrier import Barriers
from pslite.protocol.charter import Charter, GoneRow, RecordedRequest, charter_from
from pslite.protocol.succession import Seats

#: A journal is shortened beyond this length, and again when it has grown to a multiple of it.
_MOST_BYTES = 4 << 20
_TIMES = 4


class SchedulerRecords:
    """The records of one scheduler; without PS_SCHEDULER_JOURNAL it writes none."""

    def __init__(self, office: ControlOffice, title: str, barriers: Barriers, seats: Seats) -> None:
        """``title`` is that of this process."""
        self._office = office
        self._barriers = barriers
        self._seats = seats
        self._journal: SchedulerJournal | None = None
        self._saved: Charter | None = None
        #: The journal is shortened when it is longer than this.
        self._most_bytes = _MOST_BYTES
        #: How many processes have gone on from the journal.
        self.num_terms = 0
        self._title = title
        #: The title of the scheduler that was lost; "" if this is the first one.
        self.lost = ""
        self._requests = RecordedRequests(self._uid_of, self._record)
        if office.config.scheduler_journal:
            self._journal = SchedulerJournal(office.config.scheduler_journal)
            office.customers.wrap = self._requests.wrapped
            office.reporter.on_event = lambda *event: self._write(EVENT, event)

    def save(self) -> None:
        """Write the charter if it has changed."""
        charter = self._charter()
        if charter is not None and charter != self._saved:
            self._saved = charter
            self._write(CHARTER, charter.plain())

    def _charter(self) -> Charter | None:
        membership, roster = self._office.membership, self._office.membership.roster[1:]
        if self._journal is None or not roster:
            return None
        gone = tuple(
            GoneRow(node, each.left, each.reason, self._barriers.reached_by(node))
            for node, each in membership.gone.items()
        )
        return Charter(
            roster,
            tuple(membership.attempts.get(node.node_id, 0) for node in roster),
            membership.epoch,
            gone,
            self._seats.rows(),
            self._barriers.failed(),
        )

    def deadlock(self, text: str) -> None:
        """Write that the waits of all apps have ended with an error."""
        self.save()
        self._write(DEADLOCK, text)

    def end(self) -> None:
        """Write no more, and let the next job have the file: no process goes on from it."""
        if self._journal is not None:
            self._journal.empty()
            self._journal = None

    def _record(self, request: RecordedRequest) -> None:
        self.save()  # what a request does may depend on who is gone
        if self._journal is not None and self._journal.nbytes > self._most_bytes:
            self._shorten()
        self._write(REQUEST, request)

    def _shorten(self) -> None:
        """Replace the requests so far by what they have led to, if none waits."""
        state = self._requests.state()
        if state is None or self._saved is None or self._journal is None:
            return
        term = self.num_terms, self._title
        records = [(TERM, term), (CHARTER, self._saved.plain()), (APPS, state)]
        records += [(EVENT, event) for event in self._office.reporter.last_events]
        with contextlib.suppress(OSError, ConfigError):  # it goes on with the long one
            self._journal.replace(records)
        self._most_bytes = max(_MOST_BYTES, _TIMES * self._journal.nbytes)

    def _uid_of(self, node: int) -> str:
        return self._office.membership.uids.get(node, "")

    def _write(self, kind: bytes, plain: Any) -> None:
        if self._journal is None:
            return
        try:
            self._journal.append(kind, plain)
        except OSError as error:
            self._office.log.warn(
                f"cannot write PS_SCHEDULER_JOURNAL: {error.strerror}; no other process could go "
                "on in place of this scheduler"
            )
            self.end()

    def _is_of_this_job(self, records: Sequence[tuple[bytes, Any]]) -> bool:
        """Return whether the journal can be of this job; fail if it cannot."""
        office, config = self._office, self._office.config
        for plain in [plain for kind, plain in records if kind == CHARTER][:1]:
            roles = Counter(node.role for node in charter_from(plain).roster)
            found = roles[Role.WORKER.value], roles[Role.SERVER.value]
            if found != (config.num_workers, config.num_servers):
                office.fail(
                    ConfigError(
                        f"PS_SCHEDULER_JOURNAL={config.scheduler_journal} is of a job with "
                        f"{found[0]} workers and {found[1]} servers, this one has "
                        f"{config.num_workers} and {config.num_servers}; use a new file for each "
                        "job"
                    )
                )
                return False
        return True

    def replay(
        self,
        become: Callable[[Charter, Charter | None, float], None],
        deadlocked: Callable[[str], None],
        now: float,
    ) -> Charter | None:
        """Do what a lost scheduler has done; return its last charter, if there is one.

        ``become(charter, the one before, now)`` takes each charter over.
        """
        records = [] if self._journal is None else self._journal.found
        charter = None
        if not self._is_of_this_job(records):
            return None
        for kind, plain in records:
            if kind == CHARTER:
                before, charter = charter, charter_from(plain)
                become(charter, before, now)
            elif kind == REQUEST:
                known = RecordedRequest(*plain)
                incoming = self._office.customers.repeated(known.sender, request_of(known))
                self._requests.replay(known, incoming)
            elif kind == DEADLOCK:
                deadlocked(plain)
            elif kind == APPS:
                self._requests.resume(plain)
            elif kind == EVENT:
                self._office.reporter.last_events.append(tuple(plain))
            elif kind == TERM:
                self.num_terms, self.lost = plain
        self._saved = charter
        self.num_terms += 1
        self._write(TERM, (self.num_terms, self._title))
        records.clear()
        return charter
