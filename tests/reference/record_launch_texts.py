"""Record what the launchers say, after a text has been changed on purpose or a case been added.

::

    python tests/reference/record_launch_texts.py

writes ``launch_texts.json`` beside itself anew, with the same texts; read the difference before
you commit it. The functions are in ``tests/unit/kvstore/launch_texts.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "kvstore"))

from launch_texts import GROUPS, RECORDED, found_now, recorded


def line(text: str, found: object) -> str:
    return f"  {json.dumps(text, ensure_ascii=False)}: {json.dumps(found, ensure_ascii=False)}"


def main() -> None:
    texts = recorded()
    groups = []
    for group in GROUPS:
        lines = ",\n".join(line(text, found_now(group, text)) for text in texts[group])
        groups.append(f" {json.dumps(group)}: {{\n{lines}\n }}")
    RECORDED.write_text("{\n" + ",\n".join(groups) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
