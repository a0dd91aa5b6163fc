"""How far a gradient walks: ``python benchmarks/walk.py``.

Counts the Python calls that one push, pull or pushpull makes, on all threads of a worker, a server
and a scheduler in one process, connected in memory. What C code does is not counted, nor is a
comprehension, and libzmq's part is left out. Acceptances and timers are counted. The shortest of
several calls is shown, because a timer may fall into any of them.

``--list`` prints the functions in the order of their first call, by thread.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import pslite
from kvstore.optimizer import SGD
from kvstore.server import install
from kvstore.stores.dist.store import create_dist
from pslite.testing.inproc import InprocNetwork, InprocVan

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(str(ROOT / name) + "/" for name in ("kvstore", "pslite"))
NO_CALLS = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>")
#: The van in memory stands for a van of sockets: its own calls are no part of the walk.
STAND_IN = str(ROOT / "pslite" / "testing") + "/"
SETTLE_S = 0.02


@dataclass
class Walk:
    """What was called, in the order of the calls, with the thread's kind."""

    calls: list[tuple[str, CodeType]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """The figures of one line of the table."""
        codes = {code for _, code in self.calls}
        by_thread = Counter(kind for kind, _ in self.calls)
        return {
            "calls": len(self.calls),
            "functions": len(codes),
            "files": len({code.co_filename for code in codes}),
            **{kind: by_thread[kind] for kind in ("caller", "worker", "server", "pool")},
        }


def thread_kind(name: str) -> str:
    """What a thread of the cluster is for, by its name."""
    for kind in ("worker", "server", "scheduler"):
        if name.startswith(f"pslite-io-{kind}"):
            return kind
    return "caller" if name == threading.main_thread().name else "pool"


class Recorder:
    """Notes every call of product code on every thread while it is on."""

    def __init__(self) -> None:
        self.walk: Walk | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        walk, code = self.walk, frame.f_code
        if walk is None or event != "call" or not code.co_filename.startswith(PACKAGES):
            return
        if code.co_name in NO_CALLS or code.co_filename.startswith(STAND_IN):
            return
        kind = thread_kind(threading.current_thread().name)
        if kind != "scheduler":
            walk.calls.append((kind, code))

    def shortest(self, call: Callable[[], object], times: int) -> Walk:
        """The walk with the fewest calls."""
        walks = []
        for _ in range(times):
            self.walk = Walk()
            call()
            time.sleep(SETTLE_S)  # for what follows an answer: acceptances, freed memory
            walks.append(self.walk)
            self.walk = None
        return min(walks, key=lambda walk: len(walk.calls))


def operations(kv: Any, elements: int) -> dict[str, Callable[[], object]]:
    """The calls whose walk is measured, on one key; each returns when it is done."""
    gradient, weights = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    kv.init("w", weights)

    def push() -> None:
        kv.push("w", gradient)
        kv.wait("w")

    def pull() -> None:
        kv.pull("w", out=weights)

    def push_and_pull() -> None:
        kv.push("w", gradient)
        kv.pull("w", out=weights)

    def pushpull() -> None:
        kv.pushpull("w", gradient, out=weights)

    return {
        "push, wait": push,
        "pull": pull,
        "push, pull": push_and_pull,
        "pushpull": pushpull,
    }


def listed(walk: Walk) -> str:
    """The functions by thread, each at its first call."""
    lines = []
    for kind in ("caller", "worker", "server", "pool"):
        codes = Counter(code for of, code in walk.calls if of == kind)
        for code, number in codes.items():
            place = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno}"
            name = getattr(code, "co_qualname", code.co_name)  # qualified since Python 3.11
            lines.append(f"  {kind:7} {number:4} {place} {name}")
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=20_000, help="float32 values of the key")
    parser.add_argument("--times", type=int, default=20, help="calls of which the shortest counts")
    parser.add_argument("--list", action="store_true", help="print the functions too")
    options = parser.parse_args()
    network, config = InprocNetwork(), {"root_uri": "127.0.0.1", "root_port": 9091}
    recorder = Recorder()
    threading.setprofile(recorder)

    def start(role: str) -> pslite.Postoffice:
        return pslite.start(
            pslite.Config(role=role, num_workers=1, num_servers=1, task_id=0, **config),
            make_van=lambda uid: InprocVan(network, uid),
            prepare=None if role == "worker" else install,
            wait=False,
        )

    nodes = [start(role) for role in ("scheduler", "server", "worker")]
    nodes[-1].ready.result(20)
    kv = create_dist("dist_sync", "dist_sync", node=nodes[-1])
    kv.set_optimizer(SGD(learning_rate=0.1, momentum=0.9))
    calls = operations(kv, options.elements)
    sys.setprofile(recorder)
    print(f"{'operation':12}  calls functions files    caller worker server  pool")
    for name, call in calls.items():
        for _ in range(5):
            call()
        walk = recorder.shortest(call, options.times)
        figures = walk.counts()
        print(
            f"{name:12} {figures['calls']:6} {figures['functions']:9} {figures['files']:5}   "
            f"{figures['caller']:7} {figures['worker']:6} {figures['server']:6} {figures['pool']:5}"
        )
        if options.list:
            print(listed(walk))
    sys.setprofile(None)
    kv.close()
    for node in reversed(nodes):
        node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
