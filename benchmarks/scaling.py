"""How an exchange of ResNet-50 grows with workers and servers: ``python benchmarks/scaling.py``.

All processes are on this machine, so with more of them than cores a longer time is no fault of
the store: look at the bytes per second.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare.scripts import SHARED, TCP, exchange_ms, parser, task_of


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--counts", default="1,2,4", help="numbers of workers and of servers to try")
    made.add_argument("--tcp", action="store_true", help="without shared memory")
    options = made.parse_args()
    counts = [int(count) for count in options.counts.split(",")]
    for workers in counts:
        for servers in counts:
            task = task_of(options, rounds=10, workers=workers, servers=servers)
            found = exchange_ms(task, TCP if options.tcp else SHARED)
            rate = 2 * task.nbytes * workers / found.median / 1e6
            print(
                f"{workers} workers, {servers} servers: {found.text()} ms, {rate:.2f} GB/s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
