"""Choose each server's share of the bytes, so that no network is overloaded.

Pure arithmetic in exact fractions: the same machines give the same shares on every node.
``placement.place`` chooses the servers of parts by these shares; the directory on the scheduler
(``directory.py``) computes them once. Source: the optimum of BytePS (Jiang et al., "A Unified
Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters",
OSDI 2020, section 4.1), which is for machines with one worker and one server each, and machines
with one server alone. Here a machine may have any number of either.

The quantity to minimize: in a round each of W workers sends every server as many bytes as the
server holds, and receives as many. Messages within a machine use no network. A machine with w
workers whose servers hold the share x of the model therefore sends, in units of the model's size,
``w (1 - x)`` for its workers and ``x (W - w)`` for its servers, and receives the same::

    traffic(x) = w + x (W - 2 w)

The shares, which add up to 1, minimize the largest traffic of any machine.

The solution, and why it is optimal:

1. A machine with servers and more than half of the workers sends less the more it holds. If it
  holds the whole model, it sends ``W - w``. With any smaller share it sends more, so this is
  optimal.
2. Otherwise no server machine's traffic falls when it holds more, so each machine sends at least
  its own w, and the largest w is a lower bound, the *base*. At a level t of at least the base, a
  machine may hold up to ``limit(t) = (t - w) / (W - 2 w)`` (any share if W = 2 w: its traffic is
  always w). The limits grow with t, so t is possible exactly when they add up to 1 or more. If
  they do so at the base, the base is the optimum; otherwise it is the t at which they add up to
  1, which is one linear equation, because all machines are below their level.
3. If the limits at the base add up to more than 1, many shares are optimal. Then servers hold
  equal shares, as far as the limits allow.

For n machines with a worker and a server and k machines with a server alone (n > 2, k <= n)
step 2 gives BytePS's shares, ``(n - k) / (n^2 + k n - 2 k)`` and ``2 (n - 1) / (n^2 + k n - 2 k)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

#: At most this many servers with the same share are named in texts.
_NUM_NAMED = 8


class Machine(NamedTuple):
    """The numbers of workers and servers on a machine of a job."""

    num_workers: int
    num_servers: int


def best_shares(machines: Sequence[Machine]) -> list[Fraction]:
    """Return the share of the model for each machine; the shares add up to 1.

    A machine's share is that of all its servers together. There must be at least one server.
    """
    # Machines of the same kind get the same share, and there are few kinds.
    kinds = Counter(machine for machine in machines if machine.num_servers)
    of_kind = _level_out(kinds, _limits(machines, kinds))
    return [of_kind.get(machine, Fraction(0)) for machine in machines]


def _limits(machines: Sequence[Machine], kinds: Counter[Machine]) -> dict[Machine, Fraction]:
    """Return each kind of machine's limit at the least level that can be reached."""
    num_workers = sum(machine.num_workers for machine in machines)
    slopes = {kind: num_workers - 2 * kind.num_workers for kind in kinds}
    if min(slopes.values()) < 0:
        return {kind: Fraction(slope < 0) for kind, slope in slopes.items()}

    def at(level: Fraction) -> dict[Machine, Fraction]:
        return {
            kind: Fraction(level - kind.num_workers) / slope if slope else Fraction(1)
            for kind, slope in slopes.items()
        }

    base = Fraction(max(machine.num_workers for machine in machines))
    limits = at(base)
    if _total(kinds, limits) >= 1:
        return limits
    # Here every slope is above 0: with a machine whose limit is 1, the base would do.
    growth = _total(kinds, {kind: Fraction(1, slope) for kind, slope in slopes.items()})
    return at(base + (1 - _total(kinds, limits)) / growth)


def _total(kinds: Counter[Machine], values: dict[Machine, Fraction]) -> Fraction:
    return sum((count * values[kind] for kind, count in kinds.items()), Fraction(0))


def _level_out(kinds: Counter[Machine], limits: dict[Machine, Fraction]) -> dict[Machine, Fraction]:
    """Level the shares of all servers, within the limits of their machines."""
    left = Fraction(1)
    servers_left = sum(count * kind.num_servers for kind, count in kinds.items())
    shares = {}
    for kind in sorted(kinds, key=lambda kind: limits[kind] / kind.num_servers):
        shares[kind] = min(limits[kind], left * kind.num_servers / servers_left)
        left -= kinds[kind] * shares[kind]
        servers_left -= kinds[kind] * kind.num_servers
    return shares


def server_shares(workers: Sequence[str], servers: Sequence[str]) -> list[float]:
    """Return each server's share, from the machines of workers and servers.

    Servers on the same machine get equal shares. There must be at least one server.
    """
    num_workers, num_servers = Counter(workers), Counter(servers)
    names = list(num_workers | num_servers)
    machines = [Machine(num_workers[name], num_servers[name]) for name in names]
    held = dict(zip(names, best_shares(machines), strict=True))
    return [float(held[name] / num_servers[name]) for name in servers]


def describe(shares: Sequence[float]) -> str:
    """Describe shares in words: ``14.3 % on servers 0, 1; 42.9 % on server 4``."""
    ranks: dict[str, list[int]] = {}
    for rank, share in enumerate(shares):
        ranks.setdefault(f"{100 * share:.3g} %", []).append(rank)
    return "; ".join(f"{share} on {_listed(found)}" for share, found in ranks.items())


def _listed(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_NUM_NAMED]))
    more = len(ranks) - _NUM_NAMED
    return f"server{'s' * (len(ranks) > 1)} {named}" + (f" and {more} more" if more > 0 else "")
