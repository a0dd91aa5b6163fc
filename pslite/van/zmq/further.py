"""The further connections of one link, for networks that give one flow of TCP less than all.

They are opened one after the other while the first connection is there, and large messages take
turns on all of them, in both directions. What was lost with one is sent again on a new connection
of the whole link, so a link ends with each of them; one that keeps ending is given up. Runs on the
owner's thread. Read next: ``link.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from pslite.errors import ConfigError
from pslite.van.base import VanEvent
from pslite.van.zmq.accepted import MAX_FURTHER, further_routing_id
from pslite.van.zmq.addresses import Endpoint
from pslite.van.zmq.dealer import Dealer, DealerReader, LinkNeeds

CONNECT_TIMEOUT_S = 5.0
RETRY_S = 1.0
"""After an attempt that failed: the other end may be busy."""
SHORT_S = 5.0
MAX_SHORT = 3
"""When this many in a row have ended so soon while the first one stayed, something on the way does
not allow them."""

_logger = logging.getLogger(__name__)


class Further:
    """Those that are there, and the one that is being opened.

    Args:
        peer: the uid of the other end.
        read: reads messages of a dealer.
        lost: called when one that was connected has ended.
    """

    def __init__(
        self, needs: LinkNeeds, peer: str, read: DealerReader, lost: Callable[[], None]
    ) -> None:
        #: When :meth:`open_next` is to be called.
        self.due_at: float | None = None
        self.dealers: list[Dealer] = []
        self._needs = needs
        self._peer = peer
        self._read = read
        self._lost = lost
        self._wanted = 0
        self._first: tuple[Dealer, Endpoint, bytes] | None = None
        self._turn = 0
        self._num_short = 0

    def want(self, number: int) -> None:
        """Open up to this many; never fewer than before."""
        self._wanted = max(self._wanted, min(number, MAX_FURTHER))
        self.open_next()

    def begin(self, first: Dealer, endpoint: Endpoint, routing_id: bytes) -> None:
        """The first connection is there."""
        self._first = first, endpoint, routing_id
        self.open_next()

    def open_next(self) -> None:
        """Open one more, if there should be one and the others are connected."""
        self.due_at = None
        if self._first is None or len(self.dealers) >= self._wanted:
            return
        if not all(dealer.connected for dealer in self.dealers):
            return
        _, endpoint, routing_id = self._first
        name = further_routing_id(routing_id, len(self.dealers) + 1)
        try:
            dealer = Dealer(
                self._needs,
                self._peer,
                endpoint,
                name,
                CONNECT_TIMEOUT_S,
                self._read,
                self._read_monitor,
            )
        except ConfigError as error:  # no more open files
            self._try_later(str(error))
        else:
            self.dealers.append(dealer)

    def begun(self, dealer: Dealer) -> None:
        """One of them is there."""
        dealer.begin()
        self.open_next()

    def next(self) -> Dealer | None:
        """Whose turn it is; the first one's, too."""
        if self._first is None:
            return None
        there = [self._first[0], *(dealer for dealer in self.dealers if dealer.connected)]
        self._turn = (self._turn + 1) % len(there)
        return there[self._turn]

    def close(self, linger_ms: int) -> None:
        """The first connection is over, and so are these."""
        self._count()
        for dealer in self.dealers:
            dealer.close(linger_ms)
        self.dealers.clear()
        self.due_at = self._first = None

    def _read_monitor(self, dealer: Dealer, _events: list[VanEvent], _limit: int) -> None:
        news = [event for event, _ in dealer.news()]
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in news and self._needs.doors.proofs is None:
            self.begun(dealer)
        if zmq.EVENT_DISCONNECTED not in news and zmq.EVENT_CONNECT_RETRIED not in news:
            return
        dealer.has_ended = True
        if dealer.connected:
            self._lost()
        else:
            self.dealers.remove(dealer)
            dealer.close(linger_ms=0)
            self._try_later("the other end does not answer")

    def _count(self) -> None:
        """Notice when further connections end while the first one stays."""
        ended = [each for each in self.dealers if each.connected and each.has_ended]
        if not ended or self._first is None or self._first[0].has_ended:
            return
        is_short = all(time.monotonic() - each.began_at < SHORT_S for each in ended)
        self._num_short = self._num_short + 1 if is_short else 0
        if self._num_short >= MAX_SHORT and self._wanted:
            self._wanted = 0
            text = "further connections to %r end at once: there will be none (PS_CONNECTIONS)"
            _logger.warning(text, self._peer)

    def _try_later(self, reason: str) -> None:
        _logger.info("no further connection to %r yet: %s", self._peer, reason)
        self.due_at = time.monotonic() + RETRY_S
