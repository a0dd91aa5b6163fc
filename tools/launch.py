#!/usr/bin/env python3
"""Start a job from a checkout: ``python tools/launch.py -n 2 python examples/...``.

The same as the installed command ``kvstore-launch``; see ``kvstore/launch/cli.py``. Makes the
checkout importable here; the launcher does it for the processes that it starts.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run one job and return the launcher's exit code."""
    # By its path: importing anything of the package needs NumPy.
    service = runpy.run_path(str(ROOT / "kvstore" / "launch" / "service.py"))
    sentence = service["missing_packages"]()
    if sentence is not None:
        print(f"[launcher] {sentence}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    from kvstore.launch.cli import main as launch

    return launch()


if __name__ == "__main__":
    sys.exit(main())
