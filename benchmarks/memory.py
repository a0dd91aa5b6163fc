"""What each process holds during exchanges of ResNet-50: ``python benchmarks/memory.py``.

Prints resident megabytes, its own (anonymous) and shared pages apart. Shared pages count in every
process that has touched them. A worker's figure includes what the benchmark itself keeps there:
gradients twice and weights. Asked of a server: under 60 MB + 2 times the model (weights and
momentum) + the model once for each worker.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare.scripts import TRANSPORTS, parser, reports_of, task_of


def main() -> int:
    options = parser(__doc__).parse_args()
    for name, environment in TRANSPORTS:
        task = task_of(options, rounds=20, settings={"memory": "yes"})
        memory_mb = reports_of(task, environment)[0]["memory_mb"]
        print(f"{name}, {task.workers} workers, {task.servers} servers:")
        for role, found in memory_mb.items():
            own, shared = found.get("RssAnon", 0.0), found.get("RssShmem", 0.0)
            print(f"  {role:9s} {found['VmRSS']:6.0f} MB (own {own:.0f}, shared {shared:.0f})")
        share_mb = task.nbytes / 1e6 / task.servers
        limit_mb = 60 + 2 * share_mb + task.workers * share_mb
        word = "holds" if memory_mb["server"]["VmRSS"] < limit_mb else "does NOT hold"
        print(f"  asked of a server: under {limit_mb:.0f} MB, {word}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
