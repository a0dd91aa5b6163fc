"""Mistakes of servers that relay."""

from __future__ import annotations

from tests.planted.bug import Bug

STORES = "tests/inproc/test_store_relays.py"

BUGS = [
    Bug(
        "the departure of a worker ends sums that are on their way",
        "pslite/plane/server.py",
        "                after = lasts.get(each.parts[0], 0)\n",
        "                after = 0\n",
        STORES,
    ),
    Bug(
        "owners do not hear that a machine's sums have ended",
        "kvstore/server/relay.py",
        "self._node.traffic.carry_out(self._plane.end(contributor, error, lasts))",
        "pass",
        STORES,
    ),
    Bug(
        "an owner ends while sums are on their way to it",
        "kvstore/server/relay.py",
        "return has_ended and not self.awaited",
        "return has_ended",
        STORES,
    ),
    Bug(
        "a relayed round counts as work",
        "pslite/plane/server.py",
        "any(u.rounds.running and u.lane >= 0 for u in units)",
        "any(u.rounds.running for u in units)",
        STORES,
    ),
    Bug(
        "the error of rows that an owner refuses is dropped",
        "kvstore/server/relay.py",
        "            errors = [_first_error(transfers, index) for",
        "            errors = [_first_error(transfers[-1:], index) for",
        STORES,
    ),
    Bug(
        "an owner does not learn who is missing behind a relay",
        "pslite/node/open_rounds.py",
        "        self._reports[contributor, report.part] = report\n",
        "",
        STORES,
    ),
    Bug(
        "a relayed round that its owner refuses counts as applied",
        "pslite/plane/unit.py",
        "if isinstance(error, NodeLostError) and isinstance(self.rounds, SyncRounds):",
        "if False:",
        STORES,
    ),
    Bug(
        "rows for dense keys are relayed without their ids",
        "kvstore/server/sparse.py",
        "    found = np.unique(np.concatenate(ids))\n",
        "    found = np.unique(ids[0])\n",
        STORES,
    ),
    Bug(
        "compression leaves the relays in place on the servers",
        "kvstore/server/dense.py",
        "            store.contributors = None  #",
        "            pass  #",
        STORES,
    ),
    Bug(
        "sums of 16 bits are relayed",
        "kvstore/protocol/placement.py",
        "    return accumulation_dtype(dtype) == dtype\n",
        "    return True\n",
        STORES,
    ),
    Bug(
        "a value that is loaded does not reach the relays",
        "kvstore/stores/dist/control_client.py",
        "for relay in relays.relays_to(owner) if relays is not None and values else ():",
        "for relay in ():",
        STORES,
    ),
    Bug(
        "an owner takes the push of a worker for which a server relays",
        "pslite/protocol/rounds.py",
        "        if rank not in self._expected:\n            return Verdict.UNEXPECTED\n",
        "",
        STORES,
    ),
    Bug(
        "neighbours of different frames are written as one",
        "kvstore/server/relay.py",
        "            if (part.arena, part.start, piece.frame, piece.start) == (",
        "            if (part.arena, part.start, before.frame, before.stop) == (",
        "tests/unit/kvstore/server/test_relay.py",
    ),
]
