"""Runs scripts whose last line is a push, and sees whether all of it has arrived.

``python -m tests.last_push 20`` starts 20 jobs for each of ``dist_sync`` and ``dist_async`` and
0.4, 4, 40 and 120 MB, over TCP (shared memory off): two servers, a worker whose script ends with
a push, and one that looks at the values when that worker has ended. It prints one line for each
row, with what was lost, torn, or ended with another code than 0. ``--mb 4 --kinds dist_sync``
choose rows; ``--paused 8`` leaves shared memory on and stops a server for so many seconds while
the push is on its way.

Run it with each pyzmq that setup.py allows: what pyzmq does while an interpreter ends differs.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent / "process"))

from job import Job, Process

KINDS = ("dist_sync", "dist_async")
SIZES_MB = (0.4, 4.0, 40.0, 120.0)
PATIENCE_S = 90.0

JOIN = """
kv = mx.kvstore.create(sys.argv[1])
count = int(float(sys.argv[2]) * 1e6) // 4
kv.init("w", np.zeros(count, np.float32))
if "async" in kv.type:
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
kv.barrier()
kv.push("w", -np.ones(count, np.float32))
kv.pull("w")
kv.barrier()
gradient = np.full(count, -2, np.float32)
"""
#: Large pages of the gradient are there before the last line, which is then as fast as it can be.
PUSHES = JOIN + 'print("pushes", flush=True)\nkv.push("w", gradient)\n'
LOOKS = (
    JOIN
    + """
if "async" in kv.type:
    wait_for_file("pushed")
    expected = 4
else:
    kv.push("w", gradient)
    expected = -4
values = kv.pull("w")
whole = int((values == expected).sum())
print("whole" if whole == count else f"{whole} of {count}")
kv.close()
"""
)


class LastPush(NamedTuple):
    """What became of one job."""

    seen: str
    """``whole``, or how many elements have the right value, or nothing."""
    codes: Sequence[int]
    """Of scheduler, servers and workers; the last is that of the worker with the last push."""
    output: str

    @property
    def is_right(self) -> bool:
        """Whether all was there, and nobody complained."""
        return self.seen == "whole" and not any(self.codes)


def run(directory: Path, kind: str, megabytes: float, paused_s: float | None = None) -> LastPush:
    """One job of real processes. With ``paused_s``, by shared memory and with a pause."""
    settings = {"PS_SHM": "0"} if paused_s is None else {}
    job = Job(directory, 2, 2, settings, forks=False)  # the end of an interpreter is looked at
    try:
        _, servers = job.service()
        arguments = (kind, str(megabytes))
        looks = job.worker(0, LOOKS, None, arguments)
        pushes = job.worker(1, PUSHES, None, arguments)
        if paused_s is not None:
            pushes.wait_for("pushes")
            _pause(servers[0], paused_s)
        if kind == "dist_async":
            pushes.wait(PATIENCE_S)
        job.allow("pushed")
        codes = job.wait_all(PATIENCE_S)
        seen = looks.lines[-1] if looks.lines else ""
        return LastPush(seen, codes, job.output())
    finally:
        job.end()


def _pause(process: Process, paused_s: float) -> None:
    process.send(signal.SIGSTOP)
    time.sleep(paused_s)
    process.send(signal.SIGCONT)


def main() -> int:
    """``python -m tests.last_push``; returns 1 where a push was not whole."""
    parser = argparse.ArgumentParser(prog="python -m tests.last_push")
    parser.add_argument("runs", type=int, nargs="?", default=20, help="jobs for each row")
    parser.add_argument("--mb", type=float, nargs="+", default=SIZES_MB)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--paused", type=float, help="seconds for which a server is stopped")
    options = parser.parse_args()
    failed = 0
    for kind in options.kinds:
        for megabytes in options.mb:
            wrong = []
            for _ in range(options.runs):
                with tempfile.TemporaryDirectory() as directory:
                    outcome = run(Path(directory), kind, megabytes, options.paused)
                if not outcome.is_right:
                    wrong.append(f"{outcome.seen or 'nothing'}, codes {list(outcome.codes)}")
                    print(outcome.output, file=sys.stderr)
            right = options.runs - len(wrong)
            print(f"{kind:10} {megabytes:6g} MB: {right} of {options.runs} whole", *wrong, sep="; ")
            sys.stdout.flush()
            failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
