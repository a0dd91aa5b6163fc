"""The data plane: parts, rounds, two replies, order, credits. Pure, no I/O.

A **part** is the unit of data: an id, a size in bytes, and a payload per request. Workers push
contributions to parts and pull their values. ``WorkerPlane`` (``worker.py``) is a worker's
half and ``ServerPlane`` (``server.py``) a server's. Both run on the node's I/O thread and
answer every event with effects (``Send``, ``Run``) that the node carries out. The contract
between them:

* A contribution is (worker rank, part, round); each worker counts its own pushes of a part.
  It is applied once, however often it arrives, and in the order of the rounds.
* A worker sends its requests for one part in order. One that follows a request with a wanted
  result is held until that result is there, so round t+1 cannot close while somebody still
  needs the value of round t. At most 1 + window pushes of a part are unanswered.
* Requests for several parts may travel fused in one message. Fusing means nothing: each part
  has its own rounds, and when some parts of a request have to wait, the others go ahead
  (else two workers that fuse differently could wait for each other for ever).
* Two replies: ``accepted`` belongs to the channel (``protocol/channel.py``) and frees the
  sender's credits and buffers; the ``Answer`` says that the rounds are applied, and carries
  the values where they were wanted.
* Credits bound the bytes per server that are not accepted yet. They never depend on a round
  being complete, so pushing in different orders cannot deadlock; what is accepted and not yet
  applied is the server's memory, bounded by the window: bytes x workers x (1 + window).
* Of requests that wait for credits, the one with the highest priority goes first.

What a part's contributions and pulls look like may be a matter of the app alone (``form`` of
``Exchange``, ``ServerApp.take``): so some rows of a table travel. The rules are the same.

Parts that are always asked for together are kept as one (``unit.py``), which changes nothing
above but speed.

A server's app supplies what rounds mean (``ServerApp``). ``protocol/rounds.py`` decides which
contributions belong together; ``node/postoffice.py`` connects all this with a van.
"""

from pslite.plane.interface import (
    Effect,
    Formed,
    Job,
    Outcome,
    Piece,
    Run,
    Send,
    ServerApp,
    cut,
    cuts_of,
    piece_of,
)
from pslite.plane.server import ServerPlane
from pslite.plane.transfer import Sink, Transfer
from pslite.plane.unit import NO_SIZE, OpenRound
from pslite.plane.worker import WorkerPlane
from pslite.wire.messages import Ints

__all__ = [
    "NO_SIZE",
    "Effect",
    "Formed",
    "Ints",
    "Job",
    "OpenRound",
    "Outcome",
    "Piece",
    "Run",
    "Send",
    "ServerApp",
    "ServerPlane",
    "Sink",
    "Transfer",
    "WorkerPlane",
    "cut",
    "cuts_of",
    "piece_of",
]
