"""An empty barrier beside a bare round trip of ROUTER: ``python benchmarks/barrier.py``.

Asked: a barrier of 2 workers takes at most 3 times as long.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare import floors
from benchmarks.compare.figures import summary
from benchmarks.compare.scripts import SHARED, exchange_ms, holds, parser, task_of


def main() -> int:
    options = parser(__doc__).parse_args()
    task = task_of(options, rounds=500, warmup=50, tensors=1, settings={"call": "barrier"})
    ours = exchange_ms(task, SHARED)
    bare = summary(floors.round_trip_ms(50 if options.quick else 2000))
    ratio = holds(ours.median / bare.median, 3, at_least=False)
    print(f"barrier {ours.text()} ms, bare round trip {bare.text()} ms: {ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
