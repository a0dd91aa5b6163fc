"""The examples import their neighbours by name, as scripts do; so do their tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "image_classification"))
