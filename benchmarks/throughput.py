"""Pushes against what the machine can do: ``python benchmarks/throughput.py``.

Workers push 100 MB each, without an optimizer, until the server has added it up. Over TCP this is
set beside as many bare pyzmq senders with messages of the same size (asked: 85 % of their rate),
by shared memory beside ``np.add`` of arrays of the same size (asked: 80 %; the pushes of two
workers are one addition).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare import floors
from benchmarks.compare.figures import summary
from benchmarks.compare.scripts import (
    SHARED,
    TCP,
    exchange_ms,
    holds,
    parser,
    task_of,
)

NBYTES = 100_000_000
CHUNKS = (64 * 1024, 256 * 1024, 2**20, 4 * 2**20)


def main() -> int:
    options = parser(__doc__).parse_args()
    rounds = 3 if options.quick else 15
    for chunk_bytes in CHUNKS[2:3] if options.quick else CHUNKS:
        settings = {"call": "push", "optimizer": "none"}
        task = task_of(options, rounds=15, tensors=1, tensor_bytes=NBYTES, settings=settings)
        ours = exchange_ms(task, {**TCP, "PS_CHUNK_BYTES": str(chunk_bytes)})
        bare = summary(floors.send_ms(NBYTES, chunk_bytes, rounds, senders=options.workers))
        print(
            f"TCP, chunks of {chunk_bytes // 1024} KiB: push {ours.text()} ms, bare pyzmq "
            f"{bare.text()} ms: {holds(bare.median / ours.median, 0.85, at_least=True)}",
            flush=True,
        )
    additions = max(1, options.workers - 1)
    add = summary([additions * ms for ms in floors.add_ms(NBYTES, rounds)])
    for arrays in "plain", "empty":
        settings = {"call": "push", "optimizer": "none", "arrays": arrays}
        task = task_of(options, rounds=15, tensors=1, tensor_bytes=NBYTES, settings=settings)
        ours = exchange_ms(task, SHARED)
        print(
            f"shared memory, {arrays} arrays: push {ours.text()} ms, np.add {add.text()} ms: "
            f"{holds(add.median / ours.median, 0.8, at_least=True)}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
