"""The data plane: parts, rounds, two replies, order, credits. Pure, no I/O.

A **part** is the unit of data: an id, a size in bytes, and a payload per request. Workers push
contributions to parts and pull their values. ``WorkerPlane`` (``worker.py``) is a worker's
half and ``ServerPlane`` (``server.py``) a server's. Both run on the node's I/O thread and
answer every event with effects (``Send``, ``Run``) that the node carries out. The contract
between them:

* A contribution is (worker rank, part, round); each worker counts its own pushes of a part.
  The server applies it once, even if it arrives several times, and in the order of the rounds.
* A worker sends its requests for one part in order. After a request that asks for a value, the
  next request is held until that value has arrived. So round t+1 cannot be complete while a worker
  still needs the value of round t. At most 1 + window pushes of a part are unanswered.
* One message may hold requests for several parts. This does not change the rules: each part has
  its own rounds, and if some parts of a request must wait, the others are sent. (Otherwise two
  workers that group parts differently could wait for each other for ever.)
* There are two replies. ``accepted`` belongs to the channel (``protocol/channel.py``) and frees
  the sender's credits and buffers. ``Answer`` says that the rounds are applied, and carries the
  values if the worker asked for them.
* Credits limit the bytes sent to each server that it has not accepted yet. They do not depend on
  complete rounds, so workers that push in different orders cannot deadlock. Contributions that are
  accepted but not yet applied are in the server's memory. The window limits that memory to bytes x
  workers x (1 + window).
* If several requests wait for credits, the one with the highest priority is sent first.

An app may define its own form for the contributions and pulls of a part (``form`` of
``Exchange``, ``ServerApp.take``), for example to send some rows of a table. The rules are the
same. Parts that are always requested together are kept as one (``unit.py``). This only saves time.

A server's app applies the rounds (``ServerApp``). ``protocol/rounds.py`` decides which
contributions belong to one round. ``node/postoffice.py`` connects all this with a van.
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
    StateRecord,
    cut,
    frames_of,
    piece_from,
    piece_of,
    side_by_side,
)
from pslite.plane.server import ServerPlane
from pslite.plane.transfer import Sink, Transfer
from pslite.plane.unit import NO_SIZE, OpenRound
from pslite.plane.worker import WorkerPlane
from pslite.protocol.relays import Relays, contributor_of, node_of
from pslite.protocol.rounds import Batch
from pslite.wire.base import Ints
from pslite.wire.messages import RoundWaits

__all__ = [
    "NO_SIZE",
    "Batch",
    "Effect",
    "Formed",
    "Ints",
    "Job",
    "OpenRound",
    "Outcome",
    "Piece",
    "Relays",
    "RoundWaits",
    "Run",
    "Send",
    "ServerApp",
    "ServerPlane",
    "Sink",
    "StateRecord",
    "Transfer",
    "WorkerPlane",
    "contributor_of",
    "cut",
    "frames_of",
    "node_of",
    "piece_from",
    "piece_of",
    "side_by_side",
]
