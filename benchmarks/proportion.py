"""Whether cost grows in proportion: ``python benchmarks/proportion.py``.

Asked: 1 GB takes at most 11 times as long as 100 MB, and 100 MB in 1,000 keys at most 1.5 times
as long as in 100. Exchanges with SGD with momentum on the server.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare.figures import Summary
from benchmarks.compare.scripts import TRANSPORTS, exchange_ms, holds, parser, task_of

MB = 1_000_000


def main() -> int:
    options = parser(__doc__).parse_args()
    for name, environment in TRANSPORTS:

        def measured(tensors: int, nbytes: int, env: dict[str, str] = environment) -> Summary:
            size = nbytes // tensors
            rounds = 5 if nbytes > 500 * MB else 15
            task = task_of(options, rounds=rounds, tensors=tensors, tensor_bytes=size)
            return exchange_ms(task, env)

        base, large, many = (
            measured(100, 100 * MB),
            measured(100, 1000 * MB),
            measured(1000, 100 * MB),
        )
        print(f"{name}: 100 MB in 100 keys {base.text()} ms")
        ratio = holds(large.median / base.median, 11, at_least=False)
        print(f"{name}: 1 GB in 100 keys {large.text()} ms, {ratio}")
        ratio = holds(many.median / base.median, 1.5, at_least=False)
        print(f"{name}: 100 MB in 1,000 keys {many.text()} ms, {ratio}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
