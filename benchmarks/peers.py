"""Our stores and other systems, one after the other on the same tensors (``make bench-peers``).

For every row of the table in benchmarks/README.md it starts each contender in fresh processes,
one after the other and again from the beginning, checks the weights that each has computed, and
prints medians with their spread, how many times as fast we are, what is asked, and whether that
holds. Exits with 1 when a contender of ours computes wrong weights; a ratio that does not hold
is a figure, not an error. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.compare import floors, mxnet_environment, plot, table  # noqa: E402
from benchmarks.compare.contenders import CONTENDERS, Programs  # noqa: E402
from benchmarks.compare.measure import RowResult, measure  # noqa: E402
from benchmarks.compare.rows import ROWS, Row, chosen  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ",".join(row.name for row in ROWS)
    add = parser.add_argument
    add("--rows", metavar="NAMES", help=f"only these, separated by commas, of {names}")
    add("--repeats", type=int, metavar="N", help="runs of each contender (default: 5)")
    add("--quick", action="store_true", help="one run with few rounds: only to see that it runs")
    add("--out", type=Path, metavar="FILE", help="write all raw figures to this JSON file")
    add("--plot", type=Path, metavar="FILE", help="draw the figures (needs matplotlib)")
    add("--mxnet-python", metavar="FILE", help="an interpreter that can import mxnet 1.9.1")
    add("--pslite-binary", metavar="FILE", help="ps-lite's test_kv_app_benchmark")
    add("--no-floors", action="store_true", help="leave out np.add, memcpy and bare sockets")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    try:
        rows = chosen(options.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.quick:
        rows = [row.quick() for row in rows]
    repeats = options.repeats or (1 if options.quick else 5)
    begin = time.monotonic()
    found = machine()
    print(f"{found['processor']}, {found['cpus']} cores; {repeats} runs of each contender")
    if found["load"] > 0.5:
        print(f"other programs are running (load {found['load']:.1f}): figures will be too high")
    found_floors = {} if options.no_floors else floors.measure(quick=options.quick)
    if found_floors:
        print(floors.text(found_floors), flush=True)
    programs = find_programs(options, rows)
    outcomes = []
    for row in rows:
        print(f"\n{table.row_title(row)}", flush=True)
        say = lambda line: print(line, flush=True)  # noqa: E731
        outcomes.append(measure(row, repeats, programs, say, trials=not options.quick))
        print(table.figures_of(outcomes[-1]), flush=True)
        if options.out is not None:  # after every row, so that an interrupt loses little
            options.out.write_text(json.dumps(raw(found, outcomes, found_floors), indent=1) + "\n")
    print(f"\n{table.asks_table(outcomes)}\n\n{time.monotonic() - begin:.0f} s in all")
    if options.plot is not None:
        print(plot.draw(outcomes, options.plot))
    results = [(name, result) for outcome in outcomes for name, result in outcome.results.items()]
    return int(any(name.startswith("ours") and result.wrong for name, result in results))


def find_programs(options: argparse.Namespace, rows: list[Row]) -> Programs:
    """Look for what the chosen rows need besides this interpreter."""
    binary = os.path.abspath(options.pslite_binary) if options.pslite_binary else None
    names = [name for row in rows for name in row.contenders]
    if not any(name.startswith("mxnet") for name in names):
        return Programs(pslite_binary=binary)
    python, missing = mxnet_environment.find_or_make(options.mxnet_python, ROOT / ".venv-mxnet")
    return Programs(python, missing, binary)


def machine() -> dict[str, Any]:
    """What a figure means nothing without."""
    processor = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = models[0] if models else processor
    return {
        "processor": processor,
        "cpus": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def raw(
    on: dict[str, Any], outcomes: list[RowResult], found_floors: dict[str, list[float]]
) -> dict[str, Any]:
    """Everything that was measured, and on which machine, for JSON."""
    rows = {}
    for outcome in outcomes:
        rows[outcome.row.name] = {
            "title": table.row_title(outcome.row),
            "task": dataclasses.asdict(outcome.row.task),
            "contenders": {
                name: {"title": CONTENDERS[name].title, **dataclasses.asdict(result)}
                for name, result in outcome.results.items()
            },
            "verdicts": [dataclasses.asdict(verdict) for verdict in outcome.verdicts()],
        }
    return {"machine": on, "floors_ms": found_floors, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
