"""Start a job from a checkout: ``python tools/launch.py -n 2 python examples/...``.

The same as the installed command ``kvstore-launch``; see ``kvstore/launch/cli.py``. Makes the
checkout importable here; the launcher does it for the processes that it starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvstore.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
