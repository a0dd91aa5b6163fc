"""How long a push and pull of one tensor takes by its size: ``python benchmarks/latency.py``.

One key, 2 workers and 1 server, without an optimizer, by shared memory and by TCP. The smallest
sizes show the fixed cost of a call, the largest the cost of a byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare.scripts import TRANSPORTS, exchange_ms, parser, task_of

SIZES = (4, 1024, 16 * 1024, 256 * 1024, 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20)


def main() -> int:
    options = parser(__doc__).parse_args()
    for size in SIZES[::3] if options.quick else SIZES:
        rounds = 200 if size <= 2**20 else 20
        task = task_of(
            options, rounds=rounds, tensors=1, tensor_bytes=size, settings={"optimizer": "none"}
        )
        found = [f"{name} {exchange_ms(task, env).text()} ms" for name, env in TRANSPORTS]
        print(f"{size / 1024:10.1f} KiB: {', '.join(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
